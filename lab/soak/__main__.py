"""Everything at once against one replica that has too little memory, and what must still hold afterwards.

    python -m lab.soak [--minutes 10] [--seed N] [--clients 12] [--keep FOLDER]

Starts `inferloop serve` with the real model in deterministic mode, learns the answer of every known request while
nobody else is served, then lets clients mix all features with disconnects, slow readers, refusals and overload. Prints
a table on stderr and one JSON object on stdout; exits with 0 only when every check passed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lab.soak import server, verdict
from lab.soak.actors import Actors
from lab.soak.answers import Answer
from lab.soak.client import Client
from lab.soak.jobs import Jobs
from lab.soak.ledger import Ledger
from lab.soak.refusals import REFUSALS
from lab.soak.templates import COMPLETIONS, TEMPLATES, Template
from lab.soak.verdict import Check

from inferloop.backends.http import HttpError
from inferloop.core.errors import LaunchError
from inferloop.fleet.act.process import ReplicaProcess


async def solo_answers(client: Client) -> dict[str, Answer]:
    """Every template alone and from nothing: a salt of its own keeps the prefix cache out of it."""
    truth = {}
    for template in TEMPLATES:
        body = client.body(template)
        if template.takes_salt:
            body["cache_salt"] = f"solo {template.name}"
        answer = await client.answer(template, body)
        if answer is None:
            raise SystemExit(f"no solo answer: {client.ledger.problems}")
        truth[template.name] = answer
    return truth


async def whole_pool(client: Client) -> Check:
    """A prompt that needs every block there is: had one been lost, it could not run."""
    max_len = (await client.http.get_json("/v1/models"))["data"][0]["max_model_len"]
    template = Template("whole pool", COMPLETIONS, {"prompt": [28] * (max_len - 1), "max_tokens": 1, "temperature": 0})
    answer = await client.answer(template, client.body(template))
    return Check("every block can be had", answer is not None, f"a prompt of {max_len - 1} tokens")


async def soak(folder: Path, minutes: float, seed: int, num_clients: int) -> dict[str, Any]:
    ledger, samples, loop = Ledger(), list[server.Sample](), asyncio.get_running_loop()
    async with server.running(folder, server.OPTIONS) as process:
        client = Client(process.url, server.MODEL, ledger)
        truth = await solo_answers(client)
        actors = [Actors(client, truth, random.Random(f"{seed} {i}")) for i in range(num_clients)]
        for refusal in REFUSALS:
            await actors[0].be_refused(refusal)
        start_s, run_s = loop.time(), 60 * minutes
        sampler = asyncio.create_task(server.sample_memory(process, samples))
        workers = [actor.work(start_s + run_s) for actor in actors]
        jobs = [Jobs(client, truth, random.Random(f"{seed} jobs {i}")) for i in range(2)]
        await asyncio.gather(*workers, *(job.work(start_s + run_s, last_within_s=300) for job in jobs))
        sampler.cancel()
        with contextlib.suppress(asyncio.CancelledError, LaunchError):  # one that is gone is told below
            await sampler
        counters: dict[str, float] = {}
        try:
            checks = await _afterwards(process, client)
            counters = await server.counters(client.http)
        except HttpError as error:
            checks = [Check("the server is there", False, str(error))]
        await client.http.close()
        code = await process.stop()
    checks += [
        Check("drains and leaves with 0", code == 0, f"exit code {code}"),
        Check("answers, statuses, deadlines", not ledger.num_problems, f"{ledger.num_problems} problems"),
        verdict.memory(samples, from_s=start_s + verdict.warm_up_s(run_s)),
        *verdict.events(folder / "events.jsonl", ledger),
        verdict.really_happened(counters),
        verdict.log_is_clean(folder / "server.log"),
    ]
    return {
        "verdict": verdict.of(checks),
        "minutes": minutes,
        "seed": seed,
        "clients": num_clients,
        "checks": [asdict(check) for check in checks],
        "counts": dict(sorted(ledger.counts.items())) | {"requests": len(ledger.sent)},
        "counters": counters,
        "rss_mib": [[round(s.t_s - start_s), round(s.rss_mib)] for s in samples[:: max(1, len(samples) // 60)]],
        "problems": ledger.problems,
    }


async def _afterwards(process: ReplicaProcess, client: Client) -> list[Check]:
    """Idle, whole, healthy."""
    left = await server.idle(client.http)
    checks = [Check("nothing is left", not any(left.values()), ", ".join(f"{k} {v:g}" for k, v in left.items()))]
    checks.append(await whole_pool(client))
    left = await server.idle(client.http)
    checks.append(Check("nothing is left after that", not any(left.values()), f"KV in use {left['KV in use']:g}"))
    ready = (await client.http.get_json("/health/ready"))["ready"]
    return [*checks, Check("the server is ready", ready and process.returncode is None, str(ready))]


def show(result: dict[str, Any]) -> None:
    """For people."""
    width = max(len(check["name"]) for check in result["checks"])
    rows = [f"{'ok  ' if c['passed'] else 'FAIL'}  {c['name']:{width}}  {c['found']}" for c in result["checks"]]
    rows += ["", *(f"{count:8}  {name}" for name, count in result["counts"].items())]
    rows += ["", *result["problems"][:20]] if result["problems"] else []
    print("\n".join([*rows, "", f"soak: {result['verdict']}"]), file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m lab.soak", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="how long clients keep coming")
    parser.add_argument("--seed", type=int, default=1, help="of what the clients do")
    parser.add_argument("--clients", type=int, default=12, help="how many act at the same time")
    parser.add_argument("--keep", type=Path, help="an empty folder for log and events, otherwise thrown away")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = args.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        result = asyncio.run(soak(folder, args.minutes, args.seed, args.clients))
    show(result)
    print(json.dumps(result))
    return 0 if result["verdict"] == "pass" else 1


if __name__ == "__main__":
    sys.exit(main())
