"""`inferloop report --merge A B ...`: one run out of those that several machines made of one service."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inferloop.records.read import RunRecord


def merge_runs(paths: Sequence[Path], runs_dir: Path) -> RunRecord:
    """Join the runs into a new folder under `runs_dir`. Raises RecordError, naming the difference, for runs that are
    not parts of one measurement."""
    from inferloop.bench.merged import merged_summary
    from inferloop.records.merge import merge, write_merged
    from inferloop.records.read import open_run

    records = [open_run(path) for path in paths]
    merged = merge(records)
    return write_merged(runs_dir, merged, merged_summary(merged, records))
