"""What tables of differences say of what is infinite, and of what is not known."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from inferloop.cli.compare_tables import differences_table
from inferloop.pages.compare import differences_table as page_table


def shown(found: dict[str, Any]) -> tuple[str, str]:
    """As a row of the terminal, and as the page."""
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(differences_table({"comparisons": [found]}))
    return console.export_text().splitlines()[-1], str(page_table([found], {"B": "B"}))


@pytest.mark.parametrize(
    ("infinite", "told", "interval"),
    [
        ("b", "+\u221e", "+\u221e to +\u221e"),
        ("a", "-\u221e", "-\u221e to -\u221e"),
        ("ab", "\u00b1\u221e", "-\u221e to +\u221e"),
    ],
)
def test_a_side_that_never_answered(infinite: str, told: str, interval: str) -> None:
    numbers = {name: None if name in infinite else 5.0 for name in "ab"}
    found = {
        "target": "B", "offered_qps": 8.0, "figure": "ttft_ms p50", "metric": "ttft_ms", "percentile": "p50", **numbers,
        "difference": None, "noise_floor": 3.0, "infinite": [*infinite, "difference"], "called": "more",
        "better": False,
        "interval": {"low": None, "high": None, "infinite": ["low", "high"], "confidence": 0.95},
    }  # fmt: skip
    row, page = shown(found)
    assert f" {told} " in row and f" {interval} " in row
    assert f">{told}<" in page and f">{interval}<" in page


@pytest.mark.parametrize(
    ("interval", "word"),
    [(None, "not known"), ({"low": -400.0, "high": 9.0, "infinite": [], "confidence": 0.95}, "no difference")],
)
def test_what_has_no_interval_is_not_called_equal(interval: dict[str, Any] | None, word: str) -> None:
    """A target that completed something in one window only: far off, and nothing is known of chance."""
    found = {
        "target": "B", "offered_qps": 8.0, "figure": "output_tok_s", "metric": "output_tok_s", "percentile": None,
        "a": 457.0, "b": 61.7, "difference": -395.3, "noise_floor": 14.9, "infinite": [], "called": "none",
        "better": None, "interval": interval,
    }  # fmt: skip
    row, page = shown(found)
    assert row.rstrip().endswith(word) and f">{word}<" in page
