"""One row of a batch, answered the way a request over HTTP is."""

from __future__ import annotations

import asyncio

import msgspec
from msgspec import Raw, Struct

from inferloop.core.errors import EngineError, InferloopError, OverloadedError, RequestError
from inferloop.core.ids import TraceContext, new_id
from inferloop.serve.batch.input import Row
from inferloop.serve.batch.kinds import Kind
from inferloop.serve.batch.records import Answer, RowState, Tokens
from inferloop.serve.errors import NOT_FAULTS, error_object, error_status, log_bug
from inferloop.serve.finish import Attempt
from inferloop.serve.replica import Replica

TRAFFIC_CLASS = "batch"
MAX_FAULTS = 3
"""Our own fault may be the row's doing, so a row is not tried for ever."""
_MAX_WAIT_S = 10.0
_FAULT_WAIT_S = 0.2


class Reply(Struct, kw_only=True):
    status_code: int
    request_id: str
    body: Raw


class RowError(Struct, kw_only=True):
    code: str
    message: str


class OutputRow(Struct, kw_only=True):
    """One line of an output or error file. `response` null: the row was never answered, `error` says why."""

    id: str
    custom_id: str
    response: Reply | None
    error: RowError | None


def line_of(custom_id: str, response: Reply | None, error: RowError | None = None) -> bytes:
    """Without the newline."""
    row = OutputRow(id=new_id("batch_req"), custom_id=custom_id, response=response, error=error)
    return msgspec.json.encode(row)


async def answer_row(replica: Replica, kind: Kind, batch_id: str, row: Row, body: bytes) -> Answer:
    """Waits out a full queue, tries again after a fault of ours, and leaves one event per try that was begun.

    Raises EngineError when the engine is gone: that is no answer to this row. Cancelled, the request is aborted.
    """
    request_id = f"{batch_id}.{row.number}"
    num_faults = 0
    while True:
        attempt = Attempt(
            replica,
            request_id,
            TraceContext.new(),
            number=num_faults + 1,
            traffic_class=TRAFFIC_CLASS,
            background=True,
        )
        try:
            reply = await kind.answer(attempt, body)
        except OverloadedError as error:
            await asyncio.sleep(min(error.retry_after_s, _MAX_WAIT_S))
            continue
        except asyncio.CancelledError:
            attempt.abort("drain" if replica.draining else "cancelled")
            raise
        except NOT_FAULTS:
            raise
        except BaseException as error:
            attempt.fail(error)
            if not isinstance(error, InferloopError):
                log_bug(request_id, error)
            if not isinstance(error, RequestError):
                if not replica.generator.describe()[1].alive:
                    raise EngineError("the engine has stopped") from None
                num_faults += 1
                if num_faults < MAX_FAULTS:
                    await asyncio.sleep(_FAULT_WAIT_S * num_faults)
                    continue
            return _answer(attempt, batch_id, row, "failed", error_status(error), error_object(error))
        attempt.finish()
        return _answer(attempt, batch_id, row, "completed", 200, reply)


def _answer(attempt: Attempt, batch_id: str, row: Row, state: RowState, status: int, body: bytes) -> Answer:
    usage = attempt.usage
    tokens = Tokens(usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens, usage.completion_tokens)
    reply = Reply(status_code=status, request_id=attempt.request_id, body=Raw(body))
    return Answer(batch_id, row.number, state, line_of(row.custom_id, reply), tokens)
