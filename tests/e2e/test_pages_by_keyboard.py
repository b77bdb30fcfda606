"""Pages without a mouse and without eyes: real keys through the browser's input, names from its accessibility tree."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.browser import Page, browser
from tests.e2e.test_report_in_browser import chromium, comparison, run_folder  # noqa: F401  fixtures
from typer.testing import CliRunner

from inferloop.cli.main import app

CONTROLS = {"button", "combobox", "slider", "spinbutton", "link", "DisclosureTriangle", "textbox", "checkbox"}
STATE = "document.getElementById('timing-simulator').dataset.state"
FOCUS = """(() => {
  const e = document.activeElement;
  if (!e || e === document.body) return "";
  return e.getAttribute("aria-label") || (((e.labels && e.labels[0]) || e).firstChild || e).textContent.trim();
})()"""
SIMULATOR = [
    *("Play", "From the start", "Speed", "Hold back", "Reader"),
    *("Answer on the left", "Text of the answer on the left", "Answer on the right", "Text of the answer on the right"),
]


@pytest.fixture
def page(chromium: str, tmp_path: Path) -> Iterator[Page]:  # noqa: F811
    with browser(chromium, tmp_path / "profile") as page:
        yield page
        assert not page.errors


def report(run: Path, tmp_path: Path) -> str:
    made = tmp_path / "page.html"
    told = CliRunner().invoke(app, ["report", str(run), "-o", str(made)])
    assert told.exit_code == 0, told.output
    return made.as_uri()


def tab_to(page: Page, name: str) -> None:
    """By the Tab key alone, from wherever the focus is."""
    for _ in range(200):
        page.press("Tab")
        if page.run(FOCUS) == name:
            return
    raise AssertionError(f"Tab never comes to {name!r}")


def test_an_answer_is_played_by_the_keyboard_alone(page: Page, run_folder: Path, tmp_path: Path) -> None:  # noqa: F811
    page.open(report(run_folder, tmp_path))
    page.until(lambda: page.run(STATE) == "ready")
    tab_to(page, "Play")
    for name in SIMULATOR[1:]:
        page.press("Tab")
        assert page.run(FOCUS) == name
    for name in reversed(SIMULATOR[:-1]):
        page.press("Tab", shift=True)
        assert page.run(FOCUS) == name

    page.press(" ")
    page.until(lambda: page.run(STATE) == "done")
    said = page.run("document.querySelector('[role=status]').textContent")
    assert said == "Both answers are complete."
    words = page.run("Array.from(document.querySelectorAll('#timing-simulator output'), (o) => o.textContent)")
    assert [len(text.split()) for text in words] == [8, 8]

    tab_to(page, "Hold back")
    page.press("ArrowRight")
    page.press("ArrowRight")
    assert page.run("document.activeElement.getAttribute('aria-valuetext')") == "20 ms"
    assert page.run("document.querySelector('[data-figure=first]').textContent") == "123 ms", "20 later than it came"
    page.press("Home")
    assert page.run("document.querySelector('[data-figure=first]').textContent") == "103 ms"

    tab_to(page, "Answer on the left")
    before = page.run("document.activeElement.value")
    page.press("ArrowDown")
    assert page.run("document.activeElement.value") != before
    page.press("End")
    assert page.run("document.activeElement.value") == "synthetic"
    tab_to(page, "First token, ms")
    page.press("ArrowUp")
    assert page.run("document.activeElement.value") == "301", "the invented answer's numbers are in reach now"
    assert page.run("document.querySelector('[data-figure=first]').textContent") == "301 ms"
    assert "left=synthetic" in page.run("location.hash") and "ttft=301" in page.run("location.hash")


def test_all_that_takes_the_focus_has_a_name(page: Page, run_folder: Path, tmp_path: Path) -> None:  # noqa: F811
    page.open(report(run_folder, tmp_path))
    page.until(lambda: page.run("document.documentElement.dataset.charts") == "drawn")
    spoken = page.spoken()
    nameless = [n for n in spoken if (n.get("focusable") or n["role"] in CONTROLS) and not n["name"]]
    assert not [n for n in nameless if n["role"] not in ("RootWebArea", "generic")], nameless
    controls = [n["name"] for n in spoken if n["role"] in ("button", "combobox", "slider", "spinbutton")]
    for name in (*SIMULATOR[:6], SIMULATOR[7]):
        assert any(found.startswith(name) for found in controls), (name, controls)
    headings = [n["name"] for n in spoken if n["role"] == "heading"]
    assert headings[0] == "<b>assistant</b>"
    assert {"Objectives", "Frontier", "Latency", "Token timing", "TTFT against load"} <= set(headings)


def test_a_picture_is_told_in_words_and_a_table_by_its_heads(
    page: Page,
    run_folder: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    page.open(report(run_folder, tmp_path))
    page.until(lambda: page.run("document.documentElement.dataset.charts") == "drawn")
    spoken = page.spoken()
    pictures = [n["name"] for n in spoken if n["role"] in ("image", "img", "figure")]
    for title in ("TTFT against load", "TPOT against load", "TTLT against load", "Throughput against load"):
        assert any(name.startswith(title) for name in pictures), (title, pictures)
    tables = [n["name"] for n in spoken if n["role"] == "table"]
    assert "Load points, in the order in which they ran" in tables and all(tables)
    heads = {n["name"] for n in spoken if n["role"] == "columnheader"}
    assert {"Objective", "Verdict", "Load offered", "Achieved/s", "p95"} <= heads


def test_a_comparison_is_read_without_eyes(page: Page, comparison: Path, tmp_path: Path) -> None:  # noqa: F811
    page.open(report(comparison, tmp_path))
    page.until(lambda: page.run("document.documentElement.dataset.charts") == "drawn")
    spoken = page.spoken()
    assert not [n for n in spoken if n["role"] in {*CONTROLS, "table", "image", "img", "figure"} and not n["name"]], (
        "nothing without a name"
    )
    tab_to(page, "Play")
    page.press("Enter")
    page.until(lambda: page.run(STATE) == "done")


@pytest.mark.parametrize("which", ["run_folder", "comparison"])
def test_no_page_is_wider_than_a_telephone(
    page: Page, tmp_path: Path, request: pytest.FixtureRequest, which: str
) -> None:
    """What is wider, a table, scrolls in a box of its own."""
    page.open(report(request.getfixturevalue(which), tmp_path))
    page.until(lambda: page.run("document.documentElement.dataset.charts") == "drawn")
    for width in (400, 1200):
        page.resize(width=width)
        assert page.run("document.documentElement.scrollWidth - innerWidth") <= 0, width
