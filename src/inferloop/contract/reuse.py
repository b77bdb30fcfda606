"""How much of a workload repeats what came before it in the same workload."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from inferloop.core.request import TimedRequest


@dataclass(slots=True)
class _Node:
    """What has been seen after one exact beginning: by text, the longest piece; by piece, what followed."""

    longest: dict[tuple[int, str], int] = field(default_factory=dict)
    after: dict[tuple[int, str, int], _Node] = field(default_factory=dict)


class Beginnings:
    """Of prompts that were added. Two prompts are the same up to where their segments differ, and there up to the
    shorter one if they are pieces of one text."""

    def __init__(self) -> None:
        self._root = _Node()

    def shared(self, request: TimedRequest) -> int:
        """Tokens that the request begins with as one of those added does."""
        node, num = self._root, 0
        for segment in request.segments:
            num += min(node.longest.get((segment.key, segment.role), 0), segment.num_tokens)
            found = node.after.get((segment.key, segment.role, segment.num_tokens))
            if found is None:
                break
            node = found
        return num

    def add(self, request: TimedRequest) -> None:
        node = self._root
        for segment in request.segments:
            text = (segment.key, segment.role)
            node.longest[text] = max(node.longest.get(text, 0), segment.num_tokens)
            node = node.after.setdefault((*text, segment.num_tokens), _Node())


def measured_reuse(requests: Iterable[TimedRequest]) -> float:
    """Share of input tokens that repeat an earlier request's beginning, token by token and in the order given.

    A cache without limits that had seen the earlier requests' prompts, and the replies that later ones hold, would have
    this share of hits.
    """
    seen = Beginnings()
    repeated = total = 0
    for request in requests:
        total += request.input_tokens
        repeated += seen.shared(request)
        seen.add(request)
    return repeated / total if total else 0.0
