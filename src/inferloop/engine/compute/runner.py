"""The runner protocol. Every runner (torch, native, ...) is checked against the torch fp32 reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from inferloop.engine.compute.adapter import Adapter
from inferloop.engine.schedule.step import StepPlan, StepResult


class GiveUp:
    """A flag that another thread may raise while a step runs. Calling it tells whether it is up. `cell`, one byte, is
    for native code, which looks without the interpreter."""

    __slots__ = ("cell",)

    def __init__(self) -> None:
        self.cell = np.zeros(1, np.uint8)

    def set(self) -> None:
        self.cell[0] = 1

    def clear(self) -> None:
        self.cell[0] = 0

    def __call__(self) -> bool:
        return bool(self.cell[0])


never = GiveUp()
"""Of a step that nobody is in a hurry to replace. Not to be raised."""


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    """What schedule must know of a runner. `kv_group_windows[g]` is the window of KV group g in tokens, None = full.

    `block_bytes`: what one block holds in all layers and KV groups; 0 when the runner can neither load nor save blocks.
    `block_layout`: everything beside the weights and the tokens that decides those bytes, in words. A runner that says
    the same may be given what another one saved.
    """

    name: str
    revision: str
    device: str
    dtype: str
    deterministic: bool
    vocab_size: int
    context_length: int
    block_size: int
    num_blocks: int
    kv_group_windows: tuple[int | None, ...] = (None,)
    hidden_size: int = 0
    """Length of a pooled vector; 0: this runner cannot pool."""
    can_give_up: bool = False
    """Steps can be given up while they run; see `Runner.submit`."""
    num_ranks: int = 1
    """Processes that each compute a share of every step. Byte counts are of all of them."""
    weight_bytes: int = 0
    kv_bytes: int = 0
    block_bytes: int = 0
    block_layout: str = ""
    takes_adapters: bool = False
    """It is an AdapterRunner, and plans may have `adapters`."""


class Runner(Protocol):
    """Owns weights, KV blocks and sampling. Called from one thread only.

    `submit` may return before the work is done; `wait` blocks until the oldest submitted step is done. At most one
    step is in flight per runner unless its documentation says otherwise.
    """

    @property
    def info(self) -> RunnerInfo: ...

    def submit(self, plan: StepPlan, give_up: GiveUp = never) -> None:
        """Begin a step. `give_up` is asked between parts of the work by runners whose
        `info.can_give_up`: once it is true the rest may be left out, and `wait` tells a result that is given up."""
        ...

    def wait(self) -> StepResult: ...


@runtime_checkable
class AdapterRunner(Runner, Protocol):
    """What a runner offers whose `info.takes_adapters`."""

    def prepare_adapter(self, adapter: Adapter) -> object:
        """The form that this runner computes with; changes nothing. Any thread. Raises ModelFileError for weights that
        the form cannot hold."""
        ...

    def set_adapter(self, slot: int, prepared: object | None) -> None:
        """Put what `prepare_adapter` gave into a slot (0 onward), or empty it. Between steps only."""
        ...
