"""Not a load generator: a client in C that counts bytes and nothing else. What it gets, the server can give."""

from __future__ import annotations

from collections.abc import Mapping

from lab.load_generators.load import Command, Task, Told
from lab.null_server import compiled


class Counter:
    name = "C client"
    rates: Mapping[str, float] = {"plain": 190_000, "whole": 170_000, "fast": 4_000}

    def command(self, task: Task) -> Command:
        port = task.url.rpartition(":")[2]
        program = str(compiled("null_client", task.folder))
        return Command([program, port, task.load.path, str(task.load.users), str(task.count)])

    def told(self, task: Task) -> Told:
        return Told()
