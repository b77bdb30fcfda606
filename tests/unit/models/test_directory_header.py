"""Hugging Face directories: config.json, safetensors, and what is refused."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save, save_file

from inferloop.core.errors import ModelFileError
from inferloop.models.headers import read_header
from inferloop.models.headers.safetensors import read_safetensors

RELAXED = settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
Write = Callable[..., Path]


def test_a_directory_says_what_it_is(tiny_directory: Write) -> None:
    header = read_header(tiny_directory(template="{{ messages }}"))
    shape = header.shape
    assert (shape.num_layers, shape.hidden_size, shape.num_heads, shape.num_kv_heads) == (2, 16, 2, 1)
    assert (shape.head_dim, shape.ffn_size, shape.vocab_size, shape.context_length) == (4, 12, 258, 64)
    assert (header.stored_precision, header.norm_eps, header.chat_template) == ("fp32", 1e-5, "{{ messages }}")
    assert (header.bos_token_id, header.eos_token_ids) == (256, (257,))
    assert all(t.interleaved_heads == 0 for t in header.tensors.values())


def test_the_bytes_of_a_tensor_lie_where_the_header_says(tiny_directory: Write) -> None:
    folder = tiny_directory()
    info = read_header(folder).tensors["model.layers.1.self_attn.k_proj.weight"]
    with info.file.open("rb") as file:
        file.seek(info.offset)
        ours = np.frombuffer(file.read(info.num_bytes), dtype=np.float32).reshape(info.shape)
    with safe_open(str(folder / "model.safetensors"), "numpy") as theirs:
        assert np.array_equal(ours, theirs.get_tensor(info.name))


def test_an_explicit_head_size_wins(tiny_directory: Write) -> None:
    """28 layers, 8 KV heads of 128 at hidden 1024: 114,688 B per token in bf16, not half of it."""
    folder = tiny_directory(
        hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128
    )
    from inferloop.models.headers.config_json import read_config

    shape = read_config(folder / "config.json").shape
    assert shape.head_dim == 128
    assert shape.kv_bytes_per_token("bf16") == 114_688


def test_grouped_kv_heads_are_counted_once() -> None:
    from inferloop.core.shape import ModelShape

    shape = ModelShape("llama", 32, 4096, 32, 8, 128, 14336, 128_256, 8192, False)
    assert shape.kv_bytes_per_token("bf16") == 131_072


ROPES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"kind": "none", "theta": 10000.0, "dim": 4, "factor": 1.0}),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, {"kind": "linear", "factor": 2.0}),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 4}}, {"kind": "dynamic", "original_context_length": 64}),
    (
        {"rope_scaling": {"rope_type": "dynamic", "factor": 4, "original_max_position_embeddings": 16}},
        {"kind": "dynamic", "original_context_length": 64},
    ),
    (
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.5,
                "high_freq_factor": 3.0,
                "original_max_position_embeddings": 32,
            }
        },
        {"kind": "llama3", "low_freq_factor": 1.5, "high_freq_factor": 3.0, "original_context_length": 32},
    ),
    (
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16, "attention_factor": 1.2}},
        {"kind": "yarn", "beta_fast": 16.0, "beta_slow": 1.0, "attention_factor": 1.2},
    ),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, {"kind": "none", "theta": 5e5}),
    ({"partial_rotary_factor": 0.5}, {"dim": 2}),
]


@pytest.mark.parametrize(("config", "expected"), ROPES)
def test_rope_scaling_variants_are_read(tiny_directory: Write, config: Any, expected: dict[str, Any]) -> None:
    rope = read_header(tiny_directory(**config)).rope
    assert {name: getattr(rope, name) for name in expected} == expected


def test_yarn_added_by_hand_lengthens_the_context(tiny_directory: Write) -> None:
    """As model cards have it: factor and original length, and max_position_embeddings as it was."""
    by_hand = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert read_header(tiny_directory("a", rope_scaling=by_hand)).shape.context_length == 256
    assert read_header(tiny_directory("b", rope_parameters=by_hand)).shape.context_length == 256
    trained = tiny_directory("c", rope_scaling=by_hand, max_position_embeddings=256)
    assert read_header(trained).shape.context_length == 256
    unsaid = tiny_directory("d", rope_scaling={"rope_type": "yarn", "factor": 4.0})
    assert read_header(unsaid).shape.context_length == 64


def test_a_whole_file_goes_before_others_beside_it(tiny_directory: Write) -> None:
    """Repositories keep a second form of the same weights there, or adapters."""
    folder = tiny_directory()
    before = read_header(folder)
    save_file({"model.norm.weight": np.ones(16, np.float32)}, str(folder / "consolidated.safetensors"))
    assert read_header(folder).tensors == before.tensors


def test_the_text_part_of_a_nested_config_is_read(tiny_directory: Write) -> None:
    folder = tiny_directory(prefix="language_model.")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": "llava", "text_config": config}))
    header = read_header(folder)
    assert header.shape.num_layers == 2
    assert "model.layers.0.mlp.up_proj.weight" in header.tensors


def test_end_tokens_of_the_generation_config_count_too(tiny_directory: Write) -> None:
    folder = tiny_directory(eos_token_id=[257, 1])
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert read_header(folder).eos_token_ids == (257, 1, 2)


def test_of_several_templates_the_default_one_and_that_for_tools_are_used(tiny_directory: Write) -> None:
    folder = tiny_directory()
    listed = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": listed}))
    header = read_header(folder)
    assert (header.chat_template, header.tool_chat_template) == ("D", "T")
    (folder / "chat_template.jinja").write_text("J")
    header = read_header(folder)
    assert (header.chat_template, header.tool_chat_template) == ("J", None)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("JT")
    header = read_header(folder)
    assert (header.chat_template, header.tool_chat_template) == ("J", "JT")


def test_templates_without_a_default_are_not_taken_for_it(tiny_directory: Write) -> None:
    folder = tiny_directory()
    listed = [{"name": "tool_use", "template": "T"}, {"name": "rag"}, "x"]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": listed}))
    header = read_header(folder)
    assert (header.chat_template, header.tool_chat_template) == (None, "T")


def test_weights_split_over_files_are_read_through_the_index(tiny_directory: Write) -> None:
    folder = tiny_directory()
    whole = folder / "model.safetensors"
    with safe_open(str(whole), "numpy") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    names = sorted(tensors)
    parts = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for part, held in parts.items():
        save_file({name: tensors[name] for name in held}, str(folder / part))
    whole.unlink()
    weight_map = {name: part for part, held in parts.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    header = read_header(folder)
    assert {t.file.name for t in header.tensors.values()} == set(parts)
    (folder / "b.safetensors").unlink()
    with pytest.raises(ModelFileError, match=r"b\.safetensors: listed"):
        read_header(folder)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"model_type": None}, "model_type"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": -16}, "hidden_size"),
        ({"hidden_size": "16"}, "hidden_size"),
        ({"num_hidden_layers": 4_000_000_000}, "4000000000"),
        ({"num_hidden_layers": 3}, "model.layers.2"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": None, "num_attention_heads": 3, "num_key_value_heads": 1}, "not divisible"),
        ({"head_dim": 8}, "has shape"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2}}, "longrope"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": 3}, "rope_scaling"),
        ({"rope_scaling": {"type": "linear", "factor": 0.0}}, "rope_scaling.factor is 0, not from"),
        ({"rope_scaling": {"type": "linear", "factor": -2}}, "rope_scaling.factor is -2, not from"),
        ({"rope_scaling": {"type": "linear", "factor": float("nan")}}, "rope_scaling.factor is nan"),
        ({"rope_scaling": {"type": "linear", "factor": 1e-300}}, "rope_scaling.factor"),
        ({"rope_scaling": {"type": "yarn", "factor": 4, "attention_factor": 0}}, "rope_scaling.attention_factor is 0"),
        ({"rope_scaling": {"type": "yarn", "factor": 4, "beta_fast": 0.5}}, "beta_fast is 0.5, less than beta_slow, 1"),
        ({"rope_scaling": {"type": "yarn", "factor": 4, "beta_slow": -1}}, "rope_scaling.beta_slow is -1"),
        (
            {"rope_scaling": {"type": "llama3", "factor": 8, "high_freq_factor": 1}},
            "high_freq_factor is 1, not above 1",
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 4}, "partial_rotary_factor": 0.5}, "2 rotated dimensions of 4"),
        ({"rope_parameters": {"rope_theta": 1.0}}, "rope_parameters.rope_theta is 1, not from"),
        ({"rope_theta": -10_000}, "rope_theta is -10000, not from"),
        ({"partial_rotary_factor": 1e308}, "partial_rotary_factor is 1e+308, not from 0 to 1"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"tie_word_embeddings": False}, "lm_head"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"eos_token_id": [-1]}, "eos_token_id"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused_by_name(tiny_directory: Write, config: Any, named: str) -> None:
    with pytest.raises(ModelFileError, match="tiny") as caught:
        read_header(tiny_directory(**config))
    assert named in str(caught.value)


@pytest.mark.parametrize("content", ["", "[]", "{", "[" * 100_000, '{"model_type": ' + "9" * 10_000 + "}"])
def test_a_config_that_is_no_object_is_refused(tiny_directory: Write, content: str) -> None:
    folder = tiny_directory()
    (folder / "config.json").write_text(content)
    with pytest.raises(ModelFileError, match=r"config\.json"):
        read_header(folder)


def test_a_directory_without_weights_says_so(tiny_directory: Write) -> None:
    folder = tiny_directory()
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelFileError, match=r"no \*\.safetensors"):
        read_header(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_pipe_is_not_waited_for(tiny_directory: Write, name: str) -> None:
    folder = tiny_directory()
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(ModelFileError, match=r"it has no config\.json|no \*\.safetensors"):
        read_header(folder)


def test_an_index_cannot_point_outside_its_directory(tiny_directory: Write) -> None:
    folder = tiny_directory()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"x": "../other.safetensors"}}')
    with pytest.raises(ModelFileError, match="files of this directory"):
        read_header(folder)


def raw(header: Any, data: bytes = bytes(64)) -> bytes:
    body = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(body)) + body + data


F32_8 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "truncated"),
    "absurd header": (struct.pack("<Q", 2**63) + b"{}", "header cannot be"),
    "header past the end": (struct.pack("<Q", 99) + b"{}", "header cannot be"),
    "not JSON": (raw(b"{nope}"), "cannot be read"),
    "not UTF-8": (raw(b'{"\xff": 1}'), "cannot be read"),
    "deep": (raw(b"[" * 100_000), "cannot be read"),
    "not an object": (raw([1]), "not a JSON object"),
    "name twice": (raw(b'{"a": 1, "a": 2}'), "twice"),
    "entry": (raw({"a": 1}), "not described"),
    "dtype": (raw({"a": {**F32_8, "dtype": "F7"}}), "dtype"),
    "shape": (raw({"a": {**F32_8, "shape": [-2]}}), "shape"),
    "rank": (raw({"a": {**F32_8, "shape": [1] * 9}}), "shape"),
    "offsets": (raw({"a": {**F32_8, "data_offsets": [0]}}), "data_offsets"),
    "backwards": (raw({"a": {**F32_8, "data_offsets": [8, 0]}}), "takes -8"),
    "size": (raw({"a": {**F32_8, "shape": [1 << 61, 1 << 61]}}), "takes 8 bytes"),
    "past the end": (raw({"a": {**F32_8, "data_offsets": [60, 68]}}), "ends at byte"),
    "overlap": (raw({"a": F32_8, "b": {**F32_8, "data_offsets": [4, 12]}}), "overlap"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_safetensors_file_is_refused_by_name(tmp_path: Path, case: str) -> None:
    content, reason = HOSTILE[case]
    path = tmp_path / "hostile.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=r"hostile\.safetensors") as caught:
        read_safetensors(path)
    assert reason in str(caught.value)


SOUND = save({"a": np.zeros((2, 3), dtype=np.float32), "b": np.zeros(4, dtype=np.int8)}, {"format": "pt"})


@given(data=st.data())
@RELAXED
def test_cut_or_flipped_safetensors_give_a_typed_error_or_tensors_inside_the_file(
    tmp_path: Path, data: st.DataObject
) -> None:
    damaged = bytearray(SOUND[: data.draw(st.sampled_from([len(SOUND), *range(len(SOUND))]))])
    for at in data.draw(st.lists(st.integers(0, max(len(damaged) - 1, 0)), max_size=3)):
        if damaged:
            damaged[at] = data.draw(st.integers(0, 255))
    path = tmp_path / "damaged.safetensors"
    path.write_bytes(damaged)
    try:
        tensors = read_safetensors(path)
    except ModelFileError as problem:
        assert "damaged.safetensors" in str(problem)
    else:
        assert all(t.offset + t.num_bytes <= len(damaged) for t in tensors.values())


def test_a_header_that_is_most_of_a_large_file_is_refused_unread(tmp_path: Path) -> None:
    """Lists of nothing take twenty times their bytes as objects."""
    header = b'{"__metadata__": [' + b"[]," * 200_000 + b"[]]}"
    path = tmp_path / "full.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(ModelFileError, match=r"its header is \d+ bytes long, too much of \d+ in all"):
        read_safetensors(path)


def test_a_configuration_of_megabytes_is_refused_unread(tiny_directory: Write) -> None:
    folder = tiny_directory()
    (folder / "config.json").write_text('{"a": [' + "[]," * 2_000_000 + "[]]}")
    with pytest.raises(ModelFileError, match=r"config\.json: is longer than 4194304 bytes"):
        read_header(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "model.safetensors"])
def test_half_a_character_is_refused_where_it_is_read(tiny_directory: Write, name: str) -> None:
    folder = tiny_directory()
    if name == "model.safetensors":
        header = b'{"\\ud800": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}'
        (folder / name).write_bytes(struct.pack("<Q", len(header)) + header)
    else:
        kept = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**kept, "chat_template": "{{ '\ud800' }}"}))
    with pytest.raises(ModelFileError, match=rf"{name}: cannot be read as .*surrogates not allowed"):
        read_header(folder)
