"""Our checks over other engines: what each passes, what it refuses by design, and what it gets wrong.

    python -m lab.conformance --targets embedded,llamacpp,llama-server,vllm,openvino [--checks chat,stop_never_leaks]

One engine after the other, each with the same model and alone on the machine. Prints a table in Markdown; results are
kept as JSON in --out, and engines that are not asked for again are shown from there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path
from typing import Any

from inferloop.backends.conformance import CHECKS, by_design, run_checks
from inferloop.backends.discover import ENGINES
from inferloop.cli import wire
from inferloop.contract.workload import ModelRef
from inferloop.core.errors import InferloopError

OUT = Path(".peers/results/conformance")
CHECK_NAMES = {check.__name__.removeprefix("check_"): check for check in CHECKS}


async def conformance(target: str, model: str, names: list[str], timeout_s: float, venvs: list[str]) -> dict[str, Any]:
    """{"target", "version", "argv", "start_s", "checks": {name: [outcome, reason]}}."""
    entry = wire.Entry()
    name, flags = wire.target_flags(target, entry)
    begin = time.monotonic()
    async with wire.target(
        name, ModelRef(model), log_dir=OUT, cache_dir=None, entry=entry, flags=flags, venvs=venvs
    ) as up:
        start_s = time.monotonic() - begin
        checks = [CHECK_NAMES[n] for n in names]
        results = await run_checks(up.at, up.model or model, checks=checks, timeout_s=timeout_s)
    if name in ENGINES:
        results = by_design(results, ENGINES[name].capabilities)
    told = up.launched.told if up.launched else {}
    return {
        "target": target,
        "version": told.get("version", f"inferloop {name}"),
        "argv": list(told.get("argv", [])),
        "start_s": start_s,
        "checks": {r.name: [r.outcome, r.reason] for r in results},
    }


def table(runs: list[dict[str, Any]]) -> str:
    """A row for each check, a column for each engine; below it the reasons."""
    names = list(dict.fromkeys(name for run in runs for name in run["checks"]))
    lines = [f"| check | {' | '.join(run['target'] for run in runs)} |", f"|---|{'---|' * len(runs)}"]
    lines += [f"| {name} | {' | '.join(run['checks'].get(name, ['', ''])[0] for run in runs)} |" for name in names]
    counts = [" / ".join(str(_count(run, outcome)) for outcome in ("passed", "refused", "failed")) for run in runs]
    lines.append(f"| passed / refused / failed | {' | '.join(counts)} |")
    lines.append("")
    for run in runs:
        lines.append(f"{run['version']}, ready after {run['start_s']:.1f} s:")
        reasons = [f"- {n}, {outcome}: {why}" for n, (outcome, why) in run["checks"].items() if why]
        lines += [*reasons, ""]
    return "\n".join(lines)


def _count(run: dict[str, Any], outcome: str) -> int:
    return sum(found == outcome for found, _ in run["checks"].values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default="embedded,llamacpp")
    parser.add_argument("--checks", default=",".join(CHECK_NAMES), help="separated by commas; default: all")
    parser.add_argument("--model", default=wire.EMBEDDED_MODEL)
    parser.add_argument("--timeout-s", type=float, default=60.0, help="of one check")
    parser.add_argument("--venv", action="append", default=[], help="NAME=PATH of an environment")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    names = options.checks.split(",")
    unknown = [name for name in names if name not in CHECK_NAMES]
    if unknown:
        parser.error(f"no checks: {', '.join(unknown)}; there are {', '.join(CHECK_NAMES)}")
    for target in options.targets.split(","):
        try:
            run = asyncio.run(conformance(target, options.model, names, options.timeout_s, options.venv))
        except InferloopError as error:
            print(f"{target}: {error}")
            continue
        file = options.out / f"{target.split()[0]}.json"
        earlier = json.loads(file.read_text()) if file.exists() else {"checks": {}}
        run["checks"] = (
            {**earlier["checks"], **run["checks"]} if run["version"] == earlier.get("version") else run["checks"]
        )
        file.write_text(json.dumps(run, indent=1))
    print(table([json.loads(file.read_text()) for file in sorted(options.out.glob("*.json"))]))


if __name__ == "__main__":
    main()
