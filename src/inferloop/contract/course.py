"""How a rate goes up and down: ramps, and profiles read from files. Values are shares of the rate that is asked for.

A process whose rate varies is a steady one on another clock: arrival k of a process of rate 1 comes at S_k, and that of
the rate r(t) at the t up to which r has the integral S_k (time rescaling; the inversion method of Cinlar 1975). No
arrival is ever moved to make a count come out.

A profile is a CSV file with one of two headers:

    hour,qps      24 rows (0 to 23) or 168 (0 is the first hour of Monday); each is the mean of its hour
    seconds,qps   any instants that ascend, the first is 0

Between rows the rate is linear, so a burst keeps its slope instead of becoming a step.
"""

from __future__ import annotations

import csv
import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Protocol

from inferloop.contract.workload import Ramp, RateProfile
from inferloop.core.errors import ContractError

MAX_ROWS = 1_000_000
_HOUR_S = 3600.0


class Course(Protocol):
    """A rate over time, as a share of the nominal one."""

    def time_of(self, area: float) -> float | None:
        """The instant, in seconds, up to which the course has this integral (share times seconds); None: never."""
        ...


class Piecewise:
    """Linear between (seconds, share) points. After the last one the rate stays when `holds`, else nothing comes."""

    def __init__(self, points: Sequence[tuple[float, float]], *, holds: bool) -> None:
        self._points, self._holds = list(points), holds
        self._areas = [0.0]
        for (t0, y0), (t1, y1) in pairwise(self._points):
            self._areas.append(self._areas[-1] + (t1 - t0) * (y0 + y1) / 2)

    def time_of(self, area: float) -> float | None:
        last = len(self._points) - 1
        if area >= self._areas[last]:
            end_s, share = self._points[last]
            if not self._holds or share <= 0.0:
                return None
            return end_s + (area - self._areas[last]) / share
        i = bisect_right(self._areas, area) - 1
        (t0, y0), (t1, y1) = self._points[i], self._points[i + 1]
        rest, slope = area - self._areas[i], (y1 - y0) / (t1 - t0)
        root = y0 + math.sqrt(max(0.0, y0 * y0 + 2.0 * slope * rest))
        return t0 + (2.0 * rest / root if root > 0.0 else 0.0)


class Exponential:
    """From `start` to `end` in `seconds`, by the same factor in each of them, then steady."""

    def __init__(self, start: float, end: float, seconds: float) -> None:
        self._start, self._end, self._seconds = start, end, seconds
        self._growth = math.log(end / start) / seconds
        self._area = (end - start) / self._growth if self._growth else start * seconds

    def time_of(self, area: float) -> float | None:
        if area >= self._area:
            return self._seconds + (area - self._area) / self._end
        if not self._growth:
            return area / self._start
        return math.log1p(area * self._growth / self._start) / self._growth


def course_of_ramp(ramp: Ramp) -> Course:
    if ramp.shape == "exponential":
        return Exponential(ramp.start, ramp.end, ramp.seconds)
    return Piecewise([(0.0, ramp.start), (ramp.seconds, ramp.end)], holds=True)


def course_of_profile(profile: RateProfile) -> Course:
    """The profile's course with a mean of 1. Raises ContractError with file and line."""
    return Piecewise(_shares(profile), holds=False)


def profile_s(profile: RateProfile) -> float:
    """How long it takes to play. Raises ContractError with file and line."""
    return _shares(profile)[-1][0]


def highest_share(profile: RateProfile) -> float:
    """The highest rate over the mean. Raises ContractError with file and line."""
    return max(share for _, share in _shares(profile))


def _shares(profile: RateProfile) -> list[tuple[float, float]]:
    points = read_profile(Path(profile.path))
    area = sum((t1 - t0) * (y0 + y1) / 2 for (t0, y0), (t1, y1) in pairwise(points))
    mean = area / points[-1][0]
    return [(t * profile.time_scale, y / mean) for t, y in points]


def read_profile(path: Path) -> list[tuple[float, float]]:
    """(seconds, rate) points. Raises ContractError with file and line."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            return _points(path, file)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ContractError(f"cannot be read: {error}", file=str(path)) from error


def _points(path: Path, text: Iterable[str]) -> list[tuple[float, float]]:
    reader = csv.reader(text)
    header = [cell.strip().lower() for cell in next(reader, [])]
    if header not in (["hour", "qps"], ["seconds", "qps"]):
        raise ContractError(
            "is no rate profile", file=str(path), line=1, hint="the first line is hour,qps or seconds,qps"
        )
    found: list[tuple[float, float]] = []
    for row in reader:
        if not row:
            continue
        line = reader.line_num
        at, rate = (_number(path, line, key, row, i) for i, key in enumerate(header))
        if found and at <= found[-1][0]:
            raise ContractError(f"must come after {found[-1][0]:g}, not at {at:g}", file=str(path), line=line)
        if not found and at != 0:
            raise ContractError(f"{header[0]} must begin at 0, not {at:g}", file=str(path), line=line)
        found.append((at, rate))
        if len(found) > MAX_ROWS:
            raise ContractError(f"has more than {MAX_ROWS} rows", file=str(path), line=line)
    if header[0] == "hour":
        found = _hours(path, found)
    if len(found) < 2:
        raise ContractError("needs two rows at least", file=str(path))
    if not any(rate > 0 for _, rate in found):
        raise ContractError("has no rate above 0", file=str(path))
    return found


def _hours(path: Path, found: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Each hour's mean in its middle; the ends, where day or week begin again, have the mean of both neighbours."""
    if len(found) not in (24, 168) or any(at != i for i, (at, _) in enumerate(found)):
        raise ContractError(f"must have the hours 0 to 23 or 0 to 167, one each, not {len(found)} rows", file=str(path))
    edge = (found[0][1] + found[-1][1]) / 2
    middles = [((hour + 0.5) * _HOUR_S, rate) for hour, rate in found]
    return [(0.0, edge), *middles, (len(found) * _HOUR_S, edge)]


def _number(path: Path, line: int, key: str, row: Sequence[str], index: int) -> float:
    try:
        value = float(row[index])
    except (IndexError, ValueError):
        text = repr(row[index]) if index < len(row) else "nothing"
        raise ContractError(f"must be a number, not {text}", file=str(path), line=line, key=key) from None
    if not (math.isfinite(value) and value >= 0):
        raise ContractError(f"must be 0 or more, not {value}", file=str(path), line=line, key=key)
    return value
