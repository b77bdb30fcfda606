"""This project's."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from lab.load_generators.load import Command, Task, Told


class Inferloop:
    name = "inferloop"
    rates: Mapping[str, float] = {"plain": 48_000, "whole": 15_000, "fast": 5_000, "paced": 2_700}

    def command(self, task: Task) -> Command:
        spec = task.folder / "task.json"
        spec.write_text(json.dumps(asdict(task) | {"folder": str(task.folder)}))
        return Command([sys.executable, "-m", "lab.load_generators.own", str(spec)])

    def told(self, task: Task) -> Told:
        row = json.loads((task.folder / "told.json").read_text())
        return Told(row["ttft_p50"], row["ttft_p99"], row["late_p99"], tuple(row["intended_ns"]))


def task_of(path: Path) -> Task:
    """What `command` wrote."""
    from lab.load_generators.load import Load

    row = json.loads(path.read_text())
    return Task(**(row | {"load": Load(**row["load"]), "folder": Path(row["folder"])}))
