"""What lies between a load generator's own words and the table: the server's rows, and how they are counted."""

from __future__ import annotations

import shutil
import subprocess
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lab.load_generators.goals import goals, is_limited
from lab.load_generators.load import LOADS, Command, Task, Told, peer
from lab.load_generators.run import DEFAULT_LOADS, TOOLS, is_wanted, report, row_of
from lab.load_generators.tools.counter import Counter
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


def _row(tool: str, load: str, per_s: float, **more: Any) -> dict[str, Any]:
    common = {"server_share": 0.3, "rss_mb": 100.0, "late_p99": None, "ttft_p50": None, "ttft_p99": None}
    return {"tool": tool, "load": load, "per_s": per_s, **common, **more}


def test_goals_are_told_as_met_missed_open_or_not_measured() -> None:
    poisson = {"ttft_p50": 20.2, "true_p50": 20.0, "ttft_p99": 21.5, "true_p99": 20.1, "late_p99": 0.6}
    rows = [
        *(_row("inferloop", "whole", per_s) for per_s in (2_000.0, 3_000.0, 90_000.0)),  # the median counts
        *(_row("vllm bench serve", "whole", 1_000.0), _row("guidellm", "whole", 301.0)),
        *(_row("inferloop", "fast", 2_000.0, server_share=0.95), _row("vllm bench serve", "fast", 1_000.0)),
        *(_row("guidellm", "fast", 100.0), _row("C client", "fast", 2_100.0, rss_mb=1.0)),
        *(_row("inferloop", "plain", 49_000.0, rss_mb=151.0), _row("C client", "plain", 147_000.0)),
        *(_row("inferloop", "paced", 1_600.0), _row("inferloop", "200/s", 200.0, **poisson)),
    ]
    table = goals(rows)
    for line in (
        "| streams, one write each: times vllm bench serve | >= 3 | 3 | yes |",
        "| streams, one write each: times guidellm | >= 10 | 9.97 | no |",
        "| streams, one write each: times aiperf | >= 10 | - | not measured |",
        "| streams, a write per token: times vllm bench serve | >= 3 | at least 2 | not shown, the server is full |",
        "| streams, a write per token: times guidellm | >= 10 | at least 20 | yes |",
        "| plain answers/s | >= 50,000 | 49,000 | no |",
        "| paced, tokens/s | >= 100,000 | 102,400 | yes |",
        "| 200/s Poisson: TTFT p50 off the server's by, ms | <= 0.3 | 0.2 | yes |",
        "| 200/s Poisson: TTFT p99 off the server's by, ms | <= 1 | 1.4 | no |",
        "| 200/s Poisson: sends late p99, ms | <= 0.6 | 0.6 | yes |",
        "| RSS of all processes on any load, MB | <= 150 | 151 | no |",
        "| fast | 0.95 | 1.05 | the server |",
        "| plain | 0.30 | 3.00 | not it |",
    ):
        assert line in table.splitlines()
    assert not is_limited([*rows, *2 * [_row("C client", "fast", 9_000.0)]], "fast"), "there is much more to be had"
    assert is_limited([_row("inferloop", "fast", 1.0, server_share=0.91)], "fast"), "nothing else is known"
    scarce = [_row("C client", "fast", 1.4)]
    assert is_limited([_row("inferloop", "fast", 1.0, server_share=0.6), *scarce], "fast")
    assert not is_limited([_row("inferloop", "fast", 1.0, server_share=0.4), *scarce], "fast"), "others slow both"
    assert "not measured" in goals([]) and "yes" not in goals([])


def test_after_the_first_round_others_are_measured_on_streams_only() -> None:
    def wanted(tool: str, number: int) -> list[str]:
        return [load for load in DEFAULT_LOADS if is_wanted(TOOLS[tool], LOADS[load], number)]

    assert wanted("inferloop", 0) == wanted("inferloop", 2) == list(DEFAULT_LOADS)
    assert (wanted("aiperf", 0), wanted("aiperf", 1)) == (list(DEFAULT_LOADS), ["whole", "fast"])
    assert wanted("vllm bench serve", 0) == ["whole", "fast", "paced", "200/s"]
    assert wanted("C client", 0) == ["plain", "whole", "fast"]


@pytest.mark.skipif(shutil.which("gcc") is None, reason="null server and client are compiled")
def test_the_client_in_c_asks_as_often_as_it_is_told(tmp_path: Path) -> None:
    with null_server() as server:
        for load in ("plain", "whole", "fast"):
            command = Counter().command(Task(LOADS[load], server.url, 300, 1, tmp_path, ""))
            done = subprocess.run(command.argv, capture_output=True, text=True)
            assert done.returncode == 0 and float(done.stdout.split()[0]) > 0, done.stderr
            rows = server.rows()
            assert len(rows) == 301 and (rows[:, 2] > 0).all(), "one to see how long an answer is, and 300"


def test_tools_that_are_not_installed_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("INFERLOOP_PEERS", str(tmp_path))
    with pytest.raises(SystemExit, match="make peers"):
        peer("vllm")
    (tmp_path / "vllm" / "bin").mkdir(parents=True)
    (tmp_path / "vllm" / "bin" / "python").touch()
    assert peer("vllm") == str(tmp_path / "vllm" / "bin" / "python")
