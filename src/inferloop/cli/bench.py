"""`inferloop bench CONTRACT --target TARGET`: measure one replica's frontier and judge it at the contract's peak."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inferloop.cli.common import (
    CacheDirOption,
    CaFileOption,
    InsecureOption,
    JsonOption,
    RunsDirOption,
    SeedOption,
    TokenizerOption,
    chosen_seed,
    is_interactive,
    print_json,
    run_async,
    stderr,
    stdout,
    verb,
)
from inferloop.cli.compat import CompatOption, check_compat, compat_json, print_compat
from inferloop.cli.engines import VenvOption
from inferloop.core.errors import UsageError
from inferloop.core.units import figure

if TYPE_CHECKING:
    from inferloop.bench.result import BenchResult
    from inferloop.bench.search import BenchProgress
    from inferloop.plan.capacity import Sizing

EXIT_BY_VERDICT = {"pass": 0, "not declared": 0, "void": 4}


@verb
def bench(
    contract: Annotated[Path, typer.Argument(help="The contract: YAML, TOML or JSON.")],
    target: Annotated[
        str,
        typer.Option(
            help="A URL, embedded (our engine), or a backend to launch for the run, with flags after a space "
            "(llamacpp threads=2)."
        ),
    ] = "embedded",
    model: Annotated[
        str | None, typer.Option(help="Model name to ask for; default: the only one there is.", show_default=False)
    ] = None,
    budget_s: Annotated[
        float, typer.Option("--budget-s", min=5.0, max=86400, help="Seconds the measurement may take.")
    ] = 240.0,
    points: Annotated[int, typer.Option(min=0, max=50, help="Most levels to search with; the last are long.")] = 12,
    peak: Annotated[
        float | None,
        typer.Option(min=0.0, help="Rate to judge at; default: the contract's peak; 0: none.", show_default=False),
    ] = None,
    seed: SeedOption = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Play the contract's rate_profile instead of searching; judge over it.")
    ] = False,
    rho: Annotated[
        float, typer.Option(min=0.05, max=0.99, help="Share of its capacity a replica is loaded to at the peak.")
    ] = 0.7,
    failure_headroom: Annotated[int, typer.Option(min=0, help="Replicas that may be lost at the peak.")] = 1,
    ignore_eos: Annotated[
        bool, typer.Option(help="Ask for answers of exactly the sampled length; hosted APIs refuse this.")
    ] = True,
    fresh_cache: Annotated[
        bool,
        typer.Option(
            help="Let no part of the run meet what the target's prefix cache holds from before, where it can: by a "
            "cache_salt (inferloop, vLLM), or by emptying the cache before each part (SGLang)."
        ),
    ] = True,
    ca_file: CaFileOption = None,
    insecure: InsecureOption = False,
    tokenizer: TokenizerOption = None,
    venv: VenvOption = None,
    runs_dir: RunsDirOption = Path("runs"),
    cache_dir: CacheDirOption = None,
    compat: CompatOption = None,
    json_output: JsonOption = False,
) -> None:
    """Measure serial, burst, the rates between them and the contract's peak; write a run folder.

    A key for a URL is read from INFERLOOP_API_KEY. Exits 1 when the objective is missed or cannot be certified, 4
    when the run is void.

    Example: inferloop bench contracts/assistant.yaml --target http://127.0.0.1:8000
    """
    from inferloop.bench.search import BenchOptions, run_bench
    from inferloop.cli import wire
    from inferloop.cli.interrupted import telling
    from inferloop.cli.report import write_report
    from inferloop.contract.load import load
    from inferloop.plan.capacity import size
    from inferloop.records.run import RunWriter, open_run

    entry = wire.Entry(ca_file, insecure, tokenizer=tokenizer)
    name, flags = wire.target_flags(target, entry)
    tools = check_compat(compat)
    loaded = load(contract)
    if profile and loaded.traffic.rate_profile is None:
        raise UsageError(f"--profile plays traffic.rate_profile, and {contract} has none")
    wire.check_ready(name, flags, loaded.model, entry, venv, asked=model)
    told = {"contract_text": contract.read_text(), "target": target, "insecure": insecure, "tokenizer": tokenizer}

    async def main(writer: RunWriter, options: BenchOptions) -> BenchResult:
        await wire.make_ready(name, loaded.model, cache_dir)
        async with wire.target(
            name,
            loaded.model,
            log_dir=writer.path,
            cache_dir=cache_dir,
            entry=entry,
            slo=loaded.slo,
            flags=flags,
            venvs=venv,
        ) as t:
            with _Bars() as bars:
                return await run_bench(
                    loaded, t.at, model or t.model, t.codec, options, writer, bars.tell, launched=t.launched
                )

    with RunWriter(runs_dir, verb="bench", service=loaded.service, contract=loaded, options=told) as writer:
        seed = chosen_seed(seed)  # told when nothing of what was asked for is wrong
        options = BenchOptions(
            seed=seed,
            budget_s=budget_s,
            num_points=points,
            peak_qps=peak,
            ignore_eos=ignore_eos,
            fresh_cache=fresh_cache,
            profile=profile,
        )
        with telling(lambda: writer.path):
            result = run_async(lambda: main(writer, options))
        sizing = size(loaded.traffic.qps.peak, result.capacity, rho=rho, failure_headroom=failure_headroom)
        summary = writer.finish({**result.as_summary(), "seed": seed, "replicas": sizing.as_json()})
        report = write_report(open_run(writer.path))
    measured = open_run(writer.path).points() if tools else {}
    if json_output:
        print_json({**summary, "compat": compat_json(tools, measured)} if tools else summary)
    else:
        show(result, sizing, report)
        print_compat(tools, measured)
    must_fit = not result.sets_own_rate  # else no capacity was looked for, and nothing can be sized
    raise typer.Exit(EXIT_BY_VERDICT.get(result.verdict, 1) or (0 if sizing.fits or not must_fit else 1))


class _Bars:
    """A bar per point on a terminal, a line per finished point elsewhere."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._bars = Progress(
            TextColumn("{task.description:<10}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=stderr,
            disable=not is_interactive(),
        )
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> _Bars:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def tell(self, news: BenchProgress) -> None:
        if news.text is not None:
            stderr.print(news.text, markup=False)
        if news.stage not in self._tasks:
            self._tasks[news.stage] = self._bars.add_task(news.stage, total=news.num_total)
        self._bars.update(self._tasks[news.stage], completed=news.num_done, total=news.num_total)


def show(result: BenchResult, sizing: Sizing, report: Path) -> None:
    """The frontier, the verdict per objective, the sizing, and where it all lies."""
    from inferloop.cli.tables import coloured, frontier_table, notes_of, response_table, sessions_table, slo_table

    stdout.print(frontier_table(result.points))
    responses = response_table(result.points)
    for table in (responses, sessions_table(result.judged)):
        if table is not None:
            stdout.print()
            stdout.print(table)
    if result.judged is not None:
        stdout.print()
        stdout.print(slo_table(result.judged))
    c = result.capacity
    stdout.print()
    above = "no measured rate failed" if c.high is None else f"{figure(c.high)} fails"
    if result.sets_own_rate and result.judged is not None:
        stdout.print(f"capacity  not looked for: the {result.judged.name} load sets its own rate")
    elif c.method == "undecided":
        stdout.print(f"capacity  not known: {c.reason}; {above}")
    else:
        stdout.print(f"capacity  {figure(c.qps)} queries/s of one replica: {figure(c.low)} passes, {above}; {c.method}")
    if c.interval is not None:
        i = c.interval
        width = f"{i.confidence:.0%} interval {figure(i.low)} to {figure(i.high)} (+-{i.half_width:.0%})"
        stdout.print(f"          {width}: {c.reason}", soft_wrap=True)
    k = result.calibration
    if k is not None:
        added = "" if k.ttft_p50_ms is None else f"adds {k.ttft_p50_ms:.2g} ms to a TTFT (p95 {k.ttft_p95_ms:.2g})"
        reaches = "" if k.max_qps is None else f"reaches {k.max_qps:.0f} streams/s"
        stdout.print(f"client    {reaches}, {added}: measured here against a server that does nothing")
    if not result.sets_own_rate:
        stdout.print(f"sizing    {sizing.reason}", markup=False)
    for note in notes_of(result):
        stdout.print(f"note      {note}", markup=False)
    if result.verdict == "void":
        for reason in result.reasons:
            stdout.print(f"void      {reason}", markup=False)
    stdout.print(f"verdict   {coloured(result.verdict)}")
    stdout.print(f"report    {report}", soft_wrap=True, markup=False)
