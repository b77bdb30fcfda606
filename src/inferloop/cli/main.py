"""The `inferloop` command: registers the verbs, nothing else."""

from __future__ import annotations

import sys
from importlib import metadata
from typing import Annotated, cast

import typer

from inferloop.cli.batch import batch
from inferloop.cli.bench import bench
from inferloop.cli.check import check
from inferloop.cli.common import print_json
from inferloop.cli.eval import eval as eval_verb
from inferloop.cli.hardware import hardware
from inferloop.cli.models import app as models_app
from inferloop.cli.report import report
from inferloop.cli.serve import serve
from inferloop.cli.up import up

app = typer.Typer(
    name="inferloop",
    help="A workload contract goes in; a measured, sized, running and observed inference service comes out.",
    no_args_is_help=True,
    rich_markup_mode=None,  # boxes cut long options at 80 columns and turn up in logs
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _tell_version(asked: bool) -> None:
    if asked:
        typer.echo(f"inferloop {metadata.version('inferloop')}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


app.command(short_help="Validate a contract; show what has evidence.")(check)
app.command(short_help="The main job: from a contract to a proven service.")(up)
app.command(short_help="One OpenAI-compatible replica.")(serve)
app.command(short_help="Answer a file of requests, resumable.")(batch)
app.command(short_help="The frontier of one replica, into a run folder.")(bench)
app.command(name="eval", short_help="Run a quality suite against a service.")(eval_verb)
app.command(short_help="One HTML file for any run folder.")(report)
app.command(short_help="What this machine is, and how fast it reads and multiplies.")(hardware)
app.add_typer(models_app, name="models", short_help="List, fetch and verify the models known by name.")


_WrongUse = cast(type[Exception], typer.BadParameter.__mro__[1])
"""The command line does not parse. Typer carries this class but does not export it."""


def run() -> None:
    """Exits with the verb's code; with 2, and an object on stdout under --json, when the command line is wrong."""
    try:
        code = app(standalone_mode=False)
    except _WrongUse as error:
        error.show()  # type: ignore[attr-defined]
        if "--json" in sys.argv[1:]:
            print_json({"error": {"type": "UsageError", "message": error.format_message()}})  # type: ignore[attr-defined]
        sys.exit(2)
    sys.exit(code or 0)
