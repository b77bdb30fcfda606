"""The native generator around the engine loop, with a runner whose answers are known in advance."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest
from tests.gates import GatedRunner
from tests.waiting import until

from inferloop.backends import bytecodec
from inferloop.backends.native import NativeGenerator
from inferloop.backends.protocols import Delta, GenerateRequest, Prompt
from inferloop.core.errors import ContextLengthError, EngineError, OverloadedError, RequestError
from inferloop.core.ids import TraceContext
from inferloop.core.request import Sampling
from inferloop.engine.compute.echo import continuation

VOCAB = bytecodec.VOCAB_SIZE
Native = Callable[..., contextlib.AbstractAsyncContextManager[NativeGenerator]]


def runner() -> GatedRunner:
    return GatedRunner(vocab_size=VOCAB)


def request(prompt: str = "hello", request_id: str = "r", **sampling: Any) -> GenerateRequest:
    return GenerateRequest(request_id, TraceContext.new(), Prompt(text=prompt), Sampling(**sampling), 0)


async def collect(g: NativeGenerator, r: GenerateRequest) -> list[Delta]:
    return [delta async for delta in g.generate(r)]


def ids_of(deltas: Iterable[Delta]) -> list[int]:
    return [i for delta in deltas for i in delta.token_ids]


def text_of(deltas: Iterable[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


async def settled(g: NativeGenerator) -> None:
    def is_empty() -> bool:
        stats = g.describe()[1]
        return stats.num_running == stats.num_waiting == stats.kv_blocks_used == 0

    await until(is_empty)


async def test_tokens_text_and_stamps(native: Native) -> None:
    expected = continuation(list(b"hello"), 40, VOCAB)
    async with native(max_step_tokens=3) as g:
        deltas = await collect(g, request(max_tokens=40, num_logprobs=0))
    assert ids_of(deltas) == expected
    assert text_of(deltas) == bytecodec.decode(expected)
    assert deltas[0].prompt_token_ids == tuple(b"hello")
    assert [d.finish_reason for d in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish_reason == "length"
    assert all(d.logprobs is not None and len(d.logprobs) == len(d.token_ids) for d in deltas)
    times = deltas[-1].times
    assert times is not None and times.t_tokenized_ns is not None and times.t_scheduled_ns is not None
    assert times.t_first_token_ns == deltas[0].t_ns and times.t_last_token_ns == deltas[-1].t_ns
    assert times.t_tokenized_ns <= times.t_scheduled_ns <= deltas[0].t_ns


async def test_stop_string_trims_tokens_and_frees_the_engine(native: Native) -> None:
    ids = continuation(list(b"hello"), 60, VOCAB)
    texts = [bytecodec.decode(ids[:n]) for n in range(61)]
    stop = texts[60][20:23]
    async with native() as g:
        deltas = await collect(g, request(max_tokens=60, stop=(stop,)))
        await settled(g)
    full = texts[60]
    assert text_of(deltas) == full[: full.index(stop)]
    num = next(n for n in range(61) if stop in texts[n])
    assert ids_of(deltas) == ids[:num]
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", stop)


async def test_eos_ends_without_text(native: Native) -> None:
    ids = continuation(list(b"hello"), 30, VOCAB)
    end = ids[10]
    async with native(eos_token_ids=(end,)) as g:
        deltas = await collect(g, request(max_tokens=30))
        ignoring = await collect(g, request(max_tokens=30, ignore_eos=True))
    first = ids.index(end)
    assert ids_of(deltas) == ids[: first + 1]
    assert text_of(deltas) == bytecodec.decode(ids[:first]), "also an end token that the tokenizer has a text for"
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", None)
    assert ids_of(ignoring) == ids


async def test_stop_token_counts_but_has_no_text(native: Native) -> None:
    ids = continuation(list(b"hello"), 30, VOCAB)
    first = ids.index(ids[10])
    async with native() as g:
        deltas = await collect(g, request(max_tokens=30, stop_token_ids=(ids[10],)))
    assert ids_of(deltas) == ids[: first + 1]
    assert text_of(deltas) == bytecodec.decode(ids[:first])
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", ids[10])


@pytest.mark.parametrize("seed", range(3))
async def test_leaving_at_any_time_frees_everything(native: Native, seed: int) -> None:
    """Queued, prefilling in chunks, decoding: closing the iterator or cancelling its task aborts the request, and the
    others' answers do not change."""
    rng = random.Random(seed)

    async def leaver(g: NativeGenerator, i: int) -> None:
        deltas = g.generate(request("x" * rng.randrange(1, 60), request_id="same", max_tokens=100))
        with contextlib.suppress(TimeoutError):
            async with contextlib.aclosing(deltas), asyncio.timeout(rng.random() * 0.05):
                num = rng.randrange(0, 20)
                async for _ in deltas:
                    num -= 1
                    if num < 0:
                        break

    async with native(max_sequences=4, max_step_tokens=16) as g:
        stayer = asyncio.create_task(collect(g, request("stay", max_tokens=100)))
        await asyncio.gather(*(leaver(g, i) for i in range(40)))
        assert ids_of(await stayer) == continuation(list(b"stay"), 100, VOCAB)
        await settled(g)
        assert g._receivers == {}


async def test_refusals_name_the_field_and_leave_nothing(native: Native) -> None:
    async with native(context_length=64) as g:
        assert g.describe()[0].context_length == 64
        with pytest.raises(ContextLengthError) as refusal:
            await collect(g, request("x" * 64))
        assert refusal.value.param == "prompt"
        chat = GenerateRequest(
            "r", TraceContext.new(), Prompt(messages=({"role": "user", "content": "x" * 99},)), Sampling(), 0
        )
        with pytest.raises(ContextLengthError) as refusal:
            await collect(g, chat)
        assert refusal.value.param == "messages"
        with pytest.raises(RequestError):
            await collect(g, request("x", stop_token_ids=(VOCAB,)))


@pytest.mark.parametrize(
    ("prompt", "in_thread"),
    [
        (Prompt(text="x"), False),
        (Prompt(text="x" * 10_000), True),
        (Prompt(messages=({"role": "user", "content": "x"},)), False),
        (Prompt(messages=({"role": "user", "content": ""},) * 1000), True),
        (Prompt(messages=({"role": "assistant", "content": "", "reasoning_content": "x" * 10_000},)), True),
        (Prompt(messages=({"role": "user", "content": "x"},), tools=({"description": "x" * 10_000},)), True),
        (Prompt(messages=({"role": "assistant", "content": "", "tool_calls": [{"x": "x" * 10_000}]},)), True),
    ],
)
async def test_long_prompts_are_tokenized_beside_the_event_loop(
    native: Native, prompt: Prompt, in_thread: bool
) -> None:
    threads: list[int] = []

    class Watched(bytecodec.ByteCodec):
        def encode_chat(self, messages: Sequence[Mapping[str, Any]], **how: Any) -> tuple[int, ...]:
            threads.append(threading.get_ident())
            return super().encode_chat(messages, **how)

        def encode_text(self, text: str, **how: Any) -> tuple[int, ...]:
            threads.append(threading.get_ident())
            return super().encode_text(text, **how)

    async with native(codec=Watched(), context_length=2) as g:
        with pytest.raises((ContextLengthError, RequestError)):
            await collect(g, GenerateRequest("r", TraceContext.new(), prompt, Sampling(max_tokens=9), 0))
    assert [t != threading.get_ident() for t in threads] == [in_thread]


@pytest.mark.parametrize("num_prompt", range(61, 66))
async def test_prompts_around_the_context_limit(native: Native, num_prompt: int) -> None:
    """A default that the caller did not choose is cut to what remains; what was asked for is refused."""
    async with native(context_length=64) as g:
        for sampling, num_output in (
            ({"max_tokens": None}, 64 - num_prompt),
            ({"max_tokens": 2}, 2 if num_prompt + 2 <= 64 else 0),
            ({"max_tokens": 2, "cut_max_tokens": True}, min(2, 64 - num_prompt)),
        ):
            asked = request("x" * num_prompt, ignore_eos=True, **sampling)
            if num_output > 0:
                assert len(ids_of(await collect(g, asked))) == num_output, sampling
                continue
            with pytest.raises(ContextLengthError) as refusal:
                await collect(g, asked)
            assert refusal.value.param == ("prompt" if num_prompt >= 64 else "max_tokens")


async def test_a_full_queue_refuses_at_once(native: Native) -> None:
    r = runner()
    async with native(r, max_sequences=1, max_waiting=1) as g:
        r.gate.clear()
        accepted = [asyncio.create_task(collect(g, request(max_tokens=5))) for _ in range(2)]
        await until(lambda: (g.describe()[1].num_running, g.describe()[1].num_waiting) == (1, 1))
        with pytest.raises(OverloadedError):
            await collect(g, request(max_tokens=5))
        r.gate.set()
        assert [ids_of(await task) for task in accepted] == [continuation(list(b"hello"), 5, VOCAB)] * 2


async def test_a_broken_runner_ends_every_request(native: Native) -> None:
    r = runner()
    r.num_good_steps = 20
    async with native(r) as g:
        seen: list[int] = []
        with pytest.raises(EngineError):
            async for delta in g.generate(request(max_tokens=200)):
                seen += delta.token_ids
        assert seen == continuation(list(b"hello"), 200, VOCAB)[: len(seen)] != []
        assert not g.describe()[1].alive
        with pytest.raises(EngineError):
            await collect(g, request())
