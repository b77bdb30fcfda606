"""`inferloop serve MODEL`: one OpenAI-compatible replica in this process."""

from __future__ import annotations

import platform
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inferloop.cli.adapters import (
    EnableOption,
    FolderOption,
    MaxOption,
    ModulesOption,
    RankOption,
    adapter_options,
)
from inferloop.cli.common import CacheDirOption, verb
from inferloop.cli.keys import KeyFileOption, KeyOption, server_keys
from inferloop.core.errors import UsageError

if TYPE_CHECKING:
    from inferloop.backends.native_options import NativeOptions


_MAX_S = 86400.0
_MAX_MS = 1000 * _MAX_S
"""Durations without end are told by leaving the option out."""


class Backend(StrEnum):
    embedded = "embedded"
    openvino = "openvino"
    scripted = "scripted"


class Compute(StrEnum):
    auto = "auto"
    native = "native"
    torch = "torch"


class Dtype(StrEnum):
    auto = "auto"
    bf16 = "bf16"
    int8 = "int8"
    fp32 = "fp32"


class KvDtype(StrEnum):
    auto = "auto"
    bf16 = "bf16"
    int8 = "int8"


class ToolCallParser(StrEnum):
    auto = "auto"
    none = "none"
    hermes = "hermes"
    llama3_json = "llama3_json"
    pythonic = "pythonic"


class ReasoningParser(StrEnum):
    auto = "auto"
    none = "none"
    think = "think"


class Capture(StrEnum):
    none = "none"
    token_ids = "token_ids"
    text = "text"


class MetricAliases(StrEnum):
    vllm = "vllm"


@verb
def serve(
    model: Annotated[
        str, typer.Argument(help="Catalogue name, GGUF file or model directory; any name with --backend scripted.")
    ],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free port and prints it.")] = 8000,
    port_file: Annotated[
        Path | None, typer.Option(help="Write the bound port as JSON here instead of to stdout.")
    ] = None,
    api_key_file: KeyFileOption = None,
    api_key: KeyOption = None,
    backend: Annotated[
        Backend, typer.Option(help="embedded: our engine; openvino: OpenVINO GenAI; scripted: plays a timing script.")
    ] = Backend.embedded,
    served_model_name: Annotated[str | None, typer.Option(help="Name in the API, if not MODEL.")] = None,
    compute: Annotated[
        Compute,
        typer.Option(help="What computes: native, our own code for CPUs, or torch; auto: native wherever it can be."),
    ] = Compute.auto,
    dtype: Annotated[
        Dtype,
        typer.Option(
            help="Weights: auto, as stored (torch: bf16, with --deterministic fp32), or converted to bf16, int8, fp32."
        ),
    ] = Dtype.auto,
    kv_dtype: Annotated[
        KvDtype,
        typer.Option(help="Keys and values: auto, bf16 (torch: as --dtype), or int8, in half the memory."),
    ] = KvDtype.auto,
    device: Annotated[str, typer.Option(help="cpu, or a torch device: cuda, ...")] = "cpu",
    tensor_parallel_size: Annotated[
        int,
        typer.Option(
            min=1,
            max=1024,
            help="Processes that each hold and compute a share of the model (with torch; models without experts): on "
            "the cores of this host, or with --device cuda a device each.",
        ),
    ] = 1,
    deterministic: Annotated[
        bool,
        typer.Option(
            "--deterministic",
            help="One answer per prompt and seed, whatever the batch; always so in native.",
        ),
    ] = False,
    max_num_seqs: Annotated[
        int, typer.Option(min=1, max=65536, help="Most requests that run together; each of n choices is one.")
    ] = 32,
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="Token budget of one step.")] = 256,
    max_num_waiting: Annotated[int, typer.Option(min=0, help="Most requests that queue; more get a 503.")] = 256,
    max_num_waiting_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Most prompt tokens that queue; default 16 times what the KV memory holds."),
    ] = None,
    tpot_objective_ms: Annotated[
        float | None,
        typer.Option(
            min=0.001, max=_MAX_MS, help="Prefill beside answers only what keeps their time per token within this."
        ),
    ] = None,
    max_ttft_ms: Annotated[
        float | None,
        typer.Option(
            min=0.001, max=_MAX_MS, help="503 at once for a queued request whose first token cannot come within this."
        ),
    ] = None,
    request_timeout_s: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            max=_MAX_S,
            help="Longest that a request may take; the header x-request-timeout-ms may ask for less.",
        ),
    ] = None,
    kv_memory_mib: Annotated[int, typer.Option(min=1, help="Memory for the KV cache, of all ranks together.")] = 512,
    context_length: Annotated[
        int | None,
        typer.Option(
            "--context-length",
            "--max-model-len",
            min=2,
            help="Bound on prompt and output together, below the model's own.",
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Compute threads of each rank; default is one for each core in all.")
    ] = None,
    cache_dir: CacheDirOption = None,
    enable_prefix_caching: Annotated[
        bool, typer.Option(help="Keep computed prompts, and start from them when another prompt begins alike.")
    ] = True,
    prefix_cache_memory_mib: Annotated[
        int, typer.Option(min=0, help="Host memory for computed prompts that the KV memory has no room for.")
    ] = 0,
    prefix_cache_dir: Annotated[
        Path | None,
        typer.Option(help="Keep computed prompts in this folder, across restarts; replicas of one host may share it."),
    ] = None,
    prefix_cache_disk_mib: Annotated[int, typer.Option(min=1, help="How large that folder may become.")] = 4096,
    tool_call_parser: Annotated[
        ToolCallParser,
        typer.Option(
            help="How the model writes calls of tools; auto: as its chat template says. No other flag needed."
        ),
    ] = ToolCallParser.auto,
    reasoning_parser: Annotated[
        ReasoningParser,
        typer.Option(help="How the model marks its reasoning; auto: think tags if its chat template knows them."),
    ] = ReasoningParser.auto,
    enable_lora: EnableOption = False,
    lora_modules: ModulesOption = None,
    max_loras: MaxOption = 8,
    max_lora_rank: RankOption = 16,
    lora_dir: FolderOption = None,
    engine_packages: Annotated[
        Path | None,
        typer.Option(help="openvino: the site-packages to import it from, of the same Python; default: our own."),
    ] = None,
    script: Annotated[
        list[str] | None, typer.Option(help="scripted: KEY=VALUE of the script; may be repeated.")
    ] = None,
    replica: Annotated[str | None, typer.Option(help="Name of this replica in events and headers.")] = None,
    service: Annotated[str | None, typer.Option(help="Name of the service in events.")] = None,
    events: Annotated[Path | None, typer.Option(help="Append one JSON line per request to this file.")] = None,
    capture: Annotated[
        Capture, typer.Option(help="What to keep of requests, beside EVENTS in a file of its own.")
    ] = Capture.none,
    batch_dir: Annotated[
        Path | None, typer.Option(help="Keep batch jobs (/v1/files, /v1/batches) in this folder, and work them off.")
    ] = None,
    metric_aliases: Annotated[MetricAliases | None, typer.Option(help="Expose metrics under these names too.")] = None,
    drain_timeout_s: Annotated[
        float, typer.Option(min=0, max=_MAX_S, help="On SIGTERM, how long running requests may take.")
    ] = 30.0,
    json_output: Annotated[
        bool, typer.Option("--json", help="Print one object on stdout if it fails, too; the bound port always is one.")
    ] = False,
) -> None:
    """Serve one model over the OpenAI API. SIGTERM drains: /health/ready turns 503, running requests finish.

    Example: inferloop serve smollm2-135m-instruct --port 8000
    """
    from inferloop.backends.native_options import NativeOptions
    from inferloop.backends.scripted import Script
    from inferloop.cli.serve_run import Asked, run
    from inferloop.serve.config import ServeConfig
    from inferloop.serve.keys import ApiKeys

    if capture is not Capture.none and events is None:
        raise UsageError("--capture needs --events, which says where to")
    if port_file is not None and not port_file.parent.is_dir():
        raise UsageError(f"--port-file {port_file}: the folder {port_file.parent} does not exist")
    if (prefix_cache_dir or prefix_cache_memory_mib) and not enable_prefix_caching:
        raise UsageError("--prefix-cache-dir and --prefix-cache-memory-mib need --enable-prefix-caching")
    if engine_packages and backend is not Backend.openvino:
        raise UsageError("--engine-packages needs --backend openvino")
    if engine_packages and not engine_packages.is_dir():
        raise UsageError(f"--engine-packages {engine_packages}: is no folder")
    if tensor_parallel_size > 1 and backend is Backend.scripted:
        raise UsageError("--tensor-parallel-size is for a model, and a script has none")
    if script and backend is not Backend.scripted:
        raise UsageError("--script needs --backend scripted")
    adapters = adapter_options(
        enable_lora, lora_modules, max_loras, max_lora_rank, lora_dir, served_name=served_model_name or model
    )
    if adapters.num and backend is not Backend.embedded:
        raise UsageError("--enable-lora needs --backend embedded")
    keys = server_keys(api_key_file)
    named: dict[str, Any] = {} if replica is None else {"replica": replica}
    config = ServeConfig(
        **named,
        service=service,
        metric_aliases=None if metric_aliases is None else metric_aliases.value,
        capture=capture.value,
        content_path=None if events is None or capture is Capture.none else events.with_suffix(".content.jsonl"),
        drain_timeout_s=drain_timeout_s,
        request_timeout_s=request_timeout_s,
        adapter_folder=adapters.folder,
        keys=ApiKeys(keys) if keys else None,
        node=platform.node() or None,
        hardware=f"{platform.machine()} {device if backend is not Backend.scripted else 'none'}",
    )
    options = NativeOptions(
        compute=compute.value,
        device=device,
        dtype=dtype.value,
        kv_dtype=kv_dtype.value,
        deterministic=deterministic,
        tensor_parallel_size=tensor_parallel_size,
        max_sequences=max_num_seqs,
        max_step_tokens=max_num_batched_tokens,
        max_waiting=max_num_waiting,
        max_waiting_tokens=max_num_waiting_tokens,
        tpot_objective_ms=tpot_objective_ms,
        max_ttft_ms=max_ttft_ms,
        kv_memory_mib=kv_memory_mib,
        context_length=context_length,
        num_threads=threads,
        cache_dir=cache_dir,
        share_prefixes=enable_prefix_caching,
        prefix_memory_mib=prefix_cache_memory_mib,
        prefix_folder=prefix_cache_dir,
        prefix_disk_mib=prefix_cache_disk_mib,
        tool_call_parser=tool_call_parser.value,
        reasoning_parser=reasoning_parser.value,
        max_adapters=adapters.num,
        max_adapter_rank=adapters.max_rank,
        adapters=adapters.modules,
    )
    if backend is Backend.openvino:
        _refuse_for_openvino(options)
    asked = Asked(
        model=model,
        served_model_name=served_model_name,
        cache_dir=cache_dir,
        options=options,
        config=config,
        script=Script.parse(script or ()) if backend is Backend.scripted else None,
        is_openvino=backend is Backend.openvino,
        engine_packages=engine_packages,
        events=events,
        batch_dir=batch_dir,
        address=(host, port),
        port_file=port_file,
    )
    run(asked)


def _refuse_for_openvino(options: NativeOptions) -> None:
    """Raises UsageError for what was asked and only our engine has."""
    from inferloop.backends.native_options import NativeOptions

    default = NativeOptions()
    for name in (
        *("compute", "device", "dtype", "deterministic", "tpot_objective_ms", "max_ttft_ms", "max_waiting_tokens"),
        *("prefix_memory_mib", "prefix_folder", "tensor_parallel_size"),
    ):
        if getattr(options, name) != getattr(default, name):
            raise UsageError(f"--backend openvino has no {name.replace('_', ' ')}: leave that option out")
