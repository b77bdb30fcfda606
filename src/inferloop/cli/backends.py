"""`inferloop backends`: the engines that can be launched, whether they are here, and what they can do."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from inferloop.cli.common import JsonOption, print_json, stdout, verb
from inferloop.cli.engines import VenvOption
from inferloop.core.errors import UsageError, nearest


@verb
def backends(
    name: Annotated[
        str | None, typer.Argument(help="One of them, with what it can do; default: all, in short.", show_default=False)
    ] = None,
    venv: VenvOption = None,
    json_output: JsonOption = False,
) -> None:
    """Show which engines are installed, where, in which version, how to install the others, and what each can do.

    Looked at are this environment, those below .peers, the PATH and every --venv. Nothing is started.

    Example: inferloop backends vllm --venv vllm=/opt/vllm
    """
    found = [_row(kind_name, venv or []) for kind_name in _names()]
    if name is not None:
        if name not in _names():
            close = nearest(name, _names())
            hint = f"did you mean {close!r}?" if close else f"known: {', '.join(_names())}"
            raise UsageError(f"unknown backend {name!r} ({hint})")
        found = [row for row in found if row["name"] == name]
    if json_output:
        print_json({"backends": found})
    elif name is not None:
        _show_one(found[0])
    else:
        _show(found)


def _names() -> list[str]:
    from inferloop.backends.discover import ENGINES

    return ["embedded", "scripted", *ENGINES]


def _row(name: str, venvs: list[str]) -> dict[str, Any]:
    if name in ("embedded", "scripted"):
        return _own(name)
    from inferloop.backends.discover import ENGINES, find, parse_venvs

    kind = ENGINES[name]
    here = find(kind, parse_venvs(venvs))
    return {
        "name": name,
        "about": kind.about,
        "installed": here is not None and not here.missing,
        "version": here.version if here else None,
        "where": here.where if here else None,
        "missing": list(here.missing) if here else [],
        "install": kind.install,
        "verified": kind.verified,
        "tuned": kind.tuned,
        "reads": list(kind.reads),
        "homepage": kind.homepage,
        "capabilities": _told(kind.capabilities),
    }


def _own(name: str) -> dict[str, Any]:
    from importlib.metadata import version

    from inferloop.backends.serve_process import launch_spec

    about = {"embedded": "our engine", "scripted": "plays a timing script, without a model"}
    return {
        "name": name,
        "about": about[name],
        "installed": True,
        "version": version("inferloop"),
        "where": "this environment",
        "missing": [],
        "install": "",
        "verified": version("inferloop"),
        "tuned": "defaults of inferloop serve" if name == "embedded" else "",
        "reads": ["gguf", "hf"] if name == "embedded" else [],
        "homepage": "",
        "capabilities": _told(launch_spec("model", backend=name).capabilities),
    }


def _told(capabilities: Any) -> dict[str, dict[str, str]]:
    return {name: {"support": c.support, "why": c.why} for name, c in capabilities.items()}


def _show(rows: list[dict[str, Any]]) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("backend", "version", "where", "last seen to work", "what it is"):
        table.add_column(column, overflow="fold")
    for row in rows:
        version = (
            row["version"] if row["installed"] else "-" if row["version"] is None else f"{row['version']}, not whole"
        )
        where = row["where"] or f"not here: {row['install']}"
        if row["missing"]:
            where = f"{where}: lacks {', '.join(row['missing'])}"
        table.add_row(row["name"], version, escape(where), escape(row["verified"]), escape(row["about"]))
    stdout.print(table)
    stdout.print("\nwhat one of them can do: inferloop backends NAME", markup=False)


_FORMATS = {"gguf": "GGUF files", "hf": "Hugging Face directories"}


def _show_one(row: dict[str, Any]) -> None:
    from rich.markup import escape
    from rich.table import Table

    state = f"{row['version']} in {row['where']}" if row["version"] else "not here"
    stdout.print(f"{row['name']}  {row['about']}", markup=False)
    stdout.print(
        f"installed  {state}" + (f", lacks {', '.join(row['missing'])}" if row["missing"] else ""), markup=False
    )
    if not row["installed"]:
        stdout.print(f"install    {row['install']}", markup=False)
    stdout.print(f"last seen  {row['verified']}", markup=False)
    if row["tuned"]:
        stdout.print(f"flags      {row['tuned']}", markup=False)
    stdout.print(f"reads      {' and '.join(_FORMATS[form] for form in row['reads']) or 'no model'}\n", markup=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("what", "", "why"):
        table.add_column(column, overflow="fold")
    for name, told in row["capabilities"].items():
        table.add_row(name, told["support"], escape(told["why"]))
    stdout.print(table)
