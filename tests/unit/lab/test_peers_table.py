"""From samples to medians, to the best peer and to ratios."""

from __future__ import annotations

from pathlib import Path

import pytest
from lab.peers.configs import FEW, Config, configs, scout_of
from lab.peers.models import ModelSet
from lab.peers.point import Point, Timing
from lab.peers.quality import Distance, Qualities, Told, read
from lab.peers.run import Record, due_mib, is_wanted
from lab.peers.table import OURS, Sample, best_peer, markdown, measures, rows

SOLO, MANY, PREFILL = Point(1, 256, 128), Point(32, 256, 128), Point(1, 512, 1)
NOT_TOLD = Qualities([])


def told(engine: str, config: str, kl: float) -> Told:
    return Told("4-bit", engine, config, (Distance(0.9, kl - 0.001, 5.0), Distance(0.8, kl + 0.001, 6.0)))


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
    table = markdown(samples, columns, NOT_TOLD)
    assert "| 4-bit | ratio to it | a |  |  | x0.50 | x2.00 |" in table
    assert "| 4-bit | other | quick | ? | ? | 256.0* | 124* |" in table


def test_equals_in_quality_are_compared_apart_from_the_others() -> None:
    samples = [sample(OURS, "a", PREFILL, 0.5), sample("sloppy", "s", PREFILL, 1.0)]
    samples += [sample("sloppy", "s2", PREFILL, 1.1), sample("exact", "e", PREFILL, 2.0)]
    quality = [told("sloppy", "s", 0.007), told("exact", "e", 0.006)]
    same = {("4-bit", "sloppy", "s2"): ("4-bit", "sloppy", "s")}
    table = markdown(samples, measures([PREFILL]), Qualities(quality, same)).splitlines()
    assert table[3] == "| 4-bit | sloppy | s | 0.850 | 0.0070 | 2,560* |"
    assert table[4] == "| 4-bit | sloppy | s2 | 0.850 | 0.0070 | 2,327* |"
    assert table[6:] == [
        "| 4-bit | best peer of class, equal quality |  |  |  | exact e |",
        "| 4-bit | ratio to it | a |  |  | x4.00 |",
        "| 4-bit | best peer of class, any quality |  |  |  | sloppy s |",
        "| 4-bit | ratio to it | a |  |  | x2.00 |",
    ]


def test_quality_is_kept_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    assert read(path) == []
    path.write_text(told("exact", "e", 0.006).line() + told("sloppy", "s", 0.3).line())
    assert read(path) == [told("exact", "e", 0.006), told("sloppy", "s", 0.3)]
    assert read(path)[0].kl == pytest.approx(0.006) and read(path)[0].top1 == pytest.approx(0.85)


def test_memory_that_is_due_is_weights_and_blocks_of_all_streams() -> None:
    memory = {"weight_bytes": 2**20, "block_bytes": 2**19, "block_tokens": 16}
    assert due_mib(memory, MANY) == pytest.approx(1 + 24 * 32 / 2 + 200e6 / 2**20)
    assert due_mib(memory, Point(2, 8, 9)) == pytest.approx(1 + 2 * 2 / 2 + 200e6 / 2**20)


def test_what_computes_the_same_and_what_a_large_model_runs_is_there() -> None:
    models = ModelSet(*[Path("x")] * 5)
    found = configs(["4-bit", "int8", "bf16"], models, 1000, [SOLO, PREFILL], 2)
    keys = {(c.weights, c.engine, c.name) for c in found}
    assert len(keys) == len(found)
    assert all((c.weights, c.engine, c.numbers_of) in keys for c in found if c.numbers_of)
    few = configs(["4-bit", "int8", "bf16"], models, 1000, [SOLO, PREFILL], 2, few=True)
    assert {c.engine for c in few} == {c.engine for c in found}
    assert {(c.engine, c.name) for c in few if c.engine in FEW} == {(e, n) for e, names in FEW.items() for n in names}


def test_ratios_are_told_within_a_class_and_across_all() -> None:
    samples = [
        sample(OURS, "a", PREFILL, 0.5),
        sample("peer", "p", PREFILL, 1.0),
        sample(OURS, "b", PREFILL, 1.0, weights="bf16"),
        sample("peer", "p", PREFILL, 2.0, weights="bf16"),
    ]
    table = markdown(samples, measures([PREFILL]), NOT_TOLD).splitlines()
    of_bf16 = table[table.index("| bf16 | best peer of class, any quality |  |  |  | peer p |") :]
    assert of_bf16[1] == "| bf16 | ratio to it | b |  |  | x2.00 |"
    of_all = of_bf16[of_bf16.index("| bf16 | best peer of all classes, any quality |  |  |  | peer p |") :]
    assert of_all[1] == "| bf16 | ratio to it | b |  |  | x1.00 |"


def test_what_was_not_measured_stays_empty() -> None:
    samples = [sample(OURS, "a", SOLO, 1.0), sample("peer", "p", MANY, 1.0)]
    columns = measures([SOLO, MANY])
    assert rows(samples, columns)[1].values[:2] == (None, None)
    table = markdown(samples, columns, NOT_TOLD)
    assert "| 4-bit | ratio to it | a |  |  |  |  |  |  |" in table


def config(engine: str, name: str) -> Config:
    return Config(engine, "worker", "4-bit", name, {})


def test_only_the_best_configurations_of_a_peer_go_on() -> None:
    scout = scout_of(MANY)
    assert scout == Point(8, 256, 32) and scout_of(PREFILL) == Point(1, 512, 1) and scout_of(SOLO) == Point(1, 256, 32)
    assert scout_of(Point(1, 1500, 1)) == PREFILL and scout_of(Point(1, 64, 1)) == Point(1, 64, 1)
    so_far = [
        sample("peer", "quick", scout, 1.0, 0),
        sample("peer", "near", scout, 1.05, 0),
        sample("peer", "third", scout, 1.06, 0),
        sample("peer", "slow", scout, 1.3, 0),
        sample("other", "lame", scout, 9.0, 0),
        sample(OURS, "a", scout, 1.0, 0),
        sample(OURS, "b", scout, 9.0, 0),
    ]

    def wanted(engine: str, name: str, round_number: int, qualities: Qualities = NOT_TOLD) -> bool:
        return is_wanted((config(engine, name), MANY, round_number), so_far, qualities)

    assert [wanted("peer", name, 1) for name in ("quick", "near", "third", "slow")] == [True, True, False, False]
    assert wanted("other", "lame", 1) and wanted(OURS, "b", 1)
    so_far += [
        sample("peer", "quick", MANY, 1.04),
        sample("peer", "near", MANY, 1.0),
        sample("other", "lame", MANY, 2.0),
    ]
    assert wanted("peer", "near", 2) and wanted("peer", "quick", 2) and wanted(OURS, "b", 3)
    assert not wanted("other", "lame", 2)
    sloppy = Qualities([told("peer", name, 0.3) for name in ("quick", "near")])
    assert wanted("other", "lame", 2, sloppy)  # the best of those that are equal
    assert wanted("peer", "near", 2, sloppy)
    so_far[-3] = sample("peer", "quick", MANY, 1.1)
    assert not wanted("peer", "quick", 2)  # a tenth behind the best of its engine


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
