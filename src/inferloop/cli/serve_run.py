"""What `inferloop serve` does once its options are understood: take the port, open the files, and only then load the
model. What can fail fast fails first."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from inferloop.cli.common import is_interactive, stderr
from inferloop.cli.keys import warn_of_open_door
from inferloop.core.errors import InferloopError, UsageError

if TYPE_CHECKING:
    from inferloop.backends.native_options import NativeOptions
    from inferloop.backends.protocols import Generator
    from inferloop.backends.scripted import Script
    from inferloop.fleet.act.ranks import RankProcesses
    from inferloop.models.headers import ModelHeader
    from inferloop.models.resolve import ModelFiles
    from inferloop.serve.batch.service import BatchConfig
    from inferloop.serve.config import ServeConfig

_Lost = Future[InferloopError] | None
"""Set when what generates cannot go on, to why."""


@dataclass(frozen=True, slots=True)
class Asked:
    """`script`: play that instead of a model. `is_openvino`: use that instead of our engine, imported from
    `engine_packages` if those are given."""

    model: str
    served_model_name: str | None
    cache_dir: Path | None
    options: NativeOptions
    config: ServeConfig
    script: Script | None
    is_openvino: bool
    engine_packages: Path | None
    events: Path | None
    batch_dir: Path | None
    address: tuple[str, int]
    port_file: Path | None

    @property
    def name(self) -> str:
        return self.served_model_name or self.model


def run(asked: Asked) -> None:
    """Serve until SIGTERM or SIGINT; blocks. Raises InferloopError for what the machine or the model's files lack."""
    from inferloop.records.sink import DropSink, JsonlSink
    from inferloop.serve.app import build_app
    from inferloop.serve.run import bind, serve

    def tell(url: str) -> None:
        whom = "" if asked.config.keys is None else ", to who has an API key"
        ends = "(Ctrl-C stops it when running requests are done)"
        stderr.print(f"serving {asked.name} on {url}{whom}  {ends}", markup=False)

    with bind(*asked.address) as sock, contextlib.ExitStack() as stack:
        if asked.config.keys is None:
            warn_of_open_door(*sock.getsockname()[:2])
        batch = stack.enter_context(_batch(asked))
        sink = DropSink() if asked.events is None else JsonlSink(asked.events)
        content = None if asked.config.content_path is None else JsonlSink(asked.config.content_path)
        generator, lost = stack.enter_context(_generator(asked))
        app = build_app(generator, asked.config, sink, content_sink=content, batch=batch)
        serve(app, sock, port_file=asked.port_file, tell=tell if is_interactive() else None, lost=lost)


@contextlib.contextmanager
def _batch(asked: Asked) -> Iterator[BatchConfig | None]:
    """The folder of batch jobs, which is this process's alone meanwhile."""
    if asked.batch_dir is None:
        yield None
        return
    from inferloop.serve.batch.folder import Folder
    from inferloop.serve.batch.service import BatchConfig, places_for_rows

    max_running = asked.options.max_sequences if asked.script is None else asked.script.max_concurrency
    max_waiting = asked.options.max_waiting if asked.script is None else asked.script.max_waiting
    with contextlib.closing(Folder(asked.batch_dir)) as folder:
        yield BatchConfig(folder, places_for_rows(max_running, max_waiting), max_running + max_waiting)


@contextlib.contextmanager
def _generator(asked: Asked) -> Iterator[tuple[Generator, _Lost]]:
    """Started; stopped afterwards."""
    if asked.script is not None:
        yield _scripted(asked, asked.script), None
        return
    from inferloop.cli.models import model_progress
    from inferloop.models.resolve import resolve

    with model_progress() as progress:
        files = resolve(asked.model, cache_dir=asked.cache_dir, progress=progress)
    longest, length = files.header.shape.context_length, asked.options.context_length
    if length is not None and length > longest:
        raise UsageError(f"--context-length {length}: {asked.model} has a context of {longest} tokens")
    with _openvino(asked, files) if asked.is_openvino else _embedded(asked, files) as made:
        yield made


def _scripted(asked: Asked, script: Script) -> Generator:
    from inferloop.backends.scripted import ScriptedGenerator
    from inferloop.engine.text.answer import untaught_style

    style = untaught_style(asked.options.tool_call_parser, asked.options.reasoning_parser)
    return ScriptedGenerator(script, model_id=asked.name, answer_style=style)


@contextlib.contextmanager
def _openvino(asked: Asked, files: ModelFiles) -> Iterator[tuple[Generator, _Lost]]:
    from inferloop.backends.openvino import load_openvino
    from inferloop.backends.openvino_pipeline import OpenVinoOptions

    names = [field.name for field in dataclasses.fields(OpenVinoOptions) if field.name != "packages"]
    options = OpenVinoOptions(asked.engine_packages, **{name: getattr(asked.options, name) for name in names})
    made = load_openvino(files, options, served_name=asked.name, cache_dir=asked.cache_dir)
    made.start()
    try:
        yield made, None
    finally:
        made.stop()


@contextlib.contextmanager
def _embedded(asked: Asked, files: ModelFiles) -> Iterator[tuple[Generator, _Lost]]:
    from inferloop.backends.native_load import load_native
    from inferloop.cli.models import model_progress

    with _ranks(asked.options, files.header) as processes:
        ranks = None if processes is None else processes.ranks
        with model_progress() as progress:
            name = asked.served_model_name
            made = load_native(files, asked.options, served_name=name, progress=progress, ranks=ranks)
        if processes is not None:
            processes.watch()
        made.start()
        try:
            yield made, None if ranks is None else ranks.lost
        finally:
            made.stop()


@contextlib.contextmanager
def _ranks(options: NativeOptions, header: ModelHeader) -> Iterator[RankProcesses | None]:
    """The processes beside this one, started while this one gets itself ready; None where it is to compute alone.
    Raises UsageError for what they could not share, LaunchError when they cannot be started."""
    size = options.tensor_parallel_size
    if size == 1:
        yield None
        return
    from inferloop.backends.native_choice import check_parallel
    from inferloop.fleet.act.ranks import RankProcesses

    check_parallel(header, options)
    with RankProcesses(size) as processes:
        yield processes
