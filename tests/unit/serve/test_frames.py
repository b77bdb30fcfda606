"""The short way that nearly every chunk of a stream takes gives the bytes of the long one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferloop.backends.protocols import Delta
from inferloop.core.request import Sampling
from inferloop.engine.schedule.step import TokenLogprob
from inferloop.engine.text.answer import AnswerPlan
from inferloop.serve.chat import ChatEncoder
from inferloop.serve.completions import CompletionEncoder
from inferloop.serve.replies import CachedTokens, Usage
from inferloop.serve.sse import AnswerHead
from inferloop.serve.wire import Call

USAGE = Usage(prompt_tokens=1, completion_tokens=3, total_tokens=4, prompt_tokens_details=CachedTokens(cached_tokens=0))
DELTAS = st.lists(
    st.builds(
        lambda text, token_ids, logprob: Delta(
            text,
            tuple(token_ids),
            0,
            None if logprob is None else (TokenLogprob(logprob, ()),) * len(token_ids),
            (1, 2),
        ),
        st.text(st.characters(codec="utf-8"), max_size=4),
        st.lists(st.integers(0, 9), min_size=1, max_size=3),
        st.sampled_from([None, None, None, -0.5]),
    ),
    min_size=1,
    max_size=6,
)


@pytest.mark.parametrize("encoder_type", [ChatEncoder, CompletionEncoder])
@given(
    deltas=DELTAS,
    num_choices=st.integers(1, 3),
    include_usage=st.booleans(),
    tells_usage=st.booleans(),
    with_timings=st.booleans(),
    return_token_ids=st.booleans(),
    echo=st.sampled_from(["", "so: "]),
    thinks=st.booleans(),
    last=st.booleans(),
)
def test_a_frame_changes_nothing(
    encoder_type: type[ChatEncoder] | type[CompletionEncoder],
    deltas: list[Delta],
    num_choices: int,
    include_usage: bool,
    tells_usage: bool,
    with_timings: bool,
    return_token_ids: bool,
    echo: str,
    thinks: bool,
    last: bool,
) -> None:
    call = Call(
        (),
        Sampling(),
        stream=True,
        include_usage=include_usage,
        num_per_prompt=num_choices,
        return_token_ids=return_token_ids,
        answer=AnswerPlan(thinks=thinks),
    )

    def encoder() -> ChatEncoder | CompletionEncoder:
        usage = (lambda: USAGE) if tells_usage else None
        echoes = (echo,) * num_choices
        return encoder_type(AnswerHead("i", 0, "m", call, with_timings, lambda _: b"t", echoes, usage))

    fast, slow = encoder(), encoder()
    slow._frames = [None] * num_choices
    if last:
        deltas = [*deltas[:-1], Delta(deltas[-1].text, deltas[-1].token_ids, 0, finish_reason="stop", stop_reason=".")]
    for i, delta in enumerate(deltas):
        assert fast.chunk(i % num_choices, delta) == slow.chunk(i % num_choices, delta)
    assert fast.ended(0, "stop") == slow.ended(0, "stop")
