"""What a chat template puts around messages, measured in tokens by asking the target's tokenizer.

    base     all of it in a chat of one user message: head before the second word, end and generation prompt behind
    reply    what an assistant message adds to its words, ask what the next user message adds
    lead     tokens between the end of what came before (generation prompt included) and a message's first word

Where the template takes a system message, the first word of a chat without one lies in it, ahead of nearly all that
the template adds, so that chats which share nothing by contract share little by template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from inferloop.core.errors import InferloopError, RequestError, UsageError

Message = dict[str, str]


class ChatCodec(Protocol):
    """The part of a tokenizer that is asked here. Raises RequestError for what the template refuses."""

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], /) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class Turns:
    """Tokens that a reply and the next question add beside their words, and the leads of both."""

    reply: int
    ask: int
    reply_lead: int
    ask_lead: int


@dataclass(frozen=True, slots=True)
class ChatShape:
    """`head`: tokens before the second word, less the first. `joiner` stands between words."""

    with_system: bool
    base: int
    head: int
    joiner: str

    def messages(self, parts: Sequence[tuple[str, str]]) -> list[Message]:
        """(role, text) pairs as messages; without a system part the first word becomes one where that is possible."""
        if self.with_system and parts[0][0] != "system":
            first, rest = _split(parts[0][1], self.joiner)
            parts = (("system", first), (parts[0][0], rest), *parts[1:])
        return [{"role": role, "content": text} for role, text in parts]


def measure_shape(codec: ChatCodec, first: str, second: str, joiner: str) -> ChatShape:
    """Of chats with one question. `first` and `second` are words of one token each."""
    with_system = _takes_system(codec, first, second)
    asked = ChatShape(with_system, 0, 0, joiner)
    one, other = (codec.encode_chat(asked.messages([("user", joiner.join((first, word)))])) for word in (second, first))
    return ChatShape(with_system, len(one) - 2, common_length(one, other) - 1, joiner)


def measure_turns(codec: ChatCodec, shape: ChatShape, first: str, second: str) -> Turns:
    """Of conversations. Raises UsageError when the template takes no assistant messages."""

    def ids(reply: str, ask: str) -> tuple[int, ...]:
        texts = [("user", (first, second)), ("assistant", (reply, first)), ("user", (ask, second))]
        return codec.encode_chat(shape.messages([(role, shape.joiner.join(words)) for role, words in texts]))

    try:
        plain, other_reply, other_ask = ids(first, first), ids(second, first), ids(first, second)
    except RequestError as error:
        raise UsageError(f"the target's chat template takes no conversation of several turns: {error}") from error
    before = shape.base + 2
    added = len(plain) - before - 4
    reply = min(1, max(0, added))
    return Turns(
        reply=reply,
        ask=added - reply,
        reply_lead=common_length(plain, other_reply) - before,
        ask_lead=common_length(plain, other_ask) - before - 2 - reply,
    )


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _split(text: str, joiner: str) -> tuple[str, str]:
    if joiner:
        first, _, rest = text.partition(joiner)
        return first, rest
    return text[:1], text[1:]


def _takes_system(codec: ChatCodec, first: str, second: str) -> bool:
    """Whether the chat template accepts a system message and shows it."""
    conversation = [{"role": "system", "content": first}, {"role": "user", "content": second}]
    try:
        return codec.encode_chat(conversation) != codec.encode_chat([*conversation[1:]])
    except InferloopError:
        return False
