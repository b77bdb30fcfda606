"""Small sound models to begin from, in both formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as Inner
from tokenizers import decoders as decoding

from inferloop.engine.text.vocabulary import byte_level_alphabet

HIDDEN, FFN, LAYERS, HEADS, HEAD_DIM, CONTEXT = 32, 64, 2, 2, 16, 64
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}<end>{% endfor %}{{ bos_token }}"
_BYTES = list(byte_level_alphabet())
Shapes = dict[str, tuple[int, ...]]


def gguf_files(folder: Path) -> list[bytes]:
    """Byte-level and SentencePiece vocabularies, plain and quantized weights, three architectures."""
    types = gguf.GGMLQuantizationType
    kinds = (("llama", types.F32, False), ("llama", types.Q8_0, True), ("qwen3", types.Q4_0, False))
    return [_gguf(folder / f"{i}.gguf", *kind) for i, kind in enumerate((*kinds, ("gemma3", types.BF16, True)))]


def _gguf(path: Path, architecture: str, kind: gguf.GGMLQuantizationType, pieces: bool) -> bytes:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv([1] * LAYERS if architecture == "llama" else 1)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    if architecture == "gemma3":
        writer.add_sliding_window(16)
    writer.add_chat_template(TEMPLATE)
    if pieces:
        writer.add_tokenizer_model("llama")
        tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁a", "ab", "▁", "a", "b"]
        writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * 5)
        writer.add_token_scores([-float(i) for i in range(len(tokens))])
        writer.add_bos_token_id(1)
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        tokens = [*_BYTES, "ab", "<end>"]
        writer.add_token_types([1] * 257 + [3])
        writer.add_token_merges(["a b"])
    writer.add_token_list(tokens)
    writer.add_eos_token_id(2 if pieces else 257)
    rng = np.random.default_rng(1)
    for name, shape in _gguf_shapes(architecture, len(tokens)).items():
        values = rng.standard_normal(shape, np.float32)
        if len(shape) == 1:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def _gguf_shapes(architecture: str, vocab: int) -> Shapes:
    q, kv = HEADS * HEAD_DIM, HEAD_DIM
    out: Shapes = {"token_embd.weight": (vocab, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for i in range(LAYERS):
        layer: Shapes = {"attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,), "attn_q": (q, HIDDEN), "attn_k": (kv, HIDDEN)}
        layer |= {"attn_v": (kv, HIDDEN), "attn_output": (HIDDEN, q)}
        layer |= {"ffn_gate": (FFN, HIDDEN), "ffn_up": (FFN, HIDDEN), "ffn_down": (HIDDEN, FFN)}
        if architecture != "llama":
            layer |= {"attn_q_norm": (HEAD_DIM,), "attn_k_norm": (HEAD_DIM,)}
        if architecture == "gemma3":
            layer |= {"post_attention_norm": (HIDDEN,), "post_ffw_norm": (HIDDEN,)}
        out |= {f"blk.{i}.{name}.weight": shape for name, shape in layer.items()}
    return out


def directories() -> list[dict[str, bytes]]:
    """Contents by file name: weights in one file, and in two with an index; two kinds of rotary embedding."""
    tensors = _weights()
    common = {name: json.dumps(value).encode() for name, value in _settings().items()}
    common["tokenizer.json"] = _tokenizer().to_str().encode()
    first = {name: values for i, (name, values) in enumerate(tensors.items()) if i % 2}
    second = {name: values for name, values in tensors.items() if name not in first}
    parts = {"model-00001-of-00002.safetensors": first, "model-00002-of-00002.safetensors": second}
    index = {"metadata": {}, "weight_map": {name: file for file, part in parts.items() for name in part}}
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32, "beta_fast": 32.0}
    other = _settings()["config.json"] | {"rope_scaling": yarn | {"beta_slow": 1.0}, "rope_theta": 10_000.0}
    return [
        {**common, "model.safetensors": save(tensors)},
        {
            **common,
            "config.json": json.dumps(other).encode(),
            **{file: save(part) for file, part in parts.items()},
            "model.safetensors.index.json": json.dumps(index).encode(),
            "chat_template.jinja": TEMPLATE.encode(),
        },
    ]


def directory_of_experts() -> dict[str, bytes]:
    """Two experts of three for each token, in the second layer."""
    config, *_ = _settings().values()
    experts = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 2}
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope |= {"original_max_position_embeddings": 32}
    config |= {"model_type": "qwen3_moe", "rope_scaling": rope, "norm_topk_prob": True, **experts}
    tensors = {name: values for name, values in _weights().items() if ".layers.1.mlp." not in name}
    rng = np.random.default_rng(3)
    prefix = "model.layers.1.mlp."
    shapes: Shapes = {f"{prefix}gate": (3, HIDDEN)}
    for e in range(3):
        shapes |= {f"{prefix}experts.{e}.{name}_proj": (32, HIDDEN) for name in ("gate", "up", "down")}
    for i in range(LAYERS):
        shapes |= {f"model.layers.{i}.self_attn.{name}_norm": (HEAD_DIM,) for name in "qk"}
    tensors |= {f"{name}.weight": rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    return {"config.json": json.dumps(config).encode(), "model.safetensors": save(tensors)}


def adapters() -> list[dict[str, bytes]]:
    """Of all modules; of some, with ranks and strengths of their own; of those that an expression names."""
    alike = _adapter(("q", "k", "v", "o", "gate", "up", "down"), {"lora_alpha": 8})
    own = {"rank_pattern": {"up_proj": 2}, "alpha_pattern": {"^model.layers.0.self_attn.q_proj": 3.5}}
    some = _adapter(("q", "up"), {"lora_alpha": 16.0, "use_rslora": True, **own}, np.float16, ranks={"up": 2})
    named = _adapter(("v", "down"), {"lora_alpha": 1, "target_modules": ".*(v|down)_proj", "bias": "none"})
    return [alike, some, named]


def _adapter(
    modules: tuple[str, ...], config: dict[str, Any], kind: Any = np.float32, ranks: dict[str, int] | None = None
) -> dict[str, bytes]:
    rng = np.random.default_rng(4)
    tensors: dict[str, Any] = {}
    for name, (num_out, num_in) in _layer_shapes().items():
        module = name.rpartition(".")[2].removesuffix("_proj")
        if module not in modules:
            continue
        rank = (ranks or {}).get(module, 4)
        for i in range(LAYERS):
            full = f"base_model.model.model.layers.{i}.{name}"
            tensors[f"{full}.lora_A.weight"] = rng.standard_normal((rank, num_in)).astype(kind)
            tensors[f"{full}.lora_B.weight"] = rng.standard_normal((num_out, rank)).astype(kind)
    told = {"peft_type": "LORA", "r": 4, "target_modules": [f"{name}_proj" for name in modules], **config}
    return {"adapter_config.json": json.dumps(told).encode(), "adapter_model.safetensors": save(tensors)}


def _settings() -> dict[str, Any]:
    config = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "vocab_size": 258,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": 256,
        "eos_token_id": [257],
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    }
    told = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": TEMPLATE}
    return {"config.json": config, "tokenizer_config.json": told, "generation_config.json": {"eos_token_id": [257]}}


def _layer_shapes() -> Shapes:
    """(out, in) of a layer's matrices."""
    q, kv = HEADS * HEAD_DIM, HEAD_DIM
    attention: Shapes = {"q": (q, HIDDEN), "k": (kv, HIDDEN), "v": (kv, HIDDEN), "o": (HIDDEN, q)}
    mlp: Shapes = {"gate": (FFN, HIDDEN), "up": (FFN, HIDDEN), "down": (HIDDEN, FFN)}
    shapes = {f"self_attn.{name}_proj": shape for name, shape in attention.items()}
    return shapes | {f"mlp.{name}_proj": shape for name, shape in mlp.items()}


def _weights() -> dict[str, Any]:
    rng = np.random.default_rng(2)
    shapes: Shapes = {"model.embed_tokens.weight": (258, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for i in range(LAYERS):
        layer = _layer_shapes() | {"input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,)}
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def _tokenizer() -> Any:
    inner = Inner(models.BPE(vocab=dict(byte_level_alphabet().items()), merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoding.ByteLevel()
    inner.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return inner
