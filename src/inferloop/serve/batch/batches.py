"""/v1/batches: jobs over files of requests."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from inferloop.core.errors import RequestError
from inferloop.core.ids import new_id
from inferloop.serve.asgi import read_body
from inferloop.serve.batch.job import Job
from inferloop.serve.batch.kinds import KINDS
from inferloop.serve.batch.paging import limit_of, page_of
from inferloop.serve.batch.records import BatchRecord
from inferloop.serve.batch.service import Batches
from inferloop.serve.batch.wire import (
    Batch,
    BatchList,
    BatchRequest,
    BatchUsage,
    Errors,
    InputDetails,
    OutputDetails,
    Progress,
    RequestCounts,
)
from inferloop.serve.decode import decode_body
from inferloop.serve.errors import ConflictError, NotFoundError
from inferloop.serve.health import json_response
from inferloop.serve.no_op import check_no_op

WINDOW_S = 24 * 3600
_MAX_BODY_BYTES = 1 << 17
_LISTED, _MAX_LISTED = 20, 100
_IDLE = Progress(num_running=0, rows_per_s=None, tokens_per_s=None, eta_s=None)


class BatchEndpoints:
    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    async def create(self, request: Request) -> Response:
        """The file is checked afterwards, as with OpenAI; a wrong one makes the batch fail with all its errors."""
        batches = self._batches
        batches.replica.admit()
        asked = decode_body(await read_body(request.receive, _MAX_BODY_BYTES), BatchRequest)
        check_no_op(asked.output_expires_after, (), "output_expires_after")
        if asked.endpoint not in KINDS:
            known = ", ".join(KINDS)
            raise RequestError(f"endpoint {asked.endpoint!r} is none of {known}", param="endpoint")
        at_s = batches.now_s()
        record = BatchRecord(
            id=new_id("batch"),
            model=batches.replica.info.model_id,
            endpoint=asked.endpoint,
            input_file_id=asked.input_file_id,
            status="validating",
            created_at=at_s,
            expires_at=at_s + WINDOW_S,
            metadata=asked.metadata,
        )
        await self._check_input(asked.input_file_id)
        if not await batches.desk.ask(batches.desk.store.add_batch, record):
            raise _no_file(asked.input_file_id)
        batches.runner.add(record)
        return json_response(self._public(record))

    async def list(self, request: Request) -> Response:
        query = request.query_params
        limit = limit_of(query.get("limit"), _LISTED, _MAX_LISTED)
        store = self._batches.desk.store
        found = await self._batches.desk.ask(store.batches, after=query.get("after"), limit=limit + 1)
        data, page = page_of([self._public(record) for record in found], limit)
        return json_response(BatchList(data=data, **page))

    async def get(self, request: Request) -> Response:
        return json_response(self._public(await self._find(request)))

    async def cancel(self, request: Request) -> Response:
        record = await self._find(request)
        if not await self._batches.runner.cancel(record.id) and record.status != "cancelling":
            record = await self._find(request)
            raise ConflictError(f"{record.id} is {record.status}: too late to cancel", code="batch_not_cancellable")
        return json_response(self._public(await self._find(request)))

    async def _check_input(self, file_id: str) -> None:
        file = await self._batches.desk.ask(self._batches.desk.store.file, file_id)
        if file is None:
            raise _no_file(file_id)
        if file.purpose != "batch":
            raise RequestError(f"{file_id} has the purpose {file.purpose!r}, not 'batch'", param="input_file_id")

    async def _find(self, request: Request) -> BatchRecord:
        batch_id = request.path_params["batch_id"]
        record = await self._batches.desk.ask(self._batches.desk.store.batch, batch_id)
        if record is None:
            raise NotFoundError(f"There is no batch {batch_id!r}", param="batch_id", code="not_found")
        return record

    def _public(self, record: BatchRecord) -> Batch:
        job = self._batches.runner.jobs.get(record.id)
        return public_batch(record, job)


def _no_file(file_id: str) -> RequestError:
    return RequestError(f"There is no file {file_id!r}", param="input_file_id", code="file_not_found")


def public_batch(record: BatchRecord, job: Job | None) -> Batch:
    tokens, stamps = record.tokens, record.stamps
    return Batch(
        id=record.id,
        endpoint=record.endpoint,
        model=record.model,
        errors=Errors(data=list(record.errors)) if record.errors else None,
        input_file_id=record.input_file_id,
        status=record.status,
        output_file_id=record.output_file_id,
        error_file_id=record.error_file_id,
        created_at=record.created_at,
        in_progress_at=stamps.get("in_progress"),
        expires_at=record.expires_at,
        finalizing_at=stamps.get("finalizing"),
        completed_at=stamps.get("completed"),
        failed_at=stamps.get("failed"),
        expired_at=stamps.get("expired"),
        cancelling_at=stamps.get("cancelling"),
        cancelled_at=stamps.get("cancelled"),
        request_counts=RequestCounts(total=record.num_rows, completed=record.num_completed, failed=record.num_failed),
        usage=BatchUsage(
            input_tokens=tokens.num_input,
            input_tokens_details=InputDetails(cached_tokens=tokens.num_cached),
            output_tokens=tokens.num_output,
            output_tokens_details=OutputDetails(),
            total_tokens=tokens.num_input + tokens.num_output,
        ),
        metadata=record.metadata,
        inferloop=_IDLE if job is None else job.progress(),
    )
