"""What was measured of a machine: how fast it reads memory, how fast it multiplies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

OpKind = Literal["int8", "bf16", "fp32"]
"""What is multiplied; int8 sums in 32-bit integers, the others in fp32."""


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bytes read per second when the same `working_set_bytes` are read again and again, in order, each thread its part.
    The median of the samples, and the best."""

    working_set_bytes: int
    num_threads: int
    bytes_per_s: float
    best_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Peak:
    """Multiplications and additions per second between registers, of all threads together: median and best sample."""

    kind: OpKind
    isa: str
    num_threads: int
    ops_per_s: float
    best_ops_per_s: float


@dataclass(frozen=True, slots=True)
class MeasuredHardware:
    """`method` "numpy": the native extension is missing, so reads are slower than the machine could and there are no
    peaks. `huge_page_bytes` of `memory_bytes` that were read lay in huge pages; None where the system does not tell.
    `others_share` of all processor time went to other processes meanwhile: where it is not small, medians are low."""

    method: Literal["native", "numpy"]
    best_isa: str | None
    num_samples: int
    memory_bytes: int
    huge_page_bytes: int | None
    others_share: float
    bandwidth: tuple[Bandwidth, ...]
    peaks: tuple[Peak, ...]
