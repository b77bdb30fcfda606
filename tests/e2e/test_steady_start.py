"""Where the measuring of a level begins, over HTTP: a start that was lighter than the rest is given to the warm-up, one
that was slower is what users meet."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.e2e.conftest import tiny_contract
from tests.e2e.prefix_server import prefix_server

from inferloop.bench.points import settled_ns
from inferloop.bench.search import BenchOptions, run_bench
from inferloop.contract.load import parse
from inferloop.measure.quantiles import quantile
from inferloop.measure.steady import steady_start
from inferloop.measure.timing import ttft_ms
from inferloop.records.run import RunWriter, open_run

QUICK_S, SLOW_S, NUM_FIRST = 0.01, 0.4, 60


@pytest.mark.parametrize("first_s", [SLOW_S, QUICK_S], ids=["slow start", "light start"])
async def test_a_light_start_is_no_part_of_the_steady_state_and_a_slow_one_is(tmp_path: Path, first_s: float) -> None:
    """The first 60 requests of the level are answered otherwise than those that follow."""

    def delay_s(salt: str, number: int) -> float:
        return first_s if salt.endswith("-peak") and number < NUM_FIRST else QUICK_S + SLOW_S - first_s

    # A level of a few seconds: the budget is for a slow machine, and the lead that a larger one would bring is bounded.
    options = BenchOptions(
        seed=5,
        budget_s=120.0,
        num_points=0,
        peak_qps=40.0,
        calibrate=False,
        num_warmup=1,
        num_serial=3,
        num_burst=4,
        max_warmup_s=0.9,
    )
    contract = parse(tiny_contract(), base=tmp_path)
    with (
        prefix_server(owner="vllm", delay_s=delay_s) as server,
        RunWriter(tmp_path / "runs", verb="bench", service="tiny", contract=contract) as writer,
    ):
        result = await run_bench(contract, server.url, None, None, options, writer)
        writer.finish(result.as_summary())
    peak = result.points[-1]
    rows = sorted((r for r in open_run(writer.path).rows if r.point == "peak"), key=lambda r: r.timing.t_send_ns)
    sent, measured = [r.timing for r in rows], [r.timing for r in rows if not r.warmup]
    assert peak.name == "peak" and len(sent) > 100
    assert (peak.num_warmup, peak.summary.num_requests) == (len(sent) - len(measured), len(measured))
    assert [r.warmup for r in rows] == sorted((r.warmup for r in rows), reverse=True), "the warm-up comes first"
    start = steady_start(measured)
    assert peak.summary.steady == start, "and what is told of the steady state is what is measured"
    if first_s == SLOW_S:
        assert peak.num_warmup < NUM_FIRST, "no more than the lead"
        slow = [w for t in measured[: NUM_FIRST - peak.num_warmup] if (w := ttft_ms(t)) is not None]
        assert slow and min(slow) >= 1000 * SLOW_S
        assert peak.summary.ttft_ms.max is not None and peak.summary.ttft_ms.max >= 1000 * SLOW_S
        return
    quick = [w for t in sent[:NUM_FIRST] if (w := ttft_ms(t)) is not None]
    if quantile(sorted(quick), 0.5) < 100 * SLOW_S and len(sent) > 5 * NUM_FIRST:  # the machine let them be quick
        assert settled_ns(sent, measured, 0) in (None, start.t_ns)
        kept = [w for t in measured if (w := ttft_ms(t)) is not None]
        assert sum(w < 1000 * SLOW_S for w in kept) <= NUM_FIRST / 2, "most of the light start is gone"
