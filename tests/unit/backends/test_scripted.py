"""The script is played as written."""

from __future__ import annotations

import asyncio
import itertools
import statistics
from typing import Any

import pytest

from inferloop.backends.protocols import Delta, GenerateRequest, Prompt, StageTimes
from inferloop.backends.scripted import Script, ScriptedGenerator
from inferloop.backends.serve_process import launch_spec
from inferloop.core.errors import ContextLengthError, EngineError, UsageError
from inferloop.core.ids import TraceContext
from inferloop.core.request import Sampling


def request(prompt: str = "x", **sampling: Any) -> GenerateRequest:
    return GenerateRequest("r", TraceContext.new(), Prompt(text=prompt), Sampling(**sampling), 0)


async def play(generator: ScriptedGenerator, r: GenerateRequest) -> list[Delta]:
    return [delta async for delta in generator.generate(r)]


def times(deltas: list[Delta]) -> StageTimes:
    found = deltas[-1].times
    assert found is not None
    return found


async def test_the_answer_ends_by_itself_or_repeats() -> None:
    generator = ScriptedGenerator(Script(ttft_ms=0, tpot_ms=0, text="abc", tokens_per_chunk=2))
    for sampling, text, reason, num in (
        ({}, "abc", "stop", 4),
        ({"max_tokens": 2}, "ab", "length", 2),
        ({"max_tokens": 3}, "abc", "length", 3),
        ({"max_tokens": 8, "ignore_eos": True}, "abcabcab", "length", 8),
        ({"min_tokens": 5}, "abcabc", "stop", 7),
        ({"stop": ("bc",)}, "a", "stop", 3),
        ({"stop_token_ids": (98,)}, "a", "stop", 2),
        ({"stop_token_ids": (98,), "min_tokens": 1}, "a", "stop", 2),
        ({"stop_token_ids": (98,), "min_tokens": 2}, "abc", "stop", 4),
    ):
        deltas = await play(generator, request(**sampling))
        assert "".join(d.text for d in deltas) == text, sampling
        assert (deltas[-1].finish_reason, sum(len(d.token_ids) for d in deltas)) == (reason, num), sampling


async def test_a_stop_token_before_min_tokens_does_not_count_in_a_large_chunk_either() -> None:
    generator = ScriptedGenerator(Script(ttft_ms=0, tpot_ms=0, text="ab", tokens_per_chunk=6))
    deltas = await play(generator, request(stop_token_ids=(98,), min_tokens=2, ignore_eos=True))
    assert [(d.text, d.token_ids, d.finish_reason) for d in deltas] == [("aba", (97, 98, 97, 98), "stop")]


async def test_slots_are_given_in_order() -> None:
    generator = ScriptedGenerator(Script(ttft_ms=2, tpot_ms=1, max_concurrency=1))
    answers = await asyncio.gather(*(play(generator, request(max_tokens=2)) for _ in range(4)))
    for before, after in itertools.pairwise(answers):
        last, scheduled = times(before).t_last_token_ns, times(after).t_scheduled_ns
        assert last is not None and scheduled is not None and scheduled >= last
    stats = generator.describe()[1]
    assert (stats.num_running, stats.num_waiting, stats.generation_tokens) == (0, 0, 8)


async def test_tokens_never_come_before_their_time() -> None:
    script = Script(ttft_ms=5, prefill_ms_per_token=1, tpot_ms=2, tokens_per_chunk=3)
    deltas = await play(ScriptedGenerator(script), request("x" * 10, max_tokens=9))
    start = times(deltas).t_scheduled_ns
    assert start is not None
    for delta, due_ms in zip(deltas, (15, 21, 27), strict=True):
        assert delta.t_ns - start >= due_ms * 1e6 - 1e3
        assert len(delta.token_ids) == 3


def test_gaps_have_the_mean_and_spread_asked_for() -> None:
    script = Script(jitter=0.5, seed=3)
    generator, again = ScriptedGenerator(script), ScriptedGenerator(script)
    generator._num_running = again._num_running = 1
    gaps = [generator.gap_ns(10) for _ in range(20_000)]
    assert statistics.fmean(gaps) == pytest.approx(10e6, rel=0.02)
    assert statistics.stdev(gaps) / statistics.fmean(gaps) == pytest.approx(0.5, rel=0.05)
    assert [again.gap_ns(10) for _ in range(100)] == gaps[:100]
    slow = ScriptedGenerator(Script(slowdown=0.25))
    slow._num_running = 5
    assert slow.gap_ns(10) == 20e6


async def test_failures_follow_the_script() -> None:
    generator = ScriptedGenerator(Script(ttft_ms=0, tpot_ms=0, error_rate=0.5, error_after_tokens=2, seed=1))
    outcomes = []
    for _ in range(200):
        try:
            outcomes.append(len(await play(generator, request(max_tokens=5))))
        except EngineError:
            outcomes.append(-1)
    assert set(outcomes) == {5, -1}
    assert 70 <= outcomes.count(-1) <= 130
    assert generator.describe()[1].num_running == 0


async def test_the_context_is_a_limit() -> None:
    generator = ScriptedGenerator(Script(ttft_ms=0, tpot_ms=0, context_length=8))
    assert sum(len(d.token_ids) for d in await play(generator, request("x" * 7, ignore_eos=True))) == 1
    default = request("x" * 6, ignore_eos=True, max_tokens=16, cut_max_tokens=True)
    assert sum(len(d.token_ids) for d in await play(generator, default)) == 2
    for prompt, sampling in (("x" * 8, {}), ("x" * 7, {"max_tokens": 2})):
        with pytest.raises(ContextLengthError):
            await play(generator, request(prompt, **sampling))


@pytest.mark.parametrize(
    "values",
    [
        {"ttft_ms": -1.0}, {"tpot_ms": float("nan")}, {"jitter": float("inf")}, {"tokens_per_chunk": 0}, {"text": ""},
        {"error_rate": 1.5}, {"max_concurrency": 0},
    ],
)  # fmt: skip
def test_scripts_that_mean_nothing_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(values))):
        Script(**values)


def test_launch_spec_writes_flags() -> None:
    options = {"kv_memory_mib": 64, "deterministic": True, "events": None, "script": ["a=1", "b=2"], "x": False}
    spec = launch_spec("model", options, drain_timeout_s=5)
    assert spec.argv[1:6] == ("-m", "inferloop", "serve", "model", "--host")
    assert spec.argv[spec.argv.index("--port") + 1] == "{port}"
    assert spec.argv[-7:] == ("--kv-memory-mib", "64", "--deterministic", "--script", "a=1", "--script", "b=2")
    assert (spec.ready.path, spec.drain_timeout_s) == ("/health/ready", 5)
    assert spec.capabilities["json_schema"].support == "yes"
    assert launch_spec("model", backend="scripted").capabilities["json_schema"].support == "no"
