"""Tell a person how a long run goes: a line per stage, a spinner with the latest news on a TTY."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from inferloop.cli.common import is_interactive
from inferloop.core.clock import Clock
from inferloop.core.units import NS_PER_S


class Narrator:
    """Writes to stderr, so that stdout stays free for the result. Without a TTY the news come as plain lines."""

    def __init__(self, console: Console, clock: Clock) -> None:
        self._console, self._clock = console, clock
        self._t0_ns = clock.now_ns()
        self._status: Status | None = None

    @contextlib.contextmanager
    def stage(self, title: str) -> Iterator[None]:
        """Announce `title`; afterwards say how long it took, or that it stopped."""
        t_ns = self._clock.now_ns()
        if is_interactive():
            self._status = self._console.status(f"{title} ...")
            self._status.start()
        else:
            self._line(f"      {title} ...")
        try:
            yield
        except BaseException:
            self._close_status()
            self._line(f"[red]stop[/]  {title}")
            raise
        self._close_status()
        self._line(f"[green]done[/]  {title} ({(self._clock.now_ns() - t_ns) / NS_PER_S:.1f} s)")

    def news(self, text: str) -> None:
        """What just happened, kept on the screen and in a log."""
        self._line(f"      {escape(text)}")

    def glance(self, text: str) -> None:
        """What is happening right now: replaces the spinner's text on a TTY, is silent elsewhere."""
        if self._status is not None:
            self._status.update(escape(text))

    def _line(self, markup: str) -> None:
        elapsed_s = (self._clock.now_ns() - self._t0_ns) / NS_PER_S
        self._console.print(f"[dim]{elapsed_s:6.1f}s[/] {markup}")

    def _close_status(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None
