"""Runs a LaunchSpec as one replica, below a guard, and takes its whole tree down again.

The exit is noticed on any event loop (asyncio, uvloop) and in any thread, without a SIGCHLD handler: the guard's end of
the lifeline closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import psutil

from inferloop.backends.endpoint import Endpoint
from inferloop.backends.http import HttpClient, HttpError
from inferloop.backends.protocols import LaunchSpec
from inferloop.core.api_keys import KEY_VARIABLE
from inferloop.core.clock import Clock, RealClock
from inferloop.core.errors import LaunchError
from inferloop.core.units import NS_PER_S
from inferloop.fleet.act.guarded import start_guarded
from inferloop.fleet.act.ports import listens, release_port, reserve_port
from inferloop.fleet.act.tree import ProcessTree

_HOST = "127.0.0.1"
_POLL_S = 0.05
_PROBE_TIMEOUT_S = 5.0
_KILL_WAIT_S = 10.0
_LOG_TAIL_LINES = 20
_PORT_ATTEMPTS = 3
_WRONG_USAGE = 2
"""With which argparse and click end, and our own verbs."""
_LAST_WORD = re.compile(r"^\S+: error: ", re.M)
_KEY = re.compile(r"(^|_)API_KEY(_|$)")
"""Variables of keys to other servers. No engine needs one, and some would ask their callers for it."""


def log_tail(path: Path, num_lines: int = _LOG_TAIL_LINES) -> str:
    """The last lines of a log, read from its last 64 KiB; empty when there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - (1 << 16)))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-num_lines:])


def _without_usage(tail: str) -> str:
    """From argparse's last word on, where a log has it: before it stand all flags that there are."""
    found = list(_LAST_WORD.finditer(tail))
    return tail[found[-1].start() :] if found else tail


class ReplicaProcess:
    """One running engine. Made by `start` on a running event loop, and bound to that loop.

    `url` is where it listens once ready, and `at` the same with the key that it asks for; `pid` is the engine itself,
    `guard_pid` the guard above it, `tree` the engine with all that it has started.
    """

    def __init__(
        self,
        spec: LaunchSpec,
        replica_id: str,
        log_path: Path,
        clock: Clock,
        *,
        port: int,
        guard: subprocess.Popen[bytes],
        lifeline: socket.socket,
        pid: int,
    ) -> None:
        self.spec, self.replica_id, self.log_path = spec, replica_id, log_path
        self.port, self.url, self.pid = port, f"http://{_HOST}:{port}", pid
        self.t_started_ns = clock.now_ns()
        self.t_ready_ns: int | None = None
        self._clock, self._guard, self._lifeline = clock, guard, lifeline
        self.tree = ProcessTree(pid)
        self._stop_lock = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._exit: asyncio.Future[int] = self._loop.create_future()
        self._loop.add_reader(lifeline, self._on_lifeline)

    @classmethod
    async def start(
        cls,
        spec: LaunchSpec,
        *,
        log_path: Path,
        replica_id: str = "replica",
        port: int = 0,
        clock: Clock | None = None,
    ) -> ReplicaProcess:
        """Launch on `port`, or on a free one when it is 0; returns once the engine's process exists (see `wait_ready`).
        stdout and stderr are appended to `log_path`.

        Raises LaunchError when the program cannot be started.
        """
        chosen = port or reserve_port(_HOST)
        log_path.parent.mkdir(parents=True, exist_ok=True)
        filled = spec.filled(chosen, replica_id)
        inherited = {name: value for name, value in os.environ.items() if not _KEY.search(name)}
        key = {} if spec.api_key is None else {KEY_VARIABLE: spec.api_key.reveal()}
        argv, env = filled.argv, {**inherited, **filled.env, **key}
        guard: subprocess.Popen[bytes] | None = None
        ours: socket.socket | None = None
        try:
            with log_path.open("ab") as log:
                guard, ours = start_guarded(argv, env=env, stdin=subprocess.DEVNULL, output=log.fileno())
            ours.setblocking(False)
            line = await asyncio.get_running_loop().sock_recv(ours, 32)
            if not line:
                raise LaunchError(f"{replica_id}: the guard process ended at once\n{log_tail(log_path)}")
            process = cls(
                spec, replica_id, log_path, clock or RealClock(), port=chosen, guard=guard, lifeline=ours, pid=int(line)
            )
        except BaseException as error:
            if ours is not None:
                ours.close()  # makes the guard, if it runs, kill and end
            release_port(chosen)
            if guard is not None:
                guard.wait()
            if isinstance(error, OSError):
                raise LaunchError(f"{replica_id}: cannot start {argv[0]}: {error}") from error
            raise
        return process

    @classmethod
    async def start_ready(
        cls,
        spec: LaunchSpec,
        *,
        log_path: Path,
        replica_id: str = "replica",
        timeout_s: float | None = None,
        clock: Clock | None = None,
    ) -> ReplicaProcess:
        """Start and wait until ready. A replica that fails because another program took its port in between is
        started again on another one. Leaves nothing running when it raises (LaunchError, cancellation)."""
        for attempt in range(_PORT_ATTEMPTS):
            process = await cls.start(spec, log_path=log_path, replica_id=replica_id, clock=clock)
            try:
                await process.wait_ready(timeout_s)
                return process
            except LaunchError:
                lost_port = process.returncode is not None and _is_taken(process.port)
                await process.stop(0)
                if not lost_port or attempt == _PORT_ATTEMPTS - 1:
                    raise
            except BaseException:
                process.kill()
                await process.stop(0)
                raise
        raise AssertionError("unreachable")

    @property
    def at(self) -> Endpoint:
        return Endpoint(self.url, self.spec.api_key)

    @property
    def guard_pid(self) -> int:
        return self._guard.pid

    @property
    def returncode(self) -> int | None:
        """None while running; negative for death by signal, as in subprocess."""
        return self._exit.result() if self._exit.done() else None

    def memory_bytes(self) -> int:
        """Resident bytes of the engine and all it has started. Raises LaunchError (with the end of the log) when the
        engine is gone."""
        total = self.tree.memory_bytes()
        if self._exit.done() or not total:
            code = self.returncode
            raise self._launch_error("is gone" if code is None else f"exited with code {code} while it was in use")
        return total

    async def wait(self) -> int:
        """The exit code, once the engine has ended and what it left behind is gone."""
        return await asyncio.shield(self._exit)

    async def wait_ready(self, timeout_s: float | None = None) -> None:
        """Return when GET spec.ready.path answers 200 and it is our process that listens there.

        Raises LaunchError (with the end of the log) when the engine exits first or `timeout_s` (default: the spec's)
        passes. Does not stop the process.
        """
        limit_s = self.spec.ready.timeout_s if timeout_s is None else timeout_s
        deadline_ns = self._clock.now_ns() + int(limit_s * NS_PER_S)
        last = "it did not answer"
        client = HttpClient(self.url, connect_timeout_s=1.0)
        try:
            while True:
                if self._exit.done():
                    raise self._launch_error(f"exited with code {self._exit.result()} before it was ready")
                if self._clock.now_ns() >= deadline_ns:
                    raise self._launch_error(f"not ready within {limit_s:g} s ({last})")
                probe = asyncio.create_task(self._probe(client))
                try:
                    either: list[asyncio.Future[Any]] = [self._exit, probe]
                    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                    if probe.done() and not (last := probe.result()):
                        self.t_ready_ns = self._clock.now_ns()
                        return
                finally:
                    probe.cancel()
                await asyncio.wait([self._exit], timeout=_POLL_S)
        finally:
            await client.close()

    async def _probe(self, client: HttpClient) -> str:
        """Empty when ready, else why not."""
        try:
            response = await client.request("GET", self.spec.ready.path, timeout_s=_PROBE_TIMEOUT_S)
            await asyncio.wait_for(response.read(), _PROBE_TIMEOUT_S)
        except HttpError as error:
            return str(error)
        except TimeoutError:
            return f"GET {self.spec.ready.path} did not end"
        if response.status != 200:
            return f"GET {self.spec.ready.path} answered {response.status}"
        if not await asyncio.to_thread(listens, self.guard_pid, self.port):
            return f"port {self.port} is another program's"
        return ""

    async def stop(self, grace_s: float | None = None) -> int:
        """SIGTERM, wait up to `grace_s` (default: the spec's drain time), then SIGKILL for the whole tree. Returns
        the exit code. Idempotent; when cancelled it kills at once and raises."""
        grace = self.spec.drain_timeout_s if grace_s is None else grace_s
        async with self._stop_lock:
            try:
                self.tree.resume()  # who is held still cannot drain
                if not self._exit.done() and grace > 0:
                    with contextlib.suppress(ProcessLookupError):
                        self._guard.send_signal(signal.SIGTERM)
                    await asyncio.wait([self._exit], timeout=grace)
                if not self._exit.done():
                    self.kill()
                    await asyncio.wait([self._exit], timeout=_KILL_WAIT_S)
                if not self._exit.done():
                    _kill_tree(self.guard_pid)
            except asyncio.CancelledError:
                self.kill()
                raise
            return await self.wait()

    def kill(self) -> None:
        """Order SIGKILL for the whole tree without waiting. Idempotent, safe from `finally`."""
        with contextlib.suppress(OSError):
            self._lifeline.shutdown(socket.SHUT_WR)

    def _launch_error(self, what: str) -> LaunchError:
        tail = _without_usage(log_tail(self.log_path))
        end = f"its log ends:\n{tail}" if tail else "its log is empty"
        return LaunchError(
            f"{self.replica_id} ({self.spec.backend}, {self.spec.model_id}) {what}; log: {self.log_path}; {end}",
            wrong_usage=self.returncode == _WRONG_USAGE,
        )

    def _on_lifeline(self) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError):
            if self._lifeline.recv(64):
                return
        self._loop.remove_reader(self._lifeline)
        self._lifeline.close()
        code = self._guard.wait()  # its end closes as it exits: no waiting to speak of
        release_port(self.port)
        _kill_session(self.pid)
        if not self._exit.done():
            self._exit.set_result(code)


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((_HOST, port)) == 0


def _kill_tree(root_pid: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(root_pid)
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def _kill_session(session_id: int) -> None:
    """Kill what is left of the engine's session. Normally nothing: only a guard killed from outside leaves work."""
    for pid in psutil.pids():
        with contextlib.suppress(OSError):
            if os.getsid(pid) == session_id:
                os.kill(pid, signal.SIGKILL)
