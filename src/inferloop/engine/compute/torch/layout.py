"""What, beside weights and tokens, decides the bytes of a block of keys and values that this runner computes."""

from __future__ import annotations

import torch

from inferloop.core.digest import canonical_json
from inferloop.engine.compute.torch.config import TorchConfig
from inferloop.models.headers import ModelHeader


def block_layout(revision: str, header: ModelHeader, config: TorchConfig, context_length: int) -> str:
    """Equal for two runners only when one may go on from what the other has computed.

    The header counts, because the configuration of a model directory is no part of its weights; so does the context
    length, which some rotary embeddings are stretched to. Deterministic mode promises bits, and those are the same
    only on the same kind of hardware with the same number of threads.
    """
    device = torch.device(config.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    return canonical_json(
        {
            "revision": revision,
            "dtype": config.dtype,
            "block_size": config.block_size,
            "shape": header.shape,
            "rope": header.rope,
            "structure": header.structure,
            "norm_eps": header.norm_eps,
            "context_length": context_length,
            "device": device.type,
            "bits": [name, torch.get_num_threads()] if config.deterministic else None,
        }
    )
