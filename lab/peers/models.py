"""The files that the engines read: the same weights in the formats that each of them knows.

    python -m lab.peers.models smollm2|llama-1.2b|moe-2.6b      prints the folder; makes what is not there yet

The third is gemma3-270m, as it is stored alone and where it has been fetched (inferloop models fetch).

From one GGUF file of 4-bit weights come a GGUF of 8-bit ones, one of bf16 and one of fp16, and a Hugging Face directory
of bf16. The second model has the shape of Llama 3.2 with 1.2 billion weights that are random: good for speed alone.
So have those of moe-2.6b, which is 4 layers of Qwen3-30B-A3B, and there in 4 bits alone.
Needs numpy and gguf, no torch.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from inferloop.models.resolve import resolve

FOLDER = Path(".peers/models")
SMOLLM2 = "smollm2-135m-instruct"
GEMMA = "gemma3-270m"
MOE = "moe-2.6b"


@dataclass(frozen=True, slots=True)
class ModelSet:
    """One model in every format."""

    stored: Path
    """The GGUF of 4-bit weights that the others are made of."""
    q8_0: Path
    bf16: Path
    f16: Path
    hf: Path


def prepare(name: str, folder: Path = FOLDER) -> ModelSet:
    """Make what is not there yet. Takes minutes the first time for the large model."""
    where = folder / name
    where.mkdir(parents=True, exist_ok=True)
    if name == GEMMA:
        stored = resolve(GEMMA).path
        return _alone(stored, where)
    if name == "smollm2":
        stored = resolve(SMOLLM2).path
    else:
        stored = where / "q4_0.gguf"
        if not stored.exists():
            write_random(stored, MOE_2B if name == MOE else LLAMA_1B)
    if name == MOE:
        return _alone(stored, where)
    found = ModelSet(stored, where / "q8_0.gguf", where / "bf16.gguf", where / "f16.gguf", where / "hf-bf16")
    types = gguf.GGMLQuantizationType
    for path, kind in ((found.q8_0, types.Q8_0), (found.bf16, types.BF16), (found.f16, types.F16)):
        if not path.exists():
            convert(stored, path, kind)
    if not (found.hf / "config.json").exists():
        write_hf(stored, found.hf)
    return found


def _alone(stored: Path, where: Path) -> ModelSet:
    return ModelSet(stored, *(where / "not-made" for _ in range(4)))


def convert(source: Path, target: Path, kind: Any) -> None:
    """The matrices of a GGUF file in another type, everything else as it is."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target.with_suffix(".part"), "llama")
    copy_fields(reader, writer)
    writer.add_file_type({"Q8_0": 7, "BF16": 32, "F16": 1}[kind.name])
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if values.ndim < 2:
            writer.add_tensor(tensor.name, values)
        else:
            writer.add_tensor(tensor.name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    finish(writer, target)


def copy_fields(reader: Any, writer: Any) -> None:
    for field in reader.fields.values():
        if field.name == "general.architecture" or field.name == "general.file_type" or field.name.startswith("GGUF."):
            continue
        kind = field.types[0]
        writer.add_key_value(field.name, field.contents(), kind, field.types[-1] if len(field.types) > 1 else None)


def finish(writer: Any, target: Path) -> None:
    """A file is there whole or not at all."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    target.with_suffix(".part").replace(target)


# A Hugging Face directory, without a tokenizer: all prompts are ids.


def write_hf(source: Path, target: Path) -> None:
    reader = gguf.GGUFReader(source)
    meta = {name.removeprefix("llama."): f.contents() for name, f in reader.fields.items() if name.startswith("llama.")}
    num_heads, num_kv = meta["attention.head_count"], meta["attention.head_count_kv"]
    target.mkdir(exist_ok=True)
    tensors = {}
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if ".attn_q." in tensor.name:
            values = unpermuted(values, num_heads)
        elif ".attn_k." in tensor.name:
            values = unpermuted(values, num_kv)
        tensors[hf_name(tensor.name)] = values
    write_safetensors(target / "model.safetensors", tensors)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_size": meta["embedding_length"],
        "intermediate_size": meta["feed_forward_length"],
        "num_hidden_layers": meta["block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv,
        "head_dim": meta["embedding_length"] // num_heads,
        "vocab_size": next(int(t.shape[1]) for t in reader.tensors if t.name == "token_embd.weight"),
        "max_position_embeddings": meta["context_length"],
        "rms_norm_eps": meta["attention.layer_norm_rms_epsilon"],
        "rope_theta": meta["rope.freq_base"],
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (target / "config.json").write_text(json.dumps(config, indent=1))


def unpermuted(values: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """GGUF keeps the rows of queries and keys with the pairs that are rotated together side by side."""
    rows, columns = values.shape
    return values.reshape(num_heads, rows // num_heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


HF_PARTS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hf_name(name: str) -> str:
    if name.startswith("blk."):
        _, layer, part, _ = name.split(".")
        return f"model.layers.{layer}.{HF_PARTS[part]}.weight"
    return {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[name]


def write_safetensors(path: Path, tensors: dict[str, NDArray[np.float32]]) -> None:
    """As bf16, which numpy does not know: the format is a header in JSON and the bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, values in tensors.items():
        header[name] = {"dtype": "BF16", "shape": list(values.shape), "data_offsets": [begin, begin + 2 * values.size]}
        begin += 2 * values.size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for values in tensors.values():
            file.write(gguf.quants.quantize(values, gguf.GGMLQuantizationType.BF16).tobytes())


# The random model.


@dataclass(frozen=True, slots=True)
class Shape:
    """With `experts`, of which a token goes through `per_token`, it is a Qwen3-MoE, else a Llama."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    head_dim: int = 64
    experts: int = 0
    per_token: int = 0

    def matrices(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(name, shape)"""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        each, suffix = ((self.experts,), "_exps") if self.experts else ((), "")
        for layer in range(self.layers):
            for part, shape in (
                ("attn_q", (q, self.hidden)),
                ("attn_k", (kv, self.hidden)),
                ("attn_v", (kv, self.hidden)),
                ("attn_output", (self.hidden, q)),
                (f"ffn_gate{suffix}", (*each, self.ffn, self.hidden)),
                (f"ffn_up{suffix}", (*each, self.ffn, self.hidden)),
                (f"ffn_down{suffix}", (*each, self.hidden, self.ffn)),
            ):
                yield f"blk.{layer}.{part}.weight", shape


LLAMA_1B = Shape(layers=16, hidden=2048, heads=32, kv_heads=8, ffn=8192, vocab=128256)
MOE_2B = Shape(
    layers=4, hidden=2048, heads=32, kv_heads=4, ffn=768, vocab=49152, head_dim=128, experts=128, per_token=8
)
_STD = 0.02


def write_random(target: Path, shape: Shape) -> None:
    """A GGUF of Q4_0 with an embedding of Q8_0 that is the head as well. The codes themselves are drawn: all of them
    alike, with the scale that gives the usual spread."""
    rng = np.random.default_rng(1)
    writer = gguf.GGUFWriter(target.with_suffix(".part"), "qwen3moe" if shape.experts else "llama")
    writer.add_file_type(2)
    writer.add_block_count(shape.layers)
    writer.add_context_length(8192)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_freq_base(500000.0)
    writer.add_rope_dimension_count(shape.head_dim)
    if shape.experts:
        writer.add_key_length(shape.head_dim)
        writer.add_value_length(shape.head_dim)
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.per_token)
        writer.add_expert_feed_forward_length(shape.ffn)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(shape.vocab)
    for field in gguf.GGUFReader(resolve(SMOLLM2).path).fields.values():
        if field.name.startswith("tokenizer.") and field.name != "tokenizer.chat_template":
            value = field.contents()
            missing = shape.vocab - len(value) if field.name.endswith((".tokens", ".token_type")) else 0
            if missing:  # tokens that no text gives
                value = [*value, *(f"<unused{i}>" if field.name.endswith("tokens") else 1 for i in range(missing))]
            writer.add_key_value(field.name, value, field.types[0], field.types[-1] if len(field.types) > 1 else None)
    types = gguf.GGMLQuantizationType
    embedding = blocks(rng, shape.vocab, shape.hidden, scale=_STD / 73.9, num_bytes=32)
    writer.add_tensor("token_embd.weight", embedding, raw_dtype=types.Q8_0)
    ones = np.ones(shape.hidden, np.float32)
    writer.add_tensor("output_norm.weight", ones)
    for layer in range(shape.layers):
        writer.add_tensor(f"blk.{layer}.attn_norm.weight", ones)
        writer.add_tensor(f"blk.{layer}.ffn_norm.weight", ones)
        if shape.experts:
            router = rng.standard_normal((shape.experts, shape.hidden), np.float32) * np.float32(_STD)
            writer.add_tensor(f"blk.{layer}.ffn_gate_inp.weight", router)
            for part in ("attn_q_norm", "attn_k_norm"):
                writer.add_tensor(f"blk.{layer}.{part}.weight", ones[: shape.head_dim])
    for name, (*rows, columns) in shape.matrices():
        codes = blocks(rng, math.prod(rows), columns, scale=_STD / 4.61, num_bytes=16)
        writer.add_tensor(name, codes.reshape(*rows, -1), raw_dtype=types.Q4_0)
    finish(writer, target)


def blocks(rng: np.random.Generator, rows: int, columns: int, *, scale: float, num_bytes: int) -> NDArray[np.uint8]:
    """Rows of blocks of 32 weights: an fp16 scale, then `num_bytes` of codes."""
    found = np.empty((rows, columns // 32, 2 + num_bytes), np.uint8)
    found[:, :, :2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    found[:, :, 2:] = rng.integers(0, 256, (rows, columns // 32, num_bytes), np.uint8)
    return found.reshape(rows, -1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=("smollm2", "llama-1.2b", MOE))
    os.nice(5)
    prepare(parser.parse_args().model)
    print(FOLDER / parser.parse_args().model)
