"""A Hugging Face directory: config.json, *.safetensors (with or without an index), tokenizer files -> ModelHeader."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from inferloop.core.errors import ModelFileError
from inferloop.models.headers.config_json import ConfigFacts, read_config, read_json_object
from inferloop.models.headers.fields import Fields
from inferloop.models.headers.header import ModelHeader, TensorInfo, stored_precision
from inferloop.models.headers.safetensors import read_safetensors
from inferloop.models.headers.tensors import check_tensors

_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_MAX_INDEX_BYTES = 1 << 26
_SHARD = re.compile(r"(.+)-\d+-of-(\d{1,6})\.safetensors")
_TEXT_PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
"""Where multimodal checkpoints keep the text decoder."""
_EXPERT_NAMES = (
    (re.compile(r"\.block_sparse_moe\."), ".mlp."),
    (re.compile(r"(\.mlp\.experts\.\d+)\.w1\."), r"\1.gate_proj."),
    (re.compile(r"(\.mlp\.experts\.\d+)\.w3\."), r"\1.up_proj."),
    (re.compile(r"(\.mlp\.experts\.\d+)\.w2\."), r"\1.down_proj."),
)
"""Mixtral's own names of what Qwen3 calls otherwise."""


def read_directory(path: Path, *, with_weights: bool = True) -> ModelHeader:
    """Without its weights a directory need not hold them, and the header has no tensors. Raises ModelFileError naming
    the file that is missing, damaged or of an unsupported kind."""
    facts = read_config(path / "config.json")
    tensors = _checked_tensors(path, facts) if with_weights else {}
    shape = facts.shape
    templates = _chat_templates(path)
    return ModelHeader(
        shape=shape,
        rope=facts.rope,
        norm_eps=facts.norm_eps,
        tensors=tensors,
        stored_precision=stored_precision(tensors),
        bos_token_id=facts.bos_token_id,
        eos_token_ids=_eos(path, facts),
        chat_template=templates.get("default"),
        tool_chat_template=templates.get("tool_use"),
        name=path.name,
        structure=facts.structure,
        metadata=facts.raw,
    )


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a directory in a fixed order: those of the index, else model.safetensors, else all.
    Raises ModelFileError when there are none."""
    return _weight_files(path, _weight_map(path))


def _weight_files(path: Path, weight_map: Mapping[str, str] | None) -> list[Path]:
    if weight_map is not None:
        files = [path / name for name in sorted(set(weight_map.values()))]
        for file in files:
            if not file.is_file():
                raise ModelFileError(f"{file}: listed in {_INDEX} but missing")
        return files
    if (path / _WHOLE).is_file():
        return [path / _WHOLE]  # others beside it are the same in another form, or adapters
    found = sorted(file for file in path.glob("*.safetensors") if file.is_file())
    if not found:
        raise ModelFileError(f"{path}: holds no *.safetensors file")
    _check_shards(path, {file.name for file in found})
    return found


def _weight_map(path: Path) -> dict[str, str] | None:
    """File names by tensor, as the index says; None without one."""
    index = path / _INDEX
    if not index.is_file():
        return None
    weight_map = read_json_object(index, max_bytes=_MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFileError(f"{index}: weight_map is missing or empty")
    for name in weight_map.values():
        if not isinstance(name, str) or not name or name != Path(name).name or "\0" in name or len(name) > 255:
            raise ModelFileError(f"{index}: weight_map must name files of this directory")
    return weight_map


def _check_shards(path: Path, names: set[str]) -> None:
    """Without an index, shards still say how many they are. Raises ModelFileError naming the first that is missing."""
    for name in sorted(names):
        shard = _SHARD.fullmatch(name)
        if shard and int(shard[2]) > len(names):
            numbered = (f"{shard[1]}-{i:0{len(shard[2])}}-of-{shard[2]}.safetensors" for i in range(1, len(names) + 2))
            missing = next(other for other in numbered if other not in names)
            raise ModelFileError(f"{path / missing}: missing; {name} is one of {int(shard[2])} files")


def _tensors(path: Path) -> dict[str, TensorInfo]:
    out: dict[str, TensorInfo] = {}
    weight_map = _weight_map(path)
    said: dict[str, list[str]] = {}
    for name, of in (weight_map or {}).items():
        said.setdefault(of, []).append(name)
    for file in _weight_files(path, weight_map):
        found = read_safetensors(file)
        for name in said.get(file.name, ()):
            if name not in found:
                problem = f"tensor {name} is said to be in {file.name}, which does not have it"
                raise ModelFileError(f"{path / _INDEX}: {problem}")
        for info in found.values():
            name = canonical_name(info.name)
            if name in out:
                raise ModelFileError(f"{file}: tensor {name} is also in {out[name].file.name}")
            out[name] = replace(info, name=name)
    return out


def _checked_tensors(path: Path, facts: ConfigFacts) -> dict[str, TensorInfo]:
    tensors = _tensors(path)
    if facts.shape.num_layers > len(tensors):
        raise ModelFileError(
            f"{path}: config.json says {facts.shape.num_layers} layers, the files hold {len(tensors)} tensors"
        )
    check_tensors(path, facts.shape, facts.structure, tensors)
    return tensors


def canonical_name(name: str) -> str:
    """What a tensor is called here, whatever its checkpoint calls it."""
    for prefix, replacement in _TEXT_PREFIXES:
        if name.startswith(prefix):
            return replacement + name.removeprefix(prefix)
    for pattern, replacement in _EXPERT_NAMES:
        name = pattern.sub(replacement, name)
    return name


def _eos(path: Path, facts: ConfigFacts) -> tuple[int, ...]:
    """config.json's and generation_config.json's; chat models often name their end-of-turn only in the latter."""
    ids = list(facts.eos_token_ids)
    generation = path / "generation_config.json"
    if generation.is_file():
        ids += Fields(read_json_object(generation), generation).token_ids("eos_token_id")
    return tuple(dict.fromkeys(ids))


def _chat_templates(path: Path) -> dict[str, str]:
    """Templates by name: chat_template.jinja and additional_chat_templates/*.jinja, else what tokenizer_config.json,
    else what chat_template.json says. One without a name is the default."""
    default, others = path / "chat_template.jinja", sorted(path.glob("additional_chat_templates/*.jinja"))
    if default.is_file():
        return {"default": _read_text(default), **{other.stem: _read_text(other) for other in others}}
    for name in ("tokenizer_config.json", "chat_template.json"):
        file = path / name
        value = read_json_object(file).get("chat_template") if file.is_file() else None
        if isinstance(value, str):
            return {"default": value}
        if isinstance(value, list):
            named = [(t.get("name"), t.get("template")) for t in value if isinstance(t, dict)]
            return {n: t for n, t in named if isinstance(n, str) and isinstance(t, str)}
    return {}


def _read_text(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except (OSError, ValueError) as problem:
        raise ModelFileError(f"{file}: cannot be read: {problem}") from problem
