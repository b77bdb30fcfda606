"""Whatever the file holds: either one frozen contract that survives its own description, or typed errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from inferloop.contract.describe import describe
from inferloop.contract.load import KEYS, load, parse
from inferloop.contract.short_form import KEYS as SHORT_KEYS
from inferloop.contract.traffic import KEYS as TRAFFIC_KEYS
from inferloop.contract.workload import PRECISIONS, Contract
from inferloop.core.errors import ContractError

QUANTILES = ["p0", "p10", "p50", "p90", "p95", "p99", "p99.9", "p100"]
ARRIVALS: list[Any] = [
    "poisson",
    "constant",
    "burst",
    {"process": "gamma", "cv": 2},
    {"process": "closed", "users": 8, "think_ms": {"p50": 300, "p95": 2000}},
    {"process": "constant", "ramp": {"shape": "exponential", "from": 0.1, "over": "90s"}},
    {"ramp": {"from": 0, "to": 2, "over": "1h"}},
]
positive = st.floats(1e-3, 1e6, allow_nan=False) | st.integers(1, 10**6)
counts = st.integers(1, 10**6) | st.floats(1, 1e6)


@st.composite
def percentiles(draw: st.DrawFn, values: st.SearchStrategy[float], keys: list[str] = QUANTILES) -> Any:
    chosen = sorted(draw(st.sets(st.sampled_from(keys), min_size=1)), key=keys.index)
    ordered = sorted(draw(st.lists(values, min_size=len(chosen), max_size=len(chosen))))
    return dict(zip(chosen, ordered, strict=True))


@st.composite
def contracts(draw: st.DrawFn) -> dict[str, Any]:
    lengths = percentiles(counts) | counts
    calls = percentiles(st.floats(1, 1000)) | st.integers(1, 1000)
    rates = sorted(draw(st.lists(positive, min_size=3, max_size=3)))
    traffic: dict[str, Any] = {
        "qps": dict(zip(("avg", "p95", "peak"), rates, strict=True)),
        "input_tokens": draw(lengths),
        "output_tokens": draw(lengths),
    }
    optional: dict[str, st.SearchStrategy[Any]] = {
        "prefix_reuse": st.floats(0, 0.99),
        "queries_per_request": calls,
        "tool_ms": percentiles(st.floats(0, 1e6)),
        "turns": calls,
        "arrivals": st.sampled_from(ARRIVALS),
    }
    traffic |= draw(st.fixed_dictionaries({}, optional=optional))
    if draw(st.booleans()):
        names = draw(st.sets(st.sampled_from("abcdef"), min_size=1))
        traffic["classes"] = [{"name": n, "share": 1 / len(names), "output_tokens": draw(lengths)} for n in names]
    limits = percentiles(positive, QUANTILES[1:-1])
    slo: dict[str, st.SearchStrategy[Any]] = dict.fromkeys(
        ("ttft_ms", "tpot_ms", "itl_ms", "ttlt_ms", "queue_ms"), limits
    )
    slo |= {"error_rate": st.floats(0, 1), "window": st.sampled_from(["28d", "90s", 3600, "500ms"])}
    precision = st.sampled_from(PRECISIONS)
    parts = st.fixed_dictionaries({}, optional={"weights": precision, "activations": precision, "kv": precision})
    whole: dict[str, st.SearchStrategy[Any]] = {
        "service": st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True),
        "archetype": st.sampled_from(["chat", "agent", "batch"]),
        "slo": st.fixed_dictionaries({}, optional=slo),
        "sla": st.fixed_dictionaries({}, optional=slo),
        "cost": st.fixed_dictionaries({}, optional={"usd_per_hour": positive, "usd_per_mtok": positive}),
        "privacy": st.fixed_dictionaries({}, optional={"capture": st.just("text"), "retain_days": st.integers(0, 999)}),
    }
    model = st.text(min_size=1).filter(lambda t: t.isprintable() and bool(t.strip())) | st.fixed_dictionaries(
        {"id": st.just("m")}, optional={"precision": precision | parts}
    )
    result: dict[str, Any] = draw(st.fixed_dictionaries({"model": model}, optional=whole))
    return result | {"traffic": traffic}


@settings(max_examples=80, deadline=None)
@given(contracts())
def test_a_contract_survives_its_own_description(content: dict[str, Any]) -> None:
    contract: Contract = parse(content)
    described = describe(contract)
    assert parse(described) == contract
    assert parse(json.dumps(described), fmt="json") == contract
    assert parse(yaml.safe_dump(described), fmt="yaml").digest == contract.digest


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
words = st.sampled_from(
    [*KEYS, *SHORT_KEYS, *TRAFFIC_KEYS, "p50", "p95", "avg", "suite", "id", "name", "share", "ttft_ms"]
)
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words | st.text(max_size=3), inner, max_size=5)
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(words, anything, max_size=8))
def test_nonsense_is_a_typed_error(content: dict[str, Any]) -> None:
    try:
        contract = parse(content)
    except ContractError as error:
        assert str(error).startswith("contract: ")
    else:
        assert parse(describe(contract)) == contract


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60) | st.text(alphabet="{}[]:,-&*!|>'\"#% \t\n=.apq019e", max_size=60).map(str.encode))
@pytest.mark.parametrize("suffix", [".yaml", ".toml", ".json"])
def test_any_bytes_are_a_typed_error(tmp_path_factory: pytest.TempPathFactory, suffix: str, data: bytes) -> None:
    path = Path(tmp_path_factory.getbasetemp()) / f"fuzz{suffix}"
    path.write_bytes(data)
    with pytest.raises(ContractError) as caught:
        load(path)
    assert caught.value.file == str(path)
