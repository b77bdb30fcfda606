"""OpenVINO GenAI's continuous batching, as little of it as a Generator needs. The only file that imports it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from inferloop.core.errors import EnvironmentLacksError, ModelFileError, UsageError
from inferloop.core.request import Sampling
from inferloop.models.resolve import ModelFiles

_KV = {"auto": None, "bf16": "bf16", "int8": "u8"}


@dataclass(frozen=True, slots=True)
class OpenVinoOptions:
    """`packages` is the folder to import OpenVINO from when this environment has none: it has to be of the same
    version of Python. KV memory is taken in whole GiB. `kv_dtype` auto is the plug-in's own choice."""

    packages: Path | None = None
    kv_dtype: str = "auto"
    kv_memory_mib: int = 512
    context_length: int | None = None
    num_threads: int | None = None
    max_sequences: int = 32
    max_step_tokens: int = 256
    max_waiting: int = 256
    share_prefixes: bool = True
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"


class Handle(Protocol):
    """One request in the pipeline."""

    def read(self) -> tuple[tuple[int, ...], Literal["stop", "length", "error"] | None]:
        """What came since the last call, and why it ended, if it has."""
        ...

    def cancel(self) -> None: ...


class Pipeline(Protocol):
    """All on one thread."""

    version: str
    settings: dict[str, str | int | bool]

    def add(
        self, number: int, prompt: Sequence[int], sampling: Sampling, max_tokens: int, stop_ids: frozenset[int]
    ) -> Handle: ...

    def step(self) -> None:
        """One step of all that were added."""
        ...


def open_pipeline(files: ModelFiles, options: OpenVinoOptions) -> Pipeline:
    """Load a GGUF file. Raises EnvironmentLacksError when OpenVINO GenAI is not here, ModelFileError for what it cannot
    read, UsageError for options that it has not."""
    if files.kind != "gguf":
        raise ModelFileError(f"{files.path}: OpenVINO GenAI is given GGUF files here, and this is a directory")
    if options.kv_dtype not in _KV:
        raise UsageError(f"openvino keeps KV in {', '.join(_KV)}; not in {options.kv_dtype}")
    return _Pipeline(_import(options.packages), files, options)


def _import(packages: Path | None) -> Any:
    fix = "pip install 'inferloop[openvino]', or make peers and --engine-packages with the site-packages of that one."
    if packages is not None and importlib.util.find_spec("openvino_genai") is None:
        python = f"python{sys.version_info.major}.{sys.version_info.minor}"
        if packages.parent.name != python:
            raise EnvironmentLacksError(
                f"{packages} is of another Python than this one ({python}); OpenVINO's extension modules need the same",
                fix=fix,
            )
        sys.path.append(str(packages))  # last, so that everything else comes from this environment
    try:
        return importlib.import_module("openvino_genai")
    except ImportError as problem:
        raise EnvironmentLacksError(f"OpenVINO GenAI cannot be imported: {problem}", fix=fix) from problem


class _Pipeline:
    def __init__(self, genai: Any, files: ModelFiles, options: OpenVinoOptions) -> None:
        self._genai = genai
        self.version = str(genai.__version__).split("-")[0]
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = -(-options.kv_memory_mib // 1024)
        scheduler.max_num_seqs = options.max_sequences
        scheduler.max_num_batched_tokens = options.max_step_tokens
        scheduler.enable_prefix_caching = options.share_prefixes
        scheduler.dynamic_split_fuse = True
        properties: dict[str, str | int] = {"PERFORMANCE_HINT": "LATENCY"}
        if options.num_threads is not None:
            properties["INFERENCE_NUM_THREADS"] = options.num_threads
        if _KV[options.kv_dtype] is not None:
            properties["KV_CACHE_PRECISION"] = str(_KV[options.kv_dtype])
        self.settings = {
            **properties,
            "cache_size_gib": scheduler.cache_size,
            "max_num_seqs": options.max_sequences,
            "max_num_batched_tokens": options.max_step_tokens,
            "enable_prefix_caching": options.share_prefixes,
        }
        try:
            self._inner = genai.ContinuousBatchingPipeline(str(files.path), scheduler, "CPU", properties)
        except RuntimeError as problem:
            raise ModelFileError(f"{files.path}: OpenVINO GenAI cannot load it: {problem}") from problem
        self._tensor = importlib.import_module("openvino").Tensor

    def add(
        self, number: int, prompt: Sequence[int], sampling: Sampling, max_tokens: int, stop_ids: frozenset[int]
    ) -> Handle:
        config = self._genai.GenerationConfig()
        config.max_new_tokens = max_tokens
        config.min_new_tokens = sampling.min_tokens
        config.ignore_eos = sampling.ignore_eos
        config.stop_token_ids = set(stop_ids)
        config.do_sample = sampling.temperature > 0
        if config.do_sample:
            config.temperature, config.top_p = sampling.temperature, sampling.top_p
            config.min_p = sampling.min_p
            if sampling.top_k:
                config.top_k = sampling.top_k
            if sampling.seed is not None:
                config.rng_seed = sampling.seed % 2**63
        config.presence_penalty, config.frequency_penalty = sampling.presence_penalty, sampling.frequency_penalty
        config.repetition_penalty = sampling.repetition_penalty
        ids = self._tensor(np.asarray([prompt], np.int64))
        return _Handle(self._genai, self._inner.add_request(number, ids, config))

    def step(self) -> None:
        self._inner.step()


class _Handle:
    def __init__(self, genai: Any, inner: Any) -> None:
        self._inner = inner
        self._reasons = {genai.GenerationFinishReason.STOP: "stop", genai.GenerationFinishReason.LENGTH: "length"}
        self._running, self._finished = genai.GenerationStatus.RUNNING, genai.GenerationStatus.FINISHED

    def read(self) -> tuple[tuple[int, ...], Any]:
        ids: list[int] = []
        reason: str | None = None
        status = self._inner.get_status()  # before reading: what is told afterwards may not have been read
        while self._inner.can_read():
            for output in self._inner.read().values():
                ids += output.generated_ids
                reason = self._reasons.get(output.finish_reason, reason)
        if reason is None and status == self._finished:
            reason = "length"
        elif reason is None and status != self._running:
            reason = "error"  # ignored: no room for it in the KV memory
        return tuple(ids), reason

    def cancel(self) -> None:
        self._inner.cancel()
