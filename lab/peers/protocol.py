"""One engine in one process: a line of JSON in, a line of JSON out. Standard library only, as the engine's side of it
runs in the environment of that engine.

    {"do": "load", "spec": {...}}            -> {"ok": {"version": ..., "vocab_size": ..., "flags": ..., "memory": {}}}
    {"do": "run", "point": {...}, "seed": 1} -> {"ok": {"timing": {...}, "peak_rss_mib": ...}}
    {"do": "logits", "token_ids": [...], "to": "x.npy"} -> {"ok": {}}

"memory" is {} save for an engine that tells its weight_bytes and, of KV memory, block_bytes and block_tokens.
Logits are those of every position, float32 (positions, vocabulary). A failure is {"error": "..."}; the worker goes
on. What an engine prints itself goes to stderr.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from lab.peers.point import Point, Timing

Spec = Mapping[str, Any]
PATIENCE_S = 600.0
"""For any one answer."""
_PR_SET_PDEATHSIG = 1


class Peer(Protocol):
    """An engine with a model in it."""

    version: str
    """Of the engine, and of what it was built with where that matters."""
    flags: str
    """What of its settings is not the default."""
    vocab_size: int

    def run(self, prompts: Sequence[Sequence[int]], num_output: int) -> Timing:
        """Hand all in at once, wait for all; greedy, past every end token."""
        ...

    @property
    def logits(self) -> Callable[[Sequence[int], Path], None] | None:
        """Write what the model says after every position of one text; None where there is no way."""
        ...


def serve(make: Callable[[Spec], Peer]) -> None:
    """Answer until stdin ends. Killed when whoever asks is, and not after minutes of an answer for nobody: with the
    thread that started this process, which the measurement's main thread is."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # engines print
    peer: Peer | None = None
    for line in sys.stdin:
        try:
            asked = json.loads(line)
            if asked["do"] == "load":
                peer = make(asked["spec"])
                told: dict[str, Any] = {"version": peer.version, "flags": peer.flags, "vocab_size": peer.vocab_size}
                told["memory"] = getattr(peer, "memory", {})
            else:
                assert peer is not None, "load comes first"
                told = _answer(peer, asked)
            answers.write(json.dumps({"ok": told}) + "\n")
        except Exception as error:
            traceback.print_exc()
            answers.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")


def _answer(peer: Peer, asked: Mapping[str, Any]) -> dict[str, Any]:
    if asked["do"] == "logits":
        if peer.logits is None:
            raise LookupError(f"{peer.version} has no way to tell logits")
        peer.logits(asked["token_ids"], Path(asked["to"]))
        return {}
    point = Point(**asked["point"])
    timing = peer.run(point.prompts(peer.vocab_size, asked["seed"]), point.output).check(point)
    return {"timing": asdict(timing), "peak_rss_mib": peak_rss_mib()}


def peak_rss_mib() -> float:
    """The most memory that this process ever held at once."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


class PeerError(Exception):
    """An engine that said no, or died."""


class Worker:
    """The other side: starts the process of an engine and asks it."""

    def __init__(self, command: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None) -> None:
        """What the process prints on stderr goes to `log`; `env` is added to the present environment."""
        self.log, self.started_ns = log, time.monotonic_ns()
        with log.open("w") as stderr:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, **(env or {})},
                text=True,
                bufsize=1,
            )

    def load(self, spec: Spec, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        return self._ask({"do": "load", "spec": dict(spec)}, timeout_s)

    def run(self, point: Point, seed: int, timeout_s: float = PATIENCE_S) -> tuple[Timing, float]:
        """(moments, peak RSS of the worker's process in MiB)."""
        told = self._ask({"do": "run", "point": asdict(point), "seed": seed}, timeout_s)
        return Timing(**told["timing"]), told["peak_rss_mib"]

    def logits(self, token_ids: Sequence[int], to: Path) -> None:
        self._ask({"do": "logits", "token_ids": list(token_ids), "to": str(to)})

    def _ask(self, what: Mapping[str, Any], timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        """Raises PeerError; an engine that does not answer in time is killed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        timer = threading.Timer(timeout_s, self._process.kill)
        timer.start()
        try:
            with suppress(BrokenPipeError):
                self._process.stdin.write(json.dumps(what) + "\n")
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
            timer.join()
        if not line:
            raise PeerError(f"the process ended with {self._process.wait()}, see {self.log}")
        told: dict[str, Any] = json.loads(line)
        if "error" in told:
            raise PeerError(f"{told['error']} (see {self.log})")
        ok: dict[str, Any] = told["ok"]
        return ok

    def close(self) -> None:
        """End the process, kindly first."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
