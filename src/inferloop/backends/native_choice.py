"""Which of our runners computes a model: the native one, or torch where that cannot be."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, cast

from inferloop.backends.native_options import NativeOptions
from inferloop.core.errors import EnvironmentLacksError, InferloopError, UsageError, nearest
from inferloop.core.units import MIB
from inferloop.models.digests import weights_digest
from inferloop.models.fetch import Progress
from inferloop.models.headers import ModelHeader
from inferloop.models.resolve import ModelFiles

if TYPE_CHECKING:
    from inferloop.engine.compute.native.config import Weights
    from inferloop.engine.compute.runner import Runner
    from inferloop.engine.compute.torch.parallel.ranks import Ranks

_log = logging.getLogger(__name__)
_WEIGHTS = {"auto": "stored", "bf16": "bf16", "int8": "int8", "fp32": "fp32"}
_KV = ("bf16", "int8")
_ONE_PROCESS = UsageError("the native engine computes in one process: --tensor-parallel-size is for --compute torch")


def load_runner(
    files: ModelFiles, options: NativeOptions, progress: Progress | None = None, ranks: Ranks | None = None
) -> Runner:
    """The runner that `options.compute` names; "auto" is the native one wherever it can be. `progress` is told how far
    weights are hashed and packed, the first time that they are, or loaded by torch. `ranks` compute beside this
    process, with torch.

    Raises EnvironmentLacksError without the native extension or torch when there is nothing else, UsageError for
    options that cannot be, ModelFileError for files that cannot be read or that the runner has no kernels for.
    """
    problem: InferloopError | None = None
    if options.compute != "torch":
        problem = _ONE_PROCESS if ranks is not None else why_not_native(files.header, options.device)
    if options.compute == "native" and problem is not None:
        raise problem
    if options.compute == "torch" or problem is not None:
        return _load_torch(files, options, problem, ranks, progress)
    return _load_native(files, options, progress)


def pack_ahead(files: ModelFiles, dtype: str, cache_dir: Path | None, progress: Progress | None) -> None:
    """What loading the native runner with weights in `dtype` does first and once, while somebody looks on: replicas
    then map it. Nothing where it does not compute, or where the cache cannot be written, which those will say."""
    if why_not_native(files.header) is not None:
        return
    from inferloop.engine.compute.native.pack import pack_into_cache

    digest = weights_digest(files, cache_dir=cache_dir, progress=_staged(progress, "hash"))
    with contextlib.suppress(OSError):
        tell = _staged(progress, "pack")
        pack_into_cache(files.header, _weights(dtype), digest, cache_dir=cache_dir, progress=tell)


def check_parallel(header: ModelHeader, options: NativeOptions) -> None:
    """Whether a model can be computed by so many processes, before any is started. Raises UsageError, and
    ModelFileError for a file that cannot be cut so."""
    from inferloop.engine.compute.torch.parallel.split import check_kind, header_of_share, share_of

    if options.compute == "native":
        raise _ONE_PROCESS
    check_kind(options.device, options.tensor_parallel_size)
    if options.prefix_memory_mib or options.prefix_folder is not None:
        raise UsageError("with --tensor-parallel-size the prefix cache is kept in the KV memory only")
    if options.max_adapters:
        raise UsageError(
            "adapters are computed in one process: --enable-lora and --tensor-parallel-size exclude each other"
        )
    for rank in range(options.tensor_parallel_size):
        header_of_share(header, share_of(header, rank, options.tensor_parallel_size))


def _staged(progress: Progress | None, stage: str) -> Callable[[int, int], None] | None:
    return None if progress is None else functools.partial(progress, stage)


def why_not_native(header: ModelHeader, device: str = "cpu") -> InferloopError | None:
    """What keeps the native runner from a model on a device; None: nothing. Raises UsageError for a bound of the
    instruction set that names none: whoever set it does not want torch instead."""
    if not _is_cpu(device):
        return UsageError(f"the native engine computes on the cpu, not on {device}")
    from inferloop.engine.compute.native.extension import load_extension
    from inferloop.engine.compute.native.program import check_runs

    try:
        load_extension()
    except EnvironmentLacksError as error:
        return error
    from inferloop.engine.compute.native.level import best_isa  # only with the extension

    best_isa()
    try:
        check_runs(header)
    except InferloopError as error:
        return error
    return None


def _is_cpu(device: str) -> bool:
    return device.partition(":")[0] == "cpu"  # torch writes the only one cpu:0 too


def _load_native(files: ModelFiles, options: NativeOptions, progress: Progress | None) -> Runner:
    from inferloop.engine.compute.native.config import KvFormat, NativeConfig
    from inferloop.engine.compute.native.runner import NativeRunner

    kv = "bf16" if options.kv_dtype == "auto" else options.kv_dtype
    config = NativeConfig(
        weights=_weights(options.dtype),
        kv=cast(KvFormat, _known(kv, _KV, {})),
        num_threads=options.num_threads,
        kv_memory_bytes=options.kv_memory_mib * MIB,
    )
    return NativeRunner.load(
        files,
        config,
        digest=weights_digest(files, cache_dir=options.cache_dir, progress=_staged(progress, "hash")),
        cache_dir=options.cache_dir,
        progress=_staged(progress, "pack"),
    )


def _weights(dtype: str) -> Weights:
    return cast("Weights", _known(dtype, tuple(_WEIGHTS), _WEIGHTS))


def _known(value: str, known: tuple[str, ...], names: dict[str, str]) -> str:
    if value not in known:
        close = nearest(value, known)
        hint = f", did you mean {close}?" if close else ""
        raise UsageError(f"the native engine knows {', '.join(known)}, not {value!r}{hint}")
    return names.get(value, value)


def _load_torch(
    files: ModelFiles,
    options: NativeOptions,
    problem: InferloopError | None,
    ranks: Ranks | None,
    progress: Progress | None,
) -> Runner:
    """`problem`: why the native runner does not compute, unless torch was asked for."""
    why = problem.what if isinstance(problem, EnvironmentLacksError) else problem
    try:
        from inferloop.engine.compute.torch.config import TorchConfig
        from inferloop.engine.compute.torch.runner import TorchRunner
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        what = "torch is not installed" if why is None else f"torch is not installed, and {why}"
        raise EnvironmentLacksError(what, fix="pip install 'inferloop[torch]'") from None
    dtype = options.dtype
    if dtype == "auto":
        dtype = "fp32" if options.deterministic else "bf16"
    if options.kv_dtype not in ("auto", dtype):
        raise UsageError(f"torch keeps keys and values in what it computes in, {dtype}, not in {options.kv_dtype}")
    config = TorchConfig(
        device=options.device,
        dtype=dtype,
        deterministic=options.deterministic,
        num_threads=options.num_threads,
        kv_memory_bytes=options.kv_memory_mib * MIB,
    )
    if why is not None and _is_cpu(options.device):
        _log.warning(
            "torch computes, not the native engine: %s. Steps take several times as long, weights are held in %s, "
            "and answers repeat exactly with --deterministic only.",
            why,
            dtype,
        )
    if ranks is not None:
        from inferloop.engine.compute.torch.parallel.lead import LeadRunner

        return LeadRunner.load(files, config, ranks, progress=_staged(progress, "load"))
    return TorchRunner.load(files, config, progress=_staged(progress, "load"))
