"""Whole models packed: every matrix says what the file says, and the cached file is never trusted blindly."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from filelock import FileLock
from numpy.typing import NDArray

from inferloop.core.errors import EnvironmentLacksError, ModelFileError
from inferloop.engine.compute.groups import GROUP_TYPES
from inferloop.engine.compute.native.config import Weights
from inferloop.engine.compute.native.pack import pack_model
from inferloop.engine.compute.native.packed import PackedModel
from inferloop.engine.compute.native.packfile import pack_in_memory
from inferloop.engine.compute.native.plan import plan_packing
from inferloop.engine.compute.native.revisions import LAYOUT
from inferloop.engine.compute.native.unpack import unpack
from inferloop.engine.compute.stored import half_split, read_tensor
from inferloop.models.headers import ModelHeader, read_header
from inferloop.models.resolve import ModelFiles

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 256, 512, 4, 2, 64, 70
DIGEST = "0123456789abcdef" * 4
Write = Callable[..., ModelHeader]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """write(dtype, family=..., biases=..., tied=..., **dtypes of single tensors like v="q6_k") -> the header of a GGUF
    model of one layer, with random weights."""

    def made(
        dtype: str, *, family: str = "llama", biases: tuple[str, ...] = (), tied: bool = True, **others: str
    ) -> ModelHeader:
        path = tmp_path / "model.gguf"
        writer = gguf.GGUFWriter(path, family)
        for key, value in (("block_count", 1), ("context_length", 64), ("embedding_length", HIDDEN)):
            writer.add_uint32(f"{family}.{key}", value)
        for key, value in (("feed_forward_length", FFN), ("attention.head_count", HEADS)):
            writer.add_uint32(f"{family}.{key}", value)
        writer.add_head_count_kv(KV_HEADS)
        writer.add_key_length(HEAD_DIM)
        writer.add_value_length(HEAD_DIM)
        writer.add_layer_norm_rms_eps(1e-5)
        rng = np.random.default_rng(0)
        matrices = {
            "token_embd": (VOCAB, HIDDEN),
            **({} if tied else {"output": (VOCAB, HIDDEN)}),
            "blk.0.attn_q": (HEADS * HEAD_DIM, HIDDEN),
            "blk.0.attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
            "blk.0.attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
            "blk.0.attn_output": (HIDDEN, HEADS * HEAD_DIM),
            "blk.0.ffn_gate": (FFN, HIDDEN),
            "blk.0.ffn_up": (FFN, HIDDEN),
            "blk.0.ffn_down": (HIDDEN, FFN),
        }
        for name, shape in matrices.items():
            short = name.rpartition("_")[2]
            _add(writer, f"{name}.weight", others.get(short, dtype), shape, rng)
            if short in biases:
                writer.add_tensor(f"{name}.bias", rng.standard_normal(shape[0], dtype=np.float32))
        for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
            writer.add_tensor(f"{name}.weight", rng.standard_normal(HIDDEN, dtype=np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return read_header(path)

    return made


def _add(writer: Any, name: str, dtype: str, shape: tuple[int, int], rng: np.random.Generator) -> None:
    values = rng.standard_normal(shape, dtype=np.float32)
    if dtype in ("fp32", "fp16"):
        writer.add_tensor(name, values.astype(np.float16 if dtype == "fp16" else np.float32))
        return
    kind = gguf.GGMLQuantizationType[dtype.upper()]
    if dtype == "bf16":
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        return
    block = GROUP_TYPES[dtype].block
    size = gguf.GGML_QUANT_SIZES[kind][0]
    stored = rng.integers(0, 256, (shape[0], shape[1] // size * block.itemsize), dtype=np.uint8)
    fields = stored.view(block)
    for field in set(block.names or ()) & {"d", "m", "dmin"}:
        fields[field] = rng.standard_normal(fields.shape)
    writer.add_tensor(name, stored, raw_dtype=kind)


MODULES = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


def stacked(header: ModelHeader, name: str, what: str = "weight") -> NDArray[np.float32]:
    """What the file says that a packed matrix (or its bias) is."""
    if "." not in name:
        return read_tensor(header.tensors[{"embed": "model.embed_tokens", "head": "lm_head"}[name] + ".weight"])
    _, layer, kind = name.split(".")
    parts = []
    for module in MODULES[kind]:
        info = header.tensors.get(f"model.layers.{layer}.{module}.{what}")
        if info is None:
            rows = header.tensors[f"model.layers.{layer}.{module}.weight"].shape[0]
            parts.append(np.zeros(rows, np.float32))
        else:
            parts.append(half_split(read_tensor(info), info, header.shape.head_dim))
    if kind != "gate_up":
        return np.concatenate(parts)
    gate, up = parts
    halves = [half[i : i + 32] for i in range(0, len(gate), 32) for half in (gate, up)]
    return np.concatenate(halves)


def check_equal(model: PackedModel, header: ModelHeader) -> None:
    for name in model.matrices:
        np.testing.assert_array_equal(unpack(model, name), stacked(header, name), name, strict=True)


@pytest.mark.parametrize("dtype", GROUP_TYPES)
def test_quantized_models_keep_every_number(write: Write, dtype: str) -> None:
    header = write(dtype)
    model = pack_model(header, "stored")
    assert (model.precision, {m.format for m in model.matrices.values()}) == (dtype, {"group"})
    assert sorted(model.matrices) == ["embed", "layers.0.down", "layers.0.gate_up", "layers.0.out", "layers.0.qkv"]
    check_equal(model, header)


def test_the_embedded_model_keeps_every_number(embedded_model: ModelFiles) -> None:
    model = pack_model(embedded_model.header, "stored")
    assert model.precision == "q4_1"
    kinds = {(m.bits, m.group, m.wide, m.has_min) for name, m in model.matrices.items() if name != "embed"}
    assert kinds == {(4, 32, False, True)}
    check_equal(model, embedded_model.header)


def test_parts_of_other_types_meet_exactly(write: Write) -> None:
    header = write("q4_k", v="q6_k", up="q8_0")
    model = pack_model(header, "stored")
    qkv, gate_up = model.matrices["layers.0.qkv"], model.matrices["layers.0.gate_up"]
    assert (qkv.bits, qkv.group, qkv.code_offset, qkv.wide, qkv.has_min) == (8, 16, 32, True, True)
    assert (gate_up.bits, gate_up.group, gate_up.code_offset, gate_up.has_min) == (8, 32, 128, True)
    check_equal(model, header)


def test_a_part_that_is_not_quantized_makes_its_matrix_fp32(write: Write) -> None:
    header = write("q4_0", v="bf16")
    model = pack_model(header, "stored")
    assert [model.matrices[f"layers.0.{m}"].format for m in ("qkv", "out")] == ["f32", "group"]
    check_equal(model, header)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_what_is_not_quantized_becomes_bf16(write: Write, dtype: str) -> None:
    header = write(dtype)
    model = pack_model(header, "stored")
    assert (model.precision, {m.format for m in model.matrices.values()}) == ("bf16", {"bf16"})
    for name in model.matrices:
        want = stacked(header, name)
        bound = 0 if dtype == "bf16" else 2**-8
        assert (np.abs(unpack(model, name) - want) <= bound * np.abs(want)).all()


@pytest.mark.parametrize("dtype", ["q4_k", "q8_0", "bf16"])
@pytest.mark.parametrize("weights", ["fp32", "bf16", "int8"])
def test_classes_convert_from_whatever_is_stored(write: Write, dtype: str, weights: Weights) -> None:
    header = write(dtype)
    model = pack_model(header, weights)
    assert model.precision == weights
    exact = weights == "fp32" or (weights, dtype) in (("int8", "q8_0"), ("bf16", "bf16"))
    for name, matrix in model.matrices.items():
        assert matrix.format == {"fp32": "f32", "bf16": "bf16", "int8": "group"}[weights]
        got, want = unpack(model, name), stacked(header, name)
        if exact:
            np.testing.assert_array_equal(got, want)
        elif weights == "bf16":
            assert (np.abs(got - want) <= 2**-8 * np.abs(want)).all()
        else:
            largest = np.abs(want).reshape(len(want), -1, 32).max(-1).repeat(32, -1)
            assert (np.abs(got - want) <= largest / 127 * 0.501).all()


def test_untied_heads_biases_and_norms(write: Write) -> None:
    header = write("q4_1", tied=False, biases=("q", "v", "up", "down"))
    model = pack_model(header, "stored")
    check_equal(model, header)
    assert model.matrices["head"].n == VOCAB
    for name in ("layers.0.qkv", "layers.0.gate_up", "layers.0.down"):
        np.testing.assert_array_equal(model.vectors[name + ".bias"], stacked(header, name, "bias"), strict=True)
    assert "layers.0.out.bias" not in model.vectors
    norms = {"norm": "norm", "layers.0.input_norm": "layers.0.input_layernorm"}
    for name, stored in norms.items():
        np.testing.assert_array_equal(model.vectors[name], read_tensor(header.tensors[f"model.{stored}.weight"]))


@pytest.mark.parametrize("dtype", ["q4_0", "q6_k", "bf16", "fp32"])
def test_what_lies_beyond_the_last_output_is_zero(write: Write, dtype: str) -> None:
    model = pack_model(write(dtype), "stored")
    matrix = model.matrices["embed"]
    end = matrix.offset_bytes + matrix.num_bytes
    last = model.buffer[end - matrix.tile_bytes : end]
    alone = PackedModel(last, {"last": _alone(matrix)}, {}, "")
    whole = unpack(alone, "last")
    assert VOCAB % 16 == 6 and whole[:6].any() and not whole[6:].any()


def _alone(matrix: Any) -> Any:
    from dataclasses import replace

    return replace(matrix, n=16, offset_bytes=0)


def test_matrices_are_aligned_and_do_not_overlap(write: Write) -> None:
    model = pack_model(write("q4_0", biases=("q",)), "stored")
    assert model.buffer.ctypes.data % 64 == 0
    assert not model.buffer.flags.writeable
    end = 0
    for matrix in sorted(model.matrices.values(), key=lambda m: m.offset_bytes):
        assert matrix.offset_bytes % 64 == 0 and matrix.tile_bytes % 64 == 0
        assert matrix.offset_bytes >= end
        end = matrix.offset_bytes + matrix.num_bytes
    assert end <= len(model.buffer)


def test_shapes_that_kernels_do_not_take_are_refused_by_name(tiny_gguf: Callable[..., Path]) -> None:
    header = read_header(tiny_gguf())
    with pytest.raises(ModelFileError, match=r"model\.embed_tokens\.weight is 258 x 16.*multiples of 32"):
        pack_model(header, "stored")
    with pytest.raises(ModelFileError, match="same number of KV heads"):
        pack_model(read_header(tiny_gguf("other.gguf", kv_heads=[1, 2])), "stored")


def test_minimums_that_are_no_numbers_are_refused(write: Write) -> None:
    header = write("q4_1")
    info = header.tensors["model.layers.0.mlp.down_proj.weight"]
    with info.file.open("r+b") as file:
        file.seek(info.offset + 2)
        file.write(np.float16(np.inf).tobytes())
    with pytest.raises(ModelFileError, match=r"down_proj\.weight has weights that are not finite"):
        pack_model(header, "stored")


@pytest.mark.parametrize("weights", ["stored", "int8"])
def test_scales_that_are_no_numbers_are_refused(write: Write, weights: Weights) -> None:
    header = write("q8_0")
    info = header.tensors["model.layers.0.mlp.down_proj.weight"]
    with info.file.open("r+b") as file:
        file.seek(info.offset)
        file.write(np.float16(np.nan).tobytes())
    with pytest.raises(ModelFileError, match=r"down_proj\.weight has weights that are not finite"):
        pack_model(header, weights)


def test_types_that_cannot_be_read_are_refused_before_anything_is_packed(write: Write, tmp_path: Path) -> None:
    header = write("q4_0")
    name = "model.layers.0.mlp.down_proj.weight"
    of_another = {**header.tensors, name: replace(header.tensors[name], dtype="iq3_s")}
    done: list[int] = []
    with pytest.raises(ModelFileError, match=r"down_proj\.weight is iq3_s; readable are bf16, "):
        pack(replace(header, tensors=of_another), tmp_path / "cache", done)
    assert not done and not (tmp_path / "cache").exists()


def test_memory_that_cannot_be_had_is_a_fault_of_the_machine(write: Write) -> None:
    layout = replace(plan_packing(write("q4_0"), "stored").layout, num_bytes=1 << 60)
    with pytest.raises(EnvironmentLacksError, match=r"no room in memory for .* of weights"):
        pack_in_memory(layout, lambda buffer: None)


def pack(header: ModelHeader, cache: Path, done: list[int] | None = None) -> PackedModel:
    def note(num: int, total: int) -> None:
        if done is not None:
            done.append(num)

    return pack_model(header, "stored", digest=DIGEST, cache_dir=cache, progress=note)


def test_the_second_start_maps_what_the_first_wrote(write: Write, tmp_path: Path) -> None:
    header, done = write("q4_1"), list[int]()
    first = pack(header, tmp_path / "cache", done)
    assert len(done) == 5 and done == sorted(done) and done[-1] <= first.buffer.nbytes
    header.tensors["model.norm.weight"].file.unlink()
    second = pack(header, tmp_path / "cache", done)
    assert len(done) == 5
    assert second.matrices == first.matrices and second.precision == first.precision
    np.testing.assert_array_equal(second.buffer, first.buffer)
    assert {n: v.tolist() for n, v in second.vectors.items()} == {n: v.tolist() for n, v in first.vectors.items()}
    assert not second.buffer.flags.writeable and second.buffer.ctypes.data % 4096 == 0


def test_memory_and_file_hold_the_same(write: Write, tmp_path: Path) -> None:
    header = write("q5_1", v="q4_0")
    in_memory, mapped = pack_model(header, "stored"), pack(header, tmp_path)
    assert in_memory.matrices == mapped.matrices
    np.testing.assert_array_equal(in_memory.buffer, mapped.buffer)


def _truncated(content: bytes) -> bytes:
    return content[:-64]


def _flipped(at: int) -> Callable[[bytes], bytes]:
    def damage(content: bytes) -> bytes:
        flipped = bytearray(content)
        flipped[at] ^= 0x10
        return bytes(flipped)

    return damage


@pytest.mark.parametrize(
    "damage",
    [
        _truncated,
        _flipped(0),
        _flipped(20),
        _flipped(100),
        _flipped(-1),
        _flipped(-20_000),
        lambda content: b"",
        lambda content: content[:40],
        lambda content: content + bytes(64),
    ],
)
def test_a_damaged_file_is_packed_again(
    write: Write, tmp_path: Path, damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    header = write("q4_0")
    good = pack(header, tmp_path).buffer.copy()
    (file,) = (tmp_path / "packed").glob("*.bin")
    file.write_bytes(damage(file.read_bytes()))
    with caplog.at_level(logging.WARNING):
        again = pack(header, tmp_path)
    assert len(caplog.records) == 1 and str(file) in caplog.text
    np.testing.assert_array_equal(again.buffer, good)
    done: list[int] = []
    pack(header, tmp_path, done)
    assert not done


def test_without_a_cache_to_write_it_is_kept_in_memory(
    write: Write, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "occupied").write_text("a file, not a folder")
    header = write("q4_0")
    model = pack(header, tmp_path / "occupied")
    assert "kept in memory" in caplog.text
    check_equal(model, header)


def test_a_failure_leaves_nothing_behind(write: Write, tmp_path: Path) -> None:
    header = write("q8_0")

    def stop(num: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack_model(header, "stored", digest=DIGEST, cache_dir=tmp_path / "cache", progress=stop)
    assert {p.name for p in (tmp_path / "cache" / "packed").iterdir()} <= {".lock"}


def test_older_layouts_of_the_same_weights_are_removed(write: Write, tmp_path: Path) -> None:
    folder = tmp_path / "packed"
    folder.mkdir()
    old, other = folder / f"{DIGEST[:32]}-stored-0.bin", folder / f"{'f' * 32}-stored-0.bin"
    for file in (old, other):
        file.write_bytes(b"old")
    pack(write("q4_0"), tmp_path)
    assert not old.exists() and other.exists()


def test_what_a_killed_process_had_begun_is_removed(write: Write, tmp_path: Path) -> None:
    path = write("q4_0").tensors["model.norm.weight"].file
    code = (
        "import os, sys; from pathlib import Path\n"
        "from inferloop.engine.compute.native.pack import pack_model\n"
        "from inferloop.models.headers import read_header\n"
        f"pack_model(read_header(Path(sys.argv[1])), 'stored', digest={DIGEST!r}, cache_dir=Path(sys.argv[2]), "
        "progress=lambda num, total: os.kill(os.getpid(), 9))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path), str(tmp_path)], timeout=60)
    assert done.returncode == -9
    assert len(list((tmp_path / "packed").iterdir())) == 2  # the lock, and half a model
    pack_model(read_header(path), "int8", digest="f" * 64, cache_dir=tmp_path)
    assert {p.name for p in (tmp_path / "packed").iterdir()} == {".lock", f"{'f' * 32}-int8-{LAYOUT}.bin"}


def test_the_models_used_last_stay(write: Write, tmp_path: Path) -> None:
    folder, header = tmp_path / "packed", write("q4_0")
    first = pack(header, tmp_path).buffer
    (file,) = folder.glob("*.bin")
    for i in range(30):
        other = folder / f"{i:032x}-stored-{LAYOUT}.bin"
        other.write_bytes(b"other")
        os.utime(other, (1000 + i, 1000 + i))
    os.utime(file, (1, 1))
    pack(header, tmp_path)  # used again
    pack_model(header, "int8", digest=DIGEST, cache_dir=tmp_path)
    kept = {f.name for f in folder.glob("*.bin")}
    assert file.name in kept and f"{DIGEST[:32]}-int8-{LAYOUT}.bin" in kept
    assert len(kept) == 16 and all(f"{i:032x}-stored-{LAYOUT}.bin" in kept for i in range(16, 30))
    assert first.any()


def test_another_structure_over_the_same_weights_is_packed_anew(write: Write, tmp_path: Path) -> None:
    """A directory's config.json is no part of its weights, and may be changed."""
    header = write("q4_0", tied=False)
    assert "head" in pack(header, tmp_path).matrices
    tied = replace(header, shape=replace(header.shape, tied_embeddings=True))
    assert "head" not in pack(tied, tmp_path).matrices
    check_equal(pack(header, tmp_path), header)


@pytest.mark.parametrize("cached", [True, False])
def test_a_model_that_changes_while_it_is_read_is_not_packed(write: Write, tmp_path: Path, cached: bool) -> None:
    header = write("q4_0")
    path = header.tensors["model.norm.weight"].file
    digest = DIGEST if cached else None

    def exchange(num: int, total: int) -> None:
        (tmp_path / "new").write_bytes(path.read_bytes())
        (tmp_path / "new").replace(path)

    with pytest.raises(ModelFileError, match=r"model\.gguf: was changed while it was read"):
        pack_model(header, "stored", digest=digest, cache_dir=tmp_path / "cache", progress=exchange)
    assert not list((tmp_path / "cache").rglob("*.bin*"))


def test_a_file_that_becomes_short_while_it_is_read_does_not_end_the_process(write: Write) -> None:
    """As when another one is copied over it. In a process of its own, which mapped pages that are gone would kill."""
    path = write("q4_0").tensors["model.norm.weight"].file
    code = (
        "import os, sys; from pathlib import Path\n"
        "from inferloop.core.errors import ModelFileError\n"
        "from inferloop.engine.compute.native.pack import pack_model\n"
        "from inferloop.engine.compute.stored import stored_rows\n"
        "from inferloop.models.headers import read_header\n"
        "header = read_header(Path(sys.argv[1]))\n"
        "last = max(header.tensors.values(), key=lambda info: info.offset)\n"
        "rows = stored_rows(last); os.truncate(last.file, last.offset + 1); print(rows.max() > 0)\n"
        "try:\n"
        "    pack_model(header, 'stored')\n"
        "except ModelFileError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], timeout=60, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("True\n") and "cannot be read: the file ends within it" in done.stdout


def test_a_packed_model_is_readable_as_the_umask_says(write: Write, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        pack(write("q4_0"), tmp_path)
    finally:
        os.umask(before)
    (file,) = (tmp_path / "packed").glob("*.bin")
    assert file.stat().st_mode & 0o777 == 0o640


def test_who_waits_for_another_process_says_so(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("inferloop.engine.compute.native.pack._PATIENCE_S", 0.01)
    header, done = write("q4_0"), list[int]()
    (tmp_path / "packed").mkdir()
    with ThreadPoolExecutor() as threads:
        with FileLock(tmp_path / "packed" / ".lock"):
            other = threads.submit(pack, header, tmp_path, done)
            while not caplog.messages:
                assert not other.done()
        check_equal(other.result(60), header)
    assert caplog.messages == [f"waiting for another process, which packs a model in {tmp_path / 'packed'}"] and done


def test_two_processes_that_start_at_once_pack_once(write: Write, tmp_path: Path) -> None:
    path = write("q4_0").tensors["model.norm.weight"].file
    code = (
        "import sys; from pathlib import Path\n"
        "from inferloop.engine.compute.native.pack import pack_model\n"
        "from inferloop.models.headers import read_header\n"
        "done = []\n"
        "header = read_header(Path(sys.argv[1])); print('ready', flush=True); sys.stdin.readline()\n"
        f"model = pack_model(header, 'stored', digest={DIGEST!r}, cache_dir=Path(sys.argv[2]), "
        "progress=lambda num, total: done.append(num))\n"
        "print(len(done), int(model.buffer.sum()))\n"
    )
    command = [sys.executable, "-c", code, str(path), str(tmp_path / "cache")]
    racers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) for _ in "ab"
    ]
    for racer in racers:
        assert racer.stdout is not None and racer.stdout.readline() == "ready\n"
    outputs = []
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    for racer in racers:
        outputs.append(racer.communicate(timeout=60)[0].split())
        assert racer.returncode == 0
    assert sorted(int(num) for num, _ in outputs) == [0, 5]
    assert outputs[0][1] == outputs[1][1]
