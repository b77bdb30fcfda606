"""What an interrupted run leaves, told to whoever interrupted it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from shlex import quote

from inferloop.core.errors import RecordError


@contextlib.contextmanager
def telling(folder: Callable[[], Path | None]) -> Iterator[None]:
    """Ctrl-C within says what is in `folder` by then, which is None before there is one."""
    try:
        yield
    except KeyboardInterrupt:
        run = folder()
        raise KeyboardInterrupt(*(() if run is None else (_left_in(run),))) from None


def _left_in(run: Path) -> str:
    from inferloop.records.run import open_run

    try:
        points: dict[str, int] = {}
        for row in open_run(run).rows:
            points[row.point] = points.get(row.point, 0) + 1
    except RecordError as error:
        return f"interrupted; {error}"
    if not points:
        return f"interrupted before anything was measured; {run} holds what was known by then, and logs"
    told = ", ".join(f"{name} {number}" for name, number in points.items())
    return (
        f"interrupted: {run} has the requests that ended by then ({told}), and no verdict; "
        f"`inferloop report {quote(str(run))}` shows them"
    )
