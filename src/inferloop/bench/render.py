"""TimedRequests to request bodies: prompts of exactly the sampled token counts that really share their prefixes.

Prompts are rows of words (letters, for a tokenizer of bytes) that the target's tokenizer keeps apart, one token each,
so a prompt's length is the number of its words plus what the chat template puts around them. The words of a shared
prefix come from the group's number, the rest from the request's content seed: another stream of the workload has other
prompts, and no point of a run meets a cache that an earlier point warmed. In a chat the first word lies in a system
message, ahead of nearly all that the template adds, so that chats which share nothing by contract share little by
template.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from inferloop.bench.words import WORDS
from inferloop.core.errors import InferloopError, UsageError
from inferloop.core.request import TimedRequest

_MIN_WORDS = 64
_NUM_TRIED = 16
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_ATTEMPTS = 4


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
    because a chat cannot be shorter than its template."""

    timed: TimedRequest
    path: str
    body: bytes
    num_input_tokens: int
    num_shared_tokens: int
    clipped: bool


def render(requests: Sequence[TimedRequest], codec: PromptCodec, options: RenderOptions) -> tuple[RenderedRequest, ...]:
    """Bodies for all requests; see `Renderer`."""
    return Renderer(codec, options).render(requests)


class Renderer:
    """Makes bodies for one target. Deterministic; learns the tokenizer's alphabet once, when it is made.

    Raises UsageError when the tokenizer allows no exact counts as text (use `as_token_ids`), RequestError when the
    target cannot encode at all.
    """

    def __init__(self, codec: PromptCodec, options: RenderOptions) -> None:
        self._codec, self._options = codec, options
        self._words, self._joiner = (WORDS, " ") if options.as_token_ids else _alphabet(codec)
        self._with_system = self._chat and _takes_system(codec)
        first, second = self._words[0], self._words[1]
        one, other = self._encode([first, second]), self._encode([first, first])
        self._overhead = len(one) - 2
        # In a chat with a system message word 0 lies in it; what the template puts behind that word is shared too.
        self._shared_head = _common_length(one, other) - 1
        self._min_tokens = self._overhead + (2 if self._with_system else 1)

    def render(self, requests: Sequence[TimedRequest]) -> tuple[RenderedRequest, ...]:
        """One body per request, in order."""
        return tuple(self._write(request) for request in requests)

    def _write(self, request: TimedRequest) -> RenderedRequest:
        if self._options.as_token_ids:
            return self._write_ids(request)
        wanted = max(request.input_tokens, self._min_tokens)
        num_words = wanted - self._overhead
        # At least one word is a request's own: the template's end, the same for all, counts towards its length too.
        num_shared = max(0, min(request.prefix_tokens - self._shared_head, num_words - 1))
        shared = _draw(self._words, f"group {request.prefix_group}", num_shared)
        own = _draw(self._words, f"content {request.content_seed}", num_words - num_shared)
        words, num_tokens = self._adjust([*shared, *own], wanted)
        prompt = {"messages": self._messages(words)} if self._chat else {"prompt": self._join(words)}
        return self._rendered(request, prompt, num_tokens, num_shared + self._shared_head if num_shared else 0)

    def _write_ids(self, request: TimedRequest) -> RenderedRequest:
        """Every word is at least one token, so as many words as tokens are enough; what is too much is cut off."""
        num_shared = min(request.prefix_tokens, request.input_tokens - 1)
        shared = (
            self._encode(_draw(self._words, f"group {request.prefix_group}", num_shared))[:num_shared]
            if num_shared
            else ()
        )
        own = self._encode(_draw(self._words, f"content {request.content_seed}", request.input_tokens))
        if num_shared:
            own = own[self._shared_head :]  # the beginning of a text is in the shared part already
        ids = [*shared, *own][: request.input_tokens]
        return self._rendered(request, {"prompt": ids}, len(ids), num_shared)

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

    @property
    def _chat(self) -> bool:
        return self._options.path.endswith("chat/completions")

    def _adjust(self, words: list[str], wanted: int) -> tuple[list[str], int]:
        """Words may still merge or split at an edge of the template: measure, and mend at the end of the prompt."""
        for _ in range(_ATTEMPTS):
            num_tokens = len(self._encode(words))
            if num_tokens == wanted:
                return words, num_tokens
            missing = wanted - num_tokens
            words = (
                words + [self._words[i % len(self._words)] for i in range(missing)] if missing > 0 else words[:missing]
            )
            if not words:
                break
        raise UsageError(f"no text of exactly {wanted} tokens was found for this tokenizer; send token ids instead")

    def _messages(self, words: Sequence[str]) -> list[dict[str, str]]:
        if not self._with_system:
            return [{"role": "user", "content": self._join(words)}]
        return [{"role": "system", "content": words[0]}, {"role": "user", "content": self._join(words[1:])}]

    def _join(self, words: Sequence[str]) -> str:
        return self._joiner.join(words)

    def _encode(self, words: Sequence[str]) -> tuple[int, ...]:
        if self._chat:
            return self._codec.encode_chat(self._messages(words))
        return self._codec.encode_text(self._join(words))

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
        return msgspec.json.encode({**body, **o.extra})


def _draw(words: Sequence[str], key: str, count: int) -> list[str]:
    """The first `count` words of the endless row that `key` stands for: a shorter draw begins a longer one."""
    rng = random.Random(key)
    return [words[int(rng.random() * len(words))] for _ in range(count)]


def _alphabet(codec: PromptCodec) -> tuple[tuple[str, ...], str]:
    """(words, joiner): texts that are one token at the start and one more each behind another."""
    few = WORDS[:: len(WORDS) // _NUM_TRIED]
    counts = [len(codec.encode_text(word)) for word in few]
    fewest = min(counts)  # one token, and BOS where texts start with it
    if counts.count(fewest) > len(few) // 2:  # else no tokenizer of words: spare it the other questions
        after_line = len(codec.encode_text("the\nthe")) - fewest
        alone = _keep(
            WORDS, lambda some: len(codec.encode_text("\n".join(some))) == fewest + after_line * (len(some) - 1)
        )
        words = _keep(alone, lambda some: len(codec.encode_text(" ".join(["the", *some]))) == fewest + len(some))
        if len(words) >= _MIN_WORDS:
            return words, " "
    one, all_twice = len(codec.encode_text("a")), len(codec.encode_text(_LETTERS + _LETTERS[::-1]))
    if all_twice == one + 2 * len(_LETTERS) - 1:
        return tuple(_LETTERS), ""
    raise UsageError(
        "this tokenizer keeps neither words nor letters apart, so texts cannot be made exact; send token ids"
    )


def _keep(words: tuple[str, ...], holds: Callable[[tuple[str, ...]], bool]) -> tuple[str, ...]:
    """The words for which `holds`, asked of many at once because a tokenizer behind a URL is slow to ask."""
    if holds(words):
        return words
    if len(words) == 1:
        return ()
    middle = len(words) // 2
    return _keep(words[:middle], holds) + _keep(words[middle:], holds)


def _takes_system(codec: PromptCodec) -> bool:
    """Whether the chat template accepts a system message and shows it."""
    conversation = [{"role": "system", "content": "the"}, {"role": "user", "content": "day"}]
    try:
        return codec.encode_chat(conversation) != codec.encode_chat([*conversation[1:]])
    except InferloopError:
        return False


def _common_length(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
