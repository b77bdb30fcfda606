"""The report as text: what it says, what it escapes, what it survives. Whether it draws is tested in a browser."""

from __future__ import annotations

import base64
import copy
import hashlib
import html
import json
import random
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

from inferloop.pages.report import render_report

VOID_TAGS = {"meta", "br", "hr", "input"}
EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&"


class Page(HTMLParser):
    """Checks that tags nest, and collects what tests ask for."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID_TAGS:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self.open):
            self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))


def test_it_says_what_was_promised_and_what_was_found(run: dict[str, Any]) -> None:
    text = Page(render_report(run)).text
    for said in (
        "TTFT p95 \u2264 450 ms",
        "errors \u2264 1 %",
        "522 more needed",
        "Requests that did not succeed",
        "http_5xx",
        "the peak needs 5 replicas, 1 started here, 4 missing",
        "1 errored",
        "leaked",
        "Example CPU 3000",
        "0123456789ab",
        "with local changes",
        "poisson",
        "first token chunk - send",
        "f00df00df00d",
        "not finished",
        "2 replicas are missing",
        "12 checks passed",
        "refused by design",
        "1 passed: usage.",
        "Capital of Italy?",
        "memory holds 1 replica.",
        "the budget left no time",
    ):
        assert said in text, said


def test_what_the_load_generator_adds_stands_beside_the_latencies(run: dict[str, Any]) -> None:
    assert "The load generator alone" not in render_report(run), "a run that was not calibrated says nothing"
    found = {"max_qps": 15800.4, "num_tokens": 16, "paced_qps": 200.0, "ttft_p50_ms": 0.216, "ttft_p95_ms": None}
    run["summary"]["calibration"] = {**found, "send_delay_p95_ms": 0.31, "num_failed": 0}
    page = render_report(run)
    part = page[page.index('id="percentiles"') : page.index("</section>", page.index('id="percentiles"'))]
    told = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", part))
    assert told == {
        "Adds to a TTFT, p50": "0.216 ms",
        "Adds to a TTFT, p95": "\u2013",
        "Sends late by, p95": "0.31 ms",
        "Reaches, of streams of 16 tokens": "15,800 streams/s",
        "Requests that failed": "0",
    }
    assert "at 200 requests/s" in part and "never subtracted" in part


def test_the_formula_shows_its_numbers(run: dict[str, Any]) -> None:
    run["summary"]["capacity"] = {"qps": 2.0, "low": 2.0, "high": 3.0, "interval": {"low": 1.8, "high": 2.2}}
    run["summary"]["replicas"] = {"needed": 7, "rho": 0.75, "failure_headroom": 1, "started": 7}
    text = Page(render_report(run)).text
    assert "1.8 to 2.2 queries/s" in text
    assert "\u23089 / (2 \u00b7 0.75)\u2309 + 1 = 7" in text
    assert "missing" not in text.split("Objectives")[0].replace("2 replicas are missing", "")


def test_it_may_reach_nothing_and_run_only_its_own_scripts(run: dict[str, Any]) -> None:
    made = render_report(run)
    page = Page(made)
    policy = next(a["content"] for t, a in page.tags if t == "meta" and a.get("http-equiv"))
    assert policy is not None and "default-src 'none'" in policy and "unsafe-eval" not in policy
    scripts = policy.split("script-src ")[1].split(";")[0]
    assert "unsafe" not in scripts
    bodies = re.findall(r"<script>(.*?)</script>", made, re.DOTALL)
    wanted = {f"'sha256-{base64.b64encode(hashlib.sha256(b.encode()).digest()).decode()}'" for b in bodies}
    assert len(bodies) == 3 and wanted == set(scripts.split())
    outside = [
        a for _, a in page.tags for name in ("src", "href", "action") if not (a.get(name) or "#").startswith("#")
    ]
    assert not outside, outside
    assert not any(name.startswith("on") for _, a in page.tags for name in a), "no inline handlers"


def test_what_a_user_named_stays_text(run: dict[str, Any]) -> None:
    header, summary = run["header"], run["summary"]
    header |= {"service": EVIL, "target": EVIL, "arrivals": EVIL, "run": EVIL}
    header["identity"]["model_id"] = EVIL
    header["fingerprint"]["cpu_model"] = EVIL
    header["contract"]["service"] = EVIL
    summary["reasons"] = [EVIL]
    summary["quality"]["results"][0] |= {"id": EVIL, "why": EVIL, "reason": EVIL}
    summary["points"][0]["mode"] = EVIL
    summary["points"][0]["errors"]["by_class"] = {EVIL: 1}
    summary["points"][0]["slo"]["objectives"][0]["reason"] = EVIL
    run["stages"].append({"stage": EVIL, "event": "started", "t_ns": 9})
    run["contract_text"] = EVIL
    made = render_report(run)
    page = Page(made)
    assert "<img" not in made and "<script>alert" not in made
    assert page.text.count("alert(1)") >= 10
    assert html.escape(EVIL, quote=False)[:20] in made


def test_chart_data_cannot_end_its_block(run: dict[str, Any]) -> None:
    run["header"]["contract"]["slo"]["objectives"][0]["metric"] = "ttft_ms"
    made = render_report(run)
    blocks = dict(re.findall(r'<script type="application/json" id="([^"]*)">(.*?)</script>', made, re.DOTALL))
    assert len(blocks) == 6, "TTFT, TPOT, TTLT, throughput, over time, and streams"
    assert not any("<" in block for block in blocks.values())
    assert set(json.loads(blocks.pop("timing-streams"))) == {"stall_ms", "streams"}
    for block in blocks.values():
        assert set(json.loads(block)) == {"light", "dark"}


def test_every_chart_has_words_and_every_table_a_caption(run: dict[str, Any]) -> None:
    page = Page(render_report(run))
    images = [a for _, a in page.tags if a.get("role") == "img"]
    assert len(images) == 8 and all(len(a.get("aria-label") or "") > 20 for a in images)
    tags = [t for t, _ in page.tags]
    assert tags.count("table") == tags.count("caption") > 5
    ids = [a["id"] for _, a in page.tags if a.get("id")]
    assert len(ids) == len(set(ids))
    links = [str(a["href"])[1:] for t, a in page.tags if t == "a"]
    assert set(links) <= set(ids)


@pytest.mark.parametrize(
    ("status", "verdict", "said"),
    [
        ("interrupted", None, "This run is incomplete: it was interrupted"),
        ("running", None, "This run is incomplete: it is still running"),
        ("void", "void", "This run is void"),
    ],
)
def test_a_run_that_must_not_be_trusted_says_so_first(
    run: dict[str, Any], status: str, verdict: str | None, said: str
) -> None:
    run["header"]["status"] = status
    run["summary"] = {"verdict": "void", "reasons": ["the client was late"]} if verdict else None
    text = Page(render_report(run)).text
    assert said in text and text.index(said) < text.index("How it was measured")
    if verdict:
        assert "the client was late" in text


def test_requests_that_are_gone_are_missed(run: dict[str, Any]) -> None:
    said = "The requests of this run are not in its folder"
    assert said not in Page(render_report(run)).text
    assert said in Page(render_report({**run, "requests": ()})).text


def test_all_failed_is_not_nan(run: dict[str, Any]) -> None:
    point = run["summary"]["points"][0]
    for metric in ("ttft_ms", "response_ttft_ms"):
        point[metric] |= {"mean": None, "p50": None, "p95": None, "infinite": ["p50", "p95"]}
    text = Page(render_report(run)).text
    assert "\u221e" in text and "nan" not in text.lower().split()


def test_a_void_point_is_called_so_and_not_drawn(run: dict[str, Any]) -> None:
    summary = run["summary"]
    summary["points"][0] |= {"name": "peak", "verdict": "void", "void": ["sends were 60 ms late"]}
    summary["judged_point"] = "peak"
    made = render_report(run)
    text = Page(made).text
    assert "Seen at peak, 1/s, a point that is void" in text and "peak: sends were 60 ms late" in text
    assert "Points that are void are not drawn." in text
    assert text.count("Void") == 1, "in the table of points, in place of its objectives' verdict"
    assert "164 ms at 0.986 queries/s" not in made, "the words are of the drawn points"


def test_what_the_cut_off_hid_is_not_called_a_failure(run: dict[str, Any]) -> None:
    first, second, *rest = run["requests"]
    cut = replace(first, error="censored", finish_reason=None)
    broken = replace(second, error="http_5xx", finish_reason=None)
    run["summary"]["points"][0]["errors"]["by_class"] = {"censored": 1}
    text = Page(render_report(run | {"requests": [cut, broken, *rest]})).text
    assert "1 of them failed, 1 were unfinished at the cut-off" in text
    assert "1 failed; crosses" in text


def test_an_eval_run_shows_its_cases(run: dict[str, Any]) -> None:
    text = Page(render_report({"header": {"verb": "eval", "service": "s"}, "summary": run["summary"]["quality"]})).text
    assert "Quality gate" in text and "2 scored of 3" in text and "33 % to 67 %" in text


WRONG: tuple[Any, ...] = (None, "x", -3, 1.5, True, [], {}, ["x"], {"x": 1}, [None, {}], 10**30)


def places(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything inside."""
    found = []
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        found.append((value, key))
        if isinstance(value[key], dict | list):
            found += places(value[key])
    return found


def test_damaged_records_still_make_a_page(run: dict[str, Any]) -> None:
    """Any value of header and summary may be missing or of another kind; seeded, twelve places at a time."""
    rng = random.Random(3)
    run["summary"]["points"] = run["summary"]["points"][:1]
    run["requests"] = ()
    for _ in range(10):
        damaged = copy.deepcopy(run)
        spots = places({"header": damaged["header"], "summary": damaged["summary"], "stages": damaged["stages"]})
        for container, key in rng.sample(spots, 12):
            container[key] = rng.choice(WRONG)
        Page(render_report(damaged))


def test_the_waterfall_is_of_the_fullest_point_that_keeps_the_objectives(run: dict[str, Any]) -> None:
    by_point = {}
    for i, (p, verdict) in enumerate(zip(run["summary"]["points"], ("pass", "pass", "fail"), strict=True)):
        p |= {"name": f"rate-{i}", "verdict": verdict}
        by_point[p["name"]] = tuple(run["requests"][: 10 + i])
    run["points"] = by_point
    assert "The first 11 of 11 requests at rate-1, 2.5/s over" in Page(render_report(run)).text
    run["points"] = {}
    assert f"The first 40 of {len(run['requests'])} requests over" in Page(render_report(run)).text
