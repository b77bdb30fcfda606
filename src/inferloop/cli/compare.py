"""`inferloop compare CONTRACT --targets A,B`: the same frozen requests on several targets, and what differs."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from dataclasses import replace
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
    print_json,
    run_async,
    stderr,
    stdout,
    verb,
)
from inferloop.cli.engines import VenvOption
from inferloop.core.errors import UsageError

if TYPE_CHECKING:
    from inferloop.bench.compare_result import CompareResult
    from inferloop.records.run import RunWriter


@verb
def compare(
    contract: Annotated[Path, typer.Argument(help="The contract: YAML, TOML or JSON.")],
    targets: Annotated[
        str,
        typer.Option(
            help="Separated by commas: URLs, or backends to launch, with flags of `inferloop serve` or of the engine "
            "after a space (embedded kv_dtype=int8). The others are compared with the first.",
            show_default=False,
        ),
    ],
    rates: Annotated[
        str | None,
        typer.Option(
            help="Requests/s, separated by commas; default: the contract's peak, and 70 % of what each target "
            "completes of a burst, as one where they lie close together."
        ),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(
            min=2,
            max=100,
            help="How often each target is measured at each rate; default: 4, or what fits the budget.",
            show_default=False,
        ),
    ] = None,
    window_s: Annotated[
        float | None,
        typer.Option(
            "--window-s",
            min=0.5,
            max=3600,
            help="How long it is measured each time; default: what certifies a p95 at that rate, or fits the budget.",
            show_default=False,
        ),
    ] = None,
    budget_s: Annotated[
        float | None,
        typer.Option(
            "--budget-s",
            min=5.0,
            max=86400,
            help="Seconds that all may take, the start of the targets included; default: 900, or no bound where rounds "
            "and windows are given.",
            show_default=False,
        ),
    ] = None,
    seed: SeedOption = None,
    ignore_eos: Annotated[
        bool, typer.Option(help="Ask for answers of exactly the sampled length; hosted APIs refuse this.")
    ] = True,
    fresh_cache: Annotated[
        bool,
        typer.Option(
            help="Let no window meet what a target's prefix cache holds from before, where it can: by a cache_salt "
            "(inferloop, vLLM), or by emptying the cache before each window (SGLang)."
        ),
    ] = True,
    ca_file: CaFileOption = None,
    insecure: InsecureOption = False,
    tokenizer: TokenizerOption = None,
    venv: VenvOption = None,
    runs_dir: RunsDirOption = Path("runs"),
    cache_dir: CacheDirOption = None,
    json_output: JsonOption = False,
) -> None:
    """Send the same requests to every target in turns, and tell the differences that chance does not explain.

    The first target is measured against itself as well: what differs there is the noise floor.
    A key for URLs is read from INFERLOOP_API_KEY; one for the second alone from INFERLOOP_API_KEY_B, and so on. Exits 4
    when a target could not be compared.

    Example: inferloop compare contracts/assistant.yaml --targets "embedded,embedded kv_dtype=int8" --rates 1,2
    """
    from inferloop.bench.compare import CompareOptions, Contender, run_compare
    from inferloop.bench.compare_plan import DEFAULT_BUDGET_S
    from inferloop.cli import wire
    from inferloop.cli.interrupted import telling
    from inferloop.cli.report import write_report
    from inferloop.contract.load import load
    from inferloop.records.run import RunWriter, open_run

    wanted = []
    has_url = any(wire.is_url(text.strip()) for text in targets.split(","))
    for number, text in enumerate(targets.split(",")):
        # What is not https takes part in no question of certificates, as long as another target does.
        is_https = text.strip().startswith("https://") or "https://" not in targets
        label = chr(ord("A") + number)
        entry = wire.Entry(ca_file, insecure, label) if is_https else wire.Entry(label=label)
        if wire.is_url(text.strip()) or not has_url:  # what is launched beside a URL has its model's own
            entry = replace(entry, tokenizer=tokenizer)
        wanted.append((text.strip(), entry, *wire.target_flags(text, entry)))
    if len(wanted) < 2:
        raise UsageError("--targets needs at least two, separated by commas")
    loaded = load(contract)
    at_rates = _rates(rates)
    for _, entry, name, flags in wanted:  # all of them before the first is started, which may take minutes
        wire.check_ready(name, flags, loaded.model, entry, venv)
    if budget_s is None and not (rounds and window_s):
        budget_s = DEFAULT_BUDGET_S
    bound = (
        "as long as its rounds take"
        if budget_s is None
        else (f"{budget_s:g} s at most" if budget_s < 100 else f"{budget_s / 60:.3g} min at most")
    )
    begin = time.monotonic()

    async def main(writer: RunWriter, options: CompareOptions) -> CompareResult:
        async with AsyncExitStack() as stack:
            contenders = []
            for text, entry, name, flags in wanted:
                up = await stack.enter_async_context(
                    wire.target(
                        name,
                        loaded.model,
                        log_dir=writer.path,
                        cache_dir=cache_dir,
                        entry=entry,
                        slo=loaded.slo,
                        flags=flags,
                        log_name=f"{str(entry.label).lower()}-{name}",
                        venvs=venv,
                    )
                )
                words = tuple(text.split()[1:])
                contenders.append(Contender(text, up.at, up.model, up.codec, words, up.launched, up.setup, up.process))
                stderr.print(f"{entry.label}  {text}: up after {time.monotonic() - begin:.0f} s", markup=False)
            left_s = None if budget_s is None else budget_s - (time.monotonic() - begin)
            return await run_compare(loaded, contenders, replace(options, budget_s=left_s), writer, _tell)

    told = {"contract_text": contract.read_text(), "insecure": insecure, "tokenizer": tokenizer}
    with RunWriter(runs_dir, verb="compare", service=loaded.service, contract=loaded, options=told) as writer:
        seed = chosen_seed(seed)
        stderr.print(f"{len(wanted)} targets, {bound}; the plan is told when they are up", markup=False)
        options = CompareOptions(*(at_rates, seed, rounds, window_s), ignore_eos=ignore_eos, fresh_cache=fresh_cache)
        with telling(lambda: writer.path):
            result = run_async(lambda: main(writer, options))
        summary = writer.finish({**result.as_summary(), "seed": seed})
        report = write_report(open_run(writer.path))
    if json_output:
        print_json(summary)
    else:
        show(summary, report)
    raise typer.Exit(4 if summary["reasons"] else 0)


def _rates(text: str | None) -> tuple[float, ...]:
    """None: they are chosen when the first target is up."""
    if text is None:
        return ()
    try:
        found = tuple(dict.fromkeys(float(word) for word in text.split(",")))
    except ValueError:
        found = ()
    if not found or not all(0 < rate < 1e6 for rate in found):
        raise UsageError(f"--rates {text!r}: numbers above 0, separated by commas")
    return found


def _tell(stage: str, num_done: int, num_total: int, text: str | None) -> None:
    stderr.print(f"{num_done}/{num_total}  {text}", markup=False)


def show(summary: dict[str, Any], report: Path) -> None:
    """The targets, their points with what dominates them, the differences, and where it all lies."""
    from inferloop.cli.compare_tables import differences_table, number, points_table
    from inferloop.cli.tables import coloured
    from inferloop.pages.text import reuse_told

    for side in summary["targets"]:
        digest = ((side["identity"] or {}).get("digest") or "no identity told")[:12]
        burst = "" if side["burst_qps"] is None else f", completes {number(side['burst_qps'])}/s of a burst"
        stdout.print(f"{side['label']}  {side['name']}, {side['model']}, {digest}{burst}", markup=False)
        setup = side["setup"] or {}
        if setup.get("settings"):
            told = ", ".join(f"{name}: {value}" for name, value in setup["settings"].items())
            stdout.print(f"   {setup['version']}; {told}; flags: {setup['tuned']}", markup=False)
    stdout.print()
    stdout.print(points_table(summary))
    stdout.print()
    stdout.print(differences_table(summary))
    for text in filter(None, map(reuse_told, summary["targets"])):
        stdout.print(f"reuse     {text}", markup=False)
    for note in summary["notes"]:
        stdout.print(f"note      {note}", markup=False)
    for reason in summary["reasons"]:
        stdout.print(f"void      {reason}", markup=False)
    stdout.print(f"verdict   {coloured(summary['verdict'])}")
    stdout.print(f"report    {report}", soft_wrap=True, markup=False)
