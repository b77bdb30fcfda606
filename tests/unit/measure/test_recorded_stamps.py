"""Every number that is defined, from one recording, by hand. The stamps go through the form that runs are kept in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inferloop.core.slo import Objective, Slo
from inferloop.measure.summary import summarize
from inferloop.measure.timing import DEFINITIONS, READING_TOK_S
from inferloop.measure.verdict import judge
from inferloop.records.bench import from_json_line

RECORDED = Path(__file__).with_name("recorded.jsonl")
"""Milliseconds after the start, 7,000 s on the clock. A turn with reasoning: meant for 0, sent at 4, tokens 1, 3, 4 and
2 at 104, 144, 204 (the answer) and 264. The next turn: meant for 400, sent at 401, 2 tokens at 501 and 2 at 1001. A
tool call: sent at 1000, one token at 1060. And a failure: sent at 1500, HTTP 500 at 1510."""

BY_HAND = {
    "ttft_ms": (100 + 100 + 60) / 3,
    "response_ttft_ms": (104 + 101 + 60) / 3,
    "steady_ttft_ms": (100 + 100 + 60) / 3,  # three tell no steady state apart
    "ttfat_ms": (200 + 100) / 2,
    "response_ttfat_ms": (204 + 101) / 2,
    "tpot_ms": (160 / 9 + 500 / 2) / 2,
    "itl_ms": (3 * 40 / 3 + 4 * 60 / 4 + 2 * 60 / 2 + 2 * 500 / 2) / (3 + 4 + 2 + 2),
    "icl_ms": (40 + 60 + 60 + 500) / 4,
    "max_gap_ms": (60 + 500) / 2,
    "blocked_ms": (0 + (500 - 2 / READING_TOK_S * 1000) + 0) / 3,
    "ttlt_ms": (260 + 600 + 60) / 3,
    "response_ttlt_ms": (264 + 601 + 60) / 3,
    "session_ms": 1001.0,
    "queue_ms": (12 + 20) / 2,
    "schedule_delay_ms": (4 + 1 + 0 + 0) / 4,
    "tokens_per_chunk": (10 + 4 + 1) / (4 + 2 + 1),
    "goodput": 2 / 4,  # the second is over the limit on TPOT
    "goodput_qps": 2 / 4 * 2.0,
    # The completions at 264, 1001 and 1060: 775 on average.
    "achieved_qps": (0 * -0.511 + 1 * 0.226 + 2 * 0.285) / (0.511**2 + 0.226**2 + 0.285**2),
    "arrival_qps": (4 - 1) / 1.5,
    "output_tok_s": (15 - 1) / (1.060 - 0.104),
}


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    timings = [from_json_line(line).timing for line in RECORDED.read_bytes().splitlines()]
    slo = Slo((Objective("ttft_ms", 0.95, 105.0), Objective("tpot_ms", 0.95, 200.0)))
    return {**judge(slo, timings).as_json(), **summarize(timings, mode="open").as_json()}


@pytest.mark.parametrize("name", DEFINITIONS)
def test_the_definition_gives(told: dict[str, Any], name: str) -> None:
    found = told[name]["mean"] if isinstance(told[name], dict) else told[name]
    assert found == pytest.approx(BY_HAND[name], rel=1e-12)


def test_nothing_is_defined_twice_or_not_at_all() -> None:
    assert set(BY_HAND) == set(DEFINITIONS)


def test_the_failure_is_in_every_distribution_that_it_could_be_in(told: dict[str, Any]) -> None:
    assert told["errors"] == {"rate": 1 / 4, "by_class": {"http_5xx": 1}}
    num = {name: told[name]["num_samples"] for name in BY_HAND if isinstance(told[name], dict)}
    assert num == {
        **dict.fromkeys(("ttft_ms", "response_ttft_ms", "steady_ttft_ms", "ttlt_ms", "response_ttlt_ms"), 4),
        "ttfat_ms": 3,
        "response_ttfat_ms": 3,
        "tpot_ms": 3,
        "itl_ms": 3,
        "icl_ms": 3,
        "max_gap_ms": 3,
        "blocked_ms": 4,
        "session_ms": 1,
        "queue_ms": 2,
        "schedule_delay_ms": 4,
    }
