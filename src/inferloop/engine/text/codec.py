"""All that serving needs of text: chats and texts to prompt ids, ids back to text."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from inferloop.core.clock import Clock
from inferloop.core.digest import digest_of
from inferloop.core.errors import ContextLengthError, RequestError
from inferloop.core.request import Grammar
from inferloop.engine.text.answer import AUTO, NONE, PLAIN_STYLE, AnswerStyle
from inferloop.engine.text.detokenizer import Detokenizer
from inferloop.engine.text.template import ChatTemplate
from inferloop.engine.text.tokenizer import Tokenizer, load_tokenizer
from inferloop.engine.text.tools.dialects import DIALECTS
from inferloop.engine.text.tools.json_calls import HERMES
from inferloop.models.resolve import ModelFiles

if TYPE_CHECKING:
    from inferloop.engine.text.grammar import GrammarCompiler, GrammarMask


class Codec:
    """Tokenizer and chat template of one model. Safe to share between threads.

    Control tokens written inside a prompt or a message are parsed as such (`<|im_end|>` typed by a user ends the
    turn), which is what transformers and the serving engines do: the template's text and the user's cannot be told
    apart once rendered. A service that must not allow it filters its users' text.
    """

    def __init__(
        self,
        files: ModelFiles,
        *,
        clock: Clock | None = None,
        tool_call_parser: str = AUTO,
        reasoning_parser: str = AUTO,
    ) -> None:
        """The parsers are names as `inferloop serve` takes them; `auto` asks the template. Raises ModelFileError when
        the tokenizer or the template cannot be used."""
        self.tokenizer: Tokenizer = load_tokenizer(files)
        dialect = DIALECTS.get(tool_call_parser, HERMES)

        def template(source: str | None) -> ChatTemplate | None:
            if source is None:
                return None
            return ChatTemplate(source, special_texts=self.tokenizer.special_texts, clock=clock, dialect=dialect)

        self.template = template(files.header.chat_template)
        self.tool_template = template(files.header.tool_chat_template) or self.template
        """For chats that offer tools."""
        self.answer_style = _answer_style(self.tool_template, tool_call_parser, reasoning_parser)
        self._vocab_size = files.header.shape.vocab_size

    @property
    def template_digest(self) -> str:
        """sha256 hex of the template's source, of both where there is one for tools, of nothing where there is none."""
        digests = [template and template.digest for template in (self.template, self.tool_template)]
        return digests[0] if digests[0] and digests[0] == digests[1] else digest_of(digests if any(digests) else None)

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """A conversation as the template prints it, which may read `variables`. Raises RequestError naming `messages`
        or `chat_template_kwargs.<name>`."""
        template = self.tool_template if tools else self.template
        if template is None:
            raise RequestError("this model has no chat template; use /v1/completions", param="messages")
        return template.render(messages, add_generation_prompt, tools=tools, variables=variables)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
    ) -> tuple[int, ...]:
        """Prompt ids of a conversation. Where the model's texts start with BOS there is exactly one, whether or not the
        template prints it. Raises RequestError as `chat_text` does; ContextLengthError, before it tokenizes, for what
        is more than `max_tokens` however it is cut."""
        text = self.chat_text(messages, add_generation_prompt=add_generation_prompt, tools=tools, variables=variables)
        return self._prompt(text, "messages", max_tokens)

    def encode_text(
        self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> tuple[int, ...]:
        """Prompt ids of a raw text, with exactly one BOS where the model's texts start with it, also when the text
        already spells it; or the text's own ids alone. Raises RequestError naming `prompt` when nothing is left to
        start from; `max_tokens` as in `encode_chat`."""
        return self._prompt(text, "prompt", max_tokens, adds_bos=add_special_tokens)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of ids; invalid bytes become U+FFFD."""
        return self.tokenizer.decode(ids, skip_special=skip_special)

    def token_bytes(self, token_id: int) -> bytes:
        """One token alone, its leading space kept, control tokens included."""
        return self.tokenizer.token_bytes(token_id)

    def detokenizer(self, prompt_ids: Sequence[int] = ()) -> Detokenizer:
        """A fresh incremental decoder for the answer to a prompt, so that the two texts join to that of all ids."""
        return Detokenizer(self.tokenizer, after=prompt_ids)

    def compile_grammar(self, grammar: Grammar) -> GrammarMask:
        """What may follow what in one answer. Slow enough to be kept off an event loop. Raises RequestError."""
        return self._grammars.compile(grammar)

    @functools.cached_property
    def _grammars(self) -> GrammarCompiler:
        from inferloop.engine.text.grammar import GrammarCompiler  # with its library, which many servers never need

        return GrammarCompiler(self.tokenizer, self._vocab_size)

    def _prompt(self, text: str, param: str, max_tokens: int | None, *, adds_bos: bool = True) -> tuple[int, ...]:
        least = 0 if max_tokens is None else self.tokenizer.least_tokens(text)
        if max_tokens is not None and least > max_tokens:
            raise ContextLengthError(f"{param} is at least {least} tokens, the context holds {max_tokens}", param=param)
        try:
            ids = self.tokenizer.encode(text, allow_special=True)
        except RequestError as problem:
            raise RequestError(problem.message, param=param) from None
        bos = self.tokenizer.bos_token_id
        if adds_bos and self.tokenizer.adds_bos and bos is not None:
            start = 0
            while start < len(ids) and ids[start] == bos:
                start += 1
            ids = [bos, *ids[start:]]
        if not ids:
            raise RequestError("the prompt is empty", param=param)
        return tuple(ids)


def _answer_style(template: ChatTemplate | None, tool_call_parser: str, reasoning_parser: str) -> AnswerStyle:
    if template is None:
        return PLAIN_STYLE
    dialect = {AUTO: template.dialect_name, NONE: None}.get(tool_call_parser, tool_call_parser)
    thinks = template.mentions_thinking if reasoning_parser == AUTO else reasoning_parser != NONE
    return AnswerStyle(dialect, thinks, think_opened=thinks and template.opens_thinking)
