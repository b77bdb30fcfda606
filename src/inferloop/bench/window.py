"""One window of load: how it is driven, and what was seen of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from inferloop.bench.pace import Stall
from inferloop.core.errors import UsageError
from inferloop.core.units import NS_PER_MS
from inferloop.measure.timing import RequestTiming

TICK_NS = 10 * NS_PER_MS
"""How often a sender looks at the time."""
Stop = Literal["cut", "drain"]
"""Nothing more is sent; what is in flight is censored (cut) or waited for (drain)."""
OnDone = Callable[[int, RequestTiming], None]
StopWhen = Callable[[Sequence[RequestTiming]], Stop | None]


@dataclass(frozen=True, slots=True)
class DriveOptions:
    """`cut_off_s` after the last send, or after the end of the budget, what is unfinished is censored. A send is not
    the last while requests are planned to follow those in flight, however long these take.

    `num_senders` processes send, each on `sender_cores[i]` where cores are named; 0 sends from the calling process,
    whose other work then shows in the timings. `max_in_flight` makes open arrivals wait for a free slot; it and
    `max_connections` are shared out among the senders. Up to `num_connections` are opened ahead of the window, never
    more than can be busy at once. Raises UsageError for what cannot be.
    """

    request_timeout_s: float = 120.0
    cut_off_s: float = 60.0
    budget_s: float | None = None
    """No new request is sent after this long."""
    max_in_flight: int | None = None
    max_catch_up_ms: float = 250.0
    num_senders: int = 1
    sender_cores: tuple[int, ...] = ()
    num_connections: int = 64
    max_connections: int = 8192
    keep_timings: bool = True
    """False: they reach `on_done` alone, so that memory does not grow with the window."""

    def __post_init__(self) -> None:
        if self.num_senders < 0 or self.max_connections < 1:
            raise UsageError("load needs a sender and a connection")
        for what, count in (("requests in flight", self.max_in_flight), ("connections", self.max_connections)):
            if count is not None and count < self.num_senders:
                raise UsageError(f"{self.num_senders} senders cannot share {count} {what}")
        if self.sender_cores and len(self.sender_cores) != self.num_senders:
            raise UsageError(f"{len(self.sender_cores)} cores are named for {self.num_senders} senders")


@dataclass(frozen=True, slots=True)
class SenderStats:
    """What one sender saw of itself from the start of the window to its end."""

    pid: int
    window_s: float
    cpu_s: float
    num_connections: int = 0
    """All that were opened; `num_late_connections` of them in the window, because no idle one was left."""
    num_late_connections: int = 0
    num_pool_waits: int = 0
    """Requests that waited because `max_connections` were busy."""
    num_stale_retries: int = 0
    """Requests sent again, because an idle connection was closed by the server just as it was taken."""
    num_left_open: int = 0
    """Answers that were complete, and whose HTTP body did not end."""
    num_bytes_sent: int = 0
    num_bytes_received: int = 0
    peak_rss_bytes: int = 0
    loop_lags_ns: tuple[int, ...] = ()
    """How late a timer fired, of one every TICK_NS: what any arrival may have waited for its stamp."""
    timer_errors_ns: tuple[int, ...] = ()
    """How late the loop woke for requests that were due."""
    collector_pauses_ns: tuple[int, ...] = ()
    """Garbage collections of the sender in the window, which has none of its own accord."""
    priority: str = "normal"
    """real-time, nice and its value, or normal, where it may have to wait for others on a busy machine."""

    @property
    def cpu_share(self) -> float:
        """Of one core, 0 to 1."""
        return self.cpu_s / self.window_s if self.window_s > 0 else 0.0


@dataclass
class DriveResult:
    """What one window saw. `in_flight` is the client's own gauge averaged over first send to last end.

    `num_unsent` counts requests of the plan that were not sent because the window was ended early. Apart from them are
    those forgone after a stall (`num_forgone`, their later turns included) and the turns of sessions in which one
    failed (`num_dropped_turns`).
    """

    timings: Sequence[RequestTiming] = field(default=(), repr=False)  # asyncio takes the repr of a task's result
    """In the order in which requests ended. Where nobody asked for them in the window they are made at each look."""
    positions: Sequence[int] = field(default=(), repr=False)
    """In the plan, of each of `timings`."""
    stopped: Stop | None = None
    """How `stop_when` ended the window, if it did."""
    in_flight: float | None = None
    num_unsent: int = 0
    num_forgone: int = 0
    num_dropped_turns: int = 0
    stalls: tuple[Stall, ...] = ()
    num_capped: int = 0
    num_count_mismatches: int = 0
    num_length_mismatches: int = 0
    num_tokens_told: int = 0
    """Output tokens of the successes that the server counted; `num_tokens_asked` is what these were asked for."""
    num_tokens_asked: int = 0
    num_telling_cache: int = 0
    """Answers that say how many of their input tokens came from the cache."""
    counted_by: Counter[str] = field(default_factory=Counter)
    details: dict[str, str] = field(default_factory=dict)
    """One example text per error class."""
    senders: tuple[SenderStats, ...] = ()
