"""The header of a run and the names of the files in its folder."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

SCHEMA_VERSION = 2
"""2: request rows also tell the first answer token, frames without a token, session and turn."""
Status = Literal["running", "complete", "interrupted", "void"]
HEADER, STAGES, LINES, PARQUET = "run.json", "stages.jsonl", "requests.jsonl", "requests.parquet"
SUMMARY, REPORT = "summary.json", "report.html"


@dataclass(frozen=True, slots=True)
class RunHeader:
    """What every record says of itself. Monotonic times belong to the host that ran; the wall anchor joins them."""

    schema_version: int
    run: str
    verb: str
    service: str
    status: Status
    t_start_ns: int
    t_start_wall_ns: int
    fingerprint: dict[str, Any]
    pid: int
    process_started_s: float
    host: str
    t_end_ns: int | None = None
    target: str | None = None
    contract_digest: str | None = None
    contract: dict[str, Any] | None = None
    identity: dict[str, Any] | None = None
    """The serving identity's fields, with its digest under "digest"."""
    seed: int | None = None
    warmup_s: float | None = None
    window_s: float | None = None
    arrivals: str | None = None
    verdict: str | None = None
    reasons: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    anchor_uncertainty_ns: int | None = None
    """How far apart the two clocks of the anchor may have been read."""
    wall_error_ns: int | None = None
    """How far the kernel thought that the wall clock may be off; None where it did not tell."""
    boot_id: str | None = None
    """Runs with the same one share a monotonic clock."""
    merged: list[dict[str, Any]] | None = None
    """Of a run that was joined from several: where each came from, and its clock's offset."""
