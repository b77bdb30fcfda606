"""The ways to run a model that the measurements compare: `torch-bf16`, `torch-fp32`, `torch-deterministic`, and
`native-WEIGHTS[/KV][@LEVEL]`, as in `native-stored`, `native-int8/int8` or `native-bf16/bf16@avx2`. `torch-bf16x2` is
two ranks that share the threads; all torch modes of a process get the threads of the one that was loaded last."""

from __future__ import annotations

import atexit
import re
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from inferloop.engine.compute.native.config import Isa, KvFormat, NativeConfig, Weights
from inferloop.engine.compute.runner import Runner
from inferloop.engine.schedule.step import SamplingColumns, StepPlan
from inferloop.models.resolve import ModelFiles

_TORCH = {"torch-bf16": ("bf16", False), "torch-fp32": ("fp32", False), "torch-deterministic": ("fp32", True)}
_RANKS = re.compile(rf"(?P<name>{'|'.join(_TORCH)})x(?P<size>[2-9])")
_NATIVE = re.compile(
    rf"native-(?P<weights>{'|'.join(get_args(Weights))})"
    rf"(/(?P<kv>{'|'.join(get_args(KvFormat))}))?(@(?P<isa>{'|'.join(get_args(Isa))}))?"
)
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Mode:
    name: str

    def __post_init__(self) -> None:
        if self.name not in _TORCH and not _RANKS.fullmatch(self.name) and not _NATIVE.fullmatch(self.name):
            raise ValueError(f"no mode {self.name!r}: {__doc__}")

    def load(self, files: ModelFiles, *, num_threads: int, num_tokens: int) -> Runner:
        """With KV memory for `num_tokens`."""
        num_blocks = -(-num_tokens // BLOCK_SIZE)
        ranks = _RANKS.fullmatch(self.name)
        if ranks is not None:
            return _load_torch(files, ranks["name"], num_threads, num_blocks, int(ranks["size"]))
        if self.name in _TORCH:
            return _load_torch(files, self.name, num_threads, num_blocks)
        from inferloop.engine.compute.native.runner import NativeRunner

        match = _NATIVE.fullmatch(self.name)
        assert match is not None
        chosen: dict[str, Any] = {name: value for name, value in match.groupdict().items() if value}
        return NativeRunner.load(files, NativeConfig(num_threads=num_threads, num_blocks=num_blocks, **chosen))


def _load_torch(files: ModelFiles, name: str, num_threads: int, num_blocks: int, num_ranks: int = 1) -> Runner:
    """Other ranks end with this process."""
    from inferloop.engine.compute.torch.config import TorchConfig
    from inferloop.engine.compute.torch.parallel.lead import LeadRunner
    from inferloop.engine.compute.torch.runner import TorchRunner
    from inferloop.fleet.act.ranks import RankProcesses

    dtype, deterministic = _TORCH[name]
    config = TorchConfig(
        dtype=dtype,
        deterministic=deterministic,
        num_threads=max(1, num_threads // num_ranks),
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
    )
    if num_ranks == 1:
        return TorchRunner.load(files, config)
    processes = RankProcesses(num_ranks)
    atexit.register(processes.close)
    return LeadRunner.load(files, config, processes.ranks)


def logits(runner: Any, token_ids: list[int]) -> NDArray[np.float32]:
    """Of every position of one text, (positions, vocabulary), computed in one step into the first blocks."""
    num = len(token_ids)
    sampling = SamplingColumns(
        temperature=np.zeros(1, np.float32),
        top_p=np.ones(1, np.float32),
        top_k=np.zeros(1, np.int32),
        min_p=np.zeros(1, np.float32),
        seed=np.zeros(1, np.uint64),
        num_logprobs=np.full(1, -1, np.int32),
    )
    plan = StepPlan(
        step_id=0,
        slots=np.zeros(1, np.int32),
        offsets=np.array([0, num], np.int32),
        token_ids=np.array(token_ids, np.int32),
        first_positions=np.zeros(1, np.int32),
        block_tables=(np.arange(-(-num // BLOCK_SIZE), dtype=np.int32)[None],),
        sample_rows=np.full(1, -1, np.int32),
        num_drafts=np.zeros(1, np.int32),
        sampling=sampling,
    )
    found = runner.logits(plan)
    return np.asarray(found if isinstance(found, np.ndarray) else found.float(), np.float32)
