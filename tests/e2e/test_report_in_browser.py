"""A run folder becomes a page that draws in a real browser without any network, in both colour schemes."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import struct
import subprocess
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from inferloop.bench.compare_result import CompareResult, Side, SideWindow, Stage
from inferloop.cli.main import app
from inferloop.core.digest import plain
from inferloop.core.slo import Objective, Slo
from inferloop.measure.summary import summarize
from inferloop.measure.timing import Chunk, RequestTiming
from inferloop.measure.verdict import judge
from inferloop.pages.chart import bokeh_script
from inferloop.records.run import RunWriter

MS = 1_000_000
LIMIT = Slo((Objective("ttft_ms", 0.95, 300.0),), max_error_rate=0.01)
OFFLINE = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-extensions"),
    *("--host-resolver-rules=MAP * ~NOTFOUND", "--proxy-server=127.0.0.1:9"),
    *("--enable-logging=stderr", "--v=0", "--virtual-time-budget=10000", "--timeout=400000"),
)  # fmt: skip


@pytest.fixture
def chromium() -> str:
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        if os.environ.get("CI"):
            pytest.fail("CI needs a browser: apt-get install chromium")
        pytest.skip("no chromium on PATH")
    return found


def requests(ttft_ms: int, gap_ms: int, every_ms: int) -> list[RequestTiming]:
    made = []
    for i in range(140):
        t = i * every_ms * MS
        first = t + (ttft_ms + i % 7) * MS
        chunks = tuple(Chunk(first + k * gap_ms * MS, 1) for k in range(8))
        made.append(RequestTiming(f"r{i}", t, t, t + MS, chunks[-1].t_ns, chunks, 20, 8, finish_reason="length"))
    return made


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    loads = [(1.0, requests(100, 20, 1000)), (4.0, requests(400, 30, 250))]
    points = [
        {**summarize(rows, mode="open", offered_qps=qps).as_json(), "slo": judge(LIMIT, rows).as_json()}
        for qps, rows in loads
    ]
    with RunWriter(tmp_path / "runs", verb="bench", service="<b>assistant</b>", seed=1, arrivals="constant") as writer:
        with writer.stage("measure"):
            for _, rows in loads[:1]:
                for row in rows:
                    writer.append(row, point="p")
        writer.update(identity={"model_id": "demo", "digest": "ab" * 32})
        writer.finish({
            "verdict": "fail", "reasons": ["TTFT misses its limit"], "points": plain(points),
            "capacity": {"qps": 2.0, "low": 1.0, "high": 4.0},
            "replicas": {"needed": 3, "rho": 0.7, "failure_headroom": 1, "peak_qps": 2.5, "started": 1},
        })  # fmt: skip
    return writer.path


def browse(chromium: str, page: Path | str, tmp_path: Path, *flags: str) -> tuple[str, str]:
    """(DOM or nothing, what the browser logged)."""
    profile = tmp_path / f"profile-{len(list(tmp_path.glob('profile-*')))}"
    done = subprocess.run(
        [chromium, *OFFLINE, f"--user-data-dir={profile}", *flags, page if isinstance(page, str) else page.as_uri()],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, done.stderr


def complaints(log: str) -> list[str]:
    """Console lines that are not mere information, and anything about the policy."""
    lines = [line for line in log.splitlines() if "CONSOLE" in line]
    return [
        line for line in lines if "INFO:CONSOLE" not in line or re.search("Content.Security|Refused|Uncaught", line)
    ]


def colours(png: Path) -> tuple[tuple[int, int], set[tuple[int, ...]]]:
    """((width, height), the distinct RGB values) of an 8-bit PNG."""
    data, at, packed = png.read_bytes(), 8, b""
    width, height, depth, kind = struct.unpack(">IIBB", data[16:26])
    assert depth == 8 and kind in (2, 6), "an 8-bit RGB or RGBA image"
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        if data[at + 4 : at + 8] == b"IDAT":
            packed += data[at + 8 : at + 8 + length]
        at += length + 12
    size = 3 if kind == 2 else 4
    raw, stride, before, seen = zlib.decompress(packed), width * size, bytearray(width * size), set()
    for row in range(height):
        line = bytearray(raw[row * (stride + 1) + 1 : (row + 1) * (stride + 1)])
        unfilter(raw[row * (stride + 1)], line, before, size)
        seen |= {tuple(line[x : x + 3]) for x in range(0, stride, size)}
        before = line
    return (width, height), seen


def unfilter(kind: int, line: bytearray, above: bytearray, size: int) -> None:
    """Undo one row's PNG filter in place (https://www.w3.org/TR/png-3/#9Filters)."""
    for i in range(len(line)):
        a, b, c = (line[i - size], above[i], above[i - size]) if i >= size else (0, above[i], 0)
        nearest = min((a, b, c), key=lambda v: abs(a + b - c - v))
        line[i] = (line[i] + (0, a, b, (a + b) // 2, nearest)[kind]) & 255


def rgb(text: str) -> tuple[int, ...]:
    return tuple(int(text[i : i + 2], 16) for i in (1, 3, 5))


def test_the_report_draws_without_network(chromium: str, run_folder: Path, tmp_path: Path) -> None:
    told = CliRunner().invoke(app, ["report", str(run_folder), "--json"])
    assert told.exit_code == 0, told.output
    page = run_folder / "report.html"

    dom, log = browse(chromium, page, tmp_path, "--dump-dom")
    assert not complaints(log), complaints(log)
    assert 'data-charts="drawn"' in dom, "the script ran to its end"
    holders = re.findall(r'<div id="plot-(\w+)"[^>]*>(.*?)</div>', dom, re.DOTALL)
    assert [name for name, _ in holders] == ["ttft", "tpot", "ttlt", "tokens", "time"]
    assert all("<div" in inside for _, inside in holders), "every chart has a Bokeh root"
    for text in (
        "TTFT p95 \u2264 300 ms",
        "522 more needed",
        "the peak needs 3 replicas",
        "1 passes",
    ):
        assert text in dom, text
    assert "<b>assistant</b>" not in dom and "&lt;b&gt;assistant" in dom
    assert 'class="rest"' in dom, "the waterfall has bars"


@pytest.mark.parametrize(
    ("scheme", "width", "ground", "series"),
    [("light", 1200, "#ffffff", "#1f5fbf"), ("dark", 400, "#14171a", "#82b1ff")],
)
def test_pixels_in_both_schemes(
    chromium: str, run_folder: Path, tmp_path: Path, scheme: str, width: int, ground: str, series: str
) -> None:
    assert CliRunner().invoke(app, ["report", str(run_folder), "-o", str(tmp_path / "r.html")]).exit_code == 0
    shot = tmp_path / "shot.png"
    flags = [f"--screenshot={shot}", f"--window-size={width},1500"]
    flags.append(f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}")
    _, log = browse(chromium, tmp_path / "r.html", tmp_path, *flags)
    assert not complaints(log), complaints(log)
    (got, _), seen = colours(shot)
    assert got == width
    assert rgb(ground) in seen and rgb(series) in seen, "ground and the first series are there"
    assert rgb("#ffffff" if scheme == "dark" else "#14171a") not in seen


def test_two_runs_side_by_side(chromium: str, tmp_path: Path) -> None:
    folders = []
    for ttft_ms in (100, 160):
        rows = requests(ttft_ms, 20, 1000)
        point = {"name": "peak", **summarize(rows, mode="open", offered_qps=1.0).as_json(), "role": "scout"}
        with RunWriter(tmp_path / "runs", verb="bench", service="s", seed=ttft_ms) as writer:
            for row in rows:
                writer.append(row, point="peak")
            writer.finish({"verdict": "pass", "reasons": [], "points": plain([point])})
        folders.append(str(writer.path))
    page = tmp_path / "both.html"
    told = CliRunner().invoke(app, ["report", *folders, "-o", str(page)])
    assert told.exit_code == 0, told.output
    dom, log = browse(chromium, page, tmp_path, "--dump-dom")
    assert not complaints(log), complaints(log)
    assert 'data-charts="drawn"' in dom
    assert "Conditions that differ" in dom and "seed" in dom
    assert "+60" in dom and "TTFT p50, ms" in dom
    assert "Hollow points only scouted." in dom and "95 % interval" in dom
    assert "A: median of TTLT" in dom and "B: median of TTLT" in dom


def paired_windows(label: str, ttft_ms: int, stage: Stage = "versus", rates: Sequence[float] = (20.0, 40.0)) -> Any:
    for rate in rates:
        for number in range(4):
            rows = dict(enumerate(requests(ttft_ms + number % 2, 20, int(1000 / rate))))
            yield SideWindow(stage, label, rate, number, rows, (), (), "d", f"{stage}/{label}/{rate:g}/{number + 1}")


LONG = "embedded kv_dtype=int8 prefill_chunk=512 max_batch_tokens=4096 model=/models/a-rather-long-name-of-a-model.gguf"


@pytest.fixture
def comparison(tmp_path: Path) -> Path:
    """A comparison of three targets with long names; the second is slower."""
    targets = {"A": (LONG, 100), "B": (f"{LONG} threads=1", 180), "C": (f"{LONG} threads=2", 100)}
    windows = [w for n in (1, 2) for w in paired_windows(f"A{n}", 100, "self")]
    windows += [w for label, (_, ms) in targets.items() for w in paired_windows(label, ms)]
    sides = tuple(Side(k, name, {"label": k, "name": name, "flags": []}, None) for k, (name, _) in targets.items())
    found = CompareResult(LIMIT, sides, tuple(windows), (20.0, 40.0), (), "/v1/completions")
    with RunWriter(tmp_path / "runs", verb="compare", service="assistant", seed=1) as writer:
        for window in windows:
            for row in window.rows:
                writer.append(row, point=window.name)
        writer.finish(found.as_summary())
    return writer.path


def test_a_comparison_is_one_page(chromium: str, comparison: Path, tmp_path: Path) -> None:
    page = tmp_path / "compare.html"
    told = CliRunner().invoke(app, ["report", str(comparison), "-o", str(page)])
    assert told.exit_code == 0, told.output
    dom, log = browse(chromium, f"{page.as_uri()}#timing?play=1", tmp_path, "--dump-dom")
    assert not complaints(log), complaints(log)
    assert 'data-charts="drawn"' in dom and 'data-state="done"' in dom
    text = re.sub(r"<[^>]*>", " ", dom)
    assert text.count("dominated by A at") == 2 and text.count("on the front") == 4, "B at both rates"
    assert "\u25b2 worse" in text and "no difference" in text and "What chance makes" in text
    keys = re.findall(r'<ul class="key">(.*?)</ul>', dom, re.DOTALL)
    assert len(keys) == 4 and all("C: embedded" in key and "threads=2" in key for key in keys)
    assert f"{LONG} threads=2" in text, "the table of targets has the whole name"
    assert len(re.findall(r"<option[^>]*>A: embedded[^<]*median of TTLT</option>", dom)) == 2, "a choice in both lanes"
    assert "B against A: worse in TTFT p50, TTFT p95," in text
    assert "C against A: no difference beyond chance." in text
    assert re.search(r"TTFT p95 at the highest load: A: .* 107 ms at 40/s; B: .* 187 ms at 40/s;", text)


def figures_of(dom: str) -> dict[str, list[str]]:
    """What the simulator says of each lane, left and right."""
    found: dict[str, list[str]] = {}
    for name, text in re.findall(r'<dd data-figure="(\w+)">([^<]*)</dd>', dom):
        found.setdefault(name, []).append(text)
    return found


FRAMELESS = "window.requestAnimationFrame = () => 0;"


@pytest.fixture
def streams(run_folder: Path, tmp_path: Path) -> str:
    """The address of a report whose answers have a known timing: 8 tokens, 20 ms apart, the first after 100 to 106."""
    page = tmp_path / "timing.html"
    assert CliRunner().invoke(app, ["report", str(run_folder), "-o", str(page)]).exit_code == 0
    return page.as_uri()


def test_the_simulator_replays_recorded_answers(chromium: str, streams: str, tmp_path: Path) -> None:
    dom, log = browse(chromium, f"{streams}#timing?play=1", tmp_path, "--dump-dom")
    assert not complaints(log), complaints(log)
    assert 'data-state="done"' in dom, "it played to its end"
    told = figures_of(dom)
    assert told["first"] == ["103 ms", "106 ms"] and told["last"] == ["243 ms", "246 ms"]
    assert told["tpot"] == ["20 ms", "20 ms"] and told["stalls"] == ["0", "0"]
    assert all(len(text.split()) == 8 for text in re.findall(r"<output[^>]*>([^<]*)</output>", dom)), "a word a token"
    assert "Both answers are complete." in dom


def test_the_simulator_plays_on_where_no_frame_is_painted(
    chromium: str, run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hidden tab paints nothing, and a starved machine too late."""
    monkeypatch.setattr("inferloop.pages.report.bokeh_script", lambda: FRAMELESS + bokeh_script())
    page = tmp_path / "frameless.html"
    assert CliRunner().invoke(app, ["report", str(run_folder), "-o", str(page)]).exit_code == 0
    dom, log = browse(chromium, f"{page.as_uri()}#timing?play=1", tmp_path, "--dump-dom")
    assert not complaints(log), complaints(log)
    assert 'data-charts="drawn"' in dom and 'data-state="done"' in dom
    assert all(len(text.split()) == 8 for text in re.findall(r"<output[^>]*>([^<]*)</output>", dom))


PROBE = """
addEventListener("DOMContentLoaded", () => {
  const root = document.documentElement.dataset, status = document.querySelector("[role=status]");
  root.said = "";
  new MutationObserver(() => { root.said += `${status.textContent}|`; }).observe(status, { childList: true });
  const reach = (e) => e.tabIndex === 0 && !e.disabled && !e.closest("fieldset:disabled") && e.checkVisibility();
  const name = (e) => e.getAttribute("aria-label") || (e.labels && e.labels[0] || e).textContent.trim();
  const inside = document.querySelectorAll("#timing-simulator :is(button, select, input, output)");
  root.reached = JSON.stringify(Array.from(inside).filter(reach).map(name));
  ACT
});
"""
"""Sees what a screen reader is told, and what the keyboard reaches, by name."""


def probed(
    chromium: str, run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: str, where: str, *flags: str
) -> str:
    """The DOM after `act`, with what the probe saw in the root's data."""
    monkeypatch.setattr("inferloop.pages.report.bokeh_script", lambda: PROBE.replace("ACT", act) + bokeh_script())
    page = tmp_path / "probed.html"
    assert CliRunner().invoke(app, ["report", str(run_folder), "-o", str(page)]).exit_code == 0
    dom, log = browse(chromium, f"{page.as_uri()}{where}", tmp_path, *flags, "--dump-dom")
    assert not complaints(log), complaints(log)
    return html.unescape(dom)


def test_the_simulator_speaks_only_when_something_is_to_be_said(
    chromium: str, run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = (chromium, run_folder, tmp_path, monkeypatch)
    dom = probed(*at, "", "#timing?play=1")
    assert 'data-said="Both answers are complete.|"' in dom, "not a word while tokens and the clock run"
    assert dom.count('aria-live="off"') == 2

    drag = "const s = document.querySelector('[name=buffer]'); for (const v of [10, 20, 30, 40]) "
    drag += "{ s.value = v; s.dispatchEvent(new Event('input', { bubbles: true })); }"
    dom = probed(*at, drag, "")
    told = re.search(r'data-said="([^"]*)"', dom)
    assert told and told[1].count("|") == 1, "once, however many steps a slider takes"
    assert told[1].startswith("left: first token after 143 ms, last after 283 ms, pauses: 0. right: ")
    assert 'aria-valuetext="40 ms"' in dom and 'aria-valuetext="5.3 tokens/s"' in dom


def test_the_keyboard_reaches_every_control_by_its_name(
    chromium: str, run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = (chromium, run_folder, tmp_path, monkeypatch)
    dom = probed(*at, "", "#timing?left=synthetic")
    reached = re.search(r'data-reached="(\[.*?\])"', dom)
    names = json.loads(reached[1]) if reached else []
    assert all(names) and len(set(names)) == len(names), names
    assert names[:2] == ["Play", "From the start"] and len(names) == 2 + 3 + 4 + 9
    pressed = "document.querySelector('[data-control=play]').click();"
    assert 'data-said="Playing.|Both answers are complete.|"' in probed(*at, pressed, "")


def test_nothing_moves_by_itself_where_less_motion_is_wanted(
    chromium: str, run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = (chromium, run_folder, tmp_path, monkeypatch)
    calm = "--force-prefers-reduced-motion"
    assert 'data-state="ready"' in probed(*at, "", "#timing?play=1", calm)
    pressed = "document.querySelector('[data-control=play]').click();"
    assert 'data-state="done"' in probed(*at, pressed, "", calm), "it plays when asked to"


def test_holding_tokens_back_smooths_what_comes_in_bursts(chromium: str, streams: str, tmp_path: Path) -> None:
    invented = "left=synthetic&ttft=100&gap=400&cv=0&stall_share=0&tokens=41&drafts=3&acceptance=100"
    dom, _ = browse(chromium, f"{streams}#timing?{invented}", tmp_path, "--dump-dom")
    told = {name: values[0] for name, values in figures_of(dom).items()}
    assert told["stalls"] == "10" and told["longest"] == "400 ms" and told["tpot"] == "108 ms", "4 tokens every 400 ms"
    assert told["probability"] == "1\u2212(1\u22121)^10 = 100 %"

    dom, _ = browse(chromium, f"{streams}#timing?{invented}&buffer=400", tmp_path, "--dump-dom")
    told = {name: values[0] for name, values in figures_of(dom).items()}
    assert told["stalls"] == "0" and told["longest"] == "100 ms" and told["first"] == "500 ms"


def test_the_same_seed_invents_the_same_answer(chromium: str, streams: str, tmp_path: Path) -> None:
    def figures(seed: int) -> dict[str, list[str]]:
        settings = f"left=synthetic&right=synthetic&seed={seed}&cv=1&stall_share=5"
        return figures_of(browse(chromium, f"{streams}#timing?{settings}", tmp_path, "--dump-dom")[0])

    one, again, other = figures(1), figures(1), figures(2)
    assert one == again and one["last"][0] == one["last"][1] and one["last"] != other["last"]
