"""GGUF keys and tensor names -> ModelHeader."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from inferloop.core.errors import ModelFileError
from inferloop.core.shape import Experts, ModelShape
from inferloop.models.headers import rope_ranges as ranges
from inferloop.models.headers.families import FAMILIES, Family, family_of_gguf
from inferloop.models.headers.fields import Fields
from inferloop.models.headers.gguf import GgufFile, GgufTensor, read_gguf_file
from inferloop.models.headers.header import ModelHeader, TensorInfo, stored_precision
from inferloop.models.headers.structure import RopeKind, RopeSpec
from inferloop.models.headers.tensors import check_tensors

_LAYER = re.compile(r"^blk\.(\d{1,6})\.(\w+)\.(weight|bias)$")
_OTHER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output.weight": "lm_head.weight",
    "output_norm.weight": "model.norm.weight",
}
_HARMLESS: dict[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "attention.scale": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "attention.temperature_length": (0,),
    "embedding_scale": (0.0, 1.0),
    "expert_gating_func": (0, 1),
    "expert_group_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_weights_scale": (0.0, 1.0),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "router_logit_softcapping": (0.0,),
}
"""Keys by which relatives of these architectures compute something else, and the values with which they do not."""
_READ_ELSEWHERE = {"attn_rot_embd"}
"""Tables that old files keep in each layer."""
_ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "<|end|>",
    "<|endoftext|>",
)
"""Tokens that end a turn or a text whatever a file says of them: many name one end token only, and that of texts. Those
of `special_eog_ids` in llama.cpp that these architectures have."""
_CONTROL, _USER_DEFINED = 3, 4
"""Values of tokenizer.ggml.token_type."""
_MIN_EXPERT_BYTES = 512
"""About what an entry for it takes: a file of many tiny ones would fill the memory."""


def read_gguf(path: Path) -> ModelHeader:
    """Raises ModelFileError for a damaged file or an architecture that does not run here."""
    file = read_gguf_file(path)
    general = Fields(file.metadata, path)
    architecture = general.text("general.architecture")
    family = family_of_gguf(architecture, has_experts=bool(general.raw(f"{architecture}.expert_count")))
    if family is None:
        known = ", ".join(dict.fromkeys(f.gguf_architecture for f in FAMILIES.values()))
        experts = " with experts" if architecture in known.split(", ") else ""
        raise ModelFileError(f"{path}: architecture {architecture!r}{experts} is not supported (supported: {known})")
    if general.raw("split.count") not in (None, 0, 1):
        raise ModelFileError(f"{path}: one part of a split model; merge the parts into one file first")
    fields = Fields(file.metadata, path, f"{architecture}.")
    for key, harmless in _HARMLESS.items():
        if fields.raw(key) not in (None, *harmless):
            raise fields.fail(key, f"is {repr(fields.raw(key))[:80]}, which is not supported")
    shape = _shape(file, family)
    rope = _rope(file, family, shape)
    structure = family.read_gguf(fields, shape, rope)
    tensors = _tensors(file, family, shape)
    check_tensors(path, shape, structure, tensors)
    return ModelHeader(
        shape=shape,
        rope=rope,
        norm_eps=fields.real("attention.layer_norm_rms_epsilon"),
        tensors=tensors,
        stored_precision=stored_precision(tensors),
        bos_token_id=general.token_id("tokenizer.ggml.bos_token_id"),
        eos_token_ids=_end_tokens(general),
        chat_template=general.text("tokenizer.chat_template"),
        tool_chat_template=general.text("tokenizer.chat_template.tool_use"),
        name=general.text("general.name"),
        structure=structure,
        license=general.text("general.license"),
        metadata=file.metadata,
    )


def _end_tokens(general: Fields) -> tuple[int, ...]:
    """Those that the file names first."""
    named = [general.token_id(f"tokenizer.ggml.{k}_token_id") for k in ("eos", "eot", "eom")]
    tokens, types = general.raw("tokenizer.ggml.tokens"), general.raw("tokenizer.ggml.token_type")
    if isinstance(tokens, list) and isinstance(types, list) and len(tokens) == len(types):
        unknown = general.token_id("tokenizer.ggml.unknown_token_id")  # which may well be called so
        special = (i for i, kind in enumerate(types) if kind in (_CONTROL, _USER_DEFINED))
        named += [i for i in special if tokens[i] in _ENDS and i != unknown]
    return tuple(dict.fromkeys(i for i in named if i is not None))


def _shape(file: GgufFile, family: Family) -> ModelShape:
    fields = Fields(file.metadata, file.path, f"{family.gguf_architecture}.")
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
        architecture=family.name,
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
        experts=_experts(file, fields, num_layers) if family.has_experts else None,
    )


def _experts(file: GgufFile, fields: Fields, num_layers: int) -> Experts:
    """Which layers have them is told by the tensors alone."""
    num, per_token = fields.count("expert_count"), fields.count("expert_used_count")
    if per_token > num:
        raise fields.fail("expert_used_count", f"is {per_token}, of {num} experts")
    return Experts(
        num=num,
        per_token=per_token,
        ffn_size=fields.count("expert_feed_forward_length", fields.same_count("feed_forward_length", num_layers)),
        layers=tuple(i for i in range(num_layers) if f"blk.{i}.ffn_gate_inp.weight" in file.tensors),
    )


def _rope(file: GgufFile, family: Family, shape: ModelShape) -> RopeSpec:
    fields = Fields(file.metadata, file.path, f"{family.gguf_architecture}.rope.")
    kind = fields.text("scaling.type") or "none"
    factor = fields.between("scaling.factor", *ranges.FACTOR, fields.between("scale_linear", *ranges.FACTOR, 1.0))
    if fields.raw("scaling.type") is None and factor != 1.0:
        kind = "linear"
    kinds: dict[str, RopeKind] = {"none": "none", "linear": "linear", "yarn": "yarn"}
    if kind not in kinds:
        raise fields.fail("scaling.type", f"{kind!r} with factor {factor} is not supported")
    attention = fields.between("scaling.attn_factor", *ranges.ATTENTION, 1.0)
    dim = fields.count("dimension_count", default=shape.head_dim)
    if dim > shape.head_dim or dim % 2:
        raise fields.fail("dimension_count", f"is {dim}, of heads of {shape.head_dim}")
    if dim < shape.head_dim and family.gguf_interleaved:  # whose rows are put right a whole head at a time
        raise fields.fail("dimension_count", f"is {dim}, less than heads of {shape.head_dim}, which is not supported")
    factors = file.tensors.get("rope_freqs.weight")
    if factors is not None and factors.shape != (dim // 2,):
        raise ModelFileError(f"{file.path}: tensor {factors.name} has shape {factors.shape}, not {(dim // 2,)}")
    spec = RopeSpec(
        theta=fields.between("freq_base", *ranges.THETA, 10000.0),
        dim=dim,
        kind=kinds[kind],
        factor=factor,
        original_context_length=fields.count("scaling.original_context_length", shape.context_length),
        beta_fast=fields.between("scaling.yarn_beta_fast", *ranges.BAND, 32.0),
        beta_slow=fields.between("scaling.yarn_beta_slow", *ranges.BAND, 1.0),
        attention_factor=attention * (0.1 * math.log(factor) + 1.0) if kind == "yarn" else None,
        factors_tensor=None if factors is None else factors.name,
    )
    if spec.beta_slow > spec.beta_fast:
        problem = f"is {spec.beta_fast:g}, less than scaling.yarn_beta_slow, {spec.beta_slow:g}"
        raise fields.fail("scaling.yarn_beta_fast", problem)
    return spec


def _tensors(file: GgufFile, family: Family, shape: ModelShape) -> dict[str, TensorInfo]:
    out: dict[str, TensorInfo] = {}
    for tensor in file.tensors.values():
        for info in _named(tensor, file, family, shape):
            if info.name in out:
                raise ModelFileError(f"{file.path}: two tensors are called {info.name}")
            out[info.name] = info
    return out


def _named(tensor: GgufTensor, file: GgufFile, family: Family, shape: ModelShape) -> Iterator[TensorInfo]:
    """A tensor under the name that Hugging Face gives it; of stacked experts, each of them."""
    found = _LAYER.match(tensor.name)
    whole = TensorInfo(tensor.name, tensor.dtype, tensor.shape, file.path, tensor.offset, tensor.num_bytes)
    if not found:
        yield replace(whole, name=_OTHER_NAMES.get(tensor.name, tensor.name))
        return
    layer, part = int(found[1]), found[2]
    name = f"model.layers.{layer}.{family.gguf_names.get(part, part)}.{found[3]}"
    if "{}" in name:
        yield from _each_expert(whole, name, file, shape)
    elif part not in _READ_ELSEWHERE:
        heads = {"attn_q": shape.num_heads, "attn_k": shape.kv_heads[layer] if layer < shape.num_layers else 0}
        yield replace(whole, name=name, interleaved_heads=heads.get(part, 0) if family.gguf_interleaved else 0)


def _each_expert(whole: TensorInfo, name: str, file: GgufFile, shape: ModelShape) -> Iterator[TensorInfo]:
    num = shape.experts.num if shape.experts else 0
    if len(whole.shape) != 3 or whole.shape[0] != num or whole.num_bytes < num * _MIN_EXPERT_BYTES:
        raise ModelFileError(f"{file.path}: tensor {whole.name} has shape {whole.shape}, not that of {num} experts")
    each = whole.num_bytes // num
    for e in range(num):
        offset = whole.offset + e * each
        yield replace(whole, name=name.format(e), shape=whole.shape[1:], offset=offset, num_bytes=each)
