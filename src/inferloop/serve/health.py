"""Is the process there, may it get traffic, does it get on."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from inferloop.serve.metrics import CONTENT_TYPE
from inferloop.serve.replica import Replica
from inferloop.serve.replies import Live, Progress, Ready


def json_response(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


class HealthEndpoints:
    """live answers for the process, ready for traffic, progress for the step loop."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    async def live(self, _: Request) -> Response:
        return json_response(Live())

    async def ready(self, _: Request) -> Response:
        """200 only after a real token was produced with the current configuration, and until a drain begins."""
        reason = self._replica.not_ready()
        return json_response(Ready(ready=reason is None, reason=reason), 200 if reason is None else 503)

    async def progress(self, _: Request) -> Response:
        replica = self._replica
        stats = replica.generator.describe()[1]
        return json_response(
            Progress(
                alive=stats.alive,
                draining=replica.draining,
                step_counter=stats.step_counter,
                running=stats.num_running,
                waiting=stats.num_waiting,
                in_flight=len(replica.attempts),
            )
        )

    async def metrics(self, _: Request) -> Response:
        """Always text 0.0.4, whatever Accept asks for."""
        return Response(self._replica.metrics.render(), headers={"content-type": CONTENT_TYPE})
