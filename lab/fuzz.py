"""Random and hostile requests, made from the server's own /openapi.json, against a replica.

    python -m lab.fuzz [--minutes 5 | --examples N] [--backend scripted|embedded] [--seed N]

Starts `inferloop serve` with a small context, lets schemathesis send what the document allows and what it forbids, and
ends with 0 only when there was no 5xx but for overload, no answer that took too long, none that the document does not
describe, nothing forbidden that was accepted, and when afterwards the server is idle, healthy and has logged no fault.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from inferloop.backends.http import HttpClient
from inferloop.backends.serve_process import Value, launch_spec
from inferloop.fleet.act.process import ReplicaProcess

MODEL = "smollm2-135m-instruct"
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
    "allow_header_conformance",
)
OPTIONS: dict[str, dict[str, Value]] = {
    "scripted": {"script": ["ttft_ms=0", "tpot_ms=0", "context_length=64"]},
    "embedded": {"context_length": 64, "kv_memory_mib": 32, "max_num_seqs": 8, "threads": 1},
}
ANSWER_WITHIN_S = {"scripted": 20, "embedded": 60}
"""A request may ask for 128 choices; the rest of the time is the machine's."""
_HERE = Path(__file__).parent
_IDLE_POLLS = 100


def command(url: str, backend: str, seed: int, *, minutes: float | None, examples: int | None) -> list[str]:
    """The schemathesis run. `examples` bounds it by cases per operation and makes it repeatable, `minutes` by time."""
    within_s = ANSWER_WITHIN_S[backend]
    argv = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(_HERE / "fuzz.toml")]
    argv += ["run", f"{url}/openapi.json", "--checks", ",".join(CHECKS), "--seed", str(seed)]
    argv += ["--max-response-time", str(within_s), "--request-timeout", str(2 * within_s)]
    argv += ["--no-color", "--warnings", "off"]
    if minutes is not None:
        argv += ["--workers", "2", "--max-time", str(max(1, round(60 * minutes))), "--continue-on-failure"]
        argv += ["--generation-database", "none"]
    if examples is not None:
        argv += ["--generation-deterministic", "--max-examples", str(examples), "--phases", "coverage,fuzzing"]
    return argv


async def problems_after(process: ReplicaProcess) -> list[str]:
    """What a server that was only asked questions must not show."""
    if process.returncode is not None:
        return [f"the server exited with code {process.returncode}"]
    problems = []
    client = HttpClient(process.url)
    try:
        for _ in range(_IDLE_POLLS):
            progress = await client.get_json("/health/progress")
            if not (progress["running"] or progress["waiting"] or progress["in_flight"]):
                break
            await asyncio.sleep(0.1)
        else:
            problems.append(f"work is left: {progress}")
        if not (await client.get_json("/health/ready"))["ready"]:
            problems.append("the server is not ready")
        metrics = (await (await client.request("GET", "/metrics")).read()).decode()
        if not sum(
            map(
                float, re.findall(r'^inferloop_requests_total\{finish_reason="(?:stop|length)".* (\S+)$', metrics, re.M)
            )
        ):
            problems.append("no request reached the engine, so this says nothing")
    finally:
        await client.close()
    # A fault is logged by its kind, without the text that may quote a prompt.
    faults = re.findall(r"request \S+ failed: (\w+)", process.log_path.read_text(errors="replace"))
    return [*problems, *(f"the server logged {fault}" for fault in sorted(set(faults)))]


async def fuzz(backend: str, seed: int, *, minutes: float | None, examples: int | None) -> list[str]:
    """Runs everything; schemathesis's report goes to stdout. Returns what was wrong."""
    with tempfile.TemporaryDirectory() as folder:
        options = {**OPTIONS[backend], "batch_dir": str(Path(folder) / "batches")}
        spec = launch_spec(MODEL, options, backend=backend, drain_timeout_s=5)
        process = await ReplicaProcess.start_ready(spec, log_path=Path(folder) / "server.log")
        try:
            argv = command(process.url, backend, seed, minutes=minutes, examples=examples)
            env = {**os.environ, "SCHEMATHESIS_HOOKS": str(_HERE / "fuzz_hooks.py"), "INFERLOOP_FUZZ_MODEL": MODEL}
            done = await asyncio.to_thread(subprocess.run, argv, cwd=folder, env=env, check=False)
            problems = [] if done.returncode == 0 else [f"schemathesis ended with {done.returncode}; see its report"]
            problems += await problems_after(process)
            if problems:
                print(process.log_path.read_text(errors="replace")[-8000:], file=sys.stderr)
        finally:
            await process.stop()
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m lab.fuzz", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--minutes", type=float, help="how long schemathesis may take (default 5)")
    parser.add_argument("--examples", type=int, help="instead: cases per operation, the same ones in every run")
    parser.add_argument("--backend", choices=sorted(OPTIONS), default="scripted")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    minutes = args.minutes or (None if args.examples else 5.0)
    problems = []
    with contextlib.suppress(KeyboardInterrupt):
        problems = asyncio.run(fuzz(args.backend, args.seed, minutes=minutes, examples=args.examples))
    for problem in problems:
        print(f"FAILED: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
