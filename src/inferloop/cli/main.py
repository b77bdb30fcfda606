"""The `inferloop` command: registers the verbs, nothing else."""

from __future__ import annotations

import typer

from inferloop.cli.bench import bench
from inferloop.cli.check import check
from inferloop.cli.eval import eval as eval_verb
from inferloop.cli.models import app as models_app
from inferloop.cli.report import report
from inferloop.cli.serve import serve
from inferloop.cli.up import up

app = typer.Typer(
    name="inferloop",
    help="A workload contract goes in; a measured, sized, running and observed inference service comes out.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


app.command()(check)
app.command()(up)
app.command()(serve)
app.command()(bench)
app.command(name="eval")(eval_verb)
app.command()(report)
app.add_typer(models_app, name="models")


def run() -> None:
    app()
