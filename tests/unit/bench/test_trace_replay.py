"""A trace of each format, with the published names of fields, from the file to the sends: instants and order."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from lab.trace_replay import FORMATS, prepare
from tests.unit.bench.test_connections import FRAMED, Server, always, run, serving

from inferloop.core.units import NS_PER_MS, NS_PER_S
from inferloop.measure.invariants import violations
from inferloop.measure.timing import response_ttft_ms

TIMES_S = (0.0, 0.004, 0.011, 0.011, 0.035, 0.05, 0.051, 0.08)


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if form.is_timed])
async def test_sends_follow_the_instants_of_the_file(tmp_path: Path, name: str) -> None:
    plan = prepare(FORMATS[name].write(tmp_path, TIMES_S), seed=1)
    assert [r.timed.at_s for r in plan] == list(TIMES_S)
    assert {r.timed.output_tokens for r in plan} == {8}
    async with serving(always(FRAMED)) as server:
        result = await run(plan, server)
    assert [t.error for t in result.timings] == [None] * len(TIMES_S)
    sent = sorted(result.timings, key=lambda t: t.t_send_ns)
    start_ns = sent[0].t_intended_ns or 0
    assert [(t.t_intended_ns or 0) - start_ns for t in sent] == [round(t * NS_PER_S) for t in TIMES_S]
    assert [violations(t) for t in sent] == [()] * len(sent), "none is sent before its instant"
    assert len({body for r in plan if (body := r.body)}) == len(plan)


async def test_conversations_without_times_go_turn_by_turn(tmp_path: Path) -> None:
    plan = prepare(FORMATS["sharegpt"].write(tmp_path, TIMES_S), seed=1)
    turns = [r.timed for r in plan]
    assert [t.session for t in turns].count(turns[0].session) == 4 and len(turns) == 8
    assert all(t.at_s == 0.1 for t in turns if t.after is not None), "the pause that the contract declares"
    # Brought forward: when conversations begin is drawn, and here only what follows is asked.
    plan = [replace(r, timed=replace(r.timed, at_s=0.0 if r.timed.after is None else 0.02)) for r in plan]

    async def play(server: Server, number: int, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.01)
        writer.write(FRAMED)

    async with serving(play) as server:
        result = await run(plan, server)
    for session in {t.session for t in result.timings}:
        talk = sorted((t for t in result.timings if t.session == session), key=lambda t: t.turn or 0)
        assert [(t.turn, t.num_turns, t.error) for t in talk] == [(k, 4, None) for k in range(4)]
        for before, after in pairwise(talk):
            assert after.t_intended_ns == before.t_end_ns + 20 * NS_PER_MS
            assert after.t_send_ns >= after.t_intended_ns
            waited = response_ttft_ms(after)
            assert waited is not None and waited >= 10.0
