"""The null server (null_server.c), compiled when it is needed and ended with the block that needs it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class NullServer:
    """`url` takes /plain, /whole, /fast and /paced ahead of /v1."""

    url: str
    pid: int

    def cpu_s(self) -> float:
        """Processor time it has used."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def rows(self) -> NDArray[np.uint64]:
        """[requests since it was asked last, 3]: when each was whole, its first token went out, and its last bytes did
        (monotonic ns; 0 where that is still to come)."""
        with urllib.request.urlopen(f"{self.url}/rows") as answer:
            return np.frombuffer(answer.read(), np.uint64).reshape(-1, 3)


def compiled(name: str, folder: Path) -> Path:
    """The program `name` of this folder's C files, made in `folder`. Raises SystemExit without a compiler."""
    program = folder / name
    try:
        subprocess.run(["gcc", "-O2", "-o", str(program), str(_HERE / f"{name}.c")], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"{name}.c cannot be compiled: {error}") from error
    return program


@contextlib.contextmanager
def null_server(core: int | None = None) -> Iterator[NullServer]:
    """A server of its own, on `core` alone if named. Raises SystemExit without a compiler."""
    with tempfile.TemporaryDirectory(prefix="inferloop-lab-") as folder:
        program = compiled("null_server", Path(folder))
        process = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        with process:  # closes its input at the end, which ends it
            if core is not None:
                os.sched_setaffinity(process.pid, {core})
            assert process.stdout is not None
            yield NullServer(f"http://127.0.0.1:{int(process.stdout.readline())}", process.pid)
