"""Ids and prompts against what transformers makes of the same file."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoTokenizer

from inferloop.engine.text.codec import Codec
from inferloop.engine.text.template import ChatTemplate
from inferloop.models.resolve import ModelFiles

CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " <|im_end|> 世界\n"}],
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
def theirs(embedded_model: ModelFiles) -> Any:
    """Built by transformers from the GGUF file, not from anything of ours. Its reading drops this model's rule that
    digits stand alone, so texts here have none; digits are held to the slow merging in test_bpe_oracle."""
    path = embedded_model.path
    return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name, local_files_only=True)


@pytest.mark.parametrize(
    "text",
    [
        "Hello, world! isn't it?",
        "def f(x):\n    return x",
        "世界 삼겹살",
        "👩‍👩‍👧 ñandú",
        "  a  b \n\n c",
        "x <|im_end|> y",
    ],
)
def test_ids_equal_theirs(codec: Codec, theirs: Any, text: str) -> None:
    assert codec.tokenizer.encode(text, allow_special=True) == theirs.encode(text, add_special_tokens=False)


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
