"""The catalogue's facts: complete, typed, sourced and pinned."""

from __future__ import annotations

import datetime
import re
from dataclasses import asdict
from typing import Any

import pytest

from inferloop.catalog.models import known_models, read_models
from inferloop.models.resolve import ModelFiles

SOURCE = {"what": "w", "url": "https://example.org", "date": datetime.date(2026, 1, 1)}


def test_every_fact_has_a_dated_source() -> None:
    for known in known_models().values():
        facts = (
            set(type(known).__dataclass_fields__) - {"name", "sources"} - ({"terms"} if known.terms is None else set())
        )
        assert set(known.sources) == facts
        assert all(s.url.startswith("https://") and s.date.year >= 2026 for s in known.sources.values())


def test_every_wheel_and_file_is_pinned() -> None:
    for known in known_models().values():
        for wheel in known.wheels:
            assert re.fullmatch(r"[a-z0-9-]+==[\w.]+", wheel.requirement)
            assert re.fullmatch(r"[0-9a-f]{64}", wheel.sha256)
            assert wheel.member.rsplit("/", 1)[-1].startswith(known.file_name)
        assert re.fullmatch(r"[0-9a-f]{64}", known.file_sha256)


def test_the_embedded_models_facts_agree_with_its_file(embedded_model: ModelFiles) -> None:
    known, header = known_models()["smollm2-135m-instruct"], embedded_model.header
    assert known.num_params == header.shape.num_params
    assert known.context_length == header.shape.context_length
    assert known.family == header.shape.architecture
    assert known.stored_precision == header.stored_precision
    assert known.license.lower() == header.license
    assert known.file_bytes == embedded_model.path.stat().st_size


def entry(**changes: Any) -> dict[str, Any]:
    known = known_models()["smollm2-135m-instruct"]
    values = {name: getattr(known, name) for name in known.sources} | changes
    values["wheels"] = [asdict(wheel) for wheel in values["wheels"]]
    return {"sources": {"s": SOURCE}, "models": {"m": {k: {"value": v, "source": "s"} for k, v in values.items()}}}


def test_an_entry_reads_back() -> None:
    assert read_models(entry(num_params=7))["m"].num_params == 7


def test_an_ill_typed_or_unsourced_fact_does_not_pass() -> None:
    with pytest.raises(TypeError, match="num_params"):
        read_models(entry(num_params="7"))
    with pytest.raises(TypeError):
        read_models(entry(surprise=1))
    unsourced = entry()
    unsourced["models"]["m"]["family"]["source"] = "nobody"
    with pytest.raises(KeyError):
        read_models(unsourced)
