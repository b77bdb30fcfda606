"""`traffic:` to values: rates, lengths, reuse, and the mix of classes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from inferloop.contract.course import read_profile
from inferloop.contract.distributions import read_distribution
from inferloop.contract.located import Located, kind_of
from inferloop.contract.reader import Problems, Section, as_number
from inferloop.contract.trace.detect import FORMATS, detect
from inferloop.contract.trace.own import REQUESTS
from inferloop.contract.trace.record import MAX_REQUESTS
from inferloop.contract.workload import Arrivals, Ramp, Rate, RateProfile, TraceSource, Traffic, TrafficClass
from inferloop.core.digest import file_digest
from inferloop.core.errors import UsageError

KEYS = (
    "qps",
    "rate_profile",
    "arrivals",
    "queries_per_request",
    "tool_ms",
    "turns",
    "think_ms",
    "input_tokens",
    "output_tokens",
    "prefix_reuse",
    "classes",
)
CLASS_KEYS = ("name", "share", "input_tokens", "output_tokens", "prefix_reuse")
PROCESSES = ("poisson", "gamma", "constant", "burst", "closed", "trace")
OPEN = PROCESSES[:3]
RAMPS: tuple[Literal["linear", "exponential"], ...] = ("linear", "exponential")
TOO_LONG: tuple[Literal["clip", "skip"], ...] = ("clip", "skip")
ARRIVAL_KEYS = {
    "cv": ("gamma",),
    "ramp": OPEN,
    "users": ("closed",),
    "think_ms": ("closed",),
    **dict.fromkeys(("file", "format", "time_scale", "max_requests", "max_context"), ("trace",)),
}
"""Which processes each key of arrivals has a meaning for."""
MOST_CALLS = 1000.0
MOST_USERS = 1e6
DEFAULT_CLASS = "default"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def read_traffic(section: Section, problems: Problems, folder: Path) -> Traffic | None:
    """None when something needed is missing or wrong; the problems say what. Files are looked up from `folder`."""
    qps = _read_qps(section.get("qps", required=True), problems)
    lengths_in = read_distribution(section.get("input_tokens", required=True), problems, low=1.0)
    lengths_out = read_distribution(section.get("output_tokens", required=True), problems, low=1.0)
    reuse = _read_reuse(section, problems)
    arrivals = _read_arrivals(section, problems, folder)
    profile = _read_profile(section.get("rate_profile"), problems, folder)
    queries, turns = (
        read_distribution(section.get(key), problems, low=1.0, high=MOST_CALLS)
        for key in ("queries_per_request", "turns")
    )
    tool_ms, think_ms = (read_distribution(section.get(key), problems, low=0.0) for key in ("tool_ms", "think_ms"))
    if (node := section.get("think_ms")) is not None and section.get("turns") is None:
        hint = "the users of a closed loop have theirs under arrivals" if arrivals.process == "closed" else None
        problems.add(node, "has no meaning without turns", hint)
    if qps is None or lengths_in is None or lengths_out is None or reuse is None:
        return None
    default = TrafficClass(DEFAULT_CLASS, 1.0, lengths_in, lengths_out, reuse)
    classes = _read_classes(section.get("classes"), problems, default)
    return Traffic(qps, arrivals, lengths_in, lengths_out, reuse, classes, queries, tool_ms, profile, turns, think_ms)


def valid_name(name: str) -> bool:
    """Names become folder names and metric labels, so they are short and plain."""
    return _NAME.fullmatch(name) is not None


def _read_qps(node: Located | None, problems: Problems) -> Rate | None:
    if node is None:
        return None
    if not isinstance(node.value, dict):
        value = as_number(node, problems, above=True)
        return None if value is None else Rate(value, value, value)
    section = Section(node, problems, ("avg", "p95", "peak", "window"))
    section.get("avg", required=True)
    avg, p95, peak = (section.number(key, above=True) for key in ("avg", "p95", "peak"))
    window_s = section.seconds("window")
    if avg is None:
        return None
    p95_or_avg = avg if p95 is None else p95
    rate = Rate(avg, p95_or_avg, p95_or_avg if peak is None else peak)
    for lower, upper in (("avg", "p95"), ("p95", "peak")):
        low, high = getattr(rate, lower), getattr(rate, upper)
        if low > high:
            problems.add(section.get(upper) or node, f"{upper} is {high:g}, below {lower} which is {low:g}")
            return None
    return Rate(rate.avg, rate.p95, rate.peak, rate.window if window_s is None else duration_text(window_s))


def duration_text(seconds: float) -> str:
    """604800 -> `7d`: the largest unit that divides it, so that 168h and 7d are one meaning."""
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.0f}s" if seconds == int(seconds) else f"{seconds * 1000:g}ms"


def _read_reuse(section: Section, problems: Problems) -> float | None:
    node = section.get("prefix_reuse")
    reuse = as_number(node, problems, high=1.0) if node else 0.0
    if node and reuse == 1.0:
        problems.add(node, "must be below 1: a prompt that repeats whole still computes its last token")
        return None
    return reuse


def _read_arrivals(section: Section, problems: Problems, folder: Path) -> Arrivals:
    node = section.get("arrivals")
    if node is not None and isinstance(node.value, str):
        node = node.moved({"process": node})
    if node is None:
        return Arrivals()
    inner = Section(node, problems, ("process", *ARRIVAL_KEYS))
    process = inner.text("process", choices=PROCESSES) or "poisson"
    for key, meant_for in ARRIVAL_KEYS.items():
        if (found := inner.get(key)) is not None and process not in meant_for:
            problems.add(found, f"has no meaning for {process} arrivals", f"it is for {' and '.join(meant_for)}")
    cv, users = inner.number("cv", above=True, high=100.0), _whole(inner, "users", MOST_USERS)
    if process == "gamma" and inner.get("cv") is None:
        problems.add(node, "is required for gamma arrivals", "1 is as bursty as poisson, 3 far more", key="cv")
    if process == "closed" and inner.get("users") is None:
        problems.add(node, "is required for closed arrivals", "how many ask at the same time", key="users")
    return Arrivals(
        process=process,
        cv=1.0 if cv is None else cv,
        ramp=_read_ramp(inner.get("ramp"), problems),
        users=users,
        think_ms=read_distribution(inner.get("think_ms"), problems, low=0.0),
        trace=_read_trace(inner, problems, folder) if process == "trace" else None,
    )


def _read_ramp(node: Located | None, problems: Problems) -> Ramp | None:
    if node is None:
        return None
    section = Section(node, problems, ("shape", "from", "to", "over"))
    for key in ("from", "over"):
        section.get(key, required=True)
    shape = section.text("shape", choices=RAMPS) or "linear"
    start, end, seconds = (
        section.number("from", high=100.0),
        section.number("to", above=True, high=100.0),
        section.seconds("over"),
    )
    if start is None or seconds is None:
        return None
    if shape == "exponential" and start == 0.0:
        problems.add(section.get("from") or node, "must be more than 0", "an exponential never leaves 0")
        return None
    return Ramp("exponential" if shape == "exponential" else "linear", start, seconds, 1.0 if end is None else end)


def _read_trace(section: Section, problems: Problems, folder: Path) -> TraceSource | None:
    file = section.text("file", required=True)
    kind = section.text("format", choices=("auto", *FORMATS)) or "auto"
    scale, most = section.number("time_scale", above=True, high=1e6), _whole(section, "max_requests", MAX_REQUESTS)
    too_long = section.text("max_context", choices=TOO_LONG)
    if file is None:
        return None
    path = folder / file
    node = section.get("file") or section.node
    try:
        found = detect(path) if kind == "auto" else kind
        digest = _file_digest(path / REQUESTS if path.is_dir() else path)
    except UsageError as error:
        problems.add(node, str(error))
        return None
    context: Literal["clip", "skip"] = "skip" if too_long == "skip" else "clip"
    return TraceSource(file, str(path), found, 1.0 if scale is None else scale, most, context, digest)


def _read_profile(node: Located | None, problems: Problems, folder: Path) -> RateProfile | None:
    if node is None:
        return None
    if not isinstance(node.value, dict):
        node = node.moved({"file": node})
    section = Section(node, problems, ("file", "time_scale"))
    file, scale = section.text("file", required=True), section.number("time_scale", above=True, high=1e6)
    if file is None:
        return None
    path = folder / file
    place = section.get("file") or node
    if not path.is_file():
        problems.add(place, f"no such file: {path}")
        return None
    try:
        read_profile(path)
        digest = _file_digest(path)
    except UsageError as error:
        problems.add(place, str(error))
        return None
    return RateProfile(file, str(path), 1.0 if scale is None else scale, digest)


def _file_digest(path: Path) -> str:
    """Raises UsageError for a file that is not there or cannot be read."""
    try:
        return file_digest(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error


def _whole(section: Section, key: str, high: float) -> int | None:
    value = section.number(key, low=1.0, high=high)
    if value is not None and value != int(value):
        problems = section.problems
        problems.add(section.get(key) or section.node, f"must be a whole number, not {value:g}")
        return None
    return None if value is None else int(value)


def _read_classes(node: Located | None, problems: Problems, default: TrafficClass) -> tuple[TrafficClass, ...]:
    if node is None or node.value == []:
        return (default,)
    if not isinstance(node.value, list):
        problems.add(node, f"must be a list, not {kind_of(node)}", "[{name: short, share: 0.7, ...}, ...]")
        return (default,)
    classes = [_read_class(item, problems, default) for item in node.value]
    sound = [c for c in classes if c is not None]
    seen: set[str] = set()
    for item, found in zip(node.value, classes, strict=True):
        if found and found.name in seen:
            problems.add(item, f"the class {found.name} is given twice")
        seen |= {found.name} if found else set()
    total = sum(c.share for c in sound)
    if len(sound) == len(classes) and abs(total - 1.0) > 1e-6:
        problems.add(node, f"the shares add up to {total:g}, not 1")
    return tuple(sorted(sound, key=lambda c: c.name)) or (default,)


def _read_class(node: Located, problems: Problems, default: TrafficClass) -> TrafficClass | None:
    section = Section(node, problems, CLASS_KEYS)
    section.get("share", required=True)
    name, share = section.text("name", required=True), section.number("share", above=True, high=1.0)
    if name and not valid_name(name):
        problems.add(node, "must be letters, digits, dot, dash or underscore, at most 64", key="name")
    lengths_in = read_distribution(section.get("input_tokens"), problems, low=1.0) or default.input_tokens
    lengths_out = read_distribution(section.get("output_tokens"), problems, low=1.0) or default.output_tokens
    reuse = default.prefix_reuse if section.get("prefix_reuse") is None else _read_reuse(section, problems)
    if name is None or share is None or reuse is None:
        return None
    return TrafficClass(name, share, lengths_in, lengths_out, reuse)
