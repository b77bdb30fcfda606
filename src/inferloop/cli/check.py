"""`inferloop check`: is the contract sound, what deserves a word, and what has evidence so far."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table
from typer.core import TyperGroup

from inferloop.cli.common import CacheDirOption, JsonOption, RunsDirOption, print_json, stderr, stdout, verb
from inferloop.cli.main import VERBS, verb_command
from inferloop.contract.archetypes import PROFILES
from inferloop.contract.checklist import Evidence, Step, checklist
from inferloop.contract.describe import describe
from inferloop.contract.explain_routing import explain
from inferloop.contract.lint import Finding, lint, model_keys
from inferloop.contract.load import load
from inferloop.contract.workload import Contract
from inferloop.core.digest import plain
from inferloop.core.errors import InferloopError, RecordError
from inferloop.records.header import HEADER
from inferloop.records.read import RunRecord, open_run

_COLOURS = {"covered": "green", "partly": "yellow", "open": "dim", "warning": "yellow", "note": "cyan"}


@verb
def check(
    contract: Annotated[Path, typer.Argument(help="The contract: YAML, TOML or JSON.")],
    strict: Annotated[bool, typer.Option("--strict", help="Exit 1 when there is a warning.")] = False,
    runs_dir: RunsDirOption = Path("runs"),
    cache_dir: CacheDirOption = None,
    json_output: JsonOption = False,
) -> None:
    """Validate a contract, point out what is weak in it, and show the ten-step checklist with its evidence.

    Exits 2 when the contract cannot be used, with file, line and key of everything that is wrong.

    Example: inferloop check contracts/assistant.yaml
    """
    loaded = load(contract)
    findings = [*_here(loaded, cache_dir), *lint(loaded)]
    steps = tuple(_runnable(step, contract, loaded) for step in checklist(loaded, evidence_for(loaded, runs_dir)))
    warnings = [f for f in findings if f.severity == "warning"]
    failed = strict and bool(warnings)
    if json_output:
        print_json(_as_object(loaded, findings, steps, "fail" if failed else "pass"))
    else:
        _show(loaded, findings, steps)
    if failed:
        raise typer.Exit(1)


def evidence_for(contract: Contract, runs_dir: Path) -> list[Evidence]:
    """What the service's finished runs under `runs_dir` show, oldest first. Unreadable folders are named on stderr."""
    from inferloop.evals.load import load_suite

    suite = load_suite(Path(contract.quality.suite)).digest if contract.quality else None
    found: list[tuple[int, Evidence]] = []
    for header in sorted(runs_dir.glob(f"*/{HEADER}")):
        try:
            run = open_run(header)
        except RecordError as error:
            stderr.print(f"skipped: {escape(str(error))}")
            continue
        if not run.complete or run.summary is None:
            continue
        if run.header.verb == "eval":  # it knows no contract: what counts is the suite and the model
            if (run.summary.get("suite", {}).get("digest"), run.summary.get("model")) != (suite, contract.model.id):
                continue
        elif run.header.service != contract.service:
            continue
        if str(run.header.options.get("target")).split()[:1] == ["scripted"]:
            continue  # a played script shows how a client behaves, nothing of the service
        current = run.header.verb == "eval" or run.header.contract_digest == contract.digest
        summary = {"run": str(run.path)} | run.summary
        evidence = Evidence.of(
            run.header.verb, summary, current=current, engine=_engine(run), identity=run.header.identity
        )
        found.append((run.header.t_start_wall_ns, evidence))
    return [item for _, item in sorted(found, key=lambda pair: pair[0])]


def _engine(run: RunRecord) -> str:
    """What answered, as --target names it. A server that tells of itself is not called by its address of that day."""
    from inferloop.cli.wire import is_url

    target = str(run.header.options.get("target") or "embedded").split()[0]
    if not is_url(target):
        return target
    engine = str((run.header.identity or {}).get("engine") or target)
    return "embedded" if engine.startswith("inferloop-") else engine


def _here(contract: Contract, cache_dir: Path | None) -> list[Finding]:
    """What would keep `up` from starting on this machine; the contract may still be right for another one.

    Raises ContractError for a suite that cannot be read: it is part of the promise.
    """
    from inferloop.catalog.models import known_models
    from inferloop.cli import wire
    from inferloop.evals.load import load_suite
    from inferloop.models.resolve import resolve

    if contract.quality is not None:
        load_suite(Path(contract.quality.suite))
    found = []
    for key, model in model_keys(contract):
        try:
            wire.precision_flags(model)
        except InferloopError as error:
            text = str(error).removeprefix("model.precision: ")
            found.append(Finding("warning", "precision-not-here", f"{key}.precision", text))
        known = known_models().get(model.id)
        if known is None or known.terms is not None:  # other names of the catalogue are fetched when they are needed
            try:
                resolve(model.id, cache_dir=cache_dir)
            except InferloopError as error:
                found.append(Finding("warning", "model-not-here", f"{key}.id", str(error)))
    return found


def _runnable(step: Step, path: Path, contract: Contract) -> Step:
    """The step with a command that can be pasted; one that this version lacks is said to be missing."""
    if step.todo is None or not step.todo.startswith("inferloop "):
        return step
    verb, *words = step.todo.split()[1:]
    known = ["inferloop", verb]
    command = verb_command(verb) if verb in VERBS else None
    for word in words:
        if not isinstance(command, TyperGroup):
            break
        known.append(word)
        command = command.commands.get(word)
    if command is None:
        return replace(step, todo=f"not in this version: {' '.join(known)}")
    suite = _short(Path(contract.quality.suite)) if contract.quality else "SUITE"
    return replace(step, todo=step.todo.replace("CONTRACT", quote(str(path))).replace("SUITE", quote(suite)))


def _short(path: Path) -> str:
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _as_object(contract: Contract, findings: list[Finding], steps: tuple[Step, ...], verdict: str) -> dict[str, Any]:
    return {
        "run": None,
        "verdict": verdict,
        "reasons": [f"{f.key}: {f.message}" for f in findings if f.severity == "warning"],
        "digest": contract.digest,
        "figure_of_merit": PROFILES[contract.archetype].figure_of_merit,
        "contract": describe(contract),
        "findings": plain(findings),
        "checklist": plain(steps),
    }


def _show(contract: Contract, findings: list[Finding], steps: tuple[Step, ...]) -> None:
    merit = PROFILES[contract.archetype].figure_of_merit
    stdout.print(f"[bold]{escape(contract.service)}[/]  {contract.archetype}, judged by {merit}")
    stdout.print(f"model {escape(contract.model.id)}")
    stdout.print(f"contract {contract.digest[:12]} [green]is sound[/]")
    if contract.routing is not None:
        for line in explain(contract.routing):
            stdout.print(escape(line), soft_wrap=True)
    for finding in findings:
        colour = _COLOURS[finding.severity]
        stdout.print(
            f"[{colour}]{finding.severity}[/] {escape(finding.key)}: {escape(finding.message)}", soft_wrap=True
        )
    table = Table(title="Ten steps", title_justify="left", expand=False, pad_edge=False, box=None)
    for name in ("", "step", "status", "evidence", "next"):
        table.add_column(name, overflow="fold")
    for step in steps:
        status = f"[{_COLOURS[step.status]}]{step.status}[/]"
        table.add_row(str(step.number), step.title, status, escape(step.detail), escape(step.todo or ""))
    stdout.print()
    stdout.print(table)
