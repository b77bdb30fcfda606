"""Two scripted targets under the same requests: what differs by construction is found, with its sign."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from inferloop.contract.load import load
from inferloop.measure.quantiles import quantile
from inferloop.measure.timing import ttft_ms
from inferloop.records.run import RunRecord, open_run

OnlyBusy = Callable[[Sequence[str]], bool]
LEFT_OUT = " is void and left out: "


def compare(contract_file: Path, targets: str, *more: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "inferloop", "compare", str(contract_file), "--targets", targets, "--json"]
    words += ["--runs-dir", str(contract_file.with_name("runs")), "--seed", "0", *more]
    return subprocess.run(words, capture_output=True, text=True, timeout=300)


def median_ttft_ms(record: RunRecord, windows: Sequence[str]) -> float:
    waits = sorted(w for name in windows for t in record.points()[name] if (w := ttft_ms(t)) is not None)
    return quantile(waits, 0.5)


def test_a_slower_target_and_an_equal_one(contract_file: Path, only_busy: OnlyBusy) -> None:
    """Whatever else the machine does meanwhile, what is told is what the record holds, and only that is called a
    difference which is beyond the noise that was seen."""
    targets = "scripted ttft_ms=40,scripted ttft_ms=140,scripted ttft_ms=40"
    done = compare(contract_file, targets, "--rates", "20", "--rounds", "2", "--window-s", "0.5")
    summary = json.loads(done.stdout)
    record = open_run(Path(summary["run"]))
    assert record.header.verb == "compare" and record.header.seed == summary["seed"] == 0
    assert [t["flags"] for t in summary["targets"]] == [["ttft_ms=40"], ["ttft_ms=140"], ["ttft_ms=40"]]
    assert all(t["identity"]["digest"] for t in summary["targets"])
    for target in summary["targets"]:
        setup = target["setup"]
        assert (setup["engine"], setup["tuned"]) == ("scripted", "a script")
        assert setup["version"].startswith("inferloop ") and f"--script {target['flags'][0]}" in " ".join(setup["argv"])
        assert f"--port {target['url'].rpartition(':')[2]}" in " ".join(setup["argv"]), "as it was started"
    assert not any("other words" in note for note in summary["notes"]), "one tokenizer: the same bytes for all"
    first = [n for n in record.points() if n.startswith("self")][:4]
    assert first == ["self/A1/20/1", "self/A2/20/1", "self/A2/20/2", "self/A1/20/2"]
    page = (record.path / "report.html").read_text()
    assert "Noise floor" in page and "Each engine&#39;s own flags" in page and "ttft_ms=140" in page

    left_out = dict(note.split(LEFT_OUT) for note in summary["notes"] if LEFT_OUT in note)
    assert all(only_busy(why.split("; ")) for why in left_out.values()), left_out
    medians = {}
    for label in "BC":
        rounds = [n for n in (1, 2) if not {f"versus/A/20/{n}", f"versus/{label}/20/{n}"} & left_out.keys()]
        told = [d for d in summary["comparisons"] if d["target"] == label]
        assert bool(rounds) == bool(told)
        for d in told:
            interval = d["interval"]
            beyond = interval and interval["low"] * interval["high"] > 0 and d["noise_floor"] is not None
            beyond = beyond and abs(d["difference"]) > d["noise_floor"]
            assert d["called"] == "none" or beyond, d
        found = [d for d in told if d["figure"] == "ttft_ms p50"]
        if found:
            medians[label] = found[0]
            for side, key in (("A", "a"), (label, "b")):
                seen = median_ttft_ms(record, [f"versus/{side}/20/{n}" for n in rounds])
                assert medians[label][key] == pytest.approx(seen)
    assert done.returncode == (0 if set(medians) == {"B", "C"} else 4), done.stderr
    if not left_out:
        assert medians["B"]["b"] >= 140 and medians["C"]["b"] >= 40, "no answer is earlier than its script"


def test_rates_are_chosen_when_none_are_given(contract_file: Path) -> None:
    done = compare(contract_file, "scripted ttft_ms=30,scripted ttft_ms=30", "--rounds", "2", "--window-s", "0.5")
    assert done.returncode in (0, 4), done.stderr
    summary = json.loads(done.stdout)
    chosen = open_run(Path(summary["run"])).header.options["chosen_rates"]
    peak = load(contract_file).traffic.qps.peak
    assert peak in chosen and 1 <= len(chosen) <= 3 and min(chosen) > 0, "the contract's peak, and what each carries"
    assert {p["offered_qps"] for p in summary["points"]} <= set(chosen)
    assert any("70% of what each completes of a burst" in note for note in summary["notes"])
    for target in summary["targets"]:
        assert target["burst_qps"] > 0 and len(target["bursts_qps"]) == 2
        assert target["idle_cpu"] >= 0 and target["void"] in (None, *summary["reasons"])
    assert "windows of" in done.stderr and "min at" not in done.stderr, "the plan is told, and nothing bounds it"


def test_a_budget_that_is_too_small_is_told_with_what_it_takes(contract_file: Path) -> None:
    more = ("--rates", "20", "--budget-s", "5")
    done = compare(contract_file, "scripted,scripted", *more)
    assert done.returncode == 2 and "5 s at most" in done.stderr
    assert "give a larger --budget-s" in json.loads(done.stdout)["error"]["message"]


def test_wrong_use_is_told_before_anything_starts(contract_file: Path) -> None:
    for targets, said in (
        ("scripted", "at least two"),
        ("scripted,scriptd", "did you mean"),
        ("scripted,http://h:1 a=1", "flags are for"),
    ):
        done = compare(contract_file, targets)
        assert done.returncode == 2 and said in json.loads(done.stdout)["error"]["message"]
    assert not contract_file.with_name("runs").exists()
