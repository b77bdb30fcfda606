"""The reference page names every key that loads, and its short example does load."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from inferloop.contract import load, objectives, routing, short_form, traffic

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "contract.md").read_text()


@pytest.mark.parametrize(
    "key",
    sorted(
        {
            *(*load.KEYS, *traffic.KEYS, *traffic.CLASS_KEYS, *traffic.PROCESSES, *objectives.KEYS, *short_form.KEYS),
            *(*routing.KEYS, *routing.MODEL_KEYS, *routing.PRICE_KEYS, *routing.RULE_KEYS, *routing.TAG_KEYS),
            *(*routing.ESCALATION_KEYS, *routing.CHECKS, *routing.EXPECTATIONS),
        }
    ),
)
def test_every_key_is_explained(key: str) -> None:
    assert re.search(rf"\b{key}\b", PAGE)


def test_the_short_example_loads(tmp_path: Path) -> None:
    (tmp_path / "evals").mkdir()
    (tmp_path / "evals" / "assistant.yaml").write_text("version: 1")
    (example,) = re.findall(r"^ {4}(\{model: .*?\})\n\n", PAGE, flags=re.MULTILINE | re.DOTALL)
    contract = load.parse(example, base=tmp_path)
    assert (contract.model.id, contract.traffic.qps.peak, len(contract.slo.objectives)) == ("candidate", 90, 2)
