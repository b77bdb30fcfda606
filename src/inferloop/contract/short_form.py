"""The minimal flat form, rewritten to the full one before anything is read; every value keeps its place.

{model, qps, input_tokens, output_tokens, prefix_reuse, slo: {ttft_p95_ms, tpot_p95_ms}, quality_gate}
"""

from __future__ import annotations

from inferloop.contract import traffic
from inferloop.contract.located import Located
from inferloop.contract.reader import Problems

KEYS = (*traffic.KEYS, "quality_gate")


def is_short(root: Located) -> bool:
    return isinstance(root.value, dict) and "traffic" not in root.value and any(k in root.value for k in KEYS)


def expand(root: Located, problems: Problems) -> Located:
    """The full form of a short one; anything else comes back as it is."""
    if not isinstance(root.value, dict) or not is_short(root):
        return root
    rest = {k: v for k, v in root.value.items() if k not in KEYS}
    rest["traffic"] = Located({k: v for k, v in root.value.items() if k in traffic.KEYS}, root.line, "")
    gate = root.value.get("quality_gate")
    if gate is None or gate.value is None:
        return root.moved(rest)
    if "quality" in rest:
        problems.add(gate, "and quality say the same twice; keep one")
    else:
        rest["quality"] = gate.moved({"suite": gate})
    return root.moved(rest)
