"""Which flags of an engine are its best here: variants side by side, so that nobody is compared with a crippled peer.

    python -m lab.engine_flags "llamacpp" "llamacpp threads=1" "llamacpp n_batch=2048" --rounds 4

All variants are up together, idle while another is measured. In each round, in mirrored order, every variant answers
some requests of the contract one after another, then a burst of them; the first round warms up and is left out. Told
are medians over the rounds, and of the ratios to the first variant in the same round, with their range: 1.10 is a tenth
more of what the column counts.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

from inferloop.bench.agenda import in_chains
from inferloop.bench.drive import DriveOptions, drive
from inferloop.bench.render import Renderer, RenderOptions
from inferloop.cli import wire
from inferloop.contract.load import load
from inferloop.contract.sample import sample_workload
from inferloop.contract.workload import Contract
from inferloop.core.request import TimedRequest
from inferloop.core.units import NS_PER_S
from inferloop.measure.timing import RequestTiming, tpot_ms, ttft_ms

FIGURES = ("TTFT alone, ms", "TPOT alone, ms", "burst, requests/s")


async def measure(
    variants: list[str],
    contract: Contract,
    num_rounds: int,
    num_serial: int,
    num_burst: int,
    log_dir: Path,
    *,
    when_up: Callable[[], None] = lambda: None,
) -> list[list[tuple[float, float, float]]]:
    """FIGURES of each variant in each measured round. `when_up` is called before the first of them."""
    async with AsyncExitStack() as stack:
        ups = []
        for number, text in enumerate(variants):
            entry = wire.Entry(label=chr(ord("A") + number))
            name, flags = wire.target_flags(text, entry)
            up = await stack.enter_async_context(
                wire.target(name, contract.model, log_dir=log_dir, cache_dir=None, entry=entry, slo=contract.slo,
                            flags=flags, log_name=str(entry.label))
            )  # fmt: skip
            if up.codec is None:
                raise SystemExit(f"{text}: a variant is an engine that is launched here")
            extra = up.launched.exact_length if up.launched else {}
            ups.append((up, Renderer(up.codec, RenderOptions(model=str(up.model), ignore_eos=True, extra=extra))))
            print(f"{text}: up", flush=True)

        when_up()

        async def send(place: int, requests: list[TimedRequest]) -> list[RequestTiming]:
            up, renderer = ups[place]
            result = await drive(renderer.render(requests), up.at, DriveOptions(cut_off_s=120.0))
            failed = [t for t in result.timings if not t.ok]
            if failed:
                raise SystemExit(f"{variants[place]}: {len(failed)} failed: {failed[0].error} {result.details}")
            return list(result.timings)

        found: dict[int, list[tuple[float, float, float]]] = defaultdict(list)
        for number in range(num_rounds + 1):
            sampled = [
                sample_workload(contract, seed=number, stream=f"lab/{what}", arrivals="burst", num_requests=count)
                for what, count in (("serial", num_serial), ("burst", num_burst))
            ]
            places = range(len(ups))
            for place in places if number % 2 else reversed(places):
                alone = await send(place, in_chains(sampled[0].requests, 1))
                burst = await send(place, list(sampled[1].requests))
                span_ns = max(t.t_end_ns for t in burst) - min(t.t_send_ns for t in burst)
                waits = [w for t in alone if (w := ttft_ms(t)) is not None]
                steps = [s for t in alone if (s := tpot_ms(t)) is not None]
                figures = (statistics.median(waits), statistics.median(steps), len(burst) * NS_PER_S / span_ns)
                if number:
                    found[place].append(figures)
                print(f"round {number} {variants[place]}: " + ", ".join(f"{f:.4g}" for f in figures), flush=True)
    return [found[place] for place in range(len(variants))]


def table(variants: list[str], found: list[list[tuple[float, float, float]]]) -> str:
    lines = [f"| variant | {' | '.join(FIGURES)} |", f"|---|{'---|' * len(FIGURES)}"]
    for text, rounds in zip(variants, found, strict=True):
        cells = []
        for figure in range(len(FIGURES)):
            mine = [r[figure] for r in rounds]
            ratios = sorted(m / r[figure] for m, r in zip(mine, found[0], strict=True))
            told = f" ({statistics.median(ratios):.2f}; {ratios[0]:.2f} to {ratios[-1]:.2f})"
            cells.append(f"{statistics.median(mine):.3g}" + ("" if text == variants[0] else told))
        lines.append(f"| `{text}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="+", help="as targets are named: an engine and its flags")
    parser.add_argument("--contract", type=Path, default=Path("contracts/assistant.yaml"))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--serial", type=int, default=8, help="requests one after another")
    parser.add_argument("--burst", type=int, default=32, help="requests all at once")
    o = parser.parse_args()
    contract = load(o.contract)
    with tempfile.TemporaryDirectory(prefix="inferloop-lab-") as folder:
        found = asyncio.run(measure(o.variants, contract, o.rounds, o.serial, o.burst, Path(folder)))
    print(table(o.variants, found))


if __name__ == "__main__":
    main()
