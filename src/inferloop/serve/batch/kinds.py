"""The endpoints that rows can be for: how a row's body is checked, and how it is answered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from inferloop.backends.protocols import GeneratorInfo
from inferloop.core.errors import RequestError
from inferloop.core.request import BATCH_PRIORITY
from inferloop.serve.answer import CHAT, COMPLETIONS, RESPONSES, Dialect, answer_whole, prepare
from inferloop.serve.embeddings import answer_embeddings, parse_embeddings
from inferloop.serve.finish import Attempt


class Kind(Protocol):
    @property
    def at_once(self) -> bool:
        """Whether the engine must take in all choices of a row together."""
        ...

    def check(self, body: bytes, info: GeneratorInfo) -> int:
        """The places that the request takes in the engine. Raises RequestError naming the field."""
        ...

    async def answer(self, attempt: Attempt, body: bytes) -> bytes:
        """The whole answer's body, at background priority; `attempt` counts, and is not ended yet. Raises what the
        endpoint raises. Cancelled, everything is aborted."""
        ...


@dataclass(frozen=True, slots=True)
class Generating:
    dialect: Dialect
    at_once = True

    def check(self, body: bytes, info: GeneratorInfo) -> int:
        call = self.dialect.parse(body, info)
        if call.stream:
            raise RequestError("a batch does not stream", param="stream", code="unsupported_parameter")
        _check_priority(call.priority)
        return len(call.prompts) * call.num_per_prompt

    async def answer(self, attempt: Attempt, body: bytes) -> bytes:
        try:
            prepared = await prepare(attempt, self.dialect, body, priority=BATCH_PRIORITY)
            return await answer_whole(attempt, prepared)
        except RequestError as error:
            self.dialect.in_its_words(error)
            raise


class Embedding:
    at_once = False

    def check(self, body: bytes, info: GeneratorInfo) -> int:
        call = parse_embeddings(body, info)
        _check_priority(call.priority)
        return len(call.prompts)

    async def answer(self, attempt: Attempt, body: bytes) -> bytes:
        return await answer_embeddings(attempt, body, priority=BATCH_PRIORITY)


def _check_priority(priority: int) -> None:
    if priority:
        message = "rows of a batch have the lowest priority; it cannot be chosen"
        raise RequestError(message, param="priority", code="unsupported_parameter")


KINDS: Mapping[str, Kind] = {
    "/v1/chat/completions": Generating(CHAT),
    "/v1/completions": Generating(COMPLETIONS),
    "/v1/responses": Generating(RESPONSES),
    "/v1/embeddings": Embedding(),
}
