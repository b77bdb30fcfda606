"""TimedRequests to request bodies: prompts of exactly the sampled token counts that really share their beginnings.

Prompts are rows of words (letters, for a tokenizer of bytes) that the target's tokenizer keeps apart, one token each,
so a prompt's length is the number of its words plus what the chat template puts around them. A segment's words come
from its key alone, and how many it gets follows from the segments up to it, so equal leading segments are equal leading
tokens, in the template of the target too: turn k of a conversation begins with the very bytes of turn k-1. Replies in
a conversation are such rows as well, not what the target answered: the workload is frozen, and every engine under
comparison computes the same tokens. Keys differ between the parts of a run, so that none meets a cache which another
one warmed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from inferloop.bench.alphabet import Rows, alphabet
from inferloop.bench.chat_shape import ChatShape, Turns, common_length, measure_shape, measure_turns
from inferloop.bench.words import WORDS
from inferloop.core.errors import UsageError
from inferloop.core.request import Segment, TimedRequest

_ATTEMPTS = 4
_NUM_CHECKED = 8
_CHECK_EVERY = 64
_MOST_KEPT_ROWS = 4096
_MARGIN = 8
"""Words beyond those needed, where a text's tokens are cut: its end might be tokenized otherwise if it went on."""


class PromptCodec(Protocol):
    """What rendering needs of the target's tokenizer. Raises RequestError for what cannot be encoded."""

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], /) -> tuple[int, ...]: ...

    def encode_text(self, text: str, /) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class RenderOptions:
    """How bodies are made. `extra` is merged into every body; ignore_eos makes answers exactly as long as sampled
    (an extension that inference engines have and hosted APIs refuse)."""

    model: str
    as_chat: bool = True
    as_token_ids: bool = False
    """Completions whose prompt is token ids: exact for any tokenizer."""
    ignore_eos: bool = True
    temperature: float = 0.0
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.as_chat and not self.as_token_ids else "/v1/completions"


@dataclass(frozen=True, slots=True)
class RenderedRequest:
    """A request ready to send. `num_input_tokens` is exact; `clipped` says that it differs from what was sampled,
    because a chat cannot be shorter than its template. `num_shared_tokens` of its beginning are the same in every
    request with the same segments but for the last."""

    timed: TimedRequest
    path: str
    body: bytes
    num_input_tokens: int
    num_shared_tokens: int
    clipped: bool


def render(requests: Sequence[TimedRequest], codec: PromptCodec, options: RenderOptions) -> tuple[RenderedRequest, ...]:
    """Bodies for all requests; see `Renderer`."""
    return Renderer(codec, options).render(requests)


@dataclass(frozen=True, slots=True)
class _Part:
    """A message to be: per segment of it, how many words of its row it gives."""

    role: str
    words: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class _Layout:
    parts: tuple[_Part, ...]
    num_tokens: int
    num_shared: int


class Renderer:
    """Makes bodies for one target. Deterministic; learns the tokenizer's alphabet and the template's shape once.

    The first prompts, one of each new form and every 64th are tokenized to see that their counts are exact; when one is
    not, all are, and mended at their ends. Raises UsageError when the tokenizer allows no exact counts as text (use
    `as_token_ids`) or the template no conversations, RequestError when the target cannot encode at all.
    """

    def __init__(self, codec: PromptCodec, options: RenderOptions) -> None:
        self._codec, self._options = codec, options
        self._extra: dict[str, Any] = {}
        words, joiner = (WORDS, " ") if options.as_token_ids else alphabet(codec)
        self._rows = Rows(words, joiner)
        self._first, self._second = words[0], words[1]
        self._shape: ChatShape | None = None
        self._turns: Turns | None = None
        self._head_ids: tuple[int, ...] = ()
        if self._chat:
            self._shape = measure_shape(codec, self._first, self._second, joiner)
            self._base, self._head = self._shape.base, self._shape.head
        else:
            one, other = (codec.encode_text(joiner.join((words[0], word))) for word in (words[1], words[0]))
            self._head = common_length(one, other) - 1
            self._head_ids, self._base = one[: self._head], len(one) - 2
        self._ids: dict[tuple[int, int], tuple[int, ...]] = {}
        self._num_seen = 0
        self._forms: set[tuple[str, ...]] = set()
        self._always_check = False
        self._mended: dict[tuple[Segment, ...], int] = {}
        """Words that the message which ends with these segments has more than the template's shape says."""

    def render(
        self, requests: Sequence[TimedRequest], extra: Mapping[str, Any] | None = None
    ) -> tuple[RenderedRequest, ...]:
        """One body per request, in order; `extra` is merged into them after that of the options."""
        self._extra = {**self._options.extra, **(extra or {})}
        return tuple(self._write(request) for request in requests)

    @property
    def _chat(self) -> bool:
        return self._options.path.endswith("chat/completions")

    def _write(self, request: TimedRequest) -> RenderedRequest:
        if self._options.as_token_ids:
            return self._write_ids(request)
        layout = self._lay_out(request.segments)
        prompt = self._prompt(layout)
        if self._is_doubtful(layout):
            layout, prompt = self._checked(request.segments, layout, prompt)
        return self._rendered(request, prompt, layout.num_tokens, layout.num_shared)

    def _lay_out(self, segments: Sequence[Segment]) -> _Layout:
        """How many words each segment gives. What a message cannot shed, the next ones make up for."""
        parts: list[_Part] = []
        wanted = num_tokens = num_shared = start = 0
        for role, end in self._messages(segments):
            overhead, lead, least = self._around(parts, role)
            members = segments[start:end]
            start = end
            before = num_tokens + lead
            wanted_before, wanted = wanted, wanted + sum(s.num_tokens for s in members)
            extra = self._mended.get(tuple(segments[:end]), 0) if self._mended else 0
            num_words = max(least, wanted - num_tokens - overhead + extra)
            edges = [0]
            reached = wanted_before
            for segment in members[:-1]:
                reached += segment.num_tokens
                edges.append(max(edges[-1], min(reached - before, num_words - 1)))
            num_shared = before + edges[-1] if edges[-1] else num_tokens
            edges.append(num_words)
            words = tuple((s.key, b - a) for s, a, b in zip(members, edges, edges[1:], strict=False))
            parts.append(_Part(role, words))
            num_tokens += overhead + num_words - extra
        return _Layout(tuple(parts), num_tokens, num_shared)

    def _messages(self, segments: Sequence[Segment]) -> list[tuple[str, int]]:
        """(role, end among the segments) of each message. A text has no roles; a system message that the template does
        not take becomes the beginning of the question."""
        found: list[tuple[str, int]] = []
        for number, segment in enumerate(segments, 1):
            role: str = segment.role
            takes_system = self._shape is not None and self._shape.with_system and {r for r, _ in found} <= {"system"}
            if self._shape is None or (role == "system" and not takes_system):
                role = "user"
            if found and found[-1][0] == role:
                found[-1] = (role, number)
            else:
                found.append((role, number))
        return found

    def _around(self, parts: Sequence[_Part], role: str) -> tuple[int, int, int]:
        """(tokens around the words of the next message, tokens before its first one, its least number of words)."""
        shape = self._shape
        if shape is None:
            return self._base, self._head, 1
        if not parts:
            if role == "system":
                return shape.head, shape.head, 1
            return shape.base, shape.head, 2 if shape.with_system else 1
        if parts[-1].role == "system":
            return shape.base - shape.head, 0, 1
        if self._turns is None:
            self._turns = measure_turns(self._codec, shape, self._first, self._second)
        if role == "assistant":
            return self._turns.reply, self._turns.reply_lead, 1
        return self._turns.ask, self._turns.ask_lead, 1

    def _prompt(self, layout: _Layout) -> dict[str, Any]:
        texts = [(p.role, self._rows.join([self._rows.text(key, n) for key, n in p.words])) for p in layout.parts]
        if self._shape is None:
            return {"prompt": texts[0][1]}
        return {"messages": self._shape.messages(texts)}

    def _is_doubtful(self, layout: _Layout) -> bool:
        form = tuple(part.role for part in layout.parts)
        is_new = form not in self._forms
        self._forms.add(form)
        self._num_seen += 1
        return self._always_check or is_new or self._num_seen <= _NUM_CHECKED or self._num_seen % _CHECK_EVERY == 0

    def _checked(
        self, segments: tuple[Segment, ...], layout: _Layout, prompt: dict[str, Any]
    ) -> tuple[_Layout, dict[str, Any]]:
        """Words may still merge or split at an edge of the template: measure, and mend at the end of the prompt."""
        for _ in range(_ATTEMPTS):
            num_tokens = self._count(prompt)
            if num_tokens == layout.num_tokens:
                return layout, prompt
            self._always_check = True
            self._mended[segments] = self._mended.get(segments, 0) + layout.num_tokens - num_tokens
            layout = self._lay_out(segments)
            prompt = self._prompt(layout)
        raise UsageError(
            f"no text of exactly {layout.num_tokens} tokens was found for this tokenizer; send token ids instead"
        )

    def _count(self, prompt: dict[str, Any]) -> int:
        if self._shape is not None:
            return len(self._codec.encode_chat(prompt["messages"]))
        return len(self._codec.encode_text(prompt["prompt"]))

    def _write_ids(self, request: TimedRequest) -> RenderedRequest:
        """Every word is at least one token, so as many words as tokens are enough; what is too much is cut off."""
        head, wanted = self._head_ids, 0
        ids: list[int] = list(head)
        num_shared = 0
        for segment in request.segments:
            num_shared = min(len(ids), wanted)
            wanted += segment.num_tokens
            if wanted > len(ids):
                ids.extend(self._row_ids(segment.key, wanted - len(ids)))
        ids = ids[:wanted]
        return self._rendered(request, {"prompt": ids}, len(ids), num_shared)

    def _row_ids(self, key: int, count: int) -> tuple[int, ...]:
        """The first `count` tokens of the row of `key`, without what the tokenizer puts before every text."""
        found = self._ids.get((key, count))
        if found is None:
            text = self._rows.text(key, count + _MARGIN)
            found = self._codec.encode_text(text)[self._head :][:count]
            if len(self._ids) >= _MOST_KEPT_ROWS:
                self._ids.clear()
            self._ids[key, count] = found
        return found

    def _rendered(
        self, request: TimedRequest, prompt: dict[str, Any], num_tokens: int, num_shared: int
    ) -> RenderedRequest:
        return RenderedRequest(
            timed=request,
            path=self._options.path,
            body=self._body(prompt, request.output_tokens),
            num_input_tokens=num_tokens,
            num_shared_tokens=num_shared,
            clipped=num_tokens != request.input_tokens,
        )

    def _body(self, prompt: dict[str, Any], output_tokens: int) -> bytes:
        o = self._options
        body: dict[str, Any] = {
            "model": o.model,
            **prompt,
            "max_tokens": output_tokens,
            "temperature": o.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if o.ignore_eos:
            body["ignore_eos"] = True
        return msgspec.json.encode({**body, **self._extra})
