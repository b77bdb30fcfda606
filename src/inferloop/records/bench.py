"""One request of a run as a JSON line while the run goes on and as a Parquet row once it is over.

Times are monotonic nanoseconds of the load generator's host; the run's header holds the wall anchor.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise, repeat
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from inferloop.measure.columns import Columns
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
    """A zstd-compressed Parquet file with SCHEMA. Chunks go in as arrays: a long run has millions of them."""
    c = Columns.of([row.timing for row in rows])
    struct = pa.StructArray.from_arrays(
        [pa.array(c.chunk_t), pa.array(c.chunk_n.astype(np.int32))], fields=list(_CHUNKS.value_type)
    )
    plain = [_as_dict(replace(row, timing=replace(row.timing, chunks=())), chunks_as_pairs=False) for row in rows]
    table = pa.Table.from_pylist(plain, schema=SCHEMA)
    chunks = pa.ListArray.from_arrays(pa.array(c.offsets.astype(np.int32)), struct)
    table = table.set_column(SCHEMA.get_field_index("chunks"), SCHEMA.field("chunks"), chunks)
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd")
    return buffer.getvalue()


def read_parquet(path: Path) -> list[RequestRow]:
    """Raises OSError or pyarrow.ArrowInvalid for a file that is not one of ours."""
    table = pq.read_table(path, schema=SCHEMA)
    lists = table["chunks"].combine_chunks()
    offsets, values = lists.offsets.to_pylist(), lists.values
    pairs = zip(values.field("t").to_numpy().tolist(), values.field("n").to_numpy().tolist(), strict=True)
    chunks = map(tuple.__new__, repeat(Chunk), pairs)  # as Chunk(t, n), without a frame of its own for each of millions
    plain = table.drop_columns(["chunks"]).to_pylist()
    with _no_collections():
        return [_from_dict(r, tuple(islice(chunks, b - a))) for r, (a, b) in zip(plain, pairwise(offsets), strict=True)]


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Millions of new objects, none of them garbage: each collection would look at all of them again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


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
