"""Structured output between the codec that compiles it and the engine that keeps to it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import pytest

from inferloop.backends import bytecodec
from inferloop.backends.native import NativeGenerator
from inferloop.backends.protocols import GenerateRequest, Prompt
from inferloop.core.errors import EngineError, RequestError
from inferloop.core.ids import TraceContext
from inferloop.core.request import Grammar, Sampling
from inferloop.engine.compute.echo import EchoRunner, continuation
from inferloop.engine.schedule.mask import Mask
from inferloop.engine.schedule.step import StepResult, UInt32

VOCAB = bytecodec.VOCAB_SIZE
Native = Callable[..., contextlib.AbstractAsyncContextManager[NativeGenerator]]
GRAMMAR = Grammar("regex", "a+", "structured_outputs.regex")


class Recorder:
    """Takes everything, up to `fail_after` tokens."""

    def __init__(self, fail_after: int | None) -> None:
        self.fail_after, self.taken = fail_after, list[int]()

    @property
    def failed(self) -> bool:
        return self.fail_after is not None and len(self.taken) >= self.fail_after

    def fill(self, row: UInt32) -> None:
        row[:] = 0xFFFF_FFFF

    def accept(self, token_ids: list[int]) -> None:
        self.taken += token_ids


class MaskCodec(bytecodec.ByteCodec):
    def __init__(self, fail_after: int | None = None) -> None:
        self.fail_after = fail_after
        self.made: list[tuple[Grammar, Recorder, str]] = []

    def compile_grammar(self, grammar: Grammar) -> Mask:
        if grammar.text == "(":
            raise RequestError("unclosed", param=grammar.param)
        self.made.append((grammar, Recorder(self.fail_after), threading.current_thread().name))
        return self.made[-1][1]


class BreakingRunner(EchoRunner):
    def wait(self) -> StepResult:
        raise RuntimeError("the device fell off the bus")


async def ids(g: NativeGenerator, grammar: Grammar | None) -> list[int]:
    asked = GenerateRequest("r", TraceContext.new(), Prompt(text="hello"), Sampling(max_tokens=8, grammar=grammar), 0)
    return [token for delta in [d async for d in g.generate(asked)] for token in delta.token_ids]


async def test_a_grammar_is_compiled_beside_the_loop_and_its_mask_moves_with_the_tokens(native: Native) -> None:
    codec = MaskCodec()
    async with native(codec=codec) as g:
        assert g.describe()[0].structured_output
        assert await ids(g, None) == await ids(g, GRAMMAR) == continuation(list(b"hello"), 8, VOCAB)
    [(grammar, mask, thread)] = codec.made
    assert grammar == GRAMMAR and mask.taken == continuation(list(b"hello"), 8, VOCAB)
    assert thread != threading.current_thread().name


async def test_what_cannot_be_compiled_never_reaches_the_engine(native: Native) -> None:
    async with native(codec=MaskCodec()) as g:
        with pytest.raises(RequestError, match="unclosed"):
            await ids(g, Grammar("regex", "(", "structured_outputs.regex"))
        assert g.describe()[1].step_counter == 0


async def test_a_grammar_that_fails_on_the_way_is_the_callers_and_costs_nobody_else(native: Native) -> None:
    async with native(codec=MaskCodec(fail_after=3)) as g:
        with pytest.raises(RequestError) as found:
            await ids(g, GRAMMAR)
        assert found.value.param == GRAMMAR.param
        assert await ids(g, None) == continuation(list(b"hello"), 8, VOCAB)
        assert g.describe()[1].num_running == 0


async def test_an_engine_that_fails_under_a_grammar_is_no_fault_of_the_caller(
    native: Native, caplog: pytest.LogCaptureFixture
) -> None:
    async with native(BreakingRunner(vocab_size=VOCAB), MaskCodec()) as g:
        with pytest.raises(EngineError):
            await ids(g, GRAMMAR)


async def test_a_codec_without_grammars_says_so(native: Native) -> None:
    async with native() as g:
        assert not g.describe()[0].structured_output
        with pytest.raises(RequestError) as found:
            await ids(g, GRAMMAR)
        assert found.value.param == GRAMMAR.param
