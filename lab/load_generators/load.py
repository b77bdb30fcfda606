"""What is asked of every load generator, and what is read from what it wrote."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

NUM_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Load:
    """A closed loop of `users`, or Poisson arrivals at `rate` per second, on one path of the null server."""

    name: str
    path: str
    users: int = 64
    rate: float | None = None

    @property
    def is_streamed(self) -> bool:
        return self.path != "plain"


LOADS = {
    load.name: load
    for load in (
        Load("plain", "plain"),
        Load("whole", "whole"),
        Load("fast", "fast"),
        Load("paced", "paced", users=1024),
        Load("50/s", "paced", rate=50.0),
        Load("200/s", "paced", rate=200.0),
    )
}


@dataclass(frozen=True, slots=True)
class Task:
    """`count` requests of `load` on the server at `url`; `folder` is empty and takes all that a tool writes."""

    load: Load
    url: str
    count: int
    seed: int
    folder: Path
    tokenizer: str

    @property
    def base_url(self) -> str:
        return f"{self.url}/{self.load.path}"


@dataclass(frozen=True, slots=True)
class Told:
    """What the tool says of itself, in ms; None where it does not. `late_p99` is send minus intended instant."""

    ttft_p50: float | None = None
    ttft_p99: float | None = None
    late_p99: float | None = None
    intended_ns: tuple[int, ...] = ()
    """Where the plan is known, on the machine's monotonic clock: the server's arrivals can be put beside it."""


@dataclass(frozen=True, slots=True)
class Command:
    argv: list[str]
    env: Mapping[str, str] = field(default_factory=dict)


Printed = dict[str, dict[str, float]]
"""By the names of measure.compat: mean, p50 and p99 in ms, as the tool printed them."""


class Tool(Protocol):
    """One load generator. `rates` is about what it reaches of a closed load, so that windows last equally long; a load
    without one it cannot make."""

    name: str
    rates: Mapping[str, float]

    def command(self, task: Task) -> Command: ...
    def told(self, task: Task) -> Told: ...


class Peer(Tool, Protocol):
    """One whose definitions measure.compat knows as `compat`."""

    compat: str

    def printed(self, task: Task) -> Printed: ...


def peers() -> Path:
    """Where the others are installed: .peers below the current folder, or what INFERLOOP_PEERS names."""
    return Path(os.environ.get("INFERLOOP_PEERS", ".peers")).absolute()


def peer(tool: str, program: str = "python") -> str:
    """A program of a tool's own environment. Raises SystemExit where it is not installed."""
    path = peers() / tool / "bin" / program
    if not path.exists():
        raise SystemExit(f"there is no {path}: `make peers` installs it, INFERLOOP_PEERS names another place")
    return str(path)
