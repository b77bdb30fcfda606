"""GGUF headers: what a sound file says, and that no other file gets past."""

from __future__ import annotations

import re
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inferloop.core.errors import ModelFileError
from inferloop.models.headers import RopeSpec, read_header
from inferloop.models.headers.dtypes import GGML_TYPES
from inferloop.models.headers.gguf import read_gguf_file
from inferloop.models.resolve import ModelFiles

RELAXED = settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
U32, U64 = struct.Struct("<I").pack, struct.Struct("<Q").pack


def text(value: bytes) -> bytes:
    return U64(len(value)) + value


def container(*, keys: bytes = b"", num_keys: int = 0, tensors: bytes = b"", num_tensors: int = 0) -> bytes:
    return b"GGUF" + U32(3) + U64(num_tensors) + U64(num_keys) + keys + tensors


def tensor(name: bytes, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + U32(len(dims)) + b"".join(map(U64, dims)) + U32(kind) + U64(offset)


def test_the_embedded_model_says_what_it_is(embedded_model: ModelFiles) -> None:
    header = embedded_model.header
    shape = header.shape
    assert (shape.architecture, shape.num_layers, shape.hidden_size) == ("llama", 30, 576)
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (9, 3, 64)
    assert (shape.ffn_size, shape.vocab_size, shape.context_length) == (1536, 49_152, 8192)
    assert shape.tied_embeddings
    assert shape.num_params == 134_515_008
    assert header.rope == RopeSpec(theta=100_000.0, dim=64, original_context_length=8192)
    assert header.norm_eps == pytest.approx(1e-5)
    assert (header.bos_token_id, header.eos_token_ids, header.stored_precision) == (1, (2,), "q4_1")
    assert header.chat_template is not None and "<|im_start|>" in header.chat_template
    assert len(header.tensors) == 272


def test_tensors_have_canonical_names_row_major_shapes_and_their_bytes(embedded_model: ModelFiles) -> None:
    tensors = embedded_model.header.tensors
    q, k, v = (tensors[f"model.layers.3.self_attn.{n}_proj.weight"] for n in "qkv")
    assert (q.shape, q.dtype, q.interleaved_heads) == ((576, 576), "q4_1", 9)
    assert (k.shape, k.interleaved_heads, v.interleaved_heads) == ((192, 576), 3, 0)
    embedding = tensors["model.embed_tokens.weight"]
    assert (embedding.shape, embedding.dtype, embedding.num_bytes) == ((49_152, 576), "q8_0", 49_152 * 576 // 32 * 34)
    theirs = gguf.GGUFReader(embedded_model.path)
    ours = {t.offset: t.num_bytes for t in tensors.values()}
    assert ours == {int(t.data_offset): int(t.n_bytes) for t in theirs.tensors}


def test_the_stated_interleaving_is_undone_by_the_documented_formula(embedded_model: ModelFiles) -> None:
    """Row 2i of a head in the file is dimension i, row 2i + 1 dimension i + 32."""
    rows = np.arange(192).reshape(192, 1)
    info = embedded_model.header.tensors["model.layers.0.self_attn.k_proj.weight"]
    heads, head_dim = info.interleaved_heads, 64
    undone = rows.reshape(heads, head_dim // 2, 2, -1).swapaxes(1, 2).reshape(heads * head_dim, -1)[:, 0]
    assert undone[:3].tolist() == [0, 2, 4]
    assert undone[32:35].tolist() == [1, 3, 5]
    assert undone[64] == 64


@pytest.mark.parametrize(
    ("said", "type_of", "expected"),
    [
        ("<end_of_turn>", 3, (257, 2)),
        ("<|eot_id|>", 4, (257, 2)),
        ("<|endoftext|>", 3, (257, 2)),
        ("<|im_start|>", 3, (257,)),
        ("<|eot_id|>", 1, (257,)),
    ],
)
def test_ends_of_turns_that_a_file_does_not_name_are_found_by_their_text(
    said: str, type_of: int, expected: tuple[int, ...], tiny_gguf: Callable[..., Path]
) -> None:
    """As converters leave them: Gemma's files name <eos> alone, early ones of Llama 3 the end of texts."""
    tokens = [chr(0x4E00 + i) for i in range(257)] + ["<end>"]
    tokens[2] = said

    def edit(writer: Any, unknown: int | None = None) -> None:
        writer.kv_data[0].pop("tokenizer.ggml.tokens")
        writer.kv_data[0].pop("tokenizer.ggml.token_type")
        writer.add_token_list(tokens)
        writer.add_token_types([1, 1, type_of, *[1] * 254, 3])
        if unknown is not None:
            writer.add_unk_token_id(unknown)

    assert read_header(tiny_gguf(edit=edit)).eos_token_ids == expected
    other = tiny_gguf("unknown.gguf", edit=lambda writer: edit(writer, 2))
    assert read_header(other).eos_token_ids == (257,), "what stands for unknown text ends none"


def test_every_type_of_the_format_has_its_name_and_blocks() -> None:
    """A model of types that ours do not compute with may still be meant for another engine."""
    theirs = {int(kind): sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert {kind: sizes for kind, (_, *sizes) in GGML_TYPES.items()} == {k: list(v) for k, v in theirs.items()}


def test_kv_heads_given_per_layer_are_not_read_as_one_number(tiny_gguf: Callable[..., Path]) -> None:
    path = tiny_gguf(kv_heads=[0, 0, 8, 0, 0, 8], num_layers=6, num_heads=8, head_dim=64)
    shape = read_header(path).shape
    assert shape.kv_heads == (0, 0, 8, 0, 0, 8)
    assert shape.kv_bytes_per_token("bf16") == 4096
    assert read_header(tiny_gguf("same.gguf", kv_heads=[1, 1])).shape.kv_heads_per_layer is None


def test_the_head_size_is_read_not_derived(tiny_gguf: Callable[..., Path]) -> None:
    assert read_header(tiny_gguf(num_heads=2, head_dim=4)).shape.head_dim == 4  # hidden / heads would be 8


def test_rope_scaling_is_read(tiny_gguf: Callable[..., Path]) -> None:
    def yarn(writer: Any) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(16)
        writer.add_rope_freq_base(5000.0)

    rope = read_header(tiny_gguf(edit=yarn)).rope
    assert (rope.kind, rope.factor, rope.original_context_length, rope.theta) == ("yarn", 4.0, 16, 5000.0)
    assert rope.attention_factor == pytest.approx(1.1386294)


def test_frequency_factors_are_pointed_to(tiny_gguf: Callable[..., Path]) -> None:
    def factors(writer: Any) -> None:
        writer.add_tensor("rope_freqs.weight", np.ones(2, dtype=np.float32))

    header = read_header(tiny_gguf(edit=factors))
    assert header.rope.factors_tensor == "rope_freqs.weight"
    assert header.tensors["rope_freqs.weight"].shape == (2,)


@pytest.mark.parametrize(
    ("name", "length", "problem"),
    [
        ("rope_freqs.weight", 1, r"rope_freqs\.weight has shape \(1,\), not \(2,\)"),
        ("blk.1.attn_q.bias", 7, r"layers\.1\.self_attn\.q_proj\.bias has shape \(7,\), the header implies \(8,\)"),
        ("blk.0.ffn_down.bias", 17, r"layers\.0\.mlp\.down_proj\.bias has shape \(17,\), the header implies \(16,\)"),
        (
            "blk.0.attn_k_norm.weight",
            8,
            r"layers\.0\.self_attn\.k_norm\.weight has shape \(8,\), the header implies \(4,\)",
        ),
    ],
)
def test_what_a_model_need_not_have_must_fit_it(
    tiny_gguf: Callable[..., Path], name: str, length: int, problem: str
) -> None:
    def add(writer: Any) -> None:
        writer.add_tensor(name, np.ones(length, dtype=np.float32))

    with pytest.raises(ModelFileError, match=problem):
        read_header(tiny_gguf(edit=add))


@pytest.mark.parametrize("dim", [1, 2, 6])
def test_rotated_dimensions_that_are_no_whole_heads_are_refused(tiny_gguf: Callable[..., Path], dim: int) -> None:
    def part(writer: Any) -> None:
        writer.add_rope_dimension_count(dim)

    with pytest.raises(ModelFileError, match=rf"llama\.rope\.dimension_count is {dim}, .*heads of 4"):
        read_header(tiny_gguf(edit=part))


def test_layers_without_any_attention_are_refused(tiny_gguf: Callable[..., Path]) -> None:
    with pytest.raises(ModelFileError, match="head_count_kv"):
        read_header(tiny_gguf(kv_heads=[0, 0]))


def test_a_missing_weight_is_named(tiny_gguf: Callable[..., Path]) -> None:
    with pytest.raises(ModelFileError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        read_header(tiny_gguf(skip="blk.1.ffn_up.weight"))


HUGE = 2**64 - 1
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "cannot be read"),
    "other magic": (b"PK\x03\x04" + bytes(60), "not a GGUF file"),
    "only the magic": (b"GGUF", "version"),
    "version 1": (b"GGUF" + U32(1) + bytes(64), "version 1"),
    "big endian": (b"GGUF\x00\x00\x00\x03" + bytes(64), "version"),
    "absurd tensor count": (b"GGUF" + U32(3) + U64(HUGE) + U64(0), "number of tensors"),
    "absurd key count": (b"GGUF" + U32(3) + U64(0) + U64(HUGE), "number of keys"),
    "absurd key length": (container(num_keys=1, keys=U64(HUGE) + bytes(40)), "length of a key"),
    "long key": (container(num_keys=1, keys=text(b"k" * 70_000) + U32(4) + U32(1)), "70000 bytes long"),
    "key not UTF-8": (container(num_keys=1, keys=text(b"\xff\xfe") + U32(4) + U32(1)), "UTF-8"),
    "unknown type": (container(num_keys=1, keys=text(b"k") + U32(99) + bytes(8)), "unknown type 99"),
    "array of unknown": (container(num_keys=1, keys=text(b"k") + U32(9) + U32(99) + U64(1)), "unknown type 99"),
    "absurd array": (container(num_keys=1, keys=text(b"k") + U32(9) + U32(4) + U64(1 << 60)), "length of k"),
    "absurd strings": (container(num_keys=1, keys=text(b"k") + U32(9) + U32(8) + U64(1 << 60)), "length of k"),
    "string past the end": (
        container(num_keys=1, keys=text(b"k") + U32(9) + U32(8) + U64(1) + U64(999)),
        "past the end",
    ),
    "strings end early": (
        container(num_keys=1, keys=text(b"k") + U32(9) + U32(8) + U64(2) + text(b"12345678")),
        "ends after 1 of 2",
    ),
    "deep arrays": (
        container(num_keys=1, keys=text(b"k") + U32(9) + (U32(9) + U64(1)) * 5000 + U32(4) + U64(0)),
        "deeper",
    ),
    "key twice": (container(num_keys=2, keys=(text(b"k") + U32(4) + U32(1)) * 2), "twice"),
    "alignment": (container(num_keys=1, keys=text(b"general.alignment") + U32(4) + U32(3)), "power of two"),
    "alignment zero": (container(num_keys=1, keys=text(b"general.alignment") + U32(4) + U32(0)), "power of two"),
    "rank": (container(num_tensors=1, tensors=text(b"t") + U32(9) + bytes(80)), "9 dimensions"),
    "rank zero": (container(num_tensors=1, tensors=text(b"t") + U32(0) + bytes(80)), "0 dimensions"),
    "tensor type": (container(num_tensors=1, tensors=tensor(b"t", (32,), 77, 0) + bytes(256)), "unknown type 77"),
    "broken block": (container(num_tensors=1, tensors=tensor(b"t", (33,), 2, 0) + bytes(256)), "blocks of 32"),
    "empty tensor": (container(num_tensors=1, tensors=tensor(b"t", (0,), 0, 0) + bytes(256)), "dimensions"),
    "absurd dimensions": (
        container(num_tensors=1, tensors=tensor(b"t", (1 << 62, 1 << 62), 0, 0) + bytes(256)),
        "ends at byte",
    ),
    "data past the end": (container(num_tensors=1, tensors=tensor(b"t", (1024,), 0, 0) + bytes(256)), "ends at byte"),
    "offset past the end": (container(num_tensors=1, tensors=tensor(b"t", (1,), 0, 1 << 62)), "ends at byte"),
    "unaligned": (container(num_tensors=1, tensors=tensor(b"t", (1,), 0, 7) + bytes(256)), "alignment"),
    "overlap": (
        container(num_tensors=2, tensors=tensor(b"a", (16,), 0, 0) + tensor(b"b", (16,), 0, 32) + bytes(256)),
        "overlap",
    ),
    "tensor twice": (container(num_tensors=2, tensors=tensor(b"a", (8,), 0, 0) * 2 + bytes(256)), "twice"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_refused_by_name(tmp_path: Path, case: str) -> None:
    content, reason = HOSTILE[case]
    path = tmp_path / "hostile.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=r"hostile\.gguf") as caught:
        read_gguf_file(path)
    assert reason in str(caught.value)


def test_version_2_and_empty_containers_read(tmp_path: Path) -> None:
    path = tmp_path / "empty.gguf"
    path.write_bytes(b"GGUF" + U32(2) + U64(0) + U64(0))
    assert read_gguf_file(path).version == 2


@pytest.mark.parametrize(
    ("key", "kind", "value"),
    [
        ("llama.block_count", 4, U32(0)),
        ("llama.block_count", 4, U32(2**32 - 1)),
        ("llama.embedding_length", 8, text(b"16")),
        ("llama.attention.head_count", 4, U32(0)),
        ("llama.attention.head_count_kv", 4, U32(3)),
        ("llama.attention.layer_norm_rms_epsilon", 6, struct.pack("<f", float("nan"))),
        ("llama.expert_count", 4, U32(8)),
        ("split.count", 2, struct.pack("<H", 3)),
        ("llama.rope.scaling.type", 8, text(b"longrope")),
        ("llama.rope.freq_base", 6, struct.pack("<f", 0.0)),
        ("llama.rope.freq_base", 6, struct.pack("<f", -1e4)),
        ("llama.rope.freq_base", 6, struct.pack("<f", float("nan"))),
        ("llama.rope.freq_base", 12, struct.pack("<d", 1e300)),
        ("llama.rope.scale_linear", 6, struct.pack("<f", 0.0)),
        ("llama.rope.scaling.factor", 6, struct.pack("<f", -4.0)),
        ("llama.rope.scaling.factor", 12, struct.pack("<d", 1e-300)),
        ("llama.rope.scaling.attn_factor", 6, struct.pack("<f", 0.0)),
        ("llama.rope.scaling.yarn_beta_fast", 6, struct.pack("<f", 0.5)),
        ("llama.rope.scaling.yarn_beta_slow", 6, struct.pack("<f", -1.0)),
        ("general.architecture", 8, text(b"mamba2")),
        ("tokenizer.ggml.eos_token_id", 5, struct.pack("<i", -1)),
    ],
)
def test_a_senseless_value_is_refused(tiny_gguf: Callable[..., Path], key: str, kind: int, value: bytes) -> None:
    """The key is replaced (or added) in the bytes of a sound file."""
    path = tiny_gguf()
    sound = read_gguf_file(path)
    keys = b""
    for name, old in sound.metadata.items():
        if name != key:
            keys += text(name.encode()) + encode(old)
    keys += text(key.encode()) + U32(kind) + value
    num_keys = len(sound.metadata.keys() | {key})
    rows, data, data_end = b"", min(t.offset for t in sound.tensors.values()), path.stat().st_size
    for t in sound.tensors.values():
        rows += tensor(t.name.encode(), t.shape[::-1], 0, t.offset - data)
    head = container(num_keys=num_keys, keys=keys, num_tensors=len(sound.tensors), tensors=rows)
    head += bytes(-len(head) % 32)
    path.write_bytes(head + path.read_bytes()[data:data_end])
    with pytest.raises(ModelFileError, match=rf"tiny\.gguf: {re.escape(key) if '.rope.' in key else ''}"):
        read_header(path)


def encode(value: object) -> bytes:
    if isinstance(value, bool):
        return U32(7) + struct.pack("<?", value)
    if isinstance(value, int):
        return U32(4) + U32(value)
    if isinstance(value, float):
        return U32(6) + struct.pack("<f", value)
    if isinstance(value, str):
        return U32(8) + text(value.encode())
    assert isinstance(value, list)
    items = [encode(v) for v in value]
    return U32(9) + items[0][:4] + U64(len(items)) + b"".join(item[4:] for item in items)


@pytest.fixture(scope="module")
def sound_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("sound") / "sound.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_token_list(["a", "bc", "世"])
    writer.add_array("scores", [1.0, 2.0])
    writer.add_array("nested", [[1, 2], [3]])
    writer.add_tensor("t", np.zeros((4, 32), dtype=np.float32))
    writer.add_tensor("u", np.zeros(8, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


@given(data=st.data())
@RELAXED
def test_a_file_cut_anywhere_is_refused(sound_bytes: bytes, tmp_path: Path, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(sound_bytes) - 33))  # the last tensor may end in padding
    path = tmp_path / "cut.gguf"
    path.write_bytes(sound_bytes[:at])
    with pytest.raises(ModelFileError, match=r"cut\.gguf"):
        read_gguf_file(path)


@given(data=st.data())
@RELAXED
def test_flipped_bytes_give_a_typed_error_or_a_readable_file(
    sound_bytes: bytes, tmp_path: Path, data: st.DataObject
) -> None:
    damaged = bytearray(sound_bytes)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, 400))] = data.draw(st.integers(0, 255))
    path = tmp_path / "flipped.gguf"
    path.write_bytes(damaged)
    try:
        read = read_gguf_file(path)
    except ModelFileError as problem:
        assert "flipped.gguf" in str(problem)
    else:
        assert all(t.offset + t.num_bytes <= len(damaged) for t in read.tensors.values())


@given(data=st.data())
@RELAXED
def test_flipped_bytes_of_a_whole_model_give_a_typed_error_or_a_header(
    embedded_head: bytes, embedded_model: ModelFiles, tmp_path: Path, data: st.DataObject
) -> None:
    """Flips among the keys that shape the model: lengths, counts, types, values."""
    damaged = bytearray(embedded_head)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, 1500))] ^= 1 << data.draw(st.integers(0, 7))
    path = tmp_path / "flipped.gguf"
    with path.open("wb") as file:
        file.write(damaged)
        file.truncate(embedded_model.path.stat().st_size)  # sparse: the weights are not read
    try:
        read_header(path)
    except ModelFileError as problem:
        assert "flipped.gguf" in str(problem)


@pytest.fixture(scope="module")
def embedded_head(embedded_model: ModelFiles) -> bytes:
    first = min(t.offset for t in embedded_model.header.tensors.values())
    with embedded_model.path.open("rb") as file:
        return file.read(first)


@pytest.mark.parametrize("item", ["texts", "numbers", "arrays", "tensors"])
def test_a_header_that_would_fill_the_memory_is_refused_before(tmp_path: Path, item: str) -> None:
    """Texts of two letters take eight times their bytes as objects, numbers of one byte up to forty."""
    num = 200_000
    bodies = {
        "texts": U32(9) + U32(8) + U64(num) + text(b"ab") * num,
        "numbers": U32(9) + U32(5) + U64(num) + U32(1 << 20) * num,
        "arrays": U32(9) + U32(9) + U64(num) + (U32(0) + U64(0)) * num,
    }
    if item == "tensors":
        num_tensors = num // 10
        listed = b"".join(tensor(b"t%d" % i, (1,), 24, 0) for i in range(num_tensors))
        data = container(tensors=listed, num_tensors=num_tensors)
    else:
        data = container(keys=text(b"k") + bodies[item], num_keys=1)
    path = tmp_path / "full.gguf"
    path.write_bytes(data)
    tracemalloc.start()
    with pytest.raises(ModelFileError, match="takes too much memory for a file of"):
        read_gguf_file(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * len(data) + (1 << 20)
