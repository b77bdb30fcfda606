"""What may be chosen of a model that is run here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Compute = Literal["auto", "native", "torch"]


@dataclass(frozen=True, slots=True)
class NativeOptions:
    """How to run a model here. `compute` and the formats are as native_choice.py reads them; "auto" is the native
    runner with weights as stored, wherever that can be. `context_length` None: all that the model and the KV memory
    allow. What else bounds the queue and the steps is as in EngineConfig.

    `tensor_parallel_size` processes, this one among them, each compute a share with torch.

    `cache_dir` keeps repacked weights; None: the user's cache.

    What the KV memory cannot keep of computed prompts is kept in `prefix_memory_mib` of host memory (0: nothing) and in
    at most `prefix_disk_mib` of files in `prefix_folder` (None: nothing), where it outlives this process.

    Up to `max_adapters` low-rank adapters of ranks up to `max_adapter_rank` can be loaded at a time, (name, directory)
    of `adapters` from the beginning.
    """

    compute: Compute = "auto"
    device: str = "cpu"
    dtype: str = "auto"
    kv_dtype: str = "auto"
    deterministic: bool = False
    tensor_parallel_size: int = 1
    max_sequences: int = 32
    max_step_tokens: int = 256
    max_waiting: int = 256
    max_waiting_tokens: int | None = None
    tpot_objective_ms: float | None = None
    max_ttft_ms: float | None = None
    kv_memory_mib: int = 512
    context_length: int | None = None
    num_threads: int | None = None
    cache_dir: Path | None = None
    share_prefixes: bool = True
    prefix_memory_mib: int = 0
    prefix_folder: Path | None = None
    prefix_disk_mib: int = 4096
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    max_adapters: int = 0
    max_adapter_rank: int = 16
    adapters: tuple[tuple[str, Path], ...] = ()
