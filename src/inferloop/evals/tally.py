"""What a run of a suite amounts to. Cases that got no score stay in the denominator and widen the bounds."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import NormalDist

from inferloop.evals.scorer import Score

_Z_TWO_SIDED_95 = NormalDist().inv_cdf(0.975)
_Z_ONE_SIDED_95 = NormalDist().inv_cdf(0.95)
_Z_POWER_80 = NormalDist().inv_cdf(0.80)


def wilson(num_right: float, num: int, z: float = _Z_TWO_SIDED_95) -> tuple[float, float]:
    """Wilson's score interval of a proportion (E. B. Wilson, JASA 22, 1927). Unlike mean +- z*sd/sqrt(n) it does not
    collapse to zero width when all or none are right. `num` 0 knows nothing: (0, 1)."""
    if num == 0:
        return (0.0, 1.0)
    p, zz = num_right / num, z * z
    middle = (p + zz / (2 * num)) / (1 + zz / num)
    half = z / (1 + zz / num) * math.sqrt(p * (1 - p) / num + zz / (4 * num * num))
    low = 0.0 if num_right == 0 else max(0.0, middle - half)
    high = 1.0 if num_right == num else min(1.0, middle + half)
    return (low, high)


def minimum_detectable_effect(num_right: float, num: int) -> float | None:
    """The smallest true drop of the score that a run of this size would show (one-sided 5 %, power 80 %), unpaired:
    (z_0.95 + z_0.80) * sqrt(p(1-p)/n), at the Agresti-Coull proportion (right + 2)/(n + 4) so that a perfect run does
    not claim to detect everything. None without scored cases."""
    if num == 0:
        return None
    p = (num_right + 2) / (num + 4)
    return min(1.0, (_Z_ONE_SIDED_95 + _Z_POWER_80) * math.sqrt(p * (1 - p) / num))


@dataclass(frozen=True, slots=True)
class Tally:
    """total = scored + errored + unparsed + judge_failed + skipped; `sum` adds the scores of the scored."""

    total: int = 0
    scored: int = 0
    errored: int = 0
    unparsed: int = 0
    judge_failed: int = 0
    skipped: int = 0
    sum: float = 0.0

    @classmethod
    def of(cls, scores: Iterable[Score]) -> Tally:
        all_scores = list(scores)
        count = {name: sum(s.status == name for s in all_scores) for name in cls._names()}
        return cls(total=len(all_scores), sum=math.fsum(s.value or 0.0 for s in all_scores), **count)

    @staticmethod
    def _names() -> tuple[str, ...]:
        return ("scored", "errored", "unparsed", "judge_failed", "skipped")

    @property
    def unscored(self) -> int:
        return self.total - self.scored

    @property
    def score(self) -> float | None:
        """Mean over the scored only; never a reason to pass a gate by itself."""
        return self.sum / self.scored if self.scored else None

    @property
    def worst(self) -> float:
        """Every case without a score counted as wrong."""
        return self.sum / self.total if self.total else 0.0

    @property
    def best(self) -> float:
        """Every case without a score counted as right."""
        return (self.sum + self.unscored) / self.total if self.total else 1.0

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson 95 %, over the scored."""
        return wilson(self.sum, self.scored)

    @property
    def mde(self) -> float | None:
        return minimum_detectable_effect(self.sum, self.scored)

    @property
    def counts(self) -> dict[str, int]:
        return {"total": self.total, **{name: getattr(self, name) for name in self._names()}}
