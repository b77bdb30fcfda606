"""Several requests at once: all get a place or none does, each prompt is read once, and failures end them all."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.gates import GatedRunner
from tests.waiting import PATIENCE_S, until

from inferloop.backends import bytecodec
from inferloop.backends.native import NativeGenerator
from inferloop.backends.protocols import Delta, GenerateRequest, Prompt
from inferloop.core.errors import OverloadedError, RequestError
from inferloop.core.ids import TraceContext
from inferloop.core.request import Sampling
from inferloop.engine.compute.echo import continuation

VOCAB = bytecodec.VOCAB_SIZE
Native = Callable[..., contextlib.AbstractAsyncContextManager[NativeGenerator]]


def request(prompt: str, n: int = 1, **sampling: Any) -> GenerateRequest:
    return GenerateRequest("r", TraceContext.new(), Prompt(text=prompt), Sampling(**sampling), 0, n=n, num_choices=n)


class Taken:
    """Takes deltas."""

    def __init__(self, num: int) -> None:
        self.deltas: list[list[Delta]] = [[] for _ in range(num)]

    def __call__(self, index: int, delta: Delta) -> None:
        self.deltas[index].append(delta)

    @property
    def token_ids(self) -> list[list[int]]:
        return [[i for delta in deltas for i in delta.token_ids] for deltas in self.deltas]


async def idle(generator: NativeGenerator) -> None:
    await until(lambda: generator.describe()[1].num_running + generator.describe()[1].num_waiting == 0)


async def test_each_request_gets_its_own_answer(native: Native) -> None:
    prompts, taken = ["one", "two", "six"], Taken(3)
    async with native(max_sequences=2) as g:
        await g.push([request(prompt, max_tokens=4 + i) for i, prompt in enumerate(prompts)], taken)
    assert taken.token_ids == [continuation(list(p.encode()), 4 + i, VOCAB) for i, p in enumerate(prompts)]
    assert [[d.finish_reason for d in deltas][-1] for deltas in taken.deltas] == ["length"] * 3


async def test_choices_find_room_together_however_little_may_wait(native: Native) -> None:
    """As many as can run at once never wait for one another."""
    taken = Taken(4)
    async with native(max_sequences=4, max_waiting_tokens=1) as g:
        for _ in range(20):
            await g.push([request("hello", 4, max_tokens=2)] * 4, taken)
    assert taken.token_ids == [continuation(list(b"hello"), 2, VOCAB) * 20] * 4


async def test_none_is_queued_when_one_has_no_place(native: Native) -> None:
    runner = GatedRunner(vocab_size=VOCAB)
    async with native(runner, max_sequences=2, max_waiting=1) as g:
        runner.gate.clear()
        running = asyncio.create_task(g.push([request("hello", max_tokens=200)], Taken(1)))
        await until(lambda: g.describe()[1].num_running)
        taken = Taken(3)
        with pytest.raises(OverloadedError):
            await g.push([request("other", 3, max_tokens=200)] * 3, taken)
        stats = g.describe()[1]
        assert (stats.num_running, stats.num_waiting) == (1, 0) and taken.token_ids == [[], [], []]
        running.cancel()
        runner.gate.set()


async def test_a_prompt_is_read_once_for_all_its_choices(native: Native, monkeypatch: pytest.MonkeyPatch) -> None:
    read, render = list[Prompt](), NativeGenerator.render

    def counting(self: NativeGenerator, prompt: Prompt, **options: Any) -> tuple[int, ...]:
        read.append(prompt)
        return render(self, prompt, **options)

    monkeypatch.setattr(NativeGenerator, "render", counting)
    first, second = request("ab", 2, max_tokens=1), request("cd", 2, max_tokens=1)
    async with native() as g:
        await g.push([first, replace(first), second, replace(second)], Taken(4))
    assert [prompt.text for prompt in read] == ["ab", "cd"]


@pytest.mark.parametrize("num_good", [0, 1, 7])
async def test_who_takes_and_fails_ends_all(native: Native, num_good: int) -> None:
    num_taken = 0

    def take(index: int, delta: Delta) -> None:
        nonlocal num_taken
        num_taken += 1
        if num_taken > num_good:
            raise ZeroDivisionError("a bug")

    async with native(max_sequences=2) as g:
        with pytest.raises(ZeroDivisionError):
            await g.push([request("hello", 3, max_tokens=200)] * 3, take)
        await idle(g)
        assert num_taken == num_good + 1
        await g.push([request("hello", max_tokens=2)], taken := Taken(1))
    assert taken.token_ids == [continuation(list(b"hello"), 2, VOCAB)]


async def test_a_stop_string_ends_one_choice_only(native: Native) -> None:
    ids = continuation(list(b"hello"), 60, VOCAB)
    stop, taken = bytecodec.decode(ids)[20:23], Taken(2)
    async with native() as g:
        await g.push([request("hello", 2, max_tokens=60, stop=(stop,)), request("hello", 2, max_tokens=60)], taken)
        await idle(g)
    assert len(taken.token_ids[0]) < 60 and taken.token_ids[1] == ids
    assert [deltas[-1].finish_reason for deltas in taken.deltas] == ["stop", "length"]


async def test_one_that_can_never_be_served_refuses_all_before_any(native: Native) -> None:
    taken = Taken(2)
    async with native() as g:
        with pytest.raises(RequestError):
            await g.push([request("fine", max_tokens=5), request("", max_tokens=5)], taken)
        assert g.describe()[1].prompt_tokens == 0 and taken.token_ids == [[], []]


async def test_even_the_failure_that_a_future_refuses_ends_its_own_requests_only(native: Native) -> None:
    def failing(index: int, delta: Delta) -> None:
        raise StopIteration

    async with native() as g, asyncio.timeout(PATIENCE_S):
        with pytest.raises(RuntimeError, match="StopIteration"):
            await g.push([request("hello", max_tokens=9)], failing)
        await idle(g)
