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


def measured_reuse(requests: Iterable[TimedRequest]) -> float:
    """Share of input tokens that repeat an earlier request's beginning, token by token and in the order given.

    A cache without limits that had seen the earlier requests' prompts, and the replies that later ones hold, would have
    this share of hits. Two prompts are the same up to where their segments differ, and there up to the shorter one if
    they are pieces of one text.
    """
    root = _Node()
    repeated = total = 0
    for request in requests:
        node, is_repeat = root, True
        for segment in request.segments:
            total += segment.num_tokens
            text = (segment.key, segment.role)
            if is_repeat:
                repeated += min(node.longest.get(text, 0), segment.num_tokens)
            node.longest[text] = max(node.longest.get(text, 0), segment.num_tokens)
            piece = (*text, segment.num_tokens)
            found = node.after.get(piece)
            if found is None:
                is_repeat = False
                found = node.after[piece] = _Node()
            node = found
    return repeated / total if total else 0.0
