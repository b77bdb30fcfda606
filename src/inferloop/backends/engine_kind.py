"""What every launched engine says of itself, and what a contract asks of one in no engine's words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from inferloop.backends.protocols import Capability, LaunchSpec
from inferloop.core.errors import UsageError
from inferloop.models.resolve import ModelFiles

Flag = str | bool
FileKind = Literal["gguf", "hf"]


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """One replica as a contract wants it; None leaves it to the engine, or to its file here.

    `weights`, `activations` and `kv` are precisions as contracts name them. `memory_mib` is for keys and values,
    `memory_share` (0 to 1) that of a device which the engine may take. `flags` are the engine's own, by their names
    without leading dashes: they come last, and so win; False takes away one that would be set here.
    """

    model_id: str
    files: ModelFiles
    weights: str | None = None
    activations: str | None = None
    kv: str | None = None
    context_length: int | None = None
    threads: int | None = None
    memory_mib: int | None = None
    memory_share: float | None = None
    tensor_parallel: int = 1
    seed: int | None = None
    prefix_cache: bool = True
    max_num_seqs: int | None = None
    flags: Mapping[str, Flag] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Installation:
    """An engine that is here. `packages` is the folder that it is imported from, `python` starts it; `missing` names
    what else it needs to serve. A program without a package has no `distribution`, and stands in `python`."""

    engine: str
    version: str
    distribution: str
    python: Path
    packages: Path
    where: str
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineKind:
    """`distributions` are the packages that mean it is installed, any of them, `program` what may stand on the PATH
    instead; `server_needs` are packages that its server imports beside. `verified` says by what version it was last
    seen to work here, or that nobody has run it; `tuned`, how the flags that `launch` sets were chosen.

    `launch` raises UsageError for options that the engine cannot meet, before anything is started. `read_flags` is a
    command that lets the engine's own parser read some of its flags, and ends, in a second or two; None where that
    takes as long as starting the engine, which ends at once of a flag that is wrong.
    """

    name: str
    about: str
    distributions: tuple[str, ...]
    install: str
    reads: tuple[FileKind, ...]
    verified: str
    tuned: str
    capabilities: Mapping[str, Capability]
    launch: Callable[[Installation, ReplicaOptions], LaunchSpec]
    program: str | None = None
    server_needs: tuple[str, ...] = ()
    read_flags: Callable[[Installation, Mapping[str, Flag]], Argv] | None = None
    homepage: str = ""


class Argv:
    """A command line that grows: flags are set by name, in the spelling of one engine, and a name is set once."""

    def __init__(self, *words: str, joiner: str = "-") -> None:
        self._words, self._joiner = words, joiner
        self._flags: dict[str, str | bool] = {}

    def set(self, name: str, value: str | float | bool | Path | None) -> Argv:
        """True is a flag without a value, False and None are none at all."""
        key = name.removeprefix("--").replace("-", self._joiner).replace("_", self._joiner)
        if value is None or value is False:
            self._flags.pop(key, None)
        else:
            self._flags[key] = value if value is True else str(value)
        return self

    def update(self, flags: Mapping[str, Flag]) -> Argv:
        for name, value in flags.items():
            self.set(name, value)
        return self

    def get(self, name: str, default: str) -> str:
        """The value of a flag; for one that is not set, what the engine then takes."""
        value = self._flags.get(name.replace("-", self._joiner).replace("_", self._joiner))
        return default if value is None else "on" if value is True else str(value)

    def words(self) -> tuple[str, ...]:
        told = [[f"--{name}"] if value is True else [f"--{name}", str(value)] for name, value in self._flags.items()]
        return (*self._words, *(word for pair in told for word in pair))


PARSE_AND_END = """
import argparse, runpy, sys
parse_args = argparse.ArgumentParser.parse_args
def parse_and_end(self, *args, **named):
    parse_args(self, *args, **named)
    sys.exit(0)
argparse.ArgumentParser.parse_args = parse_and_end
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__")
"""
"""For `python -c`, followed by a module that is a program and its words: it goes no further than reading them."""


def refuse(engine: str, what: str, asked: object, instead: str) -> UsageError:
    """The error for an option that an engine cannot meet."""
    return UsageError(f"{engine}: {what} {asked} cannot be: {instead}")


def one_device(engine: str, options: ReplicaOptions) -> None:
    """Raises UsageError for what only engines on accelerators have."""
    if options.tensor_parallel != 1:
        raise refuse(engine, "tensor_parallel", options.tensor_parallel, "it runs one model on one device")
    if options.memory_share is not None:
        raise refuse(engine, "memory_share", options.memory_share, "memory is given in MiB, as memory_mib")


def check_share(engine: str, options: ReplicaOptions) -> None:
    """Raises UsageError for a share of a device that is none."""
    if options.memory_share is not None and not 0 < options.memory_share <= 1:
        raise refuse(engine, "memory_share", options.memory_share, "it lies above 0 and up to 1")
    if options.tensor_parallel < 1:
        raise refuse(engine, "tensor_parallel", options.tensor_parallel, "it is 1 or more")


def precision_in_directory(options: ReplicaOptions) -> str:
    """What weights are stored in where an engine reads directories alone: a GGUF file becomes one in bf16."""
    return "bf16" if options.files.kind == "gguf" else options.files.header.stored_precision


def context_of(options: ReplicaOptions, bytes_per_token: float) -> int:
    """The context to ask for: what is wanted, or the model's own, cut to what `memory_mib` holds."""
    length = options.context_length or options.files.header.shape.context_length
    if options.memory_mib is not None:
        length = min(length, int(options.memory_mib * 2**20 / bytes_per_token))
    return max(length, 2)
