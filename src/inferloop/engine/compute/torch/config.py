"""Settings of the torch runner."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from inferloop.core.errors import UsageError, nearest

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class TorchConfig:
    """`device` is any torch device. The KV memory is `num_blocks` blocks of `block_size` tokens, or as many as
    `kv_memory_bytes` holds. `num_threads` None leaves torch's own choice.

    `deterministic` (fp32 only): a sequence's tokens depend on its prompt and parameters alone, never on its
    neighbours, on how its prompt was cut, or on preemption. It is slower.
    """

    device: str = "cpu"
    dtype: str = "bf16"
    num_threads: int | None = None
    block_size: int = 16
    num_blocks: int | None = None
    kv_memory_bytes: int = 512 * 2**20
    deterministic: bool = False

    @property
    def torch_dtype(self) -> torch.dtype:
        """Raises UsageError for a precision that this runner does not compute in."""
        if self.dtype not in DTYPES:
            close = nearest(self.dtype, DTYPES)
            hint = f", did you mean {close}?" if close else ""
            raise UsageError(f"the torch runner computes in {' or '.join(DTYPES)}, not {self.dtype!r}{hint}")
        if self.deterministic and self.dtype != "fp32":
            raise UsageError(f"deterministic mode computes in fp32, not {self.dtype}")
        return DTYPES[self.dtype]
