"""Cancelling a request by its id, whichever replica has it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from dataclasses import replace

import msgspec

from inferloop.fleet.act.gateway.answers import Answer, error_answer
from inferloop.fleet.act.gateway.upstream import Failed, Upstream, UpstreamRequest, attempt

_CANCEL = re.compile(r"/v1/requests/([^/]+)/cancel")
_TIMEOUT_S = 5.0


def is_cancel(method: str, path: str) -> bool:
    return method == "POST" and _CANCEL.fullmatch(path) is not None


async def cancel_everywhere(path: str, upstreams: Iterable[Upstream], request: UpstreamRequest) -> Answer:
    """Ask every replica, for a retry may have taken the request to another one: 200 with the sum when any had it, 404
    when all could say that they have not, 502 when some could not be asked."""
    matched = _CANCEL.fullmatch(path)
    assert matched is not None, "not a request to cancel"
    quick = replace(request, timeout_s=_TIMEOUT_S)
    told = await asyncio.gather(*(attempt(upstream, quick) for upstream in upstreams))
    num_cancelled = sum(_num_cancelled(one) for one in told if isinstance(one, Answer))
    if num_cancelled:
        return Answer(200, msgspec.json.encode({"request_id": matched[1], "num_cancelled": num_cancelled}))
    if any(isinstance(one, Failed) for one in told):
        return error_answer(502, "not every replica could be asked", "replica_failed")
    return error_answer(404, f"no request {matched[1]!r} is being answered here", "not_found")


def _num_cancelled(answer: Answer) -> int:
    if answer.status != 200:
        return 0
    try:
        return int(msgspec.json.decode(answer.body)["num_cancelled"])
    except (ValueError, TypeError, KeyError, msgspec.DecodeError):  # an engine that means something else by this path
        return 0
