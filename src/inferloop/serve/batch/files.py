"""/v1/files: what goes into batches, and what comes out."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from inferloop.core.errors import RequestError
from inferloop.core.ids import new_id
from inferloop.serve.batch.download import Download
from inferloop.serve.batch.paging import limit_of, page_of
from inferloop.serve.batch.records import FileRecord
from inferloop.serve.batch.service import Batches
from inferloop.serve.batch.upload import Form, read_form
from inferloop.serve.batch.wire import FileDeleted, FileList, FileObject
from inferloop.serve.errors import ConflictError, NoRoomError, NotFoundError
from inferloop.serve.health import json_response

MAX_LISTED = 10_000


class FileEndpoints:
    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    async def create(self, request: Request) -> Response:
        batches = self._batches
        batches.replica.admit()
        folder, desk = batches.folder, batches.desk
        file_id = new_id("file")
        try:
            form = await read_form(request, folder.partial(file_id))
            try:
                record = _record(file_id, form, batches.now_s())
                await asyncio.to_thread(folder.make_whole, file_id)
                await desk.ask(desk.store.add_file, record)
            except Exception:  # cancelled, it may be known by now; what is not goes with the next start
                folder.remove(file_id)
                raise
        except OSError as error:
            raise NoRoomError(f"the file could not be kept: {error.strerror}") from None
        return json_response(_public(record))

    async def list(self, request: Request) -> Response:
        query = request.query_params
        limit = limit_of(query.get("limit"), MAX_LISTED, MAX_LISTED)
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise RequestError("order must be asc or desc", param="order")
        found = await self._batches.desk.ask(
            self._batches.desk.store.files,
            purpose=query.get("purpose"),
            after=query.get("after"),
            limit=limit + 1,
            newest_first=order == "desc",
        )
        data, page = page_of([_public(record) for record in found], limit)
        return json_response(FileList(data=data, **page))

    async def get(self, request: Request) -> Response:
        return json_response(_public(await self._find(request)))

    async def content(self, request: Request) -> Response:
        record = await self._find(request)
        try:
            file = await asyncio.to_thread(self._batches.folder.file(record.id).open, "rb")
        except FileNotFoundError:  # deleted since it was found
            raise _no_file(record.id) from None
        return Download(file, record.num_bytes, record.filename or record.id)

    async def delete(self, request: Request) -> Response:
        record = await self._find(request)
        desk = self._batches.desk
        if (user := await desk.ask(desk.store.remove_file, record.id)) is not None:
            raise ConflictError(f"{record.id} is the input of {user}, which has not ended", code="file_in_use")
        await asyncio.to_thread(self._batches.folder.remove, record.id)
        return json_response(FileDeleted(id=record.id))

    async def _find(self, request: Request) -> FileRecord:
        file_id = request.path_params["file_id"]
        record = await self._batches.desk.ask(self._batches.desk.store.file, file_id)
        if record is None:
            raise _no_file(file_id)
        return record


def _no_file(file_id: str) -> NotFoundError:
    return NotFoundError(f"There is no file {file_id!r}", param="file_id", code="not_found")


def _record(file_id: str, form: Form, at_s: int) -> FileRecord:
    if (purpose := form.fields.pop("purpose", None)) != "batch":
        raise RequestError(f"purpose must be 'batch', got {purpose!r}", param="purpose")
    for name in form.fields:
        raise RequestError(f"{name} is not supported by this server", param=name, code="unknown_parameter")
    if form.filename is None:
        raise RequestError("file is required", param="file", code="missing_required_parameter")
    return FileRecord(file_id, "batch", form.filename[:256], form.num_bytes, at_s)


def _public(record: FileRecord) -> FileObject:
    return FileObject(
        id=record.id,
        bytes=record.num_bytes,
        created_at=record.created_at,
        filename=record.filename,
        purpose=record.purpose,
    )
