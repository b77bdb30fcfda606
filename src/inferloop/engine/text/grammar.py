"""Grammars of answers, compiled with llguidance for one model's vocabulary."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from inferloop.core.errors import RequestError
from inferloop.core.request import Grammar
from inferloop.engine.schedule.step import UInt32
from inferloop.engine.text.depth import MAX_DEPTH, is_too_deep
from inferloop.engine.text.reasoning import CLOSE, OPEN
from inferloop.engine.text.tokenizer import Tokenizer

MAX_CHARS = 65536
MAX_COMPILED = 64
"""Grammars that are remembered; what a large one holds are some megabytes at most."""
_WHITESPACE = r" |\n {0,32}"
"""Between the parts of a JSON text: one space, or one new line with its indent. A model that may write blanks without
end sometimes does."""
_ANY_OBJECT = '{"type": "object"}'
_LIMITS = LLParserLimits(initial_lexer_fuel=300_000, step_lexer_fuel=100_000, verbose_errors=False)
"""The mask of a step is computed while the whole batch waits. With llguidance's own limits (1,000,000 and 200,000) a
repetition of repetitions holds it up for half a second; with these the worst that was found takes 0.03 s, once."""


class GrammarCompiler:
    """For one tokenizer and the `vocab_size` rows of the model's logits. Safe to share between threads. Preparing the
    vocabulary, a fraction of a second, waits for the first grammar. The grammars used last are remembered, so that the
    choices of a request, and requests that ask for the same, compile it once."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._prepared: LLTokenizer | None = None
        self._lock = threading.Lock()
        self._compiled: OrderedDict[tuple[str, str, str], _Compiled] = OrderedDict()

    def compile(self, grammar: Grammar) -> GrammarMask:
        """Takes from a millisecond to a second; a copy, some microseconds, when it is known. Raises RequestError naming
        the grammar's field for what is too large, malformed, unsupported (a schema's keywords too: nothing of it is
        ignored) or matches nothing."""
        if len(grammar.text) > MAX_CHARS:
            raise RequestError(f"{grammar.param} is longer than {MAX_CHARS} characters", param=grammar.param)
        if not self._tokenizer.eos_token_ids:
            raise RequestError("this model has no end token, which a bounded answer needs", param=grammar.param)
        key = (grammar.kind, grammar.text, grammar.thinking)
        with self._lock:
            entry = self._compiled.setdefault(key, _Compiled())
            self._compiled.move_to_end(key)
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        try:
            with entry.lock:
                if entry.matcher is None:
                    entry.matcher = self._build(grammar)
                return GrammarMask(entry.matcher.deep_copy(), frozenset(self._tokenizer.eos_token_ids))
        except RequestError:
            with self._lock:
                self._compiled.pop(key, None)
            raise

    def _build(self, grammar: Grammar) -> LLMatcher:
        try:
            source = _after_thinking(_source(grammar), grammar)
        except ValueError as error:  # JSON that Python reads and the library does not: NaN, halves of characters
            raise RequestError(f"{grammar.param} cannot be used: {error}", param=grammar.param) from None
        matcher = LLMatcher(self._vocabulary(), source, log_level=0, limits=_LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()  # the first state finds what is infinite or empty, and is the most work
        if matcher.is_error():
            problem = matcher.get_error().strip()[:500] or "it cannot be compiled"
            raise RequestError(f"{grammar.param} cannot be used: {problem}", param=grammar.param)
        return matcher

    def _vocabulary(self) -> LLTokenizer:
        with self._lock:
            if self._prepared is None:
                wrapper = TokenizerWrapper(_Vocabulary(self._tokenizer, self._vocab_size))
                ends = list(self._tokenizer.eos_token_ids)
                self._prepared = LLTokenizer(wrapper, n_vocab=self._vocab_size, eos_token=ends)
            return self._prepared


class _Compiled:
    """The start of one grammar, never moved on; None until whoever holds the lock has built it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.matcher: LLMatcher | None = None


class GrammarMask:
    """One answer's way through a grammar; implements engine.schedule.mask.Mask. For one thread at a time."""

    def __init__(self, matcher: LLMatcher, end_token_ids: frozenset[int]) -> None:
        self._matcher, self._ends = matcher, end_token_ids

    @property
    def failed(self) -> bool:
        return self._matcher.is_error()

    def fill(self, row: UInt32) -> None:
        assert row.flags.c_contiguous, "a row of packed words"
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)

    def accept(self, token_ids: list[int]) -> None:
        for token in token_ids:
            # one that has come to its end takes no more tokens, not even the end token that it allows
            if not (token in self._ends and self._matcher.is_stopped()):
                self._matcher.consume_token(token)


class _Vocabulary:
    """The form in which llguidance takes a vocabulary."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.eos_token_ids[0]
        self.bos_token_id = tokenizer.bos_token_id
        self.special_token_ids = sorted(tokenizer.vocabulary.special)
        table = tokenizer.vocabulary.token_bytes
        self._single_bytes = {token[0]: i for i, token in enumerate(table) if len(token) == 1}
        self.tokens = [*table, *[b""] * (vocab_size - len(table))]  # rows that pad the logits stand for nothing

    def __call__(self, text: str) -> list[int]:
        """Ids that stand for exactly what a grammar forces to come next. It continues a text: a space that the
        vocabulary writes before the first word of one does not belong there."""
        ids = self._encode(text)
        if not self._spells(ids, text):
            ids = self._encode("\n" + text)[len(self._encode("\n")) :]
        if not self._spells(ids, text):
            ids = [self._single_bytes[b] for b in text.encode()]
        return ids

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, allow_special=False)

    def _spells(self, ids: list[int], text: str) -> bool:
        return self._tokenizer.vocabulary.bytes_of(ids) == text.encode()


def _source(grammar: Grammar) -> str:
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind == "lark":
        return LLMatcher.grammar_from_lark(grammar.text)
    schema = _ANY_OBJECT if grammar.kind == "json_object" else grammar.text
    _check_schema(schema, grammar.param)
    return LLMatcher.grammar_from_json_schema(
        schema, overrides={"whitespace_flexible": True, "whitespace_pattern": _WHITESPACE, "lenient": False}
    )


def _after_thinking(source: str, grammar: Grammar) -> str:
    """The same, behind free text up to the closing tag. Such text begins with the opening tag, unless the prompt ended
    with that."""
    if grammar.thinking == "no":
        return source
    head = "closed /\\s{0,4}/" if grammar.thinking == "opened" else f'(/\\s{{0,4}}/ "{OPEN}" closed /\\s{{0,4}}/)?'
    top = f'start: {head} @answer\nclosed[lazy]: TEXT "{CLOSE}"\nTEXT: /(.|\\n)*/'
    answer = {"lark_grammar": source} if grammar.kind == "lark" else json.loads(source)["grammars"][0]
    return json.dumps({"grammars": [{"lark_grammar": top}, {**answer, "name": "answer"}]})


def _check_schema(text: str, param: str) -> None:
    try:
        schema = json.loads(text)
    except RecursionError:
        raise _too_deep(param) from None
    except ValueError as problem:
        raise RequestError(f"{param} is not JSON: {problem}", param=param) from None
    if not isinstance(schema, dict):
        raise RequestError(f"{param} must be a JSON object", param=param)
    if is_too_deep(schema):
        raise _too_deep(param)


def _too_deep(param: str) -> RequestError:
    return RequestError(f"{param} is nested deeper than {MAX_DEPTH} levels", param=param)
