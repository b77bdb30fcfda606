"""OpenAI's files and batches as they go over the wire. The same types make /openapi.json."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from inferloop.serve.no_op import NoOp

Purpose = Literal["batch", "batch_output"]
Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
UNFINISHED: tuple[Status, ...] = ("validating", "in_progress", "finalizing", "cancelling")
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]


class FileObject(Struct, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: Purpose
    status: Literal["processed"] = "processed"


class FileList(Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(Struct, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class BatchRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: NoOp = None


class LineError(Struct, kw_only=True, frozen=True):
    """`line` counts from 1; null when the file as a whole is wrong."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Errors(Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[LineError]


class RequestCounts(Struct, kw_only=True):
    total: int
    completed: int
    failed: int


class InputDetails(Struct, kw_only=True):
    cached_tokens: int


class OutputDetails(Struct, kw_only=True):
    reasoning_tokens: int = 0


class BatchUsage(Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Progress(Struct, kw_only=True):
    """Ours. Rates are those of the last minute; null until a row has ended in it, and when nothing runs."""

    num_running: int
    rows_per_s: float | None
    tokens_per_s: float | None
    eta_s: float | None


class Batch(Struct, kw_only=True):
    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str
    errors: Errors | None
    input_file_id: str
    completion_window: Literal["24h"] = "24h"
    status: Status
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: BatchUsage
    metadata: dict[str, str] | None
    inferloop: Progress


class BatchList(Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool
