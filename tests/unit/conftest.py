"""Tiny models written to disk, for whoever reads or loads model files, and our engine without a model."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from inferloop.backends import bytecodec
from inferloop.backends.native import NativeCodec, NativeGenerator
from inferloop.core.clock import Clock
from inferloop.engine.compute.echo import EchoRunner
from inferloop.engine.config import EngineConfig
from inferloop.engine.text.vocabulary import byte_level_alphabet
from inferloop.models.identity import ServingIdentity

Native = Callable[..., contextlib.AbstractAsyncContextManager[NativeGenerator]]

TINY_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "intermediate_size": 12,
    "vocab_size": 258,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 256,
    "eos_token_id": 257,
}


@pytest.fixture
def native() -> Native:
    """native(runner, codec, clock, **config of the engine): the model "m", started, and stopped with the block. Its
    vocabulary is bytecodec's and its runner an EchoRunner, unless others are given."""

    @contextlib.asynccontextmanager
    async def running(
        runner: EchoRunner | None = None,
        codec: NativeCodec | None = None,
        clock: Clock | None = None,
        **config: Any,
    ) -> AsyncIterator[NativeGenerator]:
        runner = runner or EchoRunner(vocab_size=bytecodec.VOCAB_SIZE)
        identity = ServingIdentity("m", "w", "none", "echo", "1", "t", "c")
        made = NativeGenerator(codec or bytecodec.ByteCodec(), runner, EngineConfig(**config), identity, clock=clock)
        made.start()
        try:
            yield made
        finally:
            await asyncio.to_thread(made.stop)

    return running


@pytest.fixture
def tiny_directory(tmp_path: Path) -> Callable[..., Path]:
    """Writes a Hugging Face directory. `config` overrides keys (None removes); `template` is the chat template."""

    def write(
        name: str = "tiny", *, template: str | None = None, adds_bos: bool = True, prefix: str = "", **config: Any
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        merged = {k: v for k, v in {**TINY_CONFIG, **config}.items() if v is not None}
        (folder / "config.json").write_text(json.dumps(merged))
        save_file(tiny_weights(prefix), str(folder / "model.safetensors"))
        tiny_tokenizer(adds_bos).save(str(folder / "tokenizer.json"))
        settings: dict[str, Any] = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
        if template is not None:
            settings["chat_template"] = template
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        return folder

    return write


def tiny_weights(prefix: str = "") -> dict[str, Any]:
    """The tensors of TINY_CONFIG, float32, seeded."""
    rng = np.random.default_rng(0)
    h, q, kv, ffn, vocab = 16, 8, 4, 12, 258
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, h), "model.norm.weight": (h,)}
    for i in range(2):
        p = f"model.layers.{i}."
        shapes |= {p + "input_layernorm.weight": (h,), p + "post_attention_layernorm.weight": (h,)}
        shapes |= {p + "self_attn.q_proj.weight": (q, h), p + "self_attn.o_proj.weight": (h, q)}
        shapes |= {p + "self_attn.k_proj.weight": (kv, h), p + "self_attn.v_proj.weight": (kv, h)}
        shapes |= {p + "mlp.gate_proj.weight": (ffn, h), p + "mlp.up_proj.weight": (ffn, h)}
        shapes |= {p + "mlp.down_proj.weight": (h, ffn)}
    return {prefix + name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def tiny_tokenizer(adds_bos: bool) -> Any:
    """One token per byte, then <s> (256) and </s> (257)."""
    inner = Tokenizer(models.BPE(vocab=dict(byte_level_alphabet().items()), merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    if adds_bos:
        inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    return inner


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Callable[..., Path]:
    """Writes a GGUF file of the llama architecture with the `gguf` package. `edit` may add or change keys."""

    def write(
        name: str = "tiny.gguf",
        *,
        kv_heads: int | list[int] = 1,
        num_layers: int = 2,
        num_heads: int = 2,
        head_dim: int = 4,
        edit: Callable[[Any], None] | None = None,
        skip: str | None = None,
    ) -> Path:
        path = tmp_path / name
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_block_count(num_layers)
        writer.add_context_length(64)
        writer.add_embedding_length(16)
        writer.add_feed_forward_length(32)
        writer.add_head_count(num_heads)
        writer.add_head_count_kv(kv_heads)
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list([*byte_level_alphabet(), "ab", "<end>"])
        writer.add_token_types([1] * 257 + [3])
        writer.add_token_merges(["a b"])
        writer.add_eos_token_id(257)
        writer.add_chat_template("{% for m in messages %}{{ m.content }}<end>{% endfor %}")
        if edit is not None:
            edit(writer)
        per_layer = kv_heads if isinstance(kv_heads, list) else [kv_heads] * num_layers
        shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (258, 16), "output_norm.weight": (16,)}
        for i, k in enumerate(per_layer):
            p = f"blk.{i}."
            shapes |= {p + "attn_norm.weight": (16,), p + "ffn_norm.weight": (16,)}
            if k:
                shapes |= {p + "attn_q.weight": (num_heads * head_dim, 16), p + "attn_k.weight": (k * head_dim, 16)}
                shapes |= {
                    p + "attn_v.weight": (k * head_dim, 16),
                    p + "attn_output.weight": (16, num_heads * head_dim),
                }
            shapes |= {p + "ffn_gate.weight": (32, 16), p + "ffn_up.weight": (32, 16), p + "ffn_down.weight": (16, 32)}
        for tensor, shape in shapes.items():
            if tensor != skip:
                writer.add_tensor(tensor, np.zeros(shape, dtype=np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write
