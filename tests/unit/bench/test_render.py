"""Prompts have exactly the sampled token counts and share exactly their prefixes, in the model's own tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferloop.bench.render import RenderedRequest, RenderOptions, render
from inferloop.contract.load import parse
from inferloop.contract.sample import sample, sample_workload
from inferloop.core.errors import RequestError, UsageError
from inferloop.core.request import Segment, TimedRequest
from inferloop.engine.text.codec import Codec
from inferloop.models.resolve import ModelFiles

CHAT = RenderOptions(model="m")
TEXT = RenderOptions(model="m", as_chat=False)
IDS = RenderOptions(model="m", as_token_ids=True)


@pytest.fixture(scope="module")
def codec(embedded_model: ModelFiles) -> Codec:
    return Codec(embedded_model)


def timed(index: int, num_tokens: int, *, group: int = -1, prefix: int = 0) -> TimedRequest:
    own = Segment(1000 + index, num_tokens - prefix)
    return TimedRequest(index, 0.0, (Segment(group, prefix), own) if prefix else (own,), 7)


def ids_of(codec: Codec, request: RenderedRequest) -> tuple[int, ...]:
    """As the server will see it."""
    body = json.loads(request.body)
    if "messages" in body:
        return codec.encode_chat(body["messages"])
    return tuple(body["prompt"]) if isinstance(body["prompt"], list) else codec.encode_text(body["prompt"])


def common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(40, 900), st.integers(-1, 2), st.floats(0, 1)), min_size=1, max_size=6),
    st.sampled_from([CHAT, TEXT, IDS]),
)
def test_counts_are_exact_and_prefixes_shared(
    codec: Codec, drawn: list[tuple[int, int, float]], options: RenderOptions
) -> None:
    requests = [
        timed(i, n, group=g, prefix=int(share * (n - 1)) if g >= 0 else 0) for i, (n, g, share) in enumerate(drawn)
    ]
    rendered = render(requests, codec, options)
    seen = [ids_of(codec, r) for r in rendered]
    for request, result, ids in zip(requests, rendered, seen, strict=True):
        assert len(ids) == request.input_tokens == result.num_input_tokens
        assert not result.clipped
    for i, a in enumerate(requests):
        for j, b in enumerate(requests[:i]):
            shared = common(seen[i], seen[j])
            if a.segments[0].key == b.segments[0].key:
                assert shared >= min(rendered[i].num_shared_tokens, rendered[j].num_shared_tokens)
                tail = 8  # the template's end counts towards the length, so it cannot lie in the shared part
                for r, x in ((a, rendered[i]), (b, rendered[j])):
                    if x.num_shared_tokens:
                        prefix = r.segments[0].num_tokens
                        assert prefix - tail <= x.num_shared_tokens <= prefix
            else:
                assert shared <= 14  # what the template puts first, and a chance word


def test_requests_of_a_group_part_where_they_say(codec: Codec) -> None:
    for options in (CHAT, TEXT, IDS):
        a, b, other = render(
            [
                timed(0, 300, group=5, prefix=200),
                timed(1, 280, group=5, prefix=200),
                timed(2, 300, group=6, prefix=200),
            ],
            codec,
            options,
        )
        assert common(ids_of(codec, a), ids_of(codec, b)) == a.num_shared_tokens == 200
        assert common(ids_of(codec, a), ids_of(codec, other)) < 14


turns = st.lists(st.tuples(st.integers(12, 300), st.integers(2, 60)), min_size=1, max_size=5)


@settings(max_examples=30, deadline=None)
@given(turns, st.integers(0, 80), st.integers(0, 200), st.sampled_from([CHAT, TEXT, IDS]))
def test_every_turn_begins_with_the_turn_before(
    codec: Codec, lengths: list[tuple[int, int]], system: int, group: int, options: RenderOptions
) -> None:
    """Token by token and message by message; a short question borrows what its frame takes from the next one."""
    segments: tuple[Segment, ...] = ()
    if system:
        segments += (Segment(70, 10 + system, "system"),)
    if group:
        segments += (Segment(71, group),)
    requests = []
    for number, (asked, answered) in enumerate(lengths):
        segments += (Segment(100 + number, 30 + asked),)
        requests.append(TimedRequest(number, 0.0, segments, answered))
        segments += (Segment(200 + number, answered, "assistant"),)
    rendered = render(requests, codec, options)
    ids = [ids_of(codec, r) for r in rendered]
    assert [len(i) for i in ids] == [r.num_input_tokens for r in rendered] == [r.input_tokens for r in requests]
    for before, after in pairwise(ids):
        assert after[: len(before)] == before
    if options is CHAT:
        roles = [m["role"] for m in json.loads(rendered[-1].body)["messages"]]
        assert roles == ["system", *(["user", "assistant"] * len(lengths))[:-1]]


def test_conversations_with_one_system_message_share_it(codec: Codec) -> None:
    a, b = render(
        [TimedRequest(i, 0.0, (Segment(7, 150, "system"), Segment(100 + i, 80)), 7) for i in range(2)], codec, CHAT
    )
    assert common(ids_of(codec, a), ids_of(codec, b)) == a.num_shared_tokens == b.num_shared_tokens == 150
    assert [m["role"] for m in json.loads(a.body)["messages"]] == ["system", "user"]


def test_content_is_unique_per_seed_and_reproducible(codec: Codec) -> None:
    requests = [timed(i, 64) for i in range(50)]
    first, again = render(requests, codec, CHAT), render(requests, codec, CHAT)
    assert [r.body for r in first] == [r.body for r in again]
    assert len({r.body for r in first}) == 50
    longest = max(common(ids_of(codec, a), ids_of(codec, b)) for a in first for b in first if a is not b)
    assert longest <= 14


def test_a_chat_shorter_than_its_template_is_clipped_and_said(codec: Codec) -> None:
    (tiny,) = render([timed(0, 3)], codec, CHAT)
    assert tiny.clipped
    assert len(ids_of(codec, tiny)) == tiny.num_input_tokens > 3
    for options in (TEXT, IDS):
        for n in (1, 2, 3):
            (exact,) = render([timed(0, n)], codec, options)
            assert not exact.clipped
            assert len(ids_of(codec, exact)) == n


def test_body_is_what_was_asked_for(codec: Codec) -> None:
    (r,) = render([timed(0, 50)], codec, replace(CHAT, extra={"seed": 3}, ignore_eos=False))
    body = json.loads(r.body)
    assert r.path == "/v1/chat/completions"
    assert {k: v for k, v in body.items() if k != "messages"} == {
        "model": "m",
        "max_tokens": 7,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "seed": 3,
    }
    assert render([timed(0, 50)], codec, TEXT)[0].path == "/v1/completions"


WORKLOADS: list[dict[str, Any]] = [
    {"prefix_reuse": 0.5},
    {"turns": {"p50": 3, "p95": 5}, "prefix_reuse": 0.5},
    {"queries_per_request": 3, "tool_ms": 50, "prefix_reuse": 0.6},
    {"arrivals": {"process": "closed", "users": 3}},
]


@pytest.mark.parametrize("options", [CHAT, TEXT, IDS])
@pytest.mark.parametrize("shaped", WORKLOADS)
def test_parts_of_a_run_share_nothing_and_a_seed_gives_the_same_bytes(
    codec: Codec, shaped: dict[str, Any], options: RenderOptions
) -> None:
    """Every point, repeat and seed has prompts of its own, which another renderer makes again to the byte."""
    base = {"model": "m", "qps": 2, "input_tokens": {"p50": 120, "p95": 300}, "output_tokens": {"p50": 20, "p95": 40}}
    contract = parse(base | shaped)

    def bodies(seed: int, stream: str) -> tuple[RenderedRequest, ...]:
        return render(sample(contract, seed=seed, stream=stream, num_requests=24), codec, options)

    parts = {(seed, stream): bodies(seed, stream) for seed in (0, 1) for stream in ("sweep-1/0", "sweep-1/1", "peak/0")}
    for (seed, stream), rendered in parts.items():
        assert [r.body for r in rendered] == [r.body for r in bodies(seed, stream)]
    template = 14  # what the template puts first, and a chance word
    for one, other in combinations(parts.values(), 2):
        heads = {ids_of(codec, r)[:template] for r in one}
        assert not heads & {ids_of(codec, r)[:template] for r in other}


def test_measured_reuse_is_that_of_the_tokens_sent(codec: Codec) -> None:
    """Counted once by segments and once by comparing every prompt with all before it, as the model will see them."""
    base = {"model": "m", "qps": 2, "input_tokens": {"p50": 200, "p95": 500}, "output_tokens": {"p50": 20, "p95": 40}}
    for shaped in WORKLOADS:
        workload = sample_workload(parse(base | shaped), seed=3, num_requests=60)
        seen = [ids_of(codec, r) for r in render(workload.requests, codec, CHAT)]
        repeated = sum(max((common(ids, x) for x in seen[:i]), default=0) for i, ids in enumerate(seen))
        by_template = 13 * len(seen) / sum(len(ids) for ids in seen)
        assert 0 <= repeated / sum(len(ids) for ids in seen) - workload.prefix_reuse + 0.01 <= by_template + 0.02


class Letters:
    """One token per byte, BOS first, and a template that refuses system messages."""

    def encode_text(self, text: str) -> tuple[int, ...]:
        return (256, *text.encode())

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        if messages[0]["role"] == "system":
            raise RequestError("no system role", param="messages")
        return (256, 257, *messages[0]["content"].encode(), 258)


class Words(Letters):
    """One token per word, with BOS."""

    def encode_text(self, text: str) -> tuple[int, ...]:
        return (0, *(hash(w) for w in text.replace("\n", " \n ").split(" ") if w))

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        if messages[0]["role"] == "system":
            raise RequestError("no system role", param="messages")
        return (0, 1, *self.encode_text(messages[0]["content"])[1:], 2)


class Triples(Letters):
    """One token per three bytes."""

    def encode_text(self, text: str) -> tuple[int, ...]:
        data = text.encode()
        return (0, *(1 + hash(data[i : i + 3]) % 10**6 for i in range(0, len(data), 3)))


def test_a_tokenizer_of_bytes_gets_letters() -> None:
    for options in (TEXT, CHAT):
        a, b = render([timed(0, 40, group=1, prefix=11), timed(1, 50, group=1, prefix=11)], Letters(), options)
        bodies = [json.loads(r.body) for r in (a, b)]
        ids = [
            Letters().encode_text(x["prompt"]) if "prompt" in x else Letters().encode_chat(x["messages"])
            for x in bodies
        ]
        assert [len(i) for i in ids] == [40, 50]
        assert ids[0][:11] == ids[1][:11]


def test_a_tokenizer_that_keeps_nothing_apart_needs_token_ids() -> None:
    with pytest.raises(UsageError, match="send token ids"):
        render([timed(0, 20)], Triples(), TEXT)
    (exact,) = render([timed(0, 20)], Triples(), IDS)
    assert len(json.loads(exact.body)["prompt"]) == 20
    a, b = render([timed(0, 20, group=1, prefix=11), timed(1, 30, group=1, prefix=11)], Letters(), IDS)
    ids_a, ids_b = json.loads(a.body)["prompt"], json.loads(b.body)["prompt"]
    assert (len(ids_a), len(ids_b)) == (20, 30)
    assert ids_a[0] == 256
    assert 256 not in ids_a[1:]
    assert ids_a[:11] == ids_b[:11]


def test_a_template_without_system_role(codec: Codec) -> None:
    a, b = render([timed(0, 20, group=1, prefix=11), timed(1, 30, group=1, prefix=11)], Words(), CHAT)
    assert [m["role"] for m in json.loads(a.body)["messages"]] == ["user"]
    tokens = [Words().encode_chat(json.loads(r.body)["messages"]) for r in (a, b)]
    assert [len(t) for t in tokens] == [20, 30]
    assert common(*tokens) == 11


class Drifting(Letters):
    """Letters and a template that adds a token more for every third message: no linear shape."""

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        if messages[0]["role"] == "system":
            raise RequestError("no system role", param="messages")
        ids: list[int] = [256]
        for number, message in enumerate(messages):
            ids += [257, *([300] * (number // 3)), *message["content"].encode(), 258]
        return (*ids, 259)


def test_a_template_of_an_odd_shape_is_measured_and_mended() -> None:
    segments: tuple[Segment, ...] = ()
    requests = []
    for number in range(8):
        segments += (Segment(100 + number, 40),)
        requests.append(TimedRequest(number, 0.0, segments, 20))
        segments += (Segment(200 + number, 20, "assistant"),)
    rendered = render(requests, Drifting(), CHAT)
    ids = [Drifting().encode_chat(json.loads(r.body)["messages"]) for r in rendered]
    assert [len(i) for i in ids] == [r.input_tokens for r in requests]
    for before, after in pairwise(ids):
        assert after[: len(before) - 1] == before[:-1], "all but the prompt to answer"
