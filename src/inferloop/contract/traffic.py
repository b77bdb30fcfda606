"""`traffic:` to values: rates, lengths, reuse, and the mix of classes."""

from __future__ import annotations

import re
from pathlib import Path

from inferloop.contract.distributions import read_distribution
from inferloop.contract.located import Located, kind_of
from inferloop.contract.reader import Problems, Section, as_number
from inferloop.contract.workload import Arrivals, Rate, Traffic, TrafficClass

KEYS = (
    "qps",
    "rate_profile",
    "arrivals",
    "queries_per_request",
    "tool_ms",
    "input_tokens",
    "output_tokens",
    "prefix_reuse",
    "classes",
)
CLASS_KEYS = ("name", "share", "input_tokens", "output_tokens", "prefix_reuse")
PROCESSES = ("poisson", "gamma", "constant", "trace")
DEFAULT_CLASS = "default"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def read_traffic(section: Section, problems: Problems, folder: Path) -> Traffic | None:
    """None when something needed is missing or wrong; the problems say what. Files are looked up from `folder`."""
    qps = _read_qps(section.get("qps", required=True), problems)
    lengths_in = read_distribution(section.get("input_tokens", required=True), problems, low=1.0)
    lengths_out = read_distribution(section.get("output_tokens", required=True), problems, low=1.0)
    reuse = _read_reuse(section, problems)
    arrivals = _read_arrivals(section, problems, folder)
    profile = section.text("rate_profile")
    if profile and not (folder / profile).is_file():
        problems.add(section.node, f"no such file: {folder / profile}", key="rate_profile")
    queries = read_distribution(section.get("queries_per_request"), problems, low=1.0)
    tool_ms = read_distribution(section.get("tool_ms"), problems, low=0.0)
    if qps is None or lengths_in is None or lengths_out is None or reuse is None:
        return None
    default = TrafficClass(DEFAULT_CLASS, 1.0, lengths_in, lengths_out, reuse)
    classes = _read_classes(section.get("classes"), problems, default)
    return Traffic(qps, arrivals, lengths_in, lengths_out, reuse, classes, queries, tool_ms, profile)


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
    inner = Section(node, problems, ("process", "cv", "file"))
    process = inner.text("process", choices=PROCESSES) or "poisson"
    cv, file = inner.number("cv", above=True, high=100.0), inner.text("file")
    if cv is not None and process != "gamma":
        problems.add(inner.get("cv") or node, f"has no meaning for {process} arrivals", "process: gamma takes a cv")
    if process == "gamma" and inner.get("cv") is None:
        problems.add(node, "is required for gamma arrivals", "1 is as bursty as poisson, 3 far more", key="cv")
    if process == "trace" and file is None:
        problems.add(node, "is required for trace arrivals", key="file")
    elif file is not None and process != "trace":
        problems.add(inner.get("file") or node, f"has no meaning for {process} arrivals", "process: trace takes a file")
    elif file is not None and not (folder / file).is_file():
        problems.add(inner.get("file") or node, f"no such file: {folder / file}")
    return Arrivals(process, 1.0 if cv is None else cv, file)


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
