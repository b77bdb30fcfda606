"""What other tools print of a stream, beside what their definitions make of a relay's stamps of that same stream.

    make peers                                                  once
    python -m lab.load_generators.proxied --write tests/unit/measure/proxied    the record that a test compares

Between tool and server stands a relay that notes when bytes passed. measure.compat makes each tool's numbers of these
stamps; all latencies are long beside what a client's own work adds to them, so they must agree within 2 %.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import uvloop
from lab.load_generators import jittered, relay
from lab.load_generators.load import Load, Peer, Printed, Task, peers
from lab.load_generators.tokenizer import NAME, write_tokenizer
from lab.load_generators.tools.aiperf import AiPerf
from lab.load_generators.tools.guidellm import GuideLlm
from lab.load_generators.tools.inference_perf import InferencePerf
from lab.load_generators.tools.vllm import VllmBench
from lab.peers.models import SMOLLM2

from inferloop.measure.compat import compat_view
from inferloop.measure.timing import RequestTiming
from inferloop.models.resolve import resolve

PEERS: dict[str, Peer] = {peer.compat: peer for peer in (VllmBench(), GuideLlm(), AiPerf(), InferencePerf())}
STATS = ("mean", "p50", "p99")


async def record(peer: Peer, count: int, users: int) -> tuple[Printed, list[RequestTiming]]:
    """Raises SystemExit with what the tool wrote when it fails."""
    recorded = relay.Recorded()
    server = await jittered.start()
    port: int = server.sockets[0].getsockname()[1]
    proxy = await relay.start(port, recorded)
    with tempfile.TemporaryDirectory(prefix="inferloop-lab-") as folder:
        url = f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
        task = Task(Load("jittered", "jittered", users=users), url, count, 1, Path(folder), NAME)
        command = peer.command(task)
        env = os.environ | {"HF_HOME": str(peers() / "hf"), "HF_HUB_OFFLINE": "1", **command.env}
        with (Path(folder) / "output.txt").open("w+") as output:
            process = await asyncio.create_subprocess_exec(
                *command.argv, env=env, cwd=folder, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output
            )
            try:
                code = await process.wait()
            finally:
                if process.returncode is None:
                    process.kill()
            output.seek(0)
            if code:
                raise SystemExit(f"{peer.name}: code {code}\n{output.read()[-3000:]}")
        printed = peer.printed(task)
    for each in (proxy, server):
        each.close()
    # What comes before is a tool that looks whether anybody is there.
    return printed, recorded.in_order()[-count:]


def compare(compat: str, printed: Printed, timings: list[RequestTiming]) -> dict[tuple[str, str], tuple[float, float]]:
    """(printed, ours) in ms by number and statistic."""
    numbers = {n.name: {"mean": n.mean, **n.percentiles} for n in compat_view(compat, timings).numbers}
    return {
        (name, stat): (told[stat], float(ours))
        for name, told in printed.items()
        for stat in STATS
        if (ours := numbers[name][stat]) is not None
    }


def as_json(peer: Peer, printed: Printed, timings: list[RequestTiming]) -> dict[str, Any]:
    """All that the comparison needs; instants are us after the first send."""
    begin = timings[0].t_send_ns

    def us(t_ns: int | None) -> int | None:
        return None if t_ns is None else round((t_ns - begin) / 1e3)

    rows = [
        {
            "send": us(r.t_send_ns),
            "end": us(r.t_end_ns),
            "first_answer": us(r.t_first_answer_ns),
            "chunks": [[us(c.t_ns), c.num_tokens] for c in r.chunks],
            "empty_frames": [us(t) for t in r.empty_frames_ns],
            "num_output_tokens": r.num_output_tokens,
        }
        for r in timings
    ]
    return {"tool": peer.name, "compat": peer.compat, "version": version(peer), "printed": printed, "requests": rows}


def version(peer: Peer) -> str:
    """Of what is installed."""
    lines = Path(f"lab/peers/requirements-{peer.compat}.txt").read_text().splitlines()
    return next(line for line in lines if line.startswith((peer.compat + "==", peer.compat + "-cpu==")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--write", type=Path, metavar="DIR", help="keep stamps and numbers there, a file a tool")
    asked = parser.parse_args()
    write_tokenizer(resolve(SMOLLM2).path, peers() / "hf")
    for peer in map(PEERS.__getitem__, asked.tools):
        printed, timings = uvloop.run(record(peer, asked.requests, asked.users))
        print(f"{peer.name}: {len(timings)} requests")
        for (name, stat), (told, ours) in compare(peer.compat, printed, timings).items():
            print(f"  {name:16} {stat:5} printed {told:9.3f} ms, from the stamps {ours:9.3f} ({told / ours - 1:+.2%})")
        if asked.write is not None:
            asked.write.mkdir(parents=True, exist_ok=True)
            path = asked.write / f"{peer.compat}.json"
            path.write_text(json.dumps(as_json(peer, printed, timings), separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
