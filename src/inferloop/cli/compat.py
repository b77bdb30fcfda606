"""The numbers of a run as other load generators would print them, for people and for scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inferloop.cli.common import stdout
from inferloop.core.errors import UsageError

if TYPE_CHECKING:
    from inferloop.measure.timing import RequestTiming

CompatOption = Annotated[
    list[str] | None,
    typer.Option(
        "--compat",
        help="Also print the numbers as another tool defines them: vllm, guidellm, aiperf, sglang, inference-perf or "
        "llmperf. May be given several times.",
        show_default=False,
    ),
]


def check_compat(tools: Sequence[str] | None) -> tuple[str, ...]:
    """Raises UsageError for a tool that is not known, before anything is measured."""
    from inferloop.measure.compat import TOOLS

    for tool in tools or ():
        if tool not in TOOLS:
            raise UsageError(f"--compat {tool}: not known; known are {', '.join(TOOLS)}")
    return tuple(dict.fromkeys(tools or ()))


def compat_json(tools: Sequence[str], points: Mapping[str, Sequence[RequestTiming]]) -> dict[str, Any]:
    """Per tool and point what that tool would print."""
    from inferloop.measure.compat import compat_view

    return {tool: {name: compat_view(tool, rows).as_json() for name, rows in points.items()} for tool in tools}


def print_compat(tools: Sequence[str], points: Mapping[str, Sequence[RequestTiming]]) -> None:
    """A table per tool and point, each number with its definition."""
    from rich.markup import escape
    from rich.table import Table

    from inferloop.measure.compat import PERCENTILES, compat_view

    for tool in tools:
        for name, rows in points.items():
            view = compat_view(tool, rows)
            title = (
                f"{name} as {view.tool} defines it (ms; {view.num_used} requests used, {view.num_left_out} left out)"
            )
            table = Table(title=escape(title), title_justify="left", box=None, pad_edge=False, header_style="bold")
            table.add_column("number", no_wrap=True)
            for column in ("n", "mean", *(f"p{p}" for p in PERCENTILES)):
                table.add_column(column, justify="right")
            table.add_column("definition", overflow="fold")
            for n in view.numbers:
                values = [n.mean, *n.percentiles.values()]
                shown = ["-" if v is None else f"{v:.2f}" for v in values]
                table.add_row(escape(n.name), str(n.num_samples), *shown, escape(n.definition))
            stdout.print()
            stdout.print(table)
        known = compat_view(tool, ())
        stdout.print(f"counts    {known.counts}", markup=False)
        stdout.print(f"read      {known.read}", markup=False)
