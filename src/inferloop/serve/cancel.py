"""POST /v1/requests/{request_id}/cancel: end what runs under an id from outside its connection."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from inferloop.serve.errors import NotFoundError
from inferloop.serve.health import json_response
from inferloop.serve.replica import Replica
from inferloop.serve.replies import Cancelled


class CancelEndpoint:
    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    async def cancel(self, request: Request) -> Response:
        """Every attempt with this x-request-id ends with all its choices, running or queued; each of them tells its own
        client. Raises NotFoundError when there is none."""
        request_id = request.path_params["request_id"]
        num_cancelled = self._replica.interrupt(request_id, "cancelled")
        if not num_cancelled:
            message = f"no request {request_id!r} is being answered here"
            raise NotFoundError(message, param="request_id", code="not_found")
        return json_response(Cancelled(request_id=request_id, num_cancelled=num_cancelled))
