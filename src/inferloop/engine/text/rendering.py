"""A prompt to ids, and ids to text: what every engine behind our own serving does alike, beside its model's codec."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol


class PromptParts(Protocol):
    """What is read of a prompt; see backends.protocols.Prompt. Exactly one of the first three is set."""

    @property
    def messages(self) -> Sequence[Mapping[str, Any]] | None: ...
    @property
    def text(self) -> str | None: ...
    @property
    def token_ids(self) -> tuple[int, ...] | None: ...
    @property
    def tools(self) -> Sequence[Mapping[str, Any]]: ...
    @property
    def variables(self) -> Mapping[str, Any]: ...


class PromptCodec(Protocol):
    """What of `Codec` it takes."""

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
    ) -> tuple[int, ...]: ...

    def encode_text(
        self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> tuple[int, ...]: ...

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...


class Rendering:
    """Gives who has a `_codec` the methods of backends.protocols.TextCodec that need nothing else."""

    _codec: PromptCodec

    def render(
        self,
        prompt: PromptParts,
        *,
        add_generation_prompt: bool = True,
        add_special_tokens: bool = True,
        max_tokens: int | None = None,
    ) -> tuple[int, ...]:
        if prompt.messages is not None:
            return self._codec.encode_chat(
                prompt.messages,
                add_generation_prompt=add_generation_prompt,
                tools=prompt.tools,
                variables=prompt.variables,
                max_tokens=max_tokens,
            )
        if prompt.text is not None:
            return self._codec.encode_text(prompt.text, add_special_tokens=add_special_tokens, max_tokens=max_tokens)
        return prompt.token_ids or ()

    def decode(self, token_ids: tuple[int, ...]) -> str:
        return self._codec.decode(token_ids, skip_special=False)

    def token_bytes(self, token_id: int) -> bytes:
        return self._codec.token_bytes(token_id)
