"""GGUF keys and tensor names -> ModelHeader."""

from __future__ import annotations

import math
import re
from pathlib import Path

from inferloop.core.errors import ModelFileError
from inferloop.core.shape import ModelShape
from inferloop.models.headers.fields import Fields
from inferloop.models.headers.gguf import GgufFile, read_gguf_file
from inferloop.models.headers.header import (
    FAMILIES,
    ModelHeader,
    RopeKind,
    RopeSpec,
    TensorInfo,
    check_tensors,
    stored_precision,
)

_LAYER = re.compile(r"^blk\.(\d{1,6})\.(\w+)\.(weight|bias)$")
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output.weight": "lm_head.weight",
    "output_norm.weight": "model.norm.weight",
}
_INTERLEAVED_FAMILIES = ("llama", "mistral")
"""The converter permutes q and k of these, because ggml rotates neighbouring pairs for them."""


def read_gguf(path: Path) -> ModelHeader:
    """Raises ModelFileError for a damaged file or an architecture that is not of the llama family."""
    file = read_gguf_file(path)
    general = Fields(file.metadata, path)
    family = general.text("general.architecture")
    if family not in FAMILIES:
        raise ModelFileError(f"{path}: architecture {family!r} is not supported (supported: {', '.join(FAMILIES)})")
    if general.raw(f"{family}.expert_count"):
        raise ModelFileError(f"{path}: mixture-of-experts models are not supported")
    if general.raw("split.count") not in (None, 0, 1):
        raise ModelFileError(f"{path}: one part of a split model; merge the parts into one file first")
    shape = _shape(file, family)
    tensors = _tensors(file, family, shape)
    check_tensors(path, shape, tensors)
    eos = (general.token_id(f"tokenizer.ggml.{k}_token_id") for k in ("eos", "eot", "eom"))
    return ModelHeader(
        shape=shape,
        rope=_rope(file, family, shape),
        norm_eps=general.real(f"{family}.attention.layer_norm_rms_epsilon"),
        tensors=tensors,
        stored_precision=stored_precision(tensors),
        bos_token_id=general.token_id("tokenizer.ggml.bos_token_id"),
        eos_token_ids=tuple(dict.fromkeys(i for i in eos if i is not None)),
        chat_template=general.text("tokenizer.chat_template"),
        tool_chat_template=general.text("tokenizer.chat_template.tool_use"),
        name=general.text("general.name"),
        license=general.text("general.license"),
        metadata=file.metadata,
    )


def _shape(file: GgufFile, family: str) -> ModelShape:
    fields = Fields(file.metadata, file.path, f"{family}.")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelFileError(f"{file.path}: tensor token_embd.weight is missing or not a matrix")
    num_layers = fields.count("block_count")
    if num_layers > len(file.tensors):  # before anything of that length is built
        raise fields.fail("block_count", f"is {num_layers}, but the file has {len(file.tensors)} tensors")
    hidden = fields.count("embedding_length")
    num_heads = fields.same_count("attention.head_count", num_layers)
    kv_heads = fields.counts("attention.head_count_kv", num_layers, default=num_heads)
    if hidden % num_heads and fields.raw("attention.key_length") is None:
        raise fields.fail("embedding_length", f"is {hidden}, not divisible by {num_heads} heads")
    head_dim = fields.count("attention.key_length", default=hidden // num_heads)
    if fields.count("attention.value_length", default=head_dim) != head_dim:
        raise fields.fail("attention.value_length", "differs from attention.key_length, which is not supported")
    if not any(kv_heads) or any(k and num_heads % k for k in kv_heads):
        raise fields.fail("attention.head_count_kv", f"does not divide the {num_heads} query heads")
    return ModelShape(
        architecture=family,
        num_layers=num_layers,
        hidden_size=hidden,
        num_heads=num_heads,
        num_kv_heads=max(kv_heads),
        head_dim=head_dim,
        ffn_size=fields.same_count("feed_forward_length", num_layers),
        vocab_size=embedding.shape[0],
        context_length=fields.count("context_length"),
        tied_embeddings="output.weight" not in file.tensors,
        kv_heads_per_layer=kv_heads if len(set(kv_heads)) > 1 else None,
    )


def _rope(file: GgufFile, family: str, shape: ModelShape) -> RopeSpec:
    fields = Fields(file.metadata, file.path, f"{family}.rope.")
    kind = fields.text("scaling.type") or "none"
    factor = fields.real("scaling.factor", fields.real("scale_linear", 1.0))
    if fields.raw("scaling.type") is None and factor != 1.0:
        kind = "linear"
    kinds: dict[str, RopeKind] = {"none": "none", "linear": "linear", "yarn": "yarn"}
    if kind not in kinds or factor <= 0:
        raise fields.fail("scaling.type", f"{kind!r} with factor {factor} is not supported")
    attention = fields.real("scaling.attn_factor", 1.0)
    dim = fields.count("dimension_count", default=shape.head_dim)
    if dim > shape.head_dim or dim % 2:
        raise fields.fail("dimension_count", f"is {dim}, of heads of {shape.head_dim}")
    if dim < shape.head_dim and family in _INTERLEAVED_FAMILIES:  # whose rows are put right a whole head at a time
        raise fields.fail("dimension_count", f"is {dim}, less than heads of {shape.head_dim}, which is not supported")
    factors = file.tensors.get("rope_freqs.weight")
    if factors is not None and factors.shape != (dim // 2,):
        raise ModelFileError(f"{file.path}: tensor {factors.name} has shape {factors.shape}, not {(dim // 2,)}")
    return RopeSpec(
        theta=fields.real("freq_base", 10000.0),
        dim=dim,
        kind=kinds[kind],
        factor=factor,
        original_context_length=fields.count("scaling.original_context_length", shape.context_length),
        beta_fast=fields.real("scaling.yarn_beta_fast", 32.0),
        beta_slow=fields.real("scaling.yarn_beta_slow", 1.0),
        attention_factor=attention * (0.1 * math.log(factor) + 1.0) if kind == "yarn" else None,
        factors_tensor=None if factors is None else factors.name,
    )


def _tensors(file: GgufFile, family: str, shape: ModelShape) -> dict[str, TensorInfo]:
    out: dict[str, TensorInfo] = {}
    for tensor in file.tensors.values():
        found = _LAYER.match(tensor.name)
        heads = 0
        if found and found[2] in _LAYER_NAMES:
            layer = int(found[1])
            name = f"model.layers.{layer}.{_LAYER_NAMES[found[2]]}.{found[3]}"
            if family in _INTERLEAVED_FAMILIES and layer < shape.num_layers:
                heads = {"attn_q": shape.num_heads, "attn_k": shape.kv_heads[layer]}.get(found[2], 0)
        else:
            name = _OTHER_NAMES.get(tensor.name, tensor.name)
        if name in out:
            raise ModelFileError(f"{file.path}: two tensors are called {name}")
        out[name] = TensorInfo(
            name, tensor.dtype, tensor.shape, file.path, tensor.offset, tensor.num_bytes, interleaved_heads=heads
        )
    return out
