"""What four load generators printed of a stream, from the stamps of a relay that stood between each and the server.

The records are made by `python -m lab.load_generators.proxied --write tests/unit/measure/proxied`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from inferloop.measure.compat import CompatNumber, compat_view
from inferloop.measure.timing import Chunk, RequestTiming

_FOLDER = Path(__file__).parent / "proxied"
_NUMBERS = {
    "vllm": ("TTFT", "TPOT", "ITL", "E2EL"),
    "guidellm": ("TTFT", "TTFOT", "ITL", "TPOT", "request latency"),
    "aiperf": ("TTFT", "TTST", "TTFO", "request latency", "ITL", "ICL"),
    "inference-perf": ("TTFT", "TPOT", "ITL", "NTPOT", "request latency"),
}
_TOLERANCE = 0.02


def record(tool: str) -> tuple[dict[str, dict[str, float]], list[RequestTiming]]:
    """(what it printed, what the relay saw)."""
    told = json.loads((_FOLDER / f"{tool}.json").read_text())
    assert told["compat"] == tool
    return told["printed"], [timing(i, row) for i, row in enumerate(told["requests"])]


def timing(i: int, row: dict[str, Any]) -> RequestTiming:
    """Stamps are kept in us."""
    return RequestTiming(
        f"request-{i}",
        None,
        1000 * row["send"],
        None,
        1000 * row["end"],
        tuple(Chunk(1000 * t, n) for t, n in row["chunks"]),
        20,
        row["num_output_tokens"],
        t_first_answer_ns=1000 * row["first_answer"],
        empty_frames_ns=tuple(1000 * t for t in row["empty_frames"]),
    )


def value(number: CompatNumber, stat: str) -> float:
    found = number.mean if stat == "mean" else number.percentiles[stat]
    assert found is not None
    return found


@pytest.mark.parametrize(("tool", "name"), [(tool, name) for tool, names in _NUMBERS.items() for name in names])
def test_what_a_tool_printed_follows_from_the_stamps(tool: str, name: str) -> None:
    printed, requests = record(tool)
    view = compat_view(tool, requests)
    assert view.num_used == len(requests) == 32
    number = next(n for n in view.numbers if n.name == name)
    for stat in ("mean", "p50", "p99"):
        assert value(number, stat) == pytest.approx(printed[name][stat], rel=_TOLERANCE), stat


@pytest.mark.parametrize("tool", _NUMBERS)
def test_all_that_a_tool_printed_is_compared(tool: str) -> None:
    printed, requests = record(tool)
    assert tuple(printed) == _NUMBERS[tool] == tuple(n.name for n in compat_view(tool, requests).numbers)


@pytest.mark.parametrize(
    ("tool", "other", "name"),
    [
        ("vllm", "guidellm", "TTFT"),  # the frame with the role alone
        ("guidellm", "vllm", "ITL"),  # a mean per request, not gaps between frames
        ("guidellm", "inference-perf", "TPOT"),  # the wait for the first token in it
        ("aiperf", "guidellm", "request latency"),  # to the last token, not to the end
        ("vllm", "aiperf", "ITL"),
        ("inference-perf", "vllm", "ITL"),  # tokens, not frames
    ],
)
def test_the_stream_tells_definitions_of_one_name_apart(tool: str, other: str, name: str) -> None:
    """Else the comparison above would prove nothing."""
    printed, requests = record(tool)
    number = next(n for n in compat_view(other, requests).numbers if n.name == name)
    assert value(number, "mean") != pytest.approx(printed[name]["mean"], rel=_TOLERANCE)
