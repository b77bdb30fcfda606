"""What is infinite keeps its sign."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from inferloop.cli.compare_tables import differences_table
from inferloop.pages.compare import differences_table as page_table


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
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(differences_table({"comparisons": [found]}))
    row = console.export_text().splitlines()[-1]
    assert f" {told} " in row and f" {interval} " in row
    page = str(page_table([found], {"B": "B"}))
    assert f">{told}<" in page and f">{interval}<" in page
