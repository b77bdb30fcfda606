"""`slo:` and `sla:` blocks to values. `{ttft_ms: {p95: 450}}` and the flat `{ttft_p95_ms: 450}` mean the same."""

from __future__ import annotations

import re
from collections.abc import Iterable

from inferloop.contract.distributions import not_a_constant, quantile_of, read_percentiles
from inferloop.contract.located import Located
from inferloop.contract.reader import Problems, Section, as_text
from inferloop.core.slo import LATENCY_METRICS, Objective, Slo

_FLAT = re.compile(r"([a-z]+)_(p[\d.]+)_ms")
_OTHER_KEYS = ("error_rate", "window", "scope", "network_ms")
KEYS = (*LATENCY_METRICS, *_OTHER_KEYS)
FROM_USER = ("ttft_ms", "ttfat_ms", "ttlt_ms")
"""Metrics that the network's share is taken off."""


def read_slo(node: Located | None, problems: Problems, class_names: Iterable[str]) -> Slo | None:
    """None when the block is absent. Objectives come ordered by metric, then quantile."""
    if node is None:
        return None
    section = Section(_unflatten(node, problems), problems, KEYS)
    network_ms = section.number("network_ms", high=1e7) or 0.0
    objectives: list[Objective] = []
    for metric in LATENCY_METRICS:
        objectives += _read_metric(section.get(metric), metric, network_ms, problems)
    return Slo(
        objectives=tuple(objectives),
        max_error_rate=section.number("error_rate", high=1.0),
        window_s=section.seconds("window") or Slo().window_s,
        scope=_read_scope(section.get("scope"), problems, list(class_names)),
        network_ms=network_ms,
    )


def _read_metric(node: Located | None, metric: str, network_ms: float, problems: Problems) -> list[Objective]:
    if node is None:
        return []
    if not isinstance(node.value, dict):
        not_a_constant(node, problems, f"{metric}: {{p95: 450}}")
        return []
    points = read_percentiles(node, node.value, problems, low=0.0, high=1e9, above=True)
    for key, child in node.value.items():
        limit = child.value
        if quantile_of(key) in (0.0, 1.0):
            problems.add(
                child, "no number of requests can prove a minimum or a maximum", "p99.9 is the most one can ask"
            )
        elif metric in FROM_USER and isinstance(limit, int | float) and 0 < limit <= network_ms:
            problems.add(child, f"allows {limit:g} ms, but network_ms alone takes {network_ms:g} ms")
    return [Objective(metric, quantile, limit) for quantile, limit in points or ()]


def _read_scope(node: Located | None, problems: Problems, class_names: list[str]) -> tuple[str, ...]:
    if node is None or node.value == "all":
        return ()
    if not isinstance(node.value, list) or not node.value:
        problems.add(node, "must be `all` or a list of traffic classes", f"classes: {', '.join(class_names)}")
        return ()
    names = [as_text(item, problems, class_names) for item in node.value]
    scope = tuple(sorted({name for name in names if name}))
    return () if set(scope) == set(class_names) else scope


def _unflatten(node: Located, problems: Problems) -> Located:
    """`ttft_p95_ms` moved under `ttft_ms` as `p95`, keeping the place where it was written."""
    if not isinstance(node.value, dict):
        return node
    result = {k: v for k, v in node.value.items() if not _is_flat(k)}
    for key, child in node.value.items():
        found = _FLAT.fullmatch(key)
        if not found or not _is_flat(key):
            continue
        metric = f"{found[1]}_ms"
        nested = result.get(metric, child.moved({}))
        if not isinstance(nested.value, dict) or found[2] in nested.value:
            problems.add(child, f"is already given under {metric}")
            continue
        result[metric] = nested.moved({**nested.value, found[2]: child})
    return node.moved(result)


def _is_flat(key: str) -> bool:
    found = _FLAT.fullmatch(key)
    return found is not None and f"{found[1]}_ms" in LATENCY_METRICS
