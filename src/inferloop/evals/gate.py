"""The quality gate: does a run of the suite keep what the contract promises?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from inferloop.contract.workload import QualityGate
from inferloop.evals.tally import Tally

MAX_UNSCORED_SHARE = 0.05
"""Above this share of cases without a score, a run that is not plainly bad proves nothing."""


@dataclass(frozen=True, slots=True)
class GateVerdict:
    verdict: Literal["pass", "fail", "inconclusive"]
    reasons: tuple[str, ...]


def judge(gate: QualityGate, tally: Tally, *, max_unscored_share: float = MAX_UNSCORED_SHARE) -> GateVerdict:
    """pass: the minimum is reached even if every unscored case were wrong. fail: it is missed even if every one were
    right. Otherwise, and whenever too many cases have no score, inconclusive: scored-only never passes."""
    if tally.total == 0:
        return GateVerdict("inconclusive", ("the suite ran no case",))
    minimum = gate.minimum
    bounds = f"between {tally.worst:.3f} and {tally.best:.3f}" if tally.unscored else f"{tally.worst:.3f}"
    if tally.best < minimum:
        return GateVerdict("fail", (f"score {bounds} is below the minimum {minimum:g}",))
    reasons: list[str] = []
    share = tally.unscored / tally.total
    if share > max_unscored_share:
        reasons.append(
            f"{tally.unscored} of {tally.total} cases have no score ({share:.0%}; at most {max_unscored_share:.0%})"
        )
    if tally.worst < minimum:
        reasons.append(f"score {bounds} may be below the minimum {minimum:g}")
    if reasons:
        return GateVerdict("inconclusive", tuple(reasons))
    passed = [f"score {bounds} reaches the minimum {minimum:g}"]
    if gate.allowed_loss is not None:
        passed.append("allowed_loss needs a baseline run to compare with; none was given, so it was not checked")
    return GateVerdict("pass", tuple(passed))
