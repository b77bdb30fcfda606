"""What lies between a load generator's own words and the table: the server's rows, and how they are counted."""

from __future__ import annotations

import shutil
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from lab.load_generators.load import LOADS, Command, Task, Told
from lab.load_generators.run import report, row_of
from lab.load_generators.usage import Watch, usage
from lab.null_server import null_server

_BODY = b'{"model":"null","messages":[],"stream":true}'


@pytest.mark.skipif(shutil.which("gcc") is None, reason="the null server is compiled")
def test_the_null_server_tells_when_it_sent_what() -> None:
    with null_server() as server:
        answers = []
        for path in ("paced", "fast", "plain"):
            request = urllib.request.Request(f"{server.url}/{path}/v1/chat/completions", _BODY)
            with urllib.request.urlopen(request) as answer:
                answers.append(answer.read())
        rows = server.rows().astype(np.int64)
        assert server.rows().shape == (0, 3)
    assert [a.count(b'" word"') for a in answers[:2]] == [64, 64] and b'"completion_tokens":64' in answers[2]
    assert rows.shape == (3, 3)
    assert rows[0, 1] - rows[0, 0] >= 20e6 and rows[0, 2] - rows[0, 1] >= 63 * 5e6 - (rows[0, 1] - rows[0, 0] - 20e6)
    assert (np.diff(rows, axis=1) >= 0).all() and (rows[1:, 0] >= rows[:-1, 2]).all()


class _Tool:
    name = "inferloop"
    rates: Mapping[str, float] = {"fast": 100.0}

    def command(self, task: Task) -> Command:
        raise NotImplementedError

    def told(self, task: Task) -> Told:
        return Told(20.5, 21.0, 0.1, tuple(range(0, 100 * 10**7, 10**7)))


def test_rates_are_the_servers_and_leave_out_how_a_tool_begins_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    times = np.arange(100) * 10**7  # one each 10 ms
    rows = np.stack([times + 10**6, times + 21 * 10**6, times + 30 * 10**6], axis=1).astype(np.uint64)
    monkeypatch.setattr(Watch, "shares", lambda *_: (0.5, 0.25))
    watch = Watch.__new__(Watch)
    watch.peak_rss_bytes = 10**8
    row = row_of(Task(LOADS["200/s"], "", 100, 1, Path(), ""), _Tool(), rows, watch)
    assert row["per_s"] == pytest.approx(100.0) and row["num_unanswered"] == 0
    assert row["cpu_ms_each"] == pytest.approx(5.0)  # half a core for 100 a second
    assert row["arrived_late_p99"] == pytest.approx(1.0) and row["true_p99"] == pytest.approx(20.0)
    rows[0] = 0, 0, 1  # long before: a tool that looks whether anybody is there
    assert row_of(Task(LOADS["200/s"], "", 100, 1, Path(), ""), _Tool(), rows, watch)["per_s"] == pytest.approx(100.0)
    table = report([row, row | {"ttft_p50": 20.7}, row | {"ttft_p50": None}])
    assert "| 200/s | inferloop | 100 | 20.6 / 21.0 | 20.0 / 20.0 | 0.10 | 1.00 | 0.50 | 100 | 3 |" in table


def test_usage_of_what_is_gone_is_none() -> None:
    assert usage(2**22 + 1) == (0.0, 0)
