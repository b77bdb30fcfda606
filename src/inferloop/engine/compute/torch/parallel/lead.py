"""The first rank: a Runner that has a share of the model, samples, and tells the other ranks what to compute."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, replace

from torch import Tensor

from inferloop.core.cores import usable_cores
from inferloop.core.errors import EngineError, LaunchError, UsageError
from inferloop.engine.compute.room import check_room
from inferloop.engine.compute.runner import GiveUp, RunnerInfo, never
from inferloop.engine.compute.torch.config import TorchConfig
from inferloop.engine.compute.torch.parallel.messages import End, Here, Job, Ready, Step
from inferloop.engine.compute.torch.parallel.process_group import ProcessGroup, open_store
from inferloop.engine.compute.torch.parallel.ranks import Ranks
from inferloop.engine.compute.torch.parallel.share import check_devices, device_of, load_share
from inferloop.engine.compute.torch.parallel.split import header_of_share, share_of
from inferloop.engine.compute.torch.runner import TorchRunner
from inferloop.engine.compute.torch.weights import Progress
from inferloop.engine.schedule.step import StepPlan, StepResult
from inferloop.models.resolve import ModelFiles

_JOIN_TIMEOUT_S = 60.0
"""For a rank to be there, which is what importing torch takes."""
_MEET_TIMEOUT_S = 60.0
"""For one to come to where the others wait for it, the first time and in every step."""
_LOAD_TIMEOUT_S = 1800.0
"""Weights may come over a slow line. A rank that dies meanwhile is noticed at once."""


class LeadRunner:
    """Steps cannot be given up once begun, and blocks neither loaded nor saved, for each rank has a part of them."""

    def __init__(self, own: TorchRunner, ranks: Ranks, info: RunnerInfo) -> None:
        """`own` is the first rank's share. Use `load` for model files."""
        self._own, self._ranks, self._info = own, ranks, info

    @classmethod
    def load(
        cls,
        files: ModelFiles,
        config: TorchConfig,
        ranks: Ranks,
        *,
        progress: Progress | None = None,
        join_timeout_s: float = _JOIN_TIMEOUT_S,
        meet_timeout_s: float = _MEET_TIMEOUT_S,
    ) -> LeadRunner:
        """Every rank reads its share of the weights, and takes its heads' part of the KV memory, which
        `config.kv_memory_bytes` bounds for all together. `config.num_threads` are each rank's; None shares the cores.
        `progress` is of the first rank.

        Raises UsageError for what cannot be split, LaunchError for a rank that does not get ready, and what
        TorchRunner.load raises.
        """
        size, header = ranks.size, files.header
        config.torch_dtype  # noqa: B018  raises for what cannot be, before anybody waits
        check_devices(config.device, size)
        shares = [share_of(header, rank, size) for rank in range(size)]
        locals_ = [header_of_share(header, share).shape for share in shares]
        block_bytes = sum(shape.kv_bytes_per_token(config.dtype) for shape in locals_) * config.block_size
        num_blocks = config.num_blocks or int(config.kv_memory_bytes // block_bytes)
        if num_blocks < 1:
            raise UsageError(f"the KV memory of {config.kv_memory_bytes} bytes holds no block of {block_bytes:g} bytes")
        num_threads = config.num_threads
        if config.device == "cpu":
            check_room(int(num_blocks * block_bytes))
            num_threads = num_threads or max(1, usable_cores() // size)
        config = replace(config, num_blocks=num_blocks, num_threads=num_threads)
        store, port = open_store(meet_timeout_s)
        told = asdict(config)
        try:
            ranks.send_each([Job(r, size, port, str(files.path), told, meet_timeout_s) for r in range(1, size)])
        except OSError:
            raise LaunchError(f"a rank of {size} ended before it was told what to do") from None
        ranks.expect(Here, join_timeout_s)
        try:
            ProcessGroup.join(store, shares[0], device_of(config, 0), meet_timeout_s)
            own = load_share(files, shares[0], config, progress)
            ready = ranks.expect(Ready, _LOAD_TIMEOUT_S)
        except BaseException:
            ProcessGroup.leave()
            raise
        info = replace(
            own.info,
            num_ranks=size,
            device=config.device,
            vocab_size=header.shape.vocab_size,
            can_give_up=False,
            weight_bytes=own.info.weight_bytes + sum(rank.weight_bytes for rank in ready),
            kv_bytes=own.info.kv_bytes + sum(rank.kv_bytes for rank in ready),
            block_bytes=0,
            block_layout="",
        )
        return cls(own, ranks, info)

    @property
    def info(self) -> RunnerInfo:
        return self._info

    def submit(self, plan: StepPlan, give_up: GiveUp = never) -> None:
        """Compute and sample one step; the flag is not looked at. Raises EngineError when the ranks cannot go on."""
        with self._together():
            self._ranks.send(Step.of(plan))
            self._own.submit(plan)

    def wait(self) -> StepResult:
        with self._together():
            return self._own.wait()

    def logits(self, plan: StepPlan) -> Tensor:
        """See TorchRunner.logits."""
        with self._together():
            self._ranks.send(Step.of(plan, all_logits=True))
            return self._own.logits(plan)

    def close(self) -> None:
        """End the job, after which the ranks can take another."""
        self._ranks.send(End())
        ProcessGroup.leave()

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """Whatever fails, the ranks are not at the same place any more."""
        try:
            yield
        except (EngineError, OSError) as problem:
            raise self._ranks.lost_by(problem) from None  # the reason is in another process
        except Exception as problem:
            raise self._ranks.lost_by(problem) from problem
