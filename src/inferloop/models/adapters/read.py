"""A PEFT directory -> the pairs of matrices that an adapter adds, every size checked before any of them is read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from inferloop.core.errors import ModelFileError
from inferloop.models.adapters.config import FILE as CONFIG_FILE
from inferloop.models.adapters.config import AdapterConfig, read_adapter_config
from inferloop.models.headers import ModelHeader, TensorInfo
from inferloop.models.headers.directory import canonical_name
from inferloop.models.headers.safetensors import read_safetensors
from inferloop.models.headers.tensors import Shapes, expected_shapes

FILE = "adapter_model.safetensors"
FILES = (CONFIG_FILE, FILE)
"""All that is read of a directory."""
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_PREFIX = "base_model.model."
_PART = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_MODULE = re.compile(rf"model\.layers\.(?P<layer>\d{{1,5}})\.(?:self_attn|mlp)\.(?P<name>{'|'.join(MODULES)})")
_DTYPES = ("fp32", "fp16", "bf16")
_KINDS = {
    "lora_embedding_": "adapts an embedding",
    "lora_magnitude_vector": "belongs to DoRA",
    "modules_to_save": "is a module saved as a whole",
    ".lora_B.bias": "is an adapted bias",
    ".bias": "is a bias",
    ".experts.": "adapts an expert",
    "lm_head": "adapts the head",
    "embed_tokens": "adapts the embedding",
}


@dataclass(frozen=True, slots=True)
class PairHeader:
    """An adapter adds scaling * b @ a to one matrix; a is (rank, in), b (out, rank)."""

    a: TensorInfo
    b: TensorInfo
    rank: int
    scaling: float


@dataclass(frozen=True, slots=True)
class AdapterHeader:
    """`pairs` by the module they belong to, like model.layers.0.self_attn.q_proj. `rank`: the largest."""

    path: Path
    pairs: Mapping[str, PairHeader]
    rank: int


def read_adapter(path: Path, model: ModelHeader, *, max_rank: int) -> AdapterHeader:
    """Raises ModelFileError for a directory that is no adapter of this model, or asks for anything that is not computed
    here, naming what."""
    config = read_adapter_config(path)
    file = path / FILE
    if not file.is_file():
        other = next((p.name for p in sorted(path.glob("adapter_model.*"))), None)
        beside = f", and {other} is not read" if other else ""
        raise ModelFileError(f"{path}: has no {FILE}{beside}")
    shapes = expected_shapes(model.shape, model.structure)
    halves: dict[str, dict[str, TensorInfo]] = {"A": {}, "B": {}}
    for side, module, info in _halves(file, shapes, model.shape.num_layers):
        if halves[side].setdefault(module, info) is not info:
            raise ModelFileError(f"{file}: {module} has two lora_{side}, under different names")
    for side, other in ("AB", "BA"):
        if alone := next((name for name in halves[side] if name not in halves[other]), None):
            raise ModelFileError(f"{file}: {alone} has a lora_{side} and no lora_{other}")
    if not halves["A"]:
        raise ModelFileError(f"{file}: holds no pair of matrices")
    pairs = {
        module: _pair(file, module, a, halves["B"][module], config, shapes[module + ".weight"], max_rank)
        for module, a in halves["A"].items()
    }
    _check_complete(file, config, shapes, pairs)
    return AdapterHeader(path, pairs, max(pair.rank for pair in pairs.values()))


def _halves(file: Path, shapes: Shapes, num_layers: int) -> Iterator[tuple[str, str, TensorInfo]]:
    """Of each tensor whether it is A or B, and its module. Raises for one that is neither."""
    for name, info in read_safetensors(file).items():
        part = _PART.fullmatch(name)
        module = canonical_name(part["module"].removeprefix(_PREFIX)) if part else ""
        found = _MODULE.fullmatch(module)
        if part is None or found is None:
            kind = next((kind for word, kind in _KINDS.items() if word in name), "is none that can be adapted here")
            raise ModelFileError(f"{file}: tensor {name[:200]} {kind}, which is not supported")
        if int(found["layer"]) >= num_layers:
            raise ModelFileError(f"{file}: adapts layer {found['layer']}, the model has {num_layers} layers")
        if module + ".weight" not in shapes:
            raise ModelFileError(f"{file}: adapts {module}, which the model has not")
        if info.dtype not in _DTYPES:
            raise ModelFileError(f"{file}: tensor {name[:200]} is {info.dtype}; adapters are {', '.join(_DTYPES)}")
        yield part["side"], module, info


def _pair(
    file: Path,
    module: str,
    a: TensorInfo,
    b: TensorInfo,
    config: AdapterConfig,
    shape: tuple[int, ...],
    max_rank: int,
) -> PairHeader:
    num_out, num_in = shape
    rank = config.rank_of(module)
    if rank > max_rank:
        raise ModelFileError(f"{file}: {module} has rank {rank}, this server takes up to {max_rank} (--max-lora-rank)")
    for info, want, side in ((a, (rank, num_in), "A"), (b, (num_out, rank), "B")):
        if info.shape != want:
            raise ModelFileError(
                f"{file}: lora_{side} of {module} has shape {info.shape}, model and config imply {want}"
            )
    return PairHeader(a, b, rank, config.scaling_of(module))


def _check_complete(file: Path, config: AdapterConfig, shapes: Shapes, pairs: Mapping[str, PairHeader]) -> None:
    """That no layer is left out which the config means: the adapter would be that of a smaller model."""
    named = {module.rpartition(".")[2] for module in pairs}
    for name in config.target_modules or ():
        if name.rpartition(".")[2] not in named:
            raise ModelFileError(f"{file}: config targets {name[:80]!r}, of which there is no tensor")
    if not config.complete:
        return
    listed = config.target_modules
    for weight in shapes:
        module = weight.removesuffix(".weight")
        name = module.rpartition(".")[2]
        means = listed is None or any(module == t or module.endswith("." + t) for t in listed)
        if name in named and _MODULE.fullmatch(module) and means and module not in pairs:
            raise ModelFileError(f"{file}: {module} is not adapted, although the config means all layers")
