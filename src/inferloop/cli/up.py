"""`inferloop up CONTRACT`: the main job, from a contract to a proven, running service."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from inferloop.cli.common import (
    CacheDirOption,
    JsonOption,
    RunsDirOption,
    SeedOption,
    print_json,
    run_async,
    stderr,
    stdout,
    verb,
)
from inferloop.cli.engines import VenvOption
from inferloop.cli.keys import KeyFileOption, KeyOption, server_keys
from inferloop.core.cores import usable_cores

if TYPE_CHECKING:
    from inferloop.cli.up_stages import Outcome
    from inferloop.fleet.act.supervise import Fleet

EXIT_BY_VERDICT = {"pass": 0, "void": 4}


@verb
def up(
    contract: Annotated[Path, typer.Argument(help="The contract: YAML, TOML or JSON.")],
    target: Annotated[
        str, typer.Option(help="What the replicas are: embedded (our engine) or openvino (behind our serve).")
    ] = "embedded",
    once: Annotated[
        bool, typer.Option("--once", help="Do everything, prove the service with real chats, stop, exit by verdict.")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the gateway; 0 takes a free one.")] = 0,
    api_key_file: KeyFileOption = None,
    api_key: KeyOption = None,
    seed: SeedOption = None,
    bench_budget_s: Annotated[float, typer.Option(min=10, max=86400, help="Time for the frontier.")] = 170.0,
    rho: Annotated[
        float, typer.Option(help="Share of its capacity that a replica is loaded to at the peak.", min=0.05, max=0.99)
    ] = 0.7,
    failure_headroom: Annotated[int, typer.Option(min=0, help="Spare replicas that may be lost at the peak.")] = 1,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Compute threads of one replica; default: every core.")
    ] = None,
    kv_memory_mib: Annotated[int, typer.Option(min=16, help="KV memory of one replica.")] = 256,
    venv: VenvOption = None,
    runs_dir: RunsDirOption = Path("runs"),
    cache_dir: CacheDirOption = None,
    json_output: JsonOption = False,
) -> None:
    """Fetch the model, start a replica, check its answers, measure its frontier, size the fleet, run it behind a
    gateway, and prove it. Everything lands in a run folder with a report. Ctrl-C stops the service.

    Example: inferloop up contracts/assistant.yaml --once
    """
    from inferloop.cli.interrupted import telling
    from inferloop.cli.narrate import Narrator
    from inferloop.cli.report import write_report
    from inferloop.cli.up_stages import Up, UpOptions
    from inferloop.core.clock import RealClock
    from inferloop.records.run import open_run

    options = UpOptions(
        contract=contract,
        runs_dir=runs_dir,
        port=port,
        seed=seed,
        bench_budget_s=bench_budget_s,
        rho=rho,
        failure_headroom=failure_headroom,
        threads=threads or usable_cores(),
        kv_memory_mib=kv_memory_mib,
        cache_dir=cache_dir,
        target=target,
        venvs=tuple(venv or ()),
        keys=server_keys(api_key_file),
    )
    job = Up(options, Narrator(stderr, RealClock()), lambda folder: write_report(open_run(folder)))

    async def serve_until(outcome: Outcome, fleet: Fleet) -> None:
        """With --once: not at all. Else until Ctrl-C or SIGTERM, which is how a service ends in good order."""
        if once:
            return
        _tell(outcome, json_output)
        whom = ", to who has an API key" if options.keys else ""
        stderr.print(f"\nserving on {fleet.url}{whom}  (Ctrl-C stops it)")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()
            stderr.print("stopping: running requests may finish")

    with telling(lambda: job.folder):
        outcome = run_async(lambda: job.run(serve_until))
    if once or outcome.summary["proof"] is None:
        _tell(outcome, json_output)
    if not once and outcome.summary["proof"] is None:
        missed = ", ".join(g.name for g in outcome.gates if g.verdict in ("fail", "inconclusive", "void"))
        stderr.print(f"\nno service was started, because of: {missed}", markup=False)
    raise typer.Exit(EXIT_BY_VERDICT.get(outcome.summary["verdict"], 1))


def _tell(outcome: Outcome, json_output: bool) -> None:
    if json_output:
        print_json(outcome.summary)
        return
    from inferloop.cli.tables import coloured, frontier_table, gates_table, notes_of, slo_table

    bench = outcome.bench
    if bench is not None:
        stdout.print()
        stdout.print(frontier_table(bench.points))
        if bench.judged is not None:
            stdout.print()
            stdout.print(slo_table(bench.judged))
    if outcome.sizing is not None:
        stdout.print(f"\n[bold]Sizing[/]  {outcome.sizing.reason}; started here: {outcome.summary['fit']['start']}")
    stdout.print()
    stdout.print(gates_table(outcome.gates))
    stdout.print()
    for note in () if bench is None else notes_of(bench):
        told = note.replace("--budget-s", "--bench-budget-s")  # which is how it is called here
        stdout.print(f"note     {told}", markup=False)
    stdout.print(f"verdict  {coloured(outcome.summary['verdict'])}")
    stdout.print(f"report   {outcome.summary['report']}", soft_wrap=True)
