"""Loads that set their own rate, and loops of agents, through the verb: one point of their name, told as recorded."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from inferloop.contract.load import load
from inferloop.contract.sample import sample
from inferloop.measure.timing import RequestTiming
from inferloop.records.run import open_run

OnlyBusy = Callable[[Sequence[str]], bool]
CONTRACTS = Path(__file__).resolve().parents[2] / "contracts"


@dataclass
class Told:
    code: int
    summary: dict[str, Any]
    points: Mapping[str, Sequence[RequestTiming]]

    @property
    def point(self) -> dict[str, Any]:
        found: dict[str, Any] = self.summary["points"][-1]
        return found

    def gave_up(self, only_busy: OnlyBusy) -> bool:
        """Whether the client stalled, and gave up requests that it was too late for."""
        if not any("gave up" in why for why in self.point["void"]):
            return False
        assert self.summary["verdict"] == "void" and only_busy(self.point["void"])
        return True


def bench(folder: Path, file: Path, *more: str) -> Told:
    words = [sys.executable, "-m", "inferloop", "bench", str(file), "--target", "scripted", "--json"]
    words += ["--runs-dir", str(folder / "runs"), "--seed", "5", *more]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    summary = json.loads(done.stdout)
    assert "run" in summary, summary
    return Told(done.returncode, summary, open_run(Path(summary["run"])).points())


def write(folder: Path, contract: dict[str, Any], **traffic: Any) -> Path:
    file = folder / "contract.json"
    file.write_text(json.dumps({**contract, "traffic": {**contract["traffic"], **traffic}}))
    return file


def test_users_who_wait_have_no_intended_instants(tmp_path: Path, contract: dict[str, Any]) -> None:
    arrivals = {"process": "closed", "users": 3, "think_ms": {"p50": 5}}
    told = bench(tmp_path, write(tmp_path, contract, arrivals=arrivals), "--budget-s", "20")
    point, rows = told.point, told.points["closed"]
    assert (point["name"], point["mode"], point["offered_qps"], point["arrival_qps"]) == (
        "closed",
        "closed",
        None,
        None,
    )
    assert [point[k] for k in ("response_ttft_ms", "response_ttlt_ms", "schedule_delay_ms")] == [None] * 3
    assert any("should have been sent" in note for note in point["notes"])
    assert rows and all(t.t_intended_ns is None for t in rows)
    assert max(sum(a.t_send_ns <= b.t_send_ns < a.t_end_ns for a in rows) for b in rows) <= 3
    assert told.code == {"pass": 0, "void": 4}.get(told.summary["verdict"], 1), "nothing had to be sized"


def test_a_profile_is_played_to_its_end_when_that_is_asked_for(
    tmp_path: Path, contract: dict[str, Any], only_busy: OnlyBusy
) -> None:
    (tmp_path / "profile.csv").write_text("seconds,qps\n0,10\n1,10\n1.1,100\n2,100\n2.1,10\n3,10\n")
    file = write(tmp_path, contract, rate_profile="profile.csv")
    told = bench(tmp_path, file, "--profile", "--budget-s", "60")
    point, rows = told.point, told.points["profile"]
    assert (point["name"], point["mode"], point["offered_qps"]) == ("profile", "open", None)
    planned_s = [r.at_s for r in sample(load(file), seed=5, duration_s=99.0, arrivals="profile", stream="profile")]
    assert sum(1.0 < t < 2.1 for t in planned_s) > 2 * len(planned_s) / 3, "most come in the busy second"
    assert told.summary["judged_point"] == "profile"
    if told.gave_up(only_busy):
        return
    due = sorted(t.t_intended_ns for t in rows if t.t_intended_ns is not None)
    assert [t - due[0] for t in due] == [round((t - planned_s[0]) * 1e9) for t in planned_s]


def test_no_profile_is_told_before_anything_starts(tmp_path: Path, contract_file: Path) -> None:
    words = [sys.executable, "-m", "inferloop", "bench", str(contract_file), "--target", "scripted", "--profile"]
    done = subprocess.run([*words, "--runs-dir", str(tmp_path / "runs")], capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "rate_profile" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_an_agents_loop_is_told_from_its_first_question_to_its_last_answer(tmp_path: Path) -> None:
    told = bench(tmp_path, CONTRACTS / "agent.yaml", "--points", "0", "--budget-s", "20", "--peak", "8")
    point, rows = told.point, told.points["peak"]
    loops: dict[int, list[RequestTiming]] = {}
    for t in rows:
        if t.session is not None:
            loops.setdefault(t.session, []).append(t)
    whole = [sorted(turns, key=lambda t: t.turn or 0) for turns in loops.values()]
    whole = [turns for turns in whole if len(turns) == turns[0].num_turns]
    assert whole and max(len(turns) for turns in whole) > 1
    for turns in whole:
        for before, after in pairwise(turns):
            assert after.t_intended_ns is not None and after.t_intended_ns >= before.t_end_ns
            assert after.num_input_tokens >= before.num_input_tokens
    assert point["session_ms"]["num_samples"] >= len(whole)
    assert point["session_ms"]["p50"] is None or point["session_ms"]["p50"] >= point["ttlt_ms"]["p50"]


def test_recorded_sessions_are_played_as_they_were(tmp_path: Path, only_busy: OnlyBusy) -> None:
    text = (CONTRACTS / "recorded.yaml").read_text().replace("time_scale: 1.0", "time_scale: 0.05")
    (tmp_path / "recorded.yaml").write_text(
        text.replace("evals/assistant.yaml", str(CONTRACTS.parent / "evals/assistant.yaml"))
    )
    (tmp_path / "recorded.csv").write_text((CONTRACTS / "recorded.csv").read_text())
    told = bench(tmp_path, tmp_path / "recorded.yaml", "--budget-s", "60")
    rows = told.points["trace"]
    lines = [line.split(",") for line in (tmp_path / "recorded.csv").read_text().splitlines()[1:]]
    asked = sorted((int(line[4]), int(line[5])) for line in lines)
    assert told.gave_up(only_busy) or sorted((t.num_input_tokens, t.num_output_tokens) for t in rows) == asked
    turns = [t for t in rows if (t.turn or 0) > 1]
    assert turns and (told.point["name"], told.point["mode"]) == ("trace", "open")
    ends = {(t.session, t.turn): t.t_end_ns for t in rows}
    for t in turns:
        before = ends.get((t.session, (t.turn or 0) - 1))
        assert before is None or (t.t_intended_ns or 0) >= before


def test_what_the_budget_left_out_is_told(tmp_path: Path, contract: dict[str, Any], only_busy: OnlyBusy) -> None:
    """A run that is too short for its load says so, and how long would be enough."""
    rows = [f"{i / 2},ChatGPT,40,4,44,Conversation log" for i in range(200)]
    head = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
    (tmp_path / "long.csv").write_text("\n".join([head, *rows]))
    file = write(tmp_path, contract, arrivals={"process": "trace", "file": "long.csv"})
    told = bench(tmp_path, file, "--budget-s", "12")
    point = told.point
    assert point["name"] == "trace" and 2 < point["num_requests"] <= 24, "most of the budget is for the trace"
    (note,) = [note for note in point["notes"] if "come after the time that the budget leaves" in note]
    assert told.gave_up(only_busy) or int(note.split()[0]) + point["num_requests"] == 200

    short = bench(tmp_path, write(tmp_path, contract), "--points", "0", "--budget-s", "12", "--peak", "2")
    assert short.summary["verdict"] in ("inconclusive", "void")
    (note,) = [n for n in short.summary["notes"] if "can decide the peak" in n] or [""]
    assert short.summary["verdict"] == "void" or 80 <= int(note.rpartition(" ")[2]) <= 100, note
