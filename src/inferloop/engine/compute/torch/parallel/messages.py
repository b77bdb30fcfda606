"""What the first rank and each other rank tell one another."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from inferloop.engine.schedule.step import Int32, PromptRows, SamplingColumns, StepPlan


class Job(Struct, tag=True, frozen=True):
    """Join the group that meets at `port` and take this share of a model. `config` holds the fields of TorchConfig;
    every call on the group is answered within `timeout_s`."""

    rank: int
    size: int
    port: int
    path: str
    config: dict[str, Any]
    timeout_s: float


class Step(Struct, tag=True, frozen=True):
    """A StepPlan without what only the rank that samples needs. Arrays are the bytes of their int32 numbers; `copies`
    may be empty, `prompt_rows` are flat tokens. With `all_logits` every row goes through the head."""

    step_id: int
    slots: bytes
    offsets: bytes
    token_ids: bytes
    first_positions: bytes
    block_tables: list[bytes]
    sample_rows: bytes
    num_drafts: bytes
    copies: list[bytes]
    prompt_rows: bytes | None
    all_logits: bool

    @classmethod
    def of(cls, plan: StepPlan, *, all_logits: bool = False) -> Step:
        assert plan.loads is None and not plan.saves, "no rank has a block whole"
        return cls(
            plan.step_id,
            plan.slots.tobytes(),
            plan.offsets.tobytes(),
            plan.token_ids.tobytes(),
            plan.first_positions.tobytes(),
            [table.tobytes() for table in plan.block_tables],
            plan.sample_rows.tobytes(),
            plan.num_drafts.tobytes(),
            [pairs.tobytes() for pairs in plan.copies],
            None if plan.prompt_rows is None else plan.prompt_rows.flat.tobytes(),
            all_logits,
        )

    def plan(self) -> StepPlan:
        """What has to be followed; its sampling parameters mean nothing."""
        num = len(self.slots) // 4
        rows = None if self.prompt_rows is None else _ints(self.prompt_rows)
        return StepPlan(
            step_id=self.step_id,
            slots=_ints(self.slots),
            offsets=_ints(self.offsets),
            token_ids=_ints(self.token_ids),
            first_positions=_ints(self.first_positions),
            block_tables=tuple(_ints(table).reshape(num, -1) for table in self.block_tables),
            sample_rows=_ints(self.sample_rows),
            num_drafts=_ints(self.num_drafts),
            sampling=_GREEDY,
            copies=tuple(_ints(pairs).reshape(-1, 2) for pairs in self.copies),
            prompt_rows=None if rows is None else PromptRows(rows, *[np.zeros_like(rows)] * 3),
        )


class End(Struct, tag=True, frozen=True):
    """The job is over; another may follow."""


class Here(Struct, tag=True, frozen=True):
    """A rank is about to join the group of its job."""


class Ready(Struct, tag=True, frozen=True):
    """A rank has joined and loaded its share, and waits for steps."""

    weight_bytes: int
    kv_bytes: int


class Failed(Struct, tag=True, frozen=True):
    """What a rank cannot go on after; `kind` is the name of the error."""

    kind: str
    text: str


ToRank = Job | Step | End
FromRank = Here | Ready | Failed

_to_rank, _from_rank = msgspec.msgpack.Decoder(ToRank), msgspec.msgpack.Decoder(FromRank)
encode = msgspec.msgpack.Encoder().encode


def decode_to_rank(data: bytes | bytearray) -> ToRank:
    found: ToRank = _to_rank.decode(data)
    return found


def decode_from_rank(data: bytes | bytearray) -> FromRank:
    found: FromRank = _from_rank.decode(data)
    return found


def _ints(data: bytes) -> Int32:
    return np.frombuffer(data, np.int32)


def _empty(kind: type[np.generic]) -> NDArray[Any]:
    return np.empty(0, kind)


_GREEDY = SamplingColumns(
    temperature=_empty(np.float32),
    top_p=_empty(np.float32),
    top_k=_empty(np.int32),
    min_p=_empty(np.float32),
    seed=_empty(np.uint64),
    num_logprobs=_empty(np.int32),
)
