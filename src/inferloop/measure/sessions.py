"""Sessions: the turns of one conversation, or the steps of one agent, timed as a whole."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from inferloop.core.units import NS_PER_MS
from inferloop.measure.columns import CENSORED, NOT_THE_SERVICE
from inferloop.measure.samples import Samples
from inferloop.measure.timing import RequestTiming


@dataclass(frozen=True, slots=True)
class SessionTiming:
    """From the first intended instant (the send in a closed loop) to the last end. `error` is that of the turn that
    ended it; `censored` also when turns that were planned had not been sent when the run ended."""

    session: int
    num_turns: int
    start_ns: int
    end_ns: int
    error: str | None

    @property
    def session_ms(self) -> float:
        return (self.end_ns - self.start_ns) / NS_PER_MS


def sessions(requests: Iterable[RequestTiming]) -> list[SessionTiming]:
    """One per session, in the order in which they started; requests without a session are left out, and
    sessions whose first turn is not among the requests: they began in the warm-up, and nobody knows when."""
    turns: dict[int, list[RequestTiming]] = {}
    for r in requests:
        if r.session is not None:
            turns.setdefault(r.session, []).append(r)
    ordered = {n: sorted(rows, key=lambda r: (r.turn or 0, r.t_send_ns)) for n, rows in turns.items()}
    found = [_session(number, rows) for number, rows in ordered.items() if not rows[0].turn]
    return sorted(found, key=lambda s: (s.start_ns, s.session))


def session_samples(requests: Iterable[RequestTiming]) -> Samples:
    """Session times as a metric's samples; an owner is a session, by its place in `sessions`."""
    values: list[float] = []
    owners: list[int] = []
    failed: list[int] = []
    hidden: list[float] = []
    hidden_owners: list[int] = []
    for i, s in enumerate(sessions(requests)):
        if s.error is None:
            values.append(s.session_ms)
            owners.append(i)
        elif s.error == CENSORED:
            hidden.append(s.session_ms)
            hidden_owners.append(i)
        elif s.error not in NOT_THE_SERVICE:
            failed.append(i)
    places = [np.array(list_, np.int64) for list_ in (owners, failed, hidden_owners)]
    num = len(values) + len(failed) + len(hidden)
    return Samples(np.array(values), places[0], places[1], np.array(hidden), places[2], num)


def _session(number: int, rows: list[RequestTiming]) -> SessionTiming:
    first = rows[0]
    start = first.t_send_ns if first.t_intended_ns is None else first.t_intended_ns
    error = next((r.error for r in rows if r.error is not None), None)
    planned = max((r.num_turns or 0 for r in rows), default=0)
    if error is None and len(rows) < planned:
        error = CENSORED
    return SessionTiming(number, len(rows), start, max(r.t_end_ns for r in rows), error)
