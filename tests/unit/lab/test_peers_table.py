"""From samples to medians, to the best peer and to ratios."""

from __future__ import annotations

from pathlib import Path

import pytest
from lab.peers.configs import Config, scout_of
from lab.peers.point import Point, Timing
from lab.peers.run import Record, is_wanted
from lab.peers.table import OURS, Sample, best_peer, markdown, measures, rows

SOLO, MANY, PREFILL = Point(1, 256, 128), Point(32, 256, 128), Point(1, 512, 1)


def sample(
    engine: str, config: str, point: Point, last_s: float, round_number: int = 1, weights: str = "4-bit"
) -> Sample:
    """The first token of each stream after a fifth of the time."""
    num = point.streams
    timing = Timing([last_s / 5] * num, [last_s] * num, [point.output] * num)
    return Sample(weights, engine, config, point, round_number, timing, 100.0, 0.5)


def test_what_is_read_off_a_run() -> None:
    timing = Timing([0.1, 0.3], [1.1, 1.3], [51, 51])
    assert timing.output_tok_s == pytest.approx(102 / 1.3)
    assert timing.decode_tok_s == pytest.approx(50.0)
    assert timing.ttft_ms == pytest.approx(200.0)
    assert timing.prefill_tok_s(Point(2, 60, 51)) == pytest.approx(120 / 0.3)


def test_a_run_that_is_not_what_was_asked_for_is_refused() -> None:
    with pytest.raises(ValueError, match="tokens"):
        Timing([0.1], [1.0], [127]).check(SOLO)
    with pytest.raises(ValueError, match="tokens"):
        Timing([0.1], [1.0], [128]).check(Point(2, 256, 128))


def test_prompts_are_the_same_for_all_and_new_in_every_round() -> None:
    first = MANY.prompts(1000, 1)
    assert first == MANY.prompts(1000, 1) and first != MANY.prompts(1000, 2)
    assert [len(prompt) for prompt in first] == [256] * 32
    assert all(0 <= token < 1000 for prompt in first for token in prompt)
    assert len({tuple(prompt) for prompt in first}) == 32


def test_medians_and_ratios() -> None:
    samples = [sample(OURS, "a", SOLO, 0.64, i) for i in (1, 2)] + [sample(OURS, "a", SOLO, 60.0, 3)]
    samples += [sample("peer", "slow", SOLO, 2.56), sample("other", "quick", SOLO, 1.28)]
    columns = measures([SOLO])
    assert [c.title for c in columns] == ["TTFT x1 ms", "decode x1 tok/s"]
    found = rows(samples, columns)
    assert [(row.engine, row.nums) for row in found] == [(OURS, (3, 3)), ("peer", (1, 1)), ("other", (1, 1))]
    assert found[0].values == pytest.approx((128.0, 127 / 0.512))  # the median does not see the slow third round
    best = [best_peer(found, columns, i) for i in (0, 1)]
    assert best[0] is not None and best[0].name == "other quick" and best[0].value == pytest.approx(256.0)
    assert best[1] is not None and best[1].value == pytest.approx(127 / 1.024)
    table = markdown(samples, columns)
    assert "| 4-bit | ratio | a / best of class | x0.50 | x2.00 |" in table
    assert "| 4-bit | other | quick | 256.0* | 124* |" in table


def test_ratios_are_told_within_a_class_and_across_all() -> None:
    samples = [
        sample(OURS, "a", PREFILL, 0.5),
        sample("peer", "p", PREFILL, 1.0),
        sample(OURS, "b", PREFILL, 1.0, weights="bf16"),
        sample("peer", "p", PREFILL, 2.0, weights="bf16"),
    ]
    table = markdown(samples, measures([PREFILL])).splitlines()
    assert "| bf16 | ratio | b / best of class | x2.00 |" in table
    assert "| bf16 | ratio | b / best of all | x1.00 |" in table


def test_what_was_not_measured_stays_empty() -> None:
    samples = [sample(OURS, "a", SOLO, 1.0), sample("peer", "p", MANY, 1.0)]
    columns = measures([SOLO, MANY])
    assert rows(samples, columns)[1].values[:2] == (None, None)
    table = markdown(samples, columns)
    assert "| 4-bit | ratio | a / best of class |  |  |  |  |" in table


def config(engine: str, name: str) -> Config:
    return Config(engine, "worker", "4-bit", name, {})


def test_only_the_best_configurations_of_a_peer_go_on() -> None:
    scout = scout_of(MANY)
    assert scout == Point(8, 256, 32) and scout_of(PREFILL) == Point(1, 512, 1) and scout_of(SOLO) == Point(1, 256, 32)
    so_far = [
        sample("peer", "quick", scout, 1.0, 0),
        sample("peer", "near", scout, 1.05, 0),
        sample("peer", "slow", scout, 1.3, 0),
        sample("other", "lame", scout, 9.0, 0),
        sample(OURS, "a", scout, 1.0, 0),
        sample(OURS, "b", scout, 9.0, 0),
    ]
    goes_on = {
        (engine, name): is_wanted((config(engine, name), MANY, 1), so_far)
        for engine, name in [("peer", "quick"), ("peer", "near"), ("peer", "slow"), ("other", "lame"), (OURS, "b")]
    }
    assert [key for key, wanted in goes_on.items() if not wanted] == [("peer", "slow")]
    so_far += [
        sample("peer", "quick", MANY, 1.0),
        sample("peer", "near", MANY, 1.2),
        sample("other", "lame", MANY, 2.0),
    ]
    assert is_wanted((config("peer", "near"), MANY, 2), so_far)
    assert not is_wanted((config("other", "lame"), MANY, 2), so_far)
    assert is_wanted((config(OURS, "b"), MANY, 3), so_far)


def test_a_record_goes_on_where_it_ended(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    record = Record(path, resume=False)
    record.tell("4-bit | peer | p", {"version": "1", "start_s": 0.5})
    record.add(sample("peer", "p", SOLO, 1.0))
    again = Record(path, resume=True)
    assert again.samples == record.samples and again.told == record.told
    assert again.has(config("peer", "p"), SOLO, 1)
    assert not again.has(config("peer", "p"), SOLO, 2) and not again.has(config("peer", "p"), MANY, 1)
    assert Record(path, resume=False).samples == []
