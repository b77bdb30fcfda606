"""Log-probabilities as the API shows them, when tokens are parts of characters."""

from __future__ import annotations

import json
from typing import Any

from inferloop.backends.protocols import Delta
from inferloop.core.request import Sampling
from inferloop.engine.schedule.step import TokenLogprob
from inferloop.serve.chat import ChatEncoder
from inferloop.serve.columns import LogprobColumns
from inferloop.serve.completions import CompletionEncoder
from inferloop.serve.replies import CachedTokens, Timings, Usage
from inferloop.serve.sse import AnswerHead
from inferloop.serve.wire import Call

VOCABULARY = (b"a", "é".encode()[:1], "é".encode()[1:], b" b")
USAGE = Usage(prompt_tokens=1, completion_tokens=3, total_tokens=4, prompt_tokens_details=CachedTokens(cached_tokens=0))
ROWS = (
    TokenLogprob(-5.0, ((0, -0.1), (3, -0.2))),
    TokenLogprob(-0.3, ((1, -0.3), (2, -0.9))),
    TokenLogprob(float("-inf"), ()),
)
DELTA = Delta("aé", (0, 1, 2), 0, ROWS)


def answer(encoder_type: type[ChatEncoder] | type[CompletionEncoder], delta: Delta = DELTA) -> Any:
    call = Call((), Sampling(num_logprobs=2), stream=False, include_usage=False)
    encoder = encoder_type(AnswerHead("i", 0, "m", call, False, VOCABULARY.__getitem__))
    encoder.collect(0, delta)
    return json.loads(encoder.body(["stop"], USAGE, Timings(num_tokens=0)))["choices"][0]["logprobs"]


def test_bytes_of_part_characters_join_to_the_text() -> None:
    rows = answer(ChatEncoder)["content"]
    assert bytes(b for row in rows for b in row["bytes"]).decode() == "aé"
    assert [row["token"] for row in rows] == ["a", "\ufffd", "\ufffd"]
    assert [row["logprob"] for row in rows] == [-5.0, -0.3, -9999.0]
    assert [[bytes(top["bytes"]) for top in row["top_logprobs"]] for row in rows] == [
        [b"a", b" b"],
        list(VOCABULARY[1:3]),
        [],
    ]


def test_the_chosen_token_is_among_the_top_and_likelier_namesakes_win() -> None:
    unlikely = Delta("b", (3,), 0, (TokenLogprob(-7.0, ((0, -0.1),)),))
    assert answer(CompletionEncoder, unlikely)["top_logprobs"] == [{" b": -7.0, "a": -0.1}]
    assert answer(CompletionEncoder)["top_logprobs"][1] == {"\ufffd": -0.3}
    assert answer(CompletionEncoder)["text_offset"] == [0, 1, 1], "where its character is"


def test_offsets_of_a_prompt_count_from_its_end() -> None:
    """What a tokenizer puts before a text (a beginning-of-text token, a blank) is not in the text."""
    columns = LogprobColumns((b"<s>", b" a", b"b", "é".encode()[:1], "é".encode()[1:]).__getitem__, 0)
    score = TokenLogprob(-1.0, (), rank=2)
    told = columns.prompt("abé", (0, 1, 2, 3, 4), (score,) * 4)
    assert told.tokens == ["<s>", " a", "b", "\ufffd", "\ufffd"]
    assert told.text_offset == [0, 0, 1, 2, 2]
    assert told.token_logprobs == [None, -1.0, -1.0, -1.0, -1.0]
    assert columns.output((2, 1), (score,) * 2).text_offset == [3, 4]
