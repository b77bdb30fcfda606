"""What every request sent has come to: the one place that counts, read by the verdict."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Sent:
    """One HTTP request. `status` None: left before the headers came. `num_output`: what usage said."""

    request_id: str
    what: str
    status: int | None = None
    complete: bool = False
    num_output: int | None = None


@dataclass(slots=True)
class Ledger:
    """Mutated by the actors, on one event loop."""

    sent: dict[str, Sent] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    """How often each kind of thing happened."""
    problems: list[str] = field(default_factory=list)
    num_problems: int = 0

    def problem(self, text: str) -> None:
        """Kept up to a number that can be read; counted beyond."""
        self.num_problems += 1
        if self.num_problems <= 50:
            self.problems.append(text)
