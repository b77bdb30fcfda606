"""From the name of another engine and its flags to a replica of it: found, its options read, its model converted."""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inferloop.core.errors import UsageError

if TYPE_CHECKING:
    from inferloop.backends.engine_kind import ReplicaOptions
    from inferloop.backends.protocols import LaunchSpec
    from inferloop.backends.serve_process import Value
    from inferloop.bench.target import Launched
    from inferloop.contract.workload import ModelRef
    from inferloop.engine.text.codec import Codec
    from inferloop.models.resolve import ModelFiles

VenvOption = Annotated[
    list[str] | None,
    typer.Option(
        "--venv",
        envvar="INFERLOOP_VENVS",
        help="NAME=PATH of a virtual environment that has an engine; may be given several times. Those below .peers "
        "are found by themselves.",
        show_default=False,
    ),
]
_NUMBERS: Mapping[str, type[int] | type[float]] = {
    "context_length": int,
    "threads": int,
    "memory_mib": int,
    "memory_share": float,
    "tensor_parallel": int,
    "seed": int,
    "max_num_seqs": int,
}
_READ_FLAGS_S = 60
_COMPLAINT = re.compile(r"(?:^|: )error[: ]")
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


@dataclass(frozen=True, slots=True)
class EngineReplica:
    """How to start one, the tokenizer of its model, and what is known of it for records."""

    spec: LaunchSpec
    codec: Codec
    launched: Launched


async def engine_replica(
    name: str,
    model: ModelRef,
    files: ModelFiles,
    flags: Mapping[str, Value],
    venvs: Sequence[str],
    cache_dir: Path | None,
) -> EngineReplica:
    """Raises UsageError for options that the engine cannot meet, EnvironmentLacksError when it is not installed,
    ModelFileError for a model that it cannot read."""
    from inferloop.backends.as_directory import as_directory
    from inferloop.backends.discover import ENGINES, parse_venvs, require
    from inferloop.core.errors import ModelFileError
    from inferloop.engine.text.codec import Codec

    kind = ENGINES[name]
    here = require(name, parse_venvs(venvs))
    options = replica_options(name, model, files, flags)
    if files.kind not in kind.reads:
        if kind.reads != ("hf",):
            raise ModelFileError(f"{name} reads GGUF files alone, and {files.path} is a directory")
        kind.launch(here, options)  # what it refuses is told before anything is converted
        files = await asyncio.to_thread(as_directory, files, cache_dir=cache_dir)
        options = replica_options(name, model, files, flags)
    spec = kind.launch(here, options)
    codec = await asyncio.to_thread(Codec, files)
    launched = await asyncio.to_thread(_launched, spec, options, codec, cache_dir, _tuned(kind.tuned, options))
    return EngineReplica(spec, codec, launched)


def replica_options(name: str, model: ModelRef, files: ModelFiles, flags: Mapping[str, Value]) -> ReplicaOptions:
    """What the contract asks of the model, and what `flags` do. Raises UsageError for a value that is none."""
    from inferloop.backends.engine_kind import ReplicaOptions

    precision = model.precision
    asked = {"weights": precision.weights, "activations": precision.activations, "kv": precision.kv}
    return ReplicaOptions(model_id=model.id, files=files, **{**asked, **read_flags(name, flags)})


def read_flags(name: str, flags: Mapping[str, Value]) -> dict[str, Any]:
    """Fields of ReplicaOptions from flags that every engine has; `flags` among them are the rest, the engine's own.
    Raises UsageError for a value that is none."""
    own: dict[str, Any] = {key: value for key, value in flags.items() if value is not None}
    found: dict[str, Any] = {}
    for key, field in (("dtype", "weights"), ("kv_dtype", "kv")):
        if key in own:
            found[field] = own.pop(key)
    for key, kind in _NUMBERS.items():
        if key in own:
            text = own.pop(key)
            try:
                found[key] = kind(text)
            except ValueError:
                what = "whole number" if kind is int else "number"
                raise UsageError(f"target {name}: {key}={text} is no {what}") from None
    prefix_cache = str(own.pop("prefix_cache", "true")).lower()
    if prefix_cache not in _TRUE + _FALSE:
        raise UsageError(f"target {name}: prefix_cache={prefix_cache} is neither true nor false")
    found["prefix_cache"] = prefix_cache in _TRUE
    found["flags"] = {key: value if isinstance(value, bool) else str(value) for key, value in own.items()}
    return found


def check_engine(name: str, flags: Mapping[str, Value], venvs: Sequence[str]) -> None:
    """Raises EnvironmentLacksError for an engine that is not here, UsageError for `venvs` that name none, and for flags
    of its own that its parser does not take, where that can be asked quickly."""
    from inferloop.backends.discover import ENGINES, parse_venvs, require

    here = require(name, parse_venvs(venvs))
    kind, own = ENGINES[name], read_flags(name, flags)["flags"]
    if not own or kind.read_flags is None:
        return
    words = kind.read_flags(here, own).words()
    with contextlib.suppress(subprocess.TimeoutExpired):  # then it is told when the engine starts
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=_READ_FLAGS_S
        )
        if done.returncode:
            raise UsageError(f"target {name}: {_complaint(done.stderr or done.stdout)}")


def _complaint(text: str) -> str:
    """The line that says what is wrong, out of all that a parser prints."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    found = next(
        (line for line in reversed(lines) if _COMPLAINT.search(line)), lines[-1] if lines else "it says nothing"
    )
    return found.rpartition("error: ")[2]


def _tuned(told: str, options: ReplicaOptions) -> str:
    return told if not options.flags else f"{told}; given by hand: {', '.join(options.flags)}"


def _launched(spec: LaunchSpec, options: ReplicaOptions, codec: Codec, cache_dir: Path | None, tuned: str) -> Launched:
    """The identity of an engine that tells none: its version, its flags, and the digests of what it reads."""
    from dataclasses import asdict

    from inferloop.backends.discover import without_secrets
    from inferloop.bench.target import Launched
    from inferloop.models.digests import weights_digest
    from inferloop.models.identity import ServingIdentity

    argv = without_secrets(spec.argv)
    engine, _, version = spec.version.partition(" ")
    identity = ServingIdentity(
        model_id=options.model_id,
        weights_digest=weights_digest(options.files, cache_dir=cache_dir),
        precision=options.weights or options.files.header.stored_precision,
        engine=engine,
        engine_revision=version,
        tokenizer_digest=codec.tokenizer.digest,
        template_digest=codec.template_digest,
        stop_token_ids=codec.tokenizer.eos_token_ids,
        config={"flags": " ".join(_stable(argv)), **{f"env {name}": value for name, value in spec.env.items()}},
    )
    return Launched(
        identity={**asdict(identity), "digest": identity.digest},
        context_length=spec.context_length,
        exact_length=spec.exact_length,
        told=setup_of(spec, options.files, identity.precision, tuned),
    )


def setup_of(spec: LaunchSpec, files: ModelFiles | None, precision: str | None, tuned: str) -> dict[str, Any]:
    """How an engine is set up, for whoever reads figures of it: all of its flags, secrets left out, what they come to,
    and how they were chosen. `precision` is that of the weights."""
    from inferloop.backends.discover import without_secrets

    return {
        "engine": spec.backend,
        "version": spec.version,
        "model_file": None if files is None else str(files.path),
        "precision": precision,
        "settings": spec.settings,
        "argv": without_secrets(spec.argv),
        "env": spec.env,
        "tuned": tuned,
    }


def _stable(argv: Sequence[str]) -> list[str]:
    """What counts for answers: not where the program and the model lie."""
    return [word for word in argv[1:] if not word.startswith("/")]
