"""A model on disk to a NativeGenerator: the one place that puts files, codec, runner and identity together."""

from __future__ import annotations

from dataclasses import asdict
from importlib.metadata import version
from typing import TYPE_CHECKING

from inferloop.backends.native import NativeGenerator
from inferloop.backends.native_adapters import AdapterLimits, AdapterShelf
from inferloop.backends.native_choice import load_runner
from inferloop.backends.native_options import NativeOptions
from inferloop.core.clock import Clock, RealClock
from inferloop.core.digest import canonical_json, digest_of
from inferloop.core.errors import UsageError
from inferloop.core.units import MIB
from inferloop.engine.blockstore.store import BlockStore, StoreConfig
from inferloop.engine.compute.runner import AdapterRunner
from inferloop.engine.config import EngineConfig
from inferloop.engine.text.codec import Codec
from inferloop.models.digests import weights_digest
from inferloop.models.identity import ServingIdentity
from inferloop.models.resolve import ModelFiles

if TYPE_CHECKING:
    from inferloop.engine.compute.runner import Runner, RunnerInfo
    from inferloop.engine.compute.torch.parallel.ranks import Ranks
    from inferloop.models.fetch import Progress


def load_native(
    files: ModelFiles,
    options: NativeOptions,
    *,
    served_name: str | None = None,
    clock: Clock | None = None,
    progress: Progress | None = None,
    ranks: Ranks | None = None,
) -> NativeGenerator:
    """Read the weights and build a generator that has not been started yet. `progress` and `ranks` as in `load_runner`;
    when `ranks` are lost, so is the generator.

    Raises EnvironmentLacksError without anything that computes or with an unusable folder, UsageError for options that
    cannot be, ModelFileError for bad files.
    """
    clock = clock or RealClock()
    codec = Codec(files, tool_call_parser=options.tool_call_parser, reasoning_parser=options.reasoning_parser)
    runner = load_runner(files, options, progress, ranks)
    engine_config = EngineConfig(
        eos_token_ids=codec.tokenizer.eos_token_ids,
        max_step_tokens=options.max_step_tokens,
        max_sequences=options.max_sequences,
        max_waiting=options.max_waiting,
        max_waiting_tokens=options.max_waiting_tokens,
        tpot_objective_ms=options.tpot_objective_ms,
        max_ttft_ms=options.max_ttft_ms,
        context_length=options.context_length,
        share_prefixes=options.share_prefixes,
    )
    identity = native_identity(files, codec, runner.info, options, served_name or files.model_id)
    store = open_store(identity, runner.info, options, clock)
    made = NativeGenerator(
        codec,
        runner,
        engine_config,
        identity,
        clock=clock,
        answer_style=codec.answer_style,
        store=store,
        adapters=open_shelf(files, runner, identity, options),
    )
    if ranks is not None:
        ranks.lost.add_done_callback(lambda lost: made.fail(lost.result()))
    return made


def open_shelf(
    files: ModelFiles, runner: Runner, identity: ServingIdentity, options: NativeOptions
) -> AdapterShelf | None:
    """With the adapters that `options` name. Raises UsageError, ModelFileError."""
    if len(options.adapters) > options.max_adapters:
        raise UsageError(f"{len(options.adapters)} adapters are more than {options.max_adapters} (--max-loras)")
    if not options.max_adapters:
        return None
    if not (runner.info.takes_adapters and isinstance(runner, AdapterRunner)):
        raise UsageError(f"the {runner.info.name} runner takes no adapters here")
    limits = AdapterLimits(options.max_adapters, options.max_adapter_rank)
    shelf = AdapterShelf(files.header, runner, identity, limits)
    for name, path in options.adapters:
        shelf.put(name, path)
    return shelf


def open_store(identity: ServingIdentity, info: RunnerInfo, options: NativeOptions, clock: Clock) -> BlockStore | None:
    """The second tier that `options` ask for. Its blocks depend on less than answers do: weights and arithmetic."""
    if not options.prefix_memory_mib and options.prefix_folder is None:
        return None
    if not options.share_prefixes:
        raise UsageError("memory or a folder for the prefix cache, which is turned off")
    if not info.block_bytes:
        raise UsageError(f"the {info.name} runner keeps the prefix cache in its KV memory only")
    depends_on = (identity.weights_digest, identity.precision, identity.engine, identity.engine_revision)
    config = StoreConfig(
        memory_bytes=options.prefix_memory_mib * MIB,
        folder=options.prefix_folder,
        disk_bytes=options.prefix_disk_mib * MIB,
    )
    return BlockStore(
        config,
        identity=canonical_json([*depends_on, identity.adapter_digest, info.block_layout]),
        block_bytes=info.block_bytes,
        clock=clock,
    )


def native_identity(
    files: ModelFiles, codec: Codec, info: RunnerInfo, options: NativeOptions, model_id: str
) -> ServingIdentity:
    """Everything that decides what this replica answers. Reads the weights to digest them, unless that is cached. The
    structure counts by itself, because the config.json of a model directory is no part of its weights."""
    header = files.header
    return ServingIdentity(
        model_id=model_id,
        weights_digest=weights_digest(files, cache_dir=options.cache_dir),
        precision=f"{header.stored_precision} in {info.dtype}",
        engine=f"inferloop-{info.name}",
        engine_revision=f"{version('inferloop')}+{info.revision}",
        tokenizer_digest=codec.tokenizer.digest,
        template_digest=codec.template_digest,
        stop_token_ids=codec.tokenizer.eos_token_ids,
        sampling_defaults={"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0},
        config={
            "structure": digest_of([header.shape, header.rope, header.norm_eps, header.structure]),
            "device": info.device,
            "dtype": info.dtype,
            "deterministic": info.deterministic,
            "tensor_parallel_size": info.num_ranks,  # sums are made of as many parts
            "context_length": options.context_length,
            "max_step_tokens": options.max_step_tokens,
            "tpot_objective_ms": options.tpot_objective_ms,  # cuts prompts, which changes roundings
            "max_sequences": options.max_sequences,
            "block_size": info.block_size,
            "share_prefixes": options.share_prefixes,
            **asdict(codec.answer_style),
        },
    )
