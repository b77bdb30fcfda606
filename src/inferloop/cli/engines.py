"""From the name of another engine and its flags to a replica of it: found, its options read, its model converted."""

from __future__ import annotations

import asyncio
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
    """What the contract asks of the model, and of `flags` those that every engine has; the rest are the engine's own.
    Raises UsageError for a value that is none."""
    from inferloop.backends.engine_kind import ReplicaOptions

    own: dict[str, Any] = {key: value for key, value in flags.items() if value is not None}
    precision = model.precision

    def number(key: str, kind: type[int] | type[float]) -> Any:
        text = own.pop(key, None)
        try:
            return None if text is None else kind(text)
        except ValueError:
            raise UsageError(
                f"target {name}: {key}={text} is no {'whole number' if kind is int else 'number'}"
            ) from None

    prefix_cache = str(own.pop("prefix_cache", "true")).lower()
    if prefix_cache not in _TRUE + _FALSE:
        raise UsageError(f"target {name}: prefix_cache={prefix_cache} is neither true nor false")
    parallel = number("tensor_parallel", int)
    return ReplicaOptions(
        model_id=model.id,
        files=files,
        weights=own.pop("dtype", precision.weights),
        activations=precision.activations,
        kv=own.pop("kv_dtype", precision.kv),
        context_length=number("context_length", int),
        threads=number("threads", int),
        memory_mib=number("memory_mib", int),
        memory_share=number("memory_share", float),
        tensor_parallel=1 if parallel is None else parallel,
        seed=number("seed", int),
        prefix_cache=prefix_cache in _TRUE,
        max_num_seqs=number("max_num_seqs", int),
        flags={key: value if isinstance(value, bool) else str(value) for key, value in own.items()},
    )


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
