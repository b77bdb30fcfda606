"""One rank's share of a model, where it is computed and loaded."""

from __future__ import annotations

from dataclasses import replace

import torch

from inferloop.core.errors import EnvironmentLacksError
from inferloop.engine.compute.torch.config import TorchConfig
from inferloop.engine.compute.torch.parallel.process_group import ProcessGroup
from inferloop.engine.compute.torch.parallel.split import Share, check_kind, header_of_share
from inferloop.engine.compute.torch.runner import TorchRunner
from inferloop.engine.compute.torch.weights import Progress
from inferloop.models.resolve import ModelFiles


def check_devices(device: str, size: int) -> None:
    """Raises UsageError for a kind of device that ranks cannot have one each of, EnvironmentLacksError for too few."""
    check_kind(device, size)
    num = torch.cuda.device_count() if device == "cuda" and torch.cuda.is_available() else 0
    if device == "cuda" and num < size:
        raise EnvironmentLacksError(f"--tensor-parallel-size {size}: torch sees {num} CUDA devices")


def device_of(config: TorchConfig, rank: int) -> torch.device:
    return torch.device("cuda", rank) if config.device == "cuda" else torch.device(config.device)


def load_share(files: ModelFiles, share: Share, config: TorchConfig, progress: Progress | None = None) -> TorchRunner:
    """Read this rank's part of the files; the ranks have joined. Raises what TorchRunner.load raises."""
    group = ProcessGroup(share, files.header.shape.vocab_size, ordered=config.deterministic)
    own = replace(files, header=header_of_share(files.header, share))
    device = device_of(config, share.rank)
    return TorchRunner.load(own, replace(config, device=str(device)), group=group, progress=progress)
