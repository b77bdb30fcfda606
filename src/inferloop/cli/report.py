"""`inferloop report RUN`: the HTML page of a run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from inferloop.cli.common import JsonOption, RunsDirOption, print_json, stderr, stdout, verb
from inferloop.cli.compat import CompatOption, check_compat, compat_json, print_compat
from inferloop.core.digest import plain
from inferloop.core.errors import InferloopError, UsageError
from inferloop.pages.report import render_report
from inferloop.pages.side_by_side import render_side_by_side
from inferloop.records.files import write_atomic
from inferloop.records.header import REPORT
from inferloop.records.run import RunRecord, open_run

_BENCHES = ("bench", "up")


@verb
def report(
    run: Annotated[Path, typer.Argument(help="A run folder, or its run.json.")],
    other: Annotated[Path | None, typer.Argument(help="A second run, to compare with.", show_default=False)] = None,
    more: Annotated[list[Path] | None, typer.Argument(help="Further runs, with --merge.", show_default=False)] = None,
    merge: Annotated[
        bool,
        typer.Option(
            "--merge",
            help="Join runs that several machines made of one service at the same time into a new run folder.",
        ),
    ] = False,
    runs_dir: RunsDirOption = Path("runs"),
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where to write; default: report.html in the run folder.")
    ] = None,
    compat: CompatOption = None,
    json_output: JsonOption = False,
) -> None:
    """Write one HTML file that shows a run, or two side by side. It opens offline, on any device.

    Example: inferloop report runs/20260102T030405Z-up-assistant-0a1b2c3d
    """
    tools = check_compat(compat)
    if merge:
        from inferloop.cli.merge import merge_runs

        record = merge_runs([path for path in (run, other, *(more or ())) if path is not None], runs_dir)
        for note in (record.summary or {}).get("notes", ()):
            stderr.print(f"note      {note}", markup=False)
    elif other is not None:
        if more:
            raise UsageError("two runs stand side by side; further ones need --merge")
        record, second = open_run(run), open_run(other)
        for one in (record, second):
            if one.header.verb not in _BENCHES:
                raise UsageError(
                    f"runs of bench or up stand side by side, and {one.path} is one of {one.header.verb}: its own page "
                    "shows it"
                )
        page = render_side_by_side({"A": report_input(record), "B": report_input(second)})
        target = write_page(page, output or second.path / "side-by-side.html")
        told = {"run": str(record.path), "other": str(second.path), "report": str(target), "status": record.status}
        if json_output:
            print_json(told)
        else:
            stdout.print(str(target), soft_wrap=True)
        return
    else:
        record = open_run(run)
    target = write_report(record, output)
    if json_output:
        told = {"run": str(record.path), "report": str(target), "status": record.status}
        print_json({**told, "compat": compat_json(tools, record.points())} if tools else told)
    else:
        stdout.print(str(target), soft_wrap=True)
        print_compat(tools, record.points() if tools else {})


def write_report(record: RunRecord, output: Path | None = None) -> Path:
    """Render and write the page, whole or not at all; by default into the run's folder. Returns where.

    Raises UsageError for a folder as `output`, RecordError for a run that cannot be read.
    """
    return write_page(render_report(report_input(record)), output or record.path / REPORT)


def write_page(page: str, target: Path) -> Path:
    """Whole or not at all. Raises UsageError for a folder."""
    if target.is_dir():
        raise UsageError(f"{target} is a directory; name a file")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(target, page.encode())
    except OSError as error:
        raise InferloopError(f"cannot write {target}: {error.strerror or error}") from error
    return target


def report_input(record: RunRecord) -> dict[str, Any]:
    """What pages.report.render_report takes, from a run as it lies on disk. Raises RecordError."""
    text = record.header.options.get("contract_text")
    return {
        "header": plain(record.header),
        "summary": record.summary,
        "status": record.status,
        "requests": record.timings,
        "points": record.points(),
        "stages": [plain(event) for event in record.stages],
        "contract_text": text if isinstance(text, str) else None,
    }
