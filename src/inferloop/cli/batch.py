"""`inferloop batch FILE`: answer a file of requests, resumable, on a server's batch jobs or on one launched for it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import shutil
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from inferloop.backends.entry import unusable
from inferloop.backends.http import HttpError
from inferloop.cli import wire
from inferloop.cli.common import (
    CacheDirOption,
    CaFileOption,
    InsecureOption,
    JsonOption,
    is_interactive,
    print_json,
    run_async,
    stderr,
    stdout,
    verb,
)
from inferloop.core.errors import EnvironmentLacksError, UsageError
from inferloop.core.ids import new_id
from inferloop.records.files import write_atomic

if TYPE_CHECKING:
    from inferloop.backends.endpoint import Endpoint
    from inferloop.cli.batch_client import BatchClient, BatchView
    from inferloop.cli.batch_files import Input

EXIT_SOME_FAILED = 1
_RUN = "run.json"
_POLL_S = 0.5
_PATIENCE_S, _PATIENCE_OURS_S = 15.0, 2.0
"""How long a server that does not answer is taken to be starting again: its batch goes on by itself. Nobody starts the
one that was launched for this run."""


@dataclass(frozen=True, slots=True)
class Job:
    """One run of the command. `folder` holds what a later run needs to go on; it goes when all is in `output`.
    `metadata` is how the batch is known on the server."""

    source: Input
    rest: Path
    num_rest: int
    metadata: dict[str, str]
    output: Path
    errors: Path
    folder: Path


@verb
def batch(
    file: Annotated[Path, typer.Argument(help="JSONL in OpenAI's form: custom_id, method, url and body per line.")],
    target: Annotated[
        str,
        typer.Option(
            help="A URL whose server has /v1/batches, or embedded (our engine, launched for the run).",
            show_default=False,
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the answers go, as JSONL.", show_default=False)],
    model: Annotated[
        str | None,
        typer.Option(help="Model of rows that name none, and to launch; default: what rows name, or the embedded one."),
    ] = None,
    ca_file: CaFileOption = None,
    insecure: InsecureOption = False,
    cache_dir: CacheDirOption = None,
    json_output: JsonOption = False,
) -> None:
    """Answer every request of FILE. Run again with the same FILE and OUTPUT, it goes on: answers that OUTPUT has are
    kept (rows are known by custom_id), rows that failed are tried again.

    Failed rows go to OUTPUT with the suffix .errors.jsonl. Exit code 1 when there are any, 2 when FILE is wrong; then
    nothing ran, and every wrong line was told. A key for a URL is read from INFERLOOP_API_KEY.

    Example: inferloop batch requests.jsonl --target embedded --output answers.jsonl
    """
    from inferloop.cli.batch_files import held, read_input

    entry = wire.Entry(ca_file, insecure)
    wire.check_target(target, entry)
    if target in wire.ENGINES:
        raise UsageError(
            f"--target {target}: batch jobs are worked off by our own engine or by a server with /v1/batches"
        )
    launched = not wire.is_url(target)
    if insecure:
        stderr.print(f"{target}: its certificate is not checked (--insecure)", markup=False)
    if file.resolve() in (output.resolve(), _errors_of(output).resolve()):
        raise UsageError(f"--output {output} would be written over {file}; choose another")
    source = read_input(file, with_default_model=model is not None or launched)
    name = model or (min(source.models) if len(source.models) == 1 else wire.EMBEDDED_MODEL)
    folder = output.with_name(output.name + ".batch")
    t0_s = time.monotonic()
    try:
        with held(folder, output):
            job = _job(source, output, folder, name)
            done = run_async(lambda: _run(job, target, entry, name, cache_dir)) if job.num_rest else None
            shutil.rmtree(folder)
    except KeyboardInterrupt:
        how = "to go on" if launched else "the server goes on by itself; for its answers"
        stderr.print(f"{how}: {_command(file, target, entry, output, model, cache_dir)}", markup=False, soft_wrap=True)
        raise
    except HttpError as error:
        if error.is_distrust:
            raise unusable(wire.endpoint(target, entry), error) from error
        command = _command(file, target, entry, output, model, cache_dir)
        raise EnvironmentLacksError(f"the server went away: {error}", fix=f"To go on: {command}") from error
    summary = _summary(job, done, time.monotonic() - t0_s)
    print_json(summary) if json_output else _show(summary)
    if summary["failed"]:
        raise typer.Exit(EXIT_SOME_FAILED)


def _errors_of(output: Path) -> Path:
    return output.with_suffix(".errors.jsonl")


def _job(source: Input, output: Path, folder: Path, model: str) -> Job:
    """What is left to do, written into the folder. Raises UsageError, RecordWriteError."""
    from inferloop.cli.batch_files import answered_in, write_rest

    known = answered_in(output)
    if strangers := known.keys() - {row.custom_id for row in source.rows}:
        raise UsageError(
            f"{output} has answers to rows that {source.path} has not, such as {min(strangers)!r}; choose another"
        )
    rest = folder / "input.jsonl"
    num_rest, digest = write_rest(source, known, model if source.num_unnamed else None, rest)
    run_id = _run_id(folder, source.path, digest) if num_rest else ""
    if known:
        stderr.print(f"{output} has {len(known)} answers already; {num_rest} rows are left", markup=False)
    return Job(source, rest, num_rest, {"inferloop_run": run_id}, output, _errors_of(output), folder)


def _run_id(folder: Path, file: Path, digest: str) -> str:
    """Made by the first run and kept until its answers are in the output, so that a later one finds its batch.

    Raises UsageError when FILE is another one by now, RecordWriteError.
    """
    path = folder / _RUN
    try:
        run = json.loads(path.read_bytes())
        if run["input"] != digest:
            raise UsageError(f"{file} has changed since the run in {folder} began; delete that folder to begin anew")
        return str(run["id"])
    except FileNotFoundError:
        run = {"id": new_id("run"), "input": digest}
        write_atomic(path, json.dumps(run).encode())
        return str(run["id"])


async def _run(job: Job, target: str, entry: wire.Entry, model: str, cache_dir: Path | None) -> tuple[BatchView, int]:
    """The batch, and how many rows the output answers now: works until the batch has ended and its answers
    are there."""
    from inferloop.cli.batch_client import BatchClient

    async with _server(job, target, entry, model, cache_dir) as at:
        client = BatchClient(at)
        try:
            if (view := await client.find(job.metadata)) is None:
                file_id = await client.upload(job.rest)
                view = await client.create(file_id, job.source.endpoint, job.metadata)
            patience_s = _PATIENCE_S if wire.is_url(target) else _PATIENCE_OURS_S
            view = await _wait(client, view, job.num_rest, patience_s)
            _check(job, view)
            return view, await _collect(client, job, view)
        finally:
            await client.close()


@contextlib.asynccontextmanager
async def _server(
    job: Job, target: str, entry: wire.Entry, model: str, cache_dir: Path | None
) -> AsyncIterator[Endpoint | str]:
    """A URL as it is, or one of ours whose batch jobs lie beside the output."""
    from inferloop.backends.serve_process import launch_spec
    from inferloop.contract.workload import ModelRef

    if wire.is_url(target):
        yield wire.endpoint(target, entry)
        return
    jobs = str(job.folder / "jobs")
    if target == "embedded":
        await wire.make_ready(target, ModelRef(model), cache_dir)
        spec = wire.embedded_spec(ModelRef(model), cache_dir, batch_dir=jobs)
    else:
        spec = launch_spec(model, {"batch_dir": jobs}, backend=target)
    async with wire.launched(spec, log_path=job.folder / "server.log") as url:
        yield url


async def _wait(client: BatchClient, view: BatchView, num_rows: int, patience_s: float) -> BatchView:
    """Poll until the batch has ended. A server that is away for a moment is waited for."""
    from inferloop.cli.batch_client import RUNNING

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*columns, TextColumn("{task.fields[left]}"), console=stderr, disable=not is_interactive())
    loop = asyncio.get_running_loop()
    with bar:
        task = bar.add_task("rows", total=num_rows, left="")
        t_heard_s = loop.time()
        while view.status in RUNNING:
            _draw(bar, task, view)
            await asyncio.sleep(_POLL_S)
            try:
                view = await client.batch(view.id)
                t_heard_s = loop.time()
            except HttpError:
                if loop.time() - t_heard_s > patience_s:
                    raise
        _draw(bar, task, view)
    return view


def _draw(bar: Progress, task: TaskID, view: BatchView) -> None:
    counts, extension = view.request_counts, view.inferloop
    eta_s = extension.eta_s if extension is not None else None
    left = "" if eta_s is None else f"{eta_s:.0f} s left"
    bar.update(task, completed=counts.completed + counts.failed if counts else 0, left=left)


def _check(job: Job, view: BatchView) -> None:
    """Raises UsageError for a file that the server found wrong."""
    from inferloop.cli.batch_files import wrong_lines

    if view.status == "failed":
        shutil.rmtree(job.folder, ignore_errors=True)
        problems = view.errors.data if view.errors is not None else []
        raise wrong_lines(job.source.path, [(p.line, p.message) for p in problems] or [(None, "the batch failed")])


async def _collect(client: BatchClient, job: Job, view: BatchView) -> int:
    """Put the answers into the output, and tidy up on the server what we brought there. Gives how many answers the
    output has: a run that was cut short at the end may have put these answers there before."""
    from inferloop.cli.batch_files import merge

    answers, failures = job.folder / "output.jsonl", job.folder / "errors.jsonl"
    for file_id, path in ((view.output_file_id, answers), (view.error_file_id, failures)):
        path.unlink(missing_ok=True)
        if file_id is not None:
            await client.download(file_id, path)
    num_answered = merge(job.source, [job.output, answers], job.output)
    if not merge(job.source, [failures], job.errors):
        job.errors.unlink(missing_ok=True)
    (job.folder / _RUN).unlink()  # from here on another run begins anew: the files on the server go
    for file_id in (view.input_file_id, view.output_file_id, view.error_file_id):
        if file_id is not None:
            with contextlib.suppress(UsageError, EnvironmentLacksError, HttpError):  # they are only litter now
                await client.delete(file_id)
    return num_answered


def _summary(job: Job, done: tuple[BatchView, int] | None, duration_s: float) -> dict[str, Any]:
    num_rows = len(job.source.rows)
    view, num_answered = done if done is not None else (None, num_rows)
    usage = view.usage if view is not None else None
    failed = num_rows - num_answered  # those that never ran, too
    return {
        "kind": "batch",
        "status": view.status if view is not None else "completed",
        "rows": num_rows,
        "completed": num_answered,
        "failed": failed,
        "kept": num_rows - job.num_rest,
        "input_tokens": usage.input_tokens if usage is not None else 0,
        "output_tokens": usage.output_tokens if usage is not None else 0,
        "duration_s": round(duration_s, 3),
        "output": str(job.output),
        "errors": str(job.errors) if failed else None,
    }


def _show(summary: dict[str, Any]) -> None:
    stdout.print(
        f"{summary['completed']} of {summary['rows']} rows answered in {summary['output']} "
        f"({summary['kept']} of them before), {summary['output_tokens']} tokens in {summary['duration_s']:.1f} s",
        markup=False,
        soft_wrap=True,
    )
    if summary["failed"]:
        stdout.print(
            f"{summary['failed']} failed, see {summary['errors']}; the same command tries them again",
            markup=False,
            soft_wrap=True,
        )


def _command(
    file: Path, target: str, entry: wire.Entry, output: Path, model: str | None, cache_dir: Path | None
) -> str:
    words = ["inferloop", "batch", str(file), "--target", target, "--output", str(output)]
    words += ["--model", model] if model is not None else []
    words += ["--ca-file", str(entry.ca_file)] if entry.ca_file is not None else []
    words += ["--insecure"] if entry.insecure else []
    words += ["--cache-dir", str(cache_dir)] if cache_dir is not None else []
    return shlex.join(words)
