"""`inferloop eval SUITE --target TARGET`: run a quality suite against a service."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from inferloop.bench.target import Launched
from inferloop.cli import wire
from inferloop.cli.common import (
    CacheDirOption,
    CaFileOption,
    InsecureOption,
    JsonOption,
    RunsDirOption,
    is_interactive,
    print_json,
    run_async,
    stderr,
    stdout,
    verb,
)
from inferloop.cli.engines import VenvOption
from inferloop.cli.report import report_input
from inferloop.contract.workload import ModelRef, QualityGate
from inferloop.core.digest import plain
from inferloop.evals.load import load_suite
from inferloop.evals.run import CaseResult, EvalRun, run_suite
from inferloop.pages.report import render_report
from inferloop.records.header import REPORT
from inferloop.records.run import RunWriter, open_run

EXIT_NEGATIVE = 1


@verb
def eval(  # noqa: A001  the verb is called that
    suite: Annotated[Path, typer.Argument(help="A suite file, such as evals/assistant.yaml.")],
    target: Annotated[
        str,
        typer.Option(
            help="A URL, embedded (our engine), or a backend to launch for the run, with flags after a space.",
            show_default=False,
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(help="Model to ask for, or to launch; default: the first that is listed, or the embedded one."),
    ] = None,
    minimum: Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Gate: the score to reach.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, max=256, help="Cases in flight.")] = 4,
    timeout_s: Annotated[float, typer.Option(min=0.1, max=86400, help="Seconds that one exchange may take.")] = 60.0,
    ca_file: CaFileOption = None,
    insecure: InsecureOption = False,
    venv: VenvOption = None,
    runs_dir: RunsDirOption = Path("runs"),
    cache_dir: CacheDirOption = None,
    json_output: JsonOption = False,
) -> None:
    """Ask every case of a suite, score the answers, write a run folder. Cases that fail to run stay in the count.

    A key for a URL is read from INFERLOOP_API_KEY. Exit code 1 when a gate was given and not passed, or when a case was
    wrong.

    Example: inferloop eval evals/assistant.yaml --target http://127.0.0.1:8000 --minimum 0.9
    """
    entry = wire.Entry(ca_file, insecure)
    name, flags = wire.target_flags(target, entry)
    loaded = load_suite(suite)
    launched = ModelRef(model or wire.EMBEDDED_MODEL)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=stderr, disable=not is_interactive(), transient=True)
    cases = bar.add_task("cases", total=len(loaded.cases))

    def tell(result: CaseResult) -> None:
        bar.advance(cases)
        if not json_output:
            _tell(result)

    known: list[Launched] = []

    async def main(log_dir: Path) -> EvalRun:
        async with wire.target(
            name, launched, log_dir=log_dir, cache_dir=cache_dir, entry=entry, flags=flags, venvs=venv
        ) as t:
            if t.launched is not None:
                known.append(t.launched)
            return await run_suite(
                loaded, t.at, model=model or t.model, concurrency=concurrency, timeout_s=timeout_s, on_result=tell
            )

    told = {"target": target, "insecure": insecure}
    gate = QualityGate(str(suite), minimum) if minimum is not None else None
    with RunWriter(runs_dir, verb="eval", service=loaded.name, target=target, options=told) as writer:
        run_async(lambda: wire.make_ready(name, launched, cache_dir))
        with writer.stage("suite", suite=str(suite)), bar:
            run = dataclasses.replace(run_async(lambda: main(writer.path)), target=target)  # not a port of that time
        for engine in known:
            run = dataclasses.replace(run, identity=run.identity or engine.identity)
            writer.update(options={**writer.header.options, "launched": plain(engine.told)})
        if run.identity is not None:
            writer.update(identity={"model_id": run.model, **run.identity})
        summary = writer.finish({"kind": "eval", **run.summary(gate)})
        writer.write_file(REPORT, render_report(report_input(open_run(writer.path))))
    if json_output:
        print_json(summary)
    else:
        _show(run, summary)
        stdout.print(f"report: {writer.path / REPORT}", soft_wrap=True, markup=False)
    right = run.tally.worst == 1.0
    if (gate and summary["verdict"] != "pass") or (not gate and not right):
        raise typer.Exit(EXIT_NEGATIVE)


def _tell(result: CaseResult) -> None:
    if result.score.value != 1.0:
        outcome = "wrong" if result.score.status == "scored" else result.score.status
        stderr.print(f"{outcome}: {result.case.id}: {result.score.reason}", markup=False)


def _show(run: EvalRun, summary: dict[str, Any]) -> None:
    table = Table(title=f"{run.suite.name} on {run.target}", title_justify="left", box=None, pad_edge=False)
    for name in ("tag", "cases", "scored", "score"):
        table.add_column(name, justify="left" if name == "tag" else "right")
    for name, tally in [*run.by_tag.items(), ("all", run.tally)]:
        score = "-" if tally.score is None else f"{tally.score:.3f}"
        table.add_row(name, str(tally.total), str(tally.scored), score)
    stdout.print(table)
    low, high = run.tally.interval
    mde = run.tally.mde
    stdout.print(
        f"95 % interval {low:.3f} to {high:.3f}" + (f"; so many cases would show a drop of {mde:.3f}" if mde else "")
    )
    if run.tally.unscored:
        stdout.print(f"counting cases without a score: between {run.tally.worst:.3f} and {run.tally.best:.3f}")
    for note in run.notes:
        stdout.print(f"note: {note}", markup=False)
    stdout.print(f"gate: {summary['verdict']}")
    for reason in summary["reasons"]:
        stdout.print(f"  {reason}", markup=False)
