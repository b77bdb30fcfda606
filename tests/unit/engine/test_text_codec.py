"""Prompts: one BOS on every path, special tokens where they belong, and errors that name the parameter."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, processors

from inferloop.core.errors import ModelFileError, RequestError
from inferloop.engine.text.codec import Codec
from inferloop.models.resolve import ModelFiles, resolve

PRINTS_BOS = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
PRINTS_TWO = "{{ bos_token }}" + PRINTS_BOS
PRINTS_NONE = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
BOS, EOS = 256, 257
HI = [{"role": "user", "content": "hi"}]


def codec_of(folder: Path) -> Codec:
    return Codec(resolve(str(folder)))


@pytest.mark.parametrize("template", [PRINTS_BOS, PRINTS_TWO, PRINTS_NONE])
def test_a_chat_has_exactly_one_bos_whatever_the_template_prints(
    tiny_directory: Callable[..., Path], template: str
) -> None:
    codec = codec_of(tiny_directory(template=template))
    assert codec.encode_chat(HI) == (BOS, ord("h"), ord("i"), EOS)


def test_a_completion_of_the_rendered_chat_has_the_same_ids(tiny_directory: Callable[..., Path]) -> None:
    codec = codec_of(tiny_directory(template=PRINTS_BOS))
    assert codec.template is not None
    assert codec.encode_text(codec.template.render(HI)) == codec.encode_chat(HI)
    assert codec.encode_text("hi") == (BOS, ord("h"), ord("i"))


def test_an_end_token_behind_texts_is_no_bos(tiny_directory: Callable[..., Path]) -> None:
    """As tokenizers of embedding models have it."""
    folder = tiny_directory(adds_bos=False)
    inner = Tokenizer.from_file(str(folder / "tokenizer.json"))
    inner.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", EOS)])
    inner.save(str(folder / "tokenizer.json"))
    codec = codec_of(folder)
    assert (codec.encode_text("hi"), codec.tokenizer.bos_token_id) == ((ord("h"), ord("i")), BOS)


def test_the_tokenizers_own_end_token_ends_answers_too(tiny_directory: Callable[..., Path]) -> None:
    """Who trains a chat model from a base model often changes that alone."""
    assert codec_of(tiny_directory(eos_token_id=7)).tokenizer.eos_token_ids == (7, EOS)


def test_no_bos_appears_where_the_models_texts_have_none(tiny_directory: Callable[..., Path]) -> None:
    codec = codec_of(tiny_directory(template=PRINTS_NONE, adds_bos=False))
    assert codec.encode_chat(HI) == (ord("h"), ord("i"), EOS)
    assert codec.encode_text("hi") == (ord("h"), ord("i"))


def test_an_empty_prompt_is_refused_unless_bos_can_start_it(tiny_directory: Callable[..., Path]) -> None:
    assert codec_of(tiny_directory("with")).encode_text("") == (BOS,)
    with pytest.raises(RequestError) as caught:
        codec_of(tiny_directory("without", adds_bos=False)).encode_text("")
    assert caught.value.param == "prompt"


def test_a_model_without_a_template_says_so(tiny_directory: Callable[..., Path]) -> None:
    codec = codec_of(tiny_directory())
    assert codec.template is None
    with pytest.raises(RequestError, match="no chat template") as caught:
        codec.encode_chat(HI)
    assert caught.value.param == "messages"


def test_a_lone_surrogate_names_its_parameter(tiny_directory: Callable[..., Path]) -> None:
    codec = codec_of(tiny_directory(template=PRINTS_BOS))
    with pytest.raises(RequestError) as chat:
        codec.encode_chat([{"role": "user", "content": "\ud800"}])
    with pytest.raises(RequestError) as text:
        codec.encode_text("\ud800")
    assert (chat.value.param, text.value.param) == ("messages", "prompt")


def test_control_tokens_are_parsed_only_where_asked(embedded_model: ModelFiles) -> None:
    tokenizer = Codec(embedded_model).tokenizer
    assert tokenizer.encode("<|im_end|>", allow_special=True) == [2]
    spelled = tokenizer.encode("<|im_end|>", allow_special=False)
    assert 2 not in spelled
    assert tokenizer.decode(spelled) == "<|im_end|>"
    assert tokenizer.decode([2]) == ""
    assert tokenizer.decode([2], skip_special=False) == "<|im_end|>"


def test_the_embedded_models_chat_has_its_golden_ids(embedded_model: ModelFiles) -> None:
    codec = Codec(embedded_model)
    ids = codec.encode_chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}])
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    assert codec.decode(ids, skip_special=False) == text
    assert ids == (1, 9690, 198, 6077, 5453, 30, 2, 198, 1, 4093, 198, 34, 27, 34, 47, 2, 198, 1, 520, 9531, 198)
    assert codec.tokenizer.vocab_size == 49_152
    assert (codec.tokenizer.bos_token_id, codec.tokenizer.eos_token_ids) == (1, (2,))


def test_ids_outside_the_vocabulary_stand_for_nothing(embedded_model: ModelFiles) -> None:
    codec = Codec(embedded_model)
    assert codec.decode([-1, 49_152, 10**9]) == ""


def test_a_directory_without_its_tokenizer_is_named(tiny_directory: Callable[..., Path]) -> None:
    folder = tiny_directory()
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelFileError, match=r"tokenizer\.json"):
        codec_of(folder)


def test_a_damaged_tokenizer_is_named(tiny_directory: Callable[..., Path]) -> None:
    folder = tiny_directory()
    (folder / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(ModelFileError, match=r"tokenizer\.json"):
        codec_of(folder)


def add_token(folder: Path, text: str = "one more") -> Path:
    inner = Tokenizer.from_file(str(folder / "tokenizer.json"))
    inner.add_tokens([text])
    inner.save(str(folder / "tokenizer.json"))
    return folder


def test_a_token_without_a_row_is_spelled_out(tiny_directory: Callable[..., Path]) -> None:
    """Gemma 3's text models come with a token for images that their embedding has no row for."""
    codec = codec_of(add_token(tiny_directory(template=PRINTS_BOS)))
    assert codec.encode_text("one more") == (BOS, *b"one more")
    assert codec.tokenizer.vocab_size == 258


def test_a_tokenizer_of_another_model_is_refused(tiny_directory: Callable[..., Path]) -> None:
    """A piece without a row, or a token that prompts are written with."""
    with pytest.raises(ModelFileError, match="'<turn>' lies outside the 258 rows"):
        codec_of(add_token(tiny_directory("turns", template="<turn>" + PRINTS_BOS), "<turn>"))
    folder = tiny_directory("pieces")
    file = folder / "tokenizer.json"
    said = json.loads(file.read_text())
    said["model"]["vocab"]["ab"] = 258
    file.write_text(json.dumps(said))
    with pytest.raises(ModelFileError, match="258 rows"):
        codec_of(folder)


def test_the_tokenizers_digest_follows_its_files(tiny_directory: Callable[..., Path]) -> None:
    first, second, other = tiny_directory("a"), tiny_directory("b"), tiny_directory("c", adds_bos=False)
    digests = [codec_of(folder).tokenizer.digest for folder in (first, second, other)]
    assert digests[0] == digests[1] != digests[2]


def test_the_embedded_vocabulary_has_a_digest_of_its_own_keys(embedded_model: ModelFiles) -> None:
    header = embedded_model.header
    changed = {**header.metadata, "tokenizer.ggml.add_bos_token": True}
    other = dataclasses.replace(embedded_model, header=dataclasses.replace(header, metadata=changed))
    assert Codec(embedded_model).tokenizer.digest == Codec(embedded_model).tokenizer.digest
    assert Codec(embedded_model).tokenizer.digest != Codec(other).tokenizer.digest
    assert Codec(other).encode_text("x")[0] == 1, "and the changed key takes effect"


def test_a_template_for_tools_serves_chats_that_offer_them_and_counts_in_the_digest(
    tiny_directory: Callable[..., Path],
) -> None:
    tools = [{"type": "function", "function": {"name": "now"}}]
    folder = tiny_directory(template=PRINTS_NONE)
    alone = codec_of(folder)
    listed = [{"name": "default", "template": PRINTS_NONE}]
    listed += [{"name": "tool_use", "template": "{{ tools[0].function.name }}:" + PRINTS_NONE}]
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": listed}))
    both = codec_of(folder)
    assert both.chat_text(HI) == alone.chat_text(HI) == "hi</s>"
    assert both.chat_text(HI, tools=tools) == "now:hi</s>"
    assert both.template_digest != alone.template_digest


def test_the_name_of_a_special_token_counts_in_the_digest(tiny_directory: Callable[..., Path]) -> None:
    folder = tiny_directory(template=PRINTS_BOS)
    before = codec_of(folder).tokenizer.digest
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": "<s>"}))
    assert codec_of(folder).tokenizer.digest != before, "the template prints it"
