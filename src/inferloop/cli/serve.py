"""`inferloop serve MODEL`: one OpenAI-compatible replica in this process."""

from __future__ import annotations

import dataclasses
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from inferloop.cli.common import verb
from inferloop.core.errors import UsageError, nearest


class Backend(StrEnum):
    scripted = "scripted"


class Capture(StrEnum):
    none = "none"
    token_ids = "token_ids"
    text = "text"


class MetricAliases(StrEnum):
    vllm = "vllm"


@verb
def serve(
    model: Annotated[str, typer.Argument(help="Name under which the script answers.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free port and prints it.")] = 8000,
    port_file: Annotated[
        Path | None, typer.Option(help="Write the bound port as JSON here instead of to stdout.")
    ] = None,
    backend: Annotated[Backend, typer.Option(help="scripted plays a timing script.")] = Backend.scripted,
    script: Annotated[
        list[str] | None, typer.Option(help="scripted: KEY=VALUE of the script; may be repeated.")
    ] = None,
    replica: Annotated[str | None, typer.Option(help="Name of this replica in events and headers.")] = None,
    service: Annotated[str | None, typer.Option(help="Name of the service in events.")] = None,
    events: Annotated[Path | None, typer.Option(help="Append one JSON line per request to this file.")] = None,
    capture: Annotated[
        Capture, typer.Option(help="What to keep of requests, in EVENTS with the suffix .content.jsonl.")
    ] = Capture.none,
    metric_aliases: Annotated[MetricAliases | None, typer.Option(help="Expose metrics under these names too.")] = None,
    drain_timeout_s: Annotated[
        float, typer.Option(min=0, help="On SIGTERM, how long running requests may take.")
    ] = 30.0,
) -> None:
    """Serve one model over the OpenAI API. SIGTERM drains: health/ready turns 503, running requests finish.

    Example: inferloop serve demo --backend scripted --port 0 --script ttft_ms=20 --script tpot_ms=5
    """
    from inferloop.backends.scripted import ScriptedGenerator
    from inferloop.records.sink import DropSink, JsonlSink, Sink
    from inferloop.serve.app import build_app
    from inferloop.serve.config import ServeConfig
    from inferloop.serve.run import bind
    from inferloop.serve.run import serve as run_server

    if capture is not Capture.none and events is None:
        raise UsageError("--capture needs --events, which says where to")
    content_path = None if events is None or capture is Capture.none else events.with_suffix(".content.jsonl")
    named: dict[str, Any] = {} if replica is None else {"replica": replica}
    config = ServeConfig(
        **named,
        service=service,
        metric_aliases=None if metric_aliases is None else metric_aliases.value,
        capture=capture.value,
        content_path=content_path,
        drain_timeout_s=drain_timeout_s,
    )
    sock = bind(host, port)
    sink: Sink = DropSink() if events is None else JsonlSink(events)
    content_sink = None if content_path is None else JsonlSink(content_path)
    generator = ScriptedGenerator(parse_script(script or []), model_id=model)
    run_server(build_app(generator, config, sink, content_sink=content_sink), sock, port_file=port_file)


def parse_script(pairs: list[str]) -> Any:
    """KEY=VALUE pairs to a Script. Raises UsageError naming the key, with the nearest valid one."""
    from inferloop.backends.scripted import Script

    defaults: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(Script)}
    values: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or key not in defaults:
            close = nearest(key, defaults)
            hint = f"did you mean {close}?" if close else f"known: {', '.join(defaults)}"
            raise UsageError(f"--script {pair}: unknown key {key!r} ({hint})")
        try:
            values[key] = type(defaults[key])(text)
        except ValueError:
            raise UsageError(f"--script {pair}: not a {type(defaults[key]).__name__}") from None
    if values.get("error_kind") not in (None, "engine", "overloaded", "stall"):
        raise UsageError(f"--script error_kind={values['error_kind']}: must be engine, overloaded or stall")
    return Script(**values)
