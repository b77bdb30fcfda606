"""Prompts against what transformers makes of the same tokenizer and template."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from inferloop.engine.text.codec import Codec
from inferloop.engine.text.template import ChatTemplate
from inferloop.models.resolve import ModelFiles

CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " 12 <|im_end|> 世界\n"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b\n\n"},
        {"role": "user", "content": ""},
    ],
]
SOURCES = [
    "{%- for m in messages %}\n  {{- m['role'] | upper }}: {{ m.content | trim }}\n{% endfor %}\n",
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}{{ messages | tojson(indent=2) }}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% if ns.n > 1 %}{% continue %}"
    "{% endif %}{{ m.content }}{% endfor %}{{ ns.n }}{{ missing }}{{ tools is none }}{{ documents is none }}",
]


@pytest.fixture(scope="module")
def codec(embedded_model: ModelFiles) -> Codec:
    return Codec(embedded_model)


@pytest.fixture(scope="module")
def theirs(codec: Codec, embedded_model: ModelFiles) -> Any:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=codec.tokenizer._inner, bos_token="<|im_start|>")
    tokenizer.chat_template = embedded_model.header.chat_template
    return tokenizer


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("generation", [True, False])
def test_prompt_ids_equal_apply_chat_template(codec: Codec, theirs: Any, chat: Any, generation: bool) -> None:
    expected = theirs.apply_chat_template(chat, add_generation_prompt=generation, tokenize=True, return_dict=False)
    assert list(codec.encode_chat(chat, add_generation_prompt=generation)) == expected


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("chat", CHATS)
def test_rendering_equals_transformers(theirs: Any, source: str, chat: Any) -> None:
    expected = theirs.apply_chat_template(chat, chat_template=source, tokenize=False)
    ours = ChatTemplate(source, special_texts={"bos_token": "<|im_start|>"})
    assert ours.render(chat, False) == expected
