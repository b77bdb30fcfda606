"""The instruction set that native kernels of this machine may use."""

from __future__ import annotations

from typing import cast

from inferloop.core.errors import UsageError
from inferloop.engine.compute.native import _native
from inferloop.engine.compute.native.config import Isa


def best_isa() -> Isa:
    """The best of this machine, no higher than INFERLOOP_MAX_CPU_ISA. Raises UsageError when that names none."""
    try:
        return cast(Isa, _native.best_isa())
    except ValueError as error:
        raise UsageError(str(error)) from None
