"""The `inferloop` command: registers the verbs, nothing else."""

from __future__ import annotations

import gc
import sys
from importlib import import_module
from typing import Annotated, Any, cast

import typer
from typer.core import TyperGroup

from inferloop.cli.common import EXIT_INTERRUPTED, print_json

VERBS = {
    "check": "Validate a contract; show what has evidence.",
    "up": "The main job: from a contract to a proven service.",
    "serve": "One OpenAI-compatible replica.",
    "batch": "Answer a file of requests, resumable.",
    "bench": "The frontier of one replica, into a run folder.",
    "compare": "The same requests on several targets, in turns.",
    "eval": "Run a quality suite against a service.",
    "report": "One HTML file for any run folder.",
    "backends": "The engines that can be launched, and what each can do.",
    "hardware": "What this machine is, and how fast it reads and multiplies.",
    "models": "List, fetch and verify the models known by name.",
}
"""Each is a function of its name, or a Typer, in a module of its name."""


def verb_command(name: str) -> Any:
    """The command behind a verb, its module imported."""
    found = getattr(import_module(f"inferloop.cli.{name}"), name)
    if not isinstance(found, typer.Typer):
        function, found = found, typer.Typer(rich_markup_mode=None, add_completion=False)
        found.command(name)(function)
    return typer.main.get_command(found)


class _Verbs(TyperGroup):
    """Imports a verb when it is called: each brings packages that the others start faster without."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in VERBS:
            self.add_command(verb_command(args[0]), args[0])
        if args[:1] != ["serve"]:  # which collects from when it serves on: what it loads stays, too
            gc.enable()
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # while a verb was imported; afterwards it says so itself
            sys.stderr.write("interrupted\n")
            if "--json" in sys.argv[1:]:
                print_json({"error": {"type": "Interrupted", "message": "interrupted"}})
            raise typer.Exit(EXIT_INTERRUPTED) from None


app = typer.Typer(
    name="inferloop",
    cls=_Verbs,
    help="A workload contract goes in; a measured, sized, running and observed inference service comes out.",
    no_args_is_help=True,
    rich_markup_mode=None,  # boxes cut long options at 80 columns and turn up in logs
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _tell_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"inferloop {version('inferloop')}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def _not_yet() -> None:
    """Stands for a verb until it is called."""


for _name, _help in VERBS.items():
    app.command(_name, short_help=_help)(_not_yet)


WrongUse = cast(type[Exception], typer.BadParameter.__mro__[1])
"""The command line does not parse. Typer carries this class but does not export it."""


def run() -> None:
    """Exits with the verb's code; with 2, and an object on stdout under --json, when the command line is wrong."""
    try:
        code = app(standalone_mode=False)
    except WrongUse as error:
        error.show()  # type: ignore[attr-defined]
        if "--json" in sys.argv[1:]:
            print_json({"error": {"type": "UsageError", "message": error.format_message()}})  # type: ignore[attr-defined]
        sys.exit(2)
    sys.exit(code or 0)
