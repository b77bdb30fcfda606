"""One request of a run as a JSON line while the run goes on and as a Parquet row once it is over.

Times are monotonic nanoseconds of the load generator's host; the run's header holds the wall anchor.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from inferloop.measure.timing import Chunk, RequestTiming

_CHUNKS = pa.list_(pa.struct([("t", pa.int64()), ("n", pa.int32())]))
SCHEMA = pa.schema(
    [
        pa.field("point", pa.string(), nullable=False),
        pa.field("warmup", pa.bool_(), nullable=False),
        pa.field("request_id", pa.string(), nullable=False),
        pa.field("trace_id", pa.string()),
        pa.field("traffic_class", pa.string(), nullable=False),
        pa.field("t_intended", pa.int64()),
        pa.field("t_send", pa.int64(), nullable=False),
        pa.field("t_headers", pa.int64()),
        pa.field("t_end", pa.int64(), nullable=False),
        pa.field("chunks", _CHUNKS, nullable=False),
        pa.field("num_input_tokens", pa.int32(), nullable=False),
        pa.field("num_output_tokens", pa.int32(), nullable=False),
        pa.field("num_cached_tokens", pa.int32(), nullable=False),
        pa.field("error", pa.string()),
        pa.field("finish_reason", pa.string()),
        pa.field("replica", pa.string()),
        pa.field("queue_ms", pa.float64()),
        # since schema version 2; older files have none of them
        pa.field("t_first_answer", pa.int64()),
        pa.field("empty_frames", pa.list_(pa.int64())),
        pa.field("session", pa.int64()),
        pa.field("turn", pa.int32()),
        pa.field("num_turns", pa.int32()),
    ]
)


@dataclass(frozen=True, slots=True)
class RequestRow:
    """One request and the bench point it belongs to; `warmup` rows are recorded but not measured."""

    point: str
    warmup: bool
    timing: RequestTiming


def to_json_line(row: RequestRow) -> bytes:
    return json.dumps(_as_dict(row, chunks_as_pairs=True), separators=(",", ":"), allow_nan=False).encode()


def from_json_line(line: bytes) -> RequestRow:
    """Raises ValueError or KeyError for a line that is not a row."""
    value = json.loads(line)
    return _from_dict(value, tuple(Chunk(t, n) for t, n in value["chunks"]))


def to_parquet(rows: Sequence[RequestRow]) -> bytes:
    """A zstd-compressed Parquet file with SCHEMA."""
    table = pa.Table.from_pylist([_as_dict(row, chunks_as_pairs=False) for row in rows], schema=SCHEMA)
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd")
    return buffer.getvalue()


def read_parquet(path: Path) -> list[RequestRow]:
    """Raises OSError or pyarrow.ArrowInvalid for a file that is not one of ours."""
    rows = pq.read_table(path, schema=SCHEMA).to_pylist()
    return [_from_dict(row, tuple(Chunk(c["t"], c["n"]) for c in row["chunks"])) for row in rows]


def _as_dict(row: RequestRow, *, chunks_as_pairs: bool) -> dict[str, Any]:
    r = row.timing
    chunks = [(c.t_ns, c.num_tokens) if chunks_as_pairs else {"t": c.t_ns, "n": c.num_tokens} for c in r.chunks]
    return {
        "point": row.point,
        "warmup": row.warmup,
        "request_id": r.request_id,
        "trace_id": r.trace_id,
        "traffic_class": r.traffic_class,
        "t_intended": r.t_intended_ns,
        "t_send": r.t_send_ns,
        "t_headers": r.t_headers_ns,
        "t_end": r.t_end_ns,
        "chunks": chunks,
        "num_input_tokens": r.num_input_tokens,
        "num_output_tokens": r.num_output_tokens,
        "num_cached_tokens": r.num_cached_tokens,
        "error": r.error,
        "finish_reason": r.finish_reason,
        "replica": r.replica,
        "queue_ms": r.queue_ms,
        "t_first_answer": r.t_first_answer_ns,
        "empty_frames": r.empty_frames_ns,
        "session": r.session,
        "turn": r.turn,
        "num_turns": r.num_turns,
    }


def _from_dict(value: dict[str, Any], chunks: tuple[Chunk, ...]) -> RequestRow:
    timing = RequestTiming(
        request_id=value["request_id"],
        t_intended_ns=value["t_intended"],
        t_send_ns=value["t_send"],
        t_headers_ns=value["t_headers"],
        t_end_ns=value["t_end"],
        chunks=chunks,
        num_input_tokens=value["num_input_tokens"],
        num_output_tokens=value["num_output_tokens"],
        num_cached_tokens=value["num_cached_tokens"],
        error=value["error"],
        finish_reason=value["finish_reason"],
        replica=value["replica"],
        queue_ms=value["queue_ms"],
        traffic_class=value["traffic_class"],
        trace_id=value["trace_id"],
        t_first_answer_ns=value.get("t_first_answer"),
        empty_frames_ns=tuple(value.get("empty_frames") or ()),
        session=value.get("session"),
        turn=value.get("turn"),
        num_turns=value.get("num_turns"),
    )
    return RequestRow(value["point"], value["warmup"], timing)
