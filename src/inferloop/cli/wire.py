"""The only place that picks implementations; verbs ask here for what they work on."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from inferloop.cli.common import run_async
from inferloop.core.errors import UsageError, nearest

if TYPE_CHECKING:
    from inferloop.backends.endpoint import Endpoint
    from inferloop.backends.protocols import LaunchSpec
    from inferloop.backends.serve_process import Value
    from inferloop.bench.render import PromptCodec
    from inferloop.bench.resident import Resident
    from inferloop.bench.target import Launched
    from inferloop.contract.workload import ModelRef
    from inferloop.core.slo import Slo
    from inferloop.engine.compute.native.config import KvFormat, Weights
    from inferloop.fleet.act.process import ReplicaProcess
    from inferloop.models.fetch import Progress
    from inferloop.models.headers import ModelHeader
    from inferloop.models.resolve import ModelFiles

ENGINES = ("llamacpp", "llama-server", "vllm", "openvino", "sglang", "trtllm")
"""Other engines; each is a file of backends."""
LAUNCHABLE = ("embedded", "scripted", *ENGINES)
EMBEDDED_MODEL = "smollm2-135m-instruct"
_HOST_AND_PORT = re.compile(r"[\w.-]+:\d+(/.*)?")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Target:
    """A server that is up. `model` None: the only one it lists. `codec` is the model's own tokenizer when its files
    are known to be here; None: ask the server's /tokenize. `launched` is what is known of another engine. Of what was
    started here `setup` says how, and `process` are its processes."""

    at: Endpoint
    model: str | None = None
    codec: PromptCodec | None = None
    launched: Launched | None = None
    setup: Mapping[str, Any] | None = None
    process: Resident | None = None


async def open_model(
    model_id: str, cache_dir: Path | None, progress: Progress | None = None, *, text_only: bool = False
) -> ModelFiles:
    """Its files (`text_only`: weights may be absent), fetched when need be; off the loop. Raises as `resolve` does."""
    from inferloop.models.resolve import resolve, resolve_text

    find = resolve_text if text_only else resolve
    return await _in_thread(lambda tell: find(model_id, cache_dir=cache_dir, progress=tell), progress)


async def pack_weights(
    model: ModelRef, files: ModelFiles, cache_dir: Path | None, progress: Progress | None = None
) -> None:
    """What the first replica of a model would do alone and unseen, a second or minutes long; off the event loop."""
    from inferloop.backends.native_choice import pack_ahead

    flags = precision_flags(model)
    if flags.get("compute") != "torch":
        dtype = str(flags.get("dtype", "auto"))
        await _in_thread(lambda tell: pack_ahead(files, dtype, cache_dir, tell), progress)


async def make_ready(name: str, model: ModelRef, cache_dir: Path | None) -> None:
    """Fetch and pack, with a bar for a person, what `target` would have to."""
    if name == "embedded" or name in ENGINES:
        from inferloop.cli.models import model_progress

        with model_progress() as progress:
            files = await open_model(model.id, cache_dir, progress)
            if name == "embedded":
                await pack_weights(model, files, cache_dir, progress)


async def _in_thread(work: Callable[[Progress], T], progress: Progress | None) -> T:
    """Cancelling ends the work too: its thread is told at its next step, because nothing can stop it from outside."""
    abandoned = threading.Event()

    def tell(stage: str, done: int, total: int) -> None:
        if abandoned.is_set():
            raise _AbandonedError
        if progress is not None:
            progress(stage, done, total)

    try:
        return await asyncio.to_thread(work, tell)
    except asyncio.CancelledError:
        abandoned.set()
        raise


class _AbandonedError(Exception):
    """Ends what nobody waits for any more."""


def precision_flags(model: ModelRef) -> dict[str, Value]:
    """Flags of `serve` that give this model the precision it asks for; none for weights as they are stored. Raises
    UsageError for one that the embedded engine cannot run."""
    asked = model.precision
    weights, activations, kv = asked.weights or "auto", asked.activations, asked.kv
    if weights not in _ACTIVATIONS:
        known = ", ".join(name for name in _ACTIVATIONS if name != "auto")
        raise UsageError(
            f"model.precision: the embedded engine converts weights to {known}, or computes with them as stored when "
            f"no precision is given; not in {weights}"
        )
    if activations not in (None, _ACTIVATIONS[weights]):
        raise UsageError(f"model.precision: activations beside weights in {weights} are not kept in {activations}")
    flags: dict[str, Value] = {} if weights == "auto" else {"dtype": weights}
    if kv == "fp32" and weights == "fp32":
        return {**flags, "compute": "torch"}  # which keeps everything in one
    if kv not in (None, "bf16", "int8"):
        raise UsageError(f"model.precision: KV is kept in bf16 or int8, or in fp32 beside weights in fp32; not in {kv}")
    return flags if kv is None else {**flags, "kv_dtype": kv}


_ACTIVATIONS = {"auto": None, "bf16": "bf16", "int8": "int8", "fp32": "fp32"}


def memory_needs(model: ModelRef, header: ModelHeader) -> tuple[int, float]:
    """Bytes of weights, and of KV for each token, of a replica of the model that `precision_flags` start here. What the
    native engine repacks may be larger than in the file. Raises ModelFileError for weights that nobody can read."""
    from inferloop.backends.native_choice import why_not_native
    from inferloop.engine.compute.native.plan import plan_packing

    flags = precision_flags(model)
    weights, kv = str(flags.get("dtype", "auto")), str(flags.get("kv_dtype", "bf16"))
    if flags.get("compute") == "torch" or why_not_native(header) is not None:
        dtype = "bf16" if weights == "auto" else weights
        return math.ceil(header.shape.weight_bytes(dtype)), header.shape.kv_bytes_per_token(dtype)
    from inferloop.engine.compute.native.memory import BLOCK_SIZE, block_bytes  # only with the extension

    plan = plan_packing(header, cast("Weights", "stored" if weights == "auto" else weights))
    return plan.num_bytes, block_bytes(header.shape, cast("KvFormat", kv)) / BLOCK_SIZE


def tpot_objective_ms(slo: Slo) -> float | None:
    """What a replica should keep the time per token within: the tightest of the objectives; None when there is none."""
    return min((o.limit for o in slo.objectives if o.metric == "tpot_ms"), default=None)


def embedded_spec(model: ModelRef, cache_dir: Path | None, **options: Value) -> LaunchSpec:
    """How to start one replica of our own engine; `options` are flags of `inferloop serve`."""
    from inferloop.backends.serve_process import launch_spec

    named = precision_flags(model)
    if cache_dir is not None:
        named["cache_dir"] = str(cache_dir)
    return launch_spec(model.id, {**named, **options})


@dataclass(frozen=True, slots=True)
class Entry:
    """How the targets that are URLs are entered. `label` tells several of them apart: B has a key of its own in
    INFERLOOP_API_KEY_B, where that is set. `tokenizer` is a model with the same; None: their /tokenize is asked."""

    ca_file: Path | None = None
    insecure: bool = False
    label: str | None = None
    tokenizer: str | None = None


def is_url(name: str) -> bool:
    return name.startswith(("http://", "https://"))


def endpoint(url: str, entry: Entry) -> Endpoint:
    """The URL with its key, the first where the environment has several, as servers take them. Raises UsageError for a
    URL that is none, or that holds a key itself, for what is no key, and for an entry that does not fit the URL."""
    from inferloop.backends.endpoint import Endpoint
    from inferloop.core.api_keys import KEY_VARIABLE, keys_in_variable

    made = Endpoint(url, ca_file=entry.ca_file, insecure=entry.insecure)
    made.tls()  # a file that cannot be read is told now
    names = [KEY_VARIABLE]
    if entry.label is not None:
        names.insert(0, f"{KEY_VARIABLE}_{entry.label}")
    if made.is_tls and (made.host == _OPENAI or made.host.endswith("." + _OPENAI)):
        names.append("OPENAI_API_KEY")  # which is for nobody else's servers
    found = next((name for name in names if os.environ.get(name, "").strip()), None)
    return made if found is None else replace(made, api_key=keys_in_variable(os.environ[found], found)[0])


_OPENAI = "openai.com"


def target_flags(text: str, entry: Entry) -> tuple[str, dict[str, Value]]:
    """`embedded kv_dtype=int8 deterministic` to the name and the flags of `serve` to launch it with;
    `scripted ttft_ms=5` to the name and its script; `llamacpp threads=2 n_batch=256` to the name and flags that every
    engine has or that are its own. Raises UsageError for an unknown target, or flags for a URL."""
    name, *words = text.split() or [""]
    check_target(name, entry)
    if words and is_url(name):
        raise UsageError(f"target {text!r}: flags are for what is launched, and a URL is up already")
    if name == "scripted":
        from inferloop.backends.scripted import Script

        Script.parse(words)  # told before anything is started
        return name, {"script": words} if words else {}
    if asked := next((word for word in words if _KEY_FLAG.match(word)), None):
        raise UsageError(
            f"target {name}: {asked.partition('=')[0]}: what is launched for a run answers on this machine alone, and "
            "asks for no API key"
        )
    pairs = [word.removeprefix("--").partition("=") for word in words]
    flags: dict[str, Value] = {key.replace("-", "_"): value if equals else True for key, equals, value in pairs}
    if name == "embedded":
        flags = {_SERVE_NAMES.get(key, key): value for key, value in flags.items()}
        _check_flags(text, flags)
    elif name in ENGINES:
        from inferloop.cli.engines import read_flags

        own = read_flags(name, flags)["flags"]
        if name == "openvino":  # which runs behind our serve
            _check_flags(text, own)
    return name, flags


_KEY_FLAG = re.compile(r"(--)?api[-_]key([-_]file)?(=|$)")
_SERVE_NAMES = {"tensor_parallel": "tensor_parallel_size", "memory_mib": "kv_memory_mib"}
"""Of what every engine takes under one name here, where `serve` has another."""


def _check_flags(text: str, flags: Mapping[str, Value]) -> None:
    """What `inferloop serve` would say in a log, once it was started, is said now."""
    from inferloop.backends.serve_process import serve_flags
    from inferloop.cli.main import WrongUse, verb_command

    try:
        verb_command("serve").make_context("serve", [EMBEDDED_MODEL, *serve_flags(flags)])
    except WrongUse as error:
        raise UsageError(f"target {text!r}: {error.format_message()}") from None  # type: ignore[attr-defined]


def check_target(name: str, entry: Entry) -> None:
    """Raises UsageError for what is neither a URL nor a backend that can be launched, and for what of `entry` does not
    fit it."""
    if is_url(name):
        endpoint(name, entry)
        return
    if name not in LAUNCHABLE:
        close = f"http://{name}" if _HOST_AND_PORT.fullmatch(name) else nearest(name, LAUNCHABLE)
        hint = (
            f"did you mean {close!r}?"
            if close
            else f"a URL such as http://127.0.0.1:8000, or one of: {', '.join(LAUNCHABLE)}"
        )
        raise UsageError(f"unknown target {name!r} ({hint})")
    if entry.ca_file is not None or entry.insecure:
        raise UsageError(f"--ca-file and --insecure are for an https URL, and {name} is launched here")
    if entry.tokenizer is not None:
        raise UsageError(f"--tokenizer is for a URL, and {name} is launched here with its model's own")


def check_ready(
    name: str,
    flags: Mapping[str, Value],
    model: ModelRef,
    entry: Entry,
    venvs: Sequence[str] | None = None,
    *,
    asked: str | None = None,
) -> None:
    """What can be found wrong with a target in seconds, before anything is written or started. `asked` is the name
    under which a URL is asked for the model; None: the only one that it has.

    Raises UsageError for a model, a precision or a flag that cannot be, EnvironmentLacksError for an engine that is not
    here and for a URL that does not answer, does not let us in, or has no /tokenize where no tokenizer is named.
    """
    from inferloop.models.resolve import locate

    if is_url(name):
        if entry.tokenizer is not None:
            locate(entry.tokenizer)
        run_async(lambda: _ask(endpoint(name, entry), asked, with_tokenizer=entry.tokenizer is None))
    elif name != "scripted":
        locate(model.id)
        if name in ENGINES:
            from inferloop.cli.engines import check_engine

            check_engine(name, flags, venvs or ())
        else:
            precision_flags(model)


async def _ask(at: Endpoint, model: str | None, *, with_tokenizer: bool) -> None:
    from inferloop.backends.http import HttpClient
    from inferloop.bench.codecs import HttpCodec
    from inferloop.bench.target import describe_target
    from inferloop.core.errors import RequestError

    client = HttpClient(at)
    try:
        told = await describe_target(client, model=model)
    finally:
        await client.close()
    if with_tokenizer:
        with contextlib.closing(HttpCodec(at, told.model)) as codec, contextlib.suppress(RequestError):
            await asyncio.to_thread(codec.encode_text, "a")


@contextlib.asynccontextmanager
async def target(
    name: str,
    model: ModelRef,
    *,
    log_dir: Path,
    cache_dir: Path | None,
    entry: Entry,
    slo: Slo | None = None,
    flags: Mapping[str, Value] | None = None,
    log_name: str | None = None,
    venvs: Sequence[str] | None = None,
) -> AsyncIterator[Target]:
    """A URL as it is, or a backend launched with `model` for as long as the context lasts, which knows what `slo` asks
    of it. `flags` are of `inferloop serve`, or of the engine; they go before what the contract asks. `log_name` is the
    log's, without its suffix. `venvs` are NAME=PATH of environments that have other engines.

    Raises UsageError for a name that is neither, EnvironmentLacksError for an engine that is not installed, LaunchError
    when it does not get ready.
    """
    check_target(name, entry)
    from inferloop.engine.text.codec import Codec

    codec: PromptCodec | None = None
    if is_url(name):
        if entry.tokenizer is not None:
            codec = await asyncio.to_thread(Codec, await open_model(entry.tokenizer, cache_dir, text_only=True))
        yield Target(endpoint(name, entry), codec=codec)
        return
    from inferloop.backends.discover import without_secrets
    from inferloop.backends.endpoint import Endpoint
    from inferloop.backends.serve_process import launch_spec
    from inferloop.cli.engines import setup_of

    launched_as: Launched | None = None
    if name in ENGINES:
        from inferloop.cli.engines import engine_replica

        files = await open_model(model.id, cache_dir)
        replica = await engine_replica(name, model, files, flags or {}, venvs or (), cache_dir)
        spec, codec, launched_as = replica.spec, replica.codec, replica.launched
        setup = launched_as.told
    elif name == "embedded":
        files = await open_model(model.id, cache_dir)
        codec = await asyncio.to_thread(Codec, files)
        objective_ms = None if slo is None else tpot_objective_ms(slo)
        spec = embedded_spec(model, cache_dir, **{"tpot_objective_ms": objective_ms, **(flags or {})})
        weights = model.precision.weights or files.header.stored_precision
        by_hand = f"; given by hand: {', '.join(flags)}" if flags else ""
        setup = setup_of(_ours(spec, name), files, weights, f"the defaults of inferloop serve{by_hand}")
    else:
        spec = launch_spec(model.id, flags, backend="scripted")
        setup = setup_of(_ours(spec, name), None, None, "a script")
    async with _running(spec, log_dir / f"{log_name or name}.log") as process:
        ran = spec.filled(process.port, process.replica_id)
        setup = {**setup, "argv": without_secrets(ran.argv), "env": ran.env}
        if launched_as is not None:
            launched_as = replace(launched_as, told=setup)
        yield Target(Endpoint(process.url), spec.model_id, codec, launched_as, setup, process.tree)


def _ours(spec: LaunchSpec, name: str) -> LaunchSpec:
    from importlib.metadata import version

    return replace(spec, backend=name, version=f"inferloop {version('inferloop')}")


@contextlib.asynccontextmanager
async def launched(spec: LaunchSpec, *, log_path: Path) -> AsyncIterator[str]:
    """The URL of one replica, stopped on the way out: with a drain when all went well, at once when not."""
    async with _running(spec, log_path) as process:
        yield process.url


@contextlib.asynccontextmanager
async def _running(spec: LaunchSpec, log_path: Path) -> AsyncIterator[ReplicaProcess]:
    from inferloop.fleet.act.process import ReplicaProcess

    process = await ReplicaProcess.start_ready(spec, log_path=log_path, replica_id="replica")
    grace_s = 0.0
    try:
        yield process
        grace_s = spec.drain_timeout_s
    finally:
        await process.stop(grace_s)
