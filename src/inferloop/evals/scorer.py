"""Scorers: pure functions from a case and what was observed to a score with its reason.

A wrong answer scores 0. An answer of an unreadable shape is unparsed, which is neither right nor wrong: it stays in
the denominator and widens the bounds (a scorer that cannot read must not invent a score).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from inferloop.evals.suite import Case, CaseKind

Status = Literal["scored", "errored", "unparsed", "judge_failed", "skipped"]
_SHOWN_CHARS = 160


@dataclass(frozen=True, slots=True)
class Reply:
    """One HTTP answer, read as far as it can be. `body_problem` says why its shape could not be read."""

    status: int
    text: str | None = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    total_tokens: int | None = None
    error_param: str | None = None
    body_problem: str | None = None


@dataclass(frozen=True, slots=True)
class Observation:
    """All that was gathered for one case; a field is None when the case did not need it."""

    reply: Reply | None = None
    streamed: Reply | None = None
    token_ids: tuple[int, ...] | None = None
    round_trip: str | None = None


@dataclass(frozen=True, slots=True)
class Score:
    """`value` (0 wrong to 1 right) is set exactly when `status` is scored. `reason` is empty for a full score."""

    status: Status
    value: float | None = None
    reason: str = ""


Scorer = Callable[[Case, Observation], Score]

RIGHT = Score("scored", 1.0)


def wrong(reason: str) -> Score:
    return Score("scored", 0.0, reason)


def shown(value: Any) -> str:
    """A value for a reason: quoted, and cut when long."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}... ({len(text)} characters)"


def needs(case: Case) -> frozenset[str]:
    """What must be gathered before `score`: some of reply, streamed, token_ids, round_trip."""
    if case.kind == "template":
        return frozenset({"token_ids"})
    if case.kind != "protocol":
        return frozenset({"reply"})
    wanted = set()
    if case.expect.keys() - {"round_trip"}:
        wanted.add("reply")
    if "stream_equal" in case.expect:
        wanted.add("streamed")
    if "usage_exact" in case.expect:
        wanted.add("token_ids")
    if "round_trip" in case.expect:
        wanted.add("round_trip")
    return frozenset(wanted)


def score(case: Case, seen: Observation) -> Score:
    """The score of one case by its kind's scorer. Pure; `seen` must hold what `needs(case)` names."""
    return SCORERS[case.kind](case, seen)


def _answer(seen: Observation) -> str | Score:
    """The text of a successful answer, or the score that its absence gets."""
    reply = seen.reply
    assert reply is not None, "a generating case needs its reply"
    if reply.status != 200:
        return Score("errored", None, f"HTTP {reply.status}")
    if reply.text is None:
        return Score("unparsed", None, reply.body_problem or "the answer has no text")
    return reply.text


def exact(case: Case, seen: Observation) -> Score:
    """The whole text, character for character."""
    text = _answer(seen)
    if isinstance(text, Score):
        return text
    return RIGHT if text == case.expect else wrong(f"got {shown(text)}, expected {shown(case.expect)}")


def contains(case: Case, seen: Observation) -> Score:
    """Every expected text occurs."""
    text = _answer(seen)
    if isinstance(text, Score):
        return text
    absent = [part for part in case.expect if part not in text]
    return wrong(f"{shown(absent[0])} is not in {shown(text)}") if absent else RIGHT


def regex(case: Case, seen: Observation) -> Score:
    """The pattern is found somewhere (anchor it to match the whole)."""
    text = _answer(seen)
    if isinstance(text, Score):
        return text
    return RIGHT if re.search(case.expect, text) else wrong(f"{shown(case.expect)} does not match {shown(text)}")


def json_value(case: Case, seen: Observation) -> Score:
    """The answer is JSON and equals the expected value: key order is free, 1 and true differ."""
    text = _answer(seen)
    if isinstance(text, Score):
        return text
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        return wrong(f"not JSON ({error}): {shown(text)}")
    return RIGHT if same_json(found, case.expect) else wrong(f"got {shown(found)}, expected {shown(case.expect)}")


def same_json(a: Any, b: Any) -> bool:
    """Equality of JSON values; unlike Python's ==, a boolean is never equal to a number."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_json(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(same_json(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def template(case: Case, seen: Observation) -> Score:
    """The chat template and tokenizer give exactly these ids."""
    assert seen.token_ids is not None, "a template case needs token ids"
    want = tuple(case.expect)
    if seen.token_ids == want:
        return RIGHT
    pairs = zip(seen.token_ids, want, strict=False)
    at = next((i for i, (got, expected) in enumerate(pairs) if got != expected), min(len(want), len(seen.token_ids)))
    return wrong(
        f"{len(seen.token_ids)} ids, expected {len(want)}; first difference at {at}: "
        f"{list(seen.token_ids[at : at + 4])} instead of {list(want[at : at + 4])}"
    )


def protocol(case: Case, seen: Observation) -> Score:
    """Every check that the case names holds; the reason lists those that do not."""
    expect: dict[str, Any] = case.expect
    problems: list[str] = []
    if "reply" in needs(case):
        reply = seen.reply
        assert reply is not None, "this protocol case needs its reply"
        wanted_status = expect.get("status", 200)
        if reply.status != wanted_status:
            if reply.status >= 500 and wanted_status == 200:
                return Score("errored", None, f"HTTP {reply.status}")
            return wrong(f"HTTP {reply.status}, expected {wanted_status}")
        if reply.body_problem is not None:
            return Score("unparsed", None, reply.body_problem)
        problems += _reply_problems(expect, reply)
    if "usage_exact" in expect:
        problems += _usage_problems(seen)
    if "stream_equal" in expect:
        problems += _stream_problems(seen)
    if "round_trip" in expect and seen.round_trip != case.prompt:
        problems.append(f"came back as {shown(seen.round_trip)}")
    return wrong("; ".join(problems)) if problems else RIGHT


def _reply_problems(expect: dict[str, Any], reply: Reply) -> list[str]:
    problems = [
        f"{name} is {shown(got)}, expected {shown(expect[name])}"
        for name, got in (
            ("param", reply.error_param),
            ("text", reply.text),
            ("finish_reason", reply.finish_reason),
            ("prompt_tokens", reply.prompt_tokens),
            ("completion_tokens", reply.completion_tokens),
        )
        if name in expect and got != expect[name]
    ]
    leaked = [part for part in expect.get("lacks", ()) if part in (reply.text or "")]
    return problems + [f"the answer holds {shown(part)}: {shown(reply.text)}" for part in leaked]


def _usage_problems(seen: Observation) -> list[str]:
    reply, ids = seen.reply, seen.token_ids
    assert reply is not None and ids is not None, "usage_exact needs the reply and the prompt's ids"
    prompt, completion, total = reply.prompt_tokens, reply.completion_tokens, reply.total_tokens
    if prompt is None or completion is None or total is None:
        return ["the answer has no usage"]
    problems = []
    if prompt != len(ids):
        problems.append(f"usage.prompt_tokens is {prompt}, /tokenize counts {len(ids)}")
    if total != prompt + completion:
        problems.append(f"usage.total_tokens is {total}, its parts sum to {prompt + completion}")
    return problems


def _stream_problems(seen: Observation) -> list[str]:
    whole, streamed = seen.reply, seen.streamed
    assert whole is not None and streamed is not None, "stream_equal needs both replies"
    if streamed.status != 200 or streamed.body_problem is not None:
        return [f"streaming failed: HTTP {streamed.status} {streamed.body_problem or ''}".rstrip()]
    return [
        f"streamed {name} is {shown(b)}, unstreamed {shown(a)}"
        for name, a, b in (
            ("text", whole.text, streamed.text),
            ("finish_reason", whole.finish_reason, streamed.finish_reason),
            ("prompt_tokens", whole.prompt_tokens, streamed.prompt_tokens),
            ("completion_tokens", whole.completion_tokens, streamed.completion_tokens),
        )
        if a != b
    ]


SCORERS: dict[CaseKind, Scorer] = {
    "exact": exact,
    "contains": contains,
    "regex": regex,
    "json": json_value,
    "template": template,
    "protocol": protocol,
}
