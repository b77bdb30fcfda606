"""The paths of files and batches, whether the server keeps batch jobs or not."""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from inferloop.core.errors import RequestError
from inferloop.serve.batch.batches import BatchEndpoints
from inferloop.serve.batch.files import FileEndpoints
from inferloop.serve.batch.service import Batches
from inferloop.serve.errors import NoRoomError

Handler = Callable[[Request], Awaitable[Response]]


class NoBatchesError(RequestError):
    status = 501

    def __init__(self) -> None:
        message = "This server keeps no batch jobs; start it with `inferloop serve MODEL --batch-dir DIR`"
        super().__init__(message, code="batches_not_enabled")


def batch_routes(batches: Batches | None) -> list[Route]:
    """Without `batches` every path says how to get them."""
    files = None if batches is None else FileEndpoints(batches)
    jobs = None if batches is None else BatchEndpoints(batches)
    table: dict[str, dict[str, Handler | None]] = {
        "/v1/files": {"GET": files.list if files else None, "POST": files.create if files else None},
        "/v1/files/{file_id}": {"GET": files.get if files else None, "DELETE": files.delete if files else None},
        "/v1/files/{file_id}/content": {"GET": files.content if files else None},
        "/v1/batches": {"GET": jobs.list if jobs else None, "POST": jobs.create if jobs else None},
        "/v1/batches/{batch_id}": {"GET": jobs.get if jobs else None},
        "/v1/batches/{batch_id}/cancel": {"POST": jobs.cancel if jobs else None},
    }
    return [Route(path, _by_method(handlers), methods=list(handlers)) for path, handlers in table.items()]


def _by_method(handlers: dict[str, Handler | None]) -> Handler:
    """One route per path, so that a 405 lists every method that the path takes."""

    async def handle(request: Request) -> Response:
        handler = handlers["GET" if request.method == "HEAD" else request.method]
        if handler is None:
            raise NoBatchesError
        try:
            return await handler(request)
        except sqlite3.Error as error:
            raise NoRoomError(f"the database of batch jobs fails: {error}") from None

    return handle
