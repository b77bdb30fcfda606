"""Percentile keys (`p50`, `p99.9`) and the distributions written with them."""

from __future__ import annotations

import re
from decimal import Decimal
from itertools import pairwise

from inferloop.contract.located import Located, kind_of
from inferloop.contract.reader import Problems, as_number
from inferloop.contract.workload import Distribution

_PERCENTILE = re.compile(r"p(\d{1,3}(?:\.\d+)?)")
_NOT_QUANTILES = {
    "mean": "a mean says nothing about the tail; give percentiles such as p50 and p95",
    "avg": "a mean says nothing about the tail; give percentiles such as p50 and p95",
    "std": "give percentiles such as p50 and p95 instead of a spread",
    "median": "write p50",
    "min": "write p0",
    "max": "write p100",
}


def quantile_of(key: str) -> float | None:
    """`p99.9` -> 0.999, exactly what the decimal number says; None when the key is no percentile."""
    found = _PERCENTILE.fullmatch(key)
    value = Decimal(found[1]) / 100 if found else None
    return float(value) if value is not None and value <= 1 else None


def percentile_key(quantile: float) -> str:
    """0.999 -> `p99.9`; the inverse of `quantile_of`."""
    percent = Decimal(repr(quantile)) * 100
    return f"p{percent.normalize():f}"


def read_distribution(
    node: Located | None, problems: Problems, *, low: float, high: float = 1e9
) -> Distribution | None:
    """A plain number (a constant) or a mapping of percentiles; None when absent or wrong.

    Values lie in [low, high] and do not fall as the percentile rises.
    """
    if node is None:
        return None
    if not isinstance(node.value, dict):
        value = as_number(node, problems, low=low, high=high)
        return None if value is None else Distribution(((0.5, value),))
    points = read_percentiles(node, node.value, problems, low=low, high=high)
    return None if points is None else Distribution(points)


def read_percentiles(
    node: Located, children: dict[str, Located], problems: Problems, *, low: float, high: float, above: bool = False
) -> tuple[tuple[float, float], ...] | None:
    """((quantile, value), ...) ascending in both; None when anything is wrong."""
    if not children:
        problems.add(node, "holds no percentile", "for example {p50: 100, p95: 400}")
        return None
    found: dict[float, tuple[float, Located, str]] = {}
    sound = True
    for key, child in children.items():
        quantile = quantile_of(key)
        if quantile is None:
            problems.add(child, "is not a percentile", _instead_of(key))
            sound = False
            continue
        if quantile in found:
            problems.add(child, f"is the same percentile as {found[quantile][2]}")
            sound = False
        value = as_number(child, problems, low=low, high=high, above=above)
        if value is None:
            sound = False
        else:
            found[quantile] = (value, child, key)
    ordered = sorted(found.items())
    for (_, (before, _, lower)), (_, (value, child, key)) in pairwise(ordered):
        if value < before:
            problems.add(child, f"{key} is {value:g}, below {lower} which is {before:g}", "percentiles never fall")
            sound = False
    return tuple((q, v) for q, (v, _, _) in ordered) if sound else None


def _instead_of(key: str) -> str:
    number = key.lower().lstrip("pq")
    if quantile_of(f"p{number}") is not None:
        return f"write p{number}"
    return _NOT_QUANTILES.get(key, "percentiles are p0 to p100, like p99.9")


def not_a_constant(node: Located, problems: Problems, example: str) -> None:
    """A bare number where only percentiles can be judged."""
    problems.add(node, f"must say at which percentile, not {kind_of(node)}", f"for example {example}")
