"""Download a pinned wheel, without its dependencies, by running the pip of this interpreter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from inferloop.catalog.models import Wheel
from inferloop.core.errors import EnvironmentLacksError

_POLL_S = 0.1
_BROKEN = re.compile(r"after connection broken by '(.*?)'\)?': ")
_NO_PIP = "No module named pip"
_DIE_WITH_PARENT = """
import ctypes, os, sys
try:
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL: kept over exec; our thread waits, so it lives as long
except (AttributeError, OSError):
    pass  # not Linux: pip finishes on its own and the next fetch removes what it left
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent is gone")
os.execvp(sys.argv[2], sys.argv[2:])
"""


@dataclass(frozen=True, slots=True)
class PipCommand:
    """How to run pip. `options` go to `pip download` (an index, a folder of wheels, a proxy, ...)."""

    argv: tuple[str, ...] = (sys.executable, "-m", "pip")
    options: tuple[str, ...] = ()


def download_wheel(wheel: Wheel, scratch: Path, progress: Callable[[int], None], pip: PipCommand) -> Path:
    """The downloaded wheel inside `scratch`, an empty folder; its digest is not yet checked. `progress` is told bytes.

    pip's own temporary files also go into `scratch`, so that a killed run leaves nothing elsewhere. Raises
    EnvironmentLacksError with pip's last line.
    """
    target, temporary = scratch / "wheel", scratch / "pip"
    target.mkdir()
    temporary.mkdir()
    argv = [*pip.argv, "download", "--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"]
    argv += ["--progress-bar=off", *pip.options, "-d", str(target), wheel.requirement]
    log = scratch / "pip.log"
    try:
        with log.open("wb") as out:
            # Its own session, so that Ctrl-C reaches us first and we end pip in order.
            process = subprocess.Popen(
                [sys.executable, "-c", _DIE_WITH_PARENT, str(os.getpid()), *argv],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, "TMPDIR": str(temporary)},
                start_new_session=True,
            )
    except OSError as problem:
        raise EnvironmentLacksError(f"pip cannot be run: {problem}") from problem
    try:
        while True:
            try:
                code = process.wait(_POLL_S)
                break
            except subprocess.TimeoutExpired:
                progress(min(_bytes_in(scratch), wheel.num_bytes))
    except BaseException:
        process.kill()
        process.wait()
        raise
    if code != 0 and _NO_PIP in _text(log):
        raise EnvironmentLacksError(
            f"{pip.argv[0]} has no pip, which downloads {wheel.requirement}",
            fix="Put one into this environment: python -m ensurepip, or uv pip install pip where uv made it.",
        )
    if code != 0:
        raise EnvironmentLacksError(
            f"pip could not download {wheel.requirement}: {_last_line(log)}",
            fix="It needs a package index: check the network, or pip's index, proxy and find-links settings.",
        )
    found = list(target.glob("*.whl"))
    if len(found) != 1:
        raise EnvironmentLacksError(f"pip downloaded {len(found)} wheels for {wheel.requirement} instead of one")
    progress(wheel.num_bytes)
    return found[0]


def _bytes_in(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(parent) / name).stat().st_size
            except OSError:  # pip removed it meanwhile
                continue
    return total


def _text(log: Path) -> str:
    return log.read_text("utf-8", errors="replace")


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in _text(log).splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    last = (errors or lines or ["it said nothing"])[-1]
    broken = [found[1] for line in lines if (found := _BROKEN.search(line))]
    if not broken:
        return last
    # After a lost connection pip ends with "no matching distribution", which hides what really happened.
    return f"{last} (the connection failed: {broken[-1].rpartition('>: ')[2]})"
