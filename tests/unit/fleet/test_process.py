"""Real processes: small Python programs as engines. Nothing may be left behind, whatever dies first."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from tests.waiting import PATIENCE_S

from inferloop.backends.protocols import LaunchSpec, ReadyProbe
from inferloop.core.clock import RealClock
from inferloop.core.errors import LaunchError, UsageError
from inferloop.core.secret import Secret
from inferloop.core.units import NS_PER_S
from inferloop.fleet.act import guard
from inferloop.fleet.act.ports import bind_listener, reserve_port
from inferloop.fleet.act.process import ReplicaProcess, log_tail

SERVER = """
import http.server, signal, subprocess, sys, time
print("engine starts", flush=True)
if "--child" in sys.argv:
    daemon = "import os, time; os.setsid(); os.fork() and os._exit(0); time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", daemon]).wait()
if "--stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health/ready" else 404)
        self.send_header("content-length", "0")
        self.end_headers()
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def spec_of(program: str, *flags: str, timeout_s: float = PATIENCE_S) -> LaunchSpec:
    argv = (sys.executable, "-c", program, "{port}", *flags)
    return LaunchSpec("test", argv, "none", ready=ReadyProbe(timeout_s=timeout_s))


class HurryingClock(RealClock):
    """`step_s` more pass with each look at it, once `holds()` is true."""

    def __init__(self, step_s: float, holds: Callable[[], bool]) -> None:
        self._step_ns, self._holds, self._passed_ns = round(step_s * NS_PER_S), holds, 0

    def now_ns(self) -> int:
        if self._holds():
            self._passed_ns += self._step_ns
        return super().now_ns() + self._passed_ns


def below(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=PATIENCE_S)
    assert not alive


async def test_runs_answers_and_stops_with_the_engines_own_exit_code(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = await ReplicaProcess.start(spec_of(SERVER), log_path=log, replica_id="r0")
    await process.wait_ready()
    assert process.t_ready_ns is not None
    assert await process.stop(PATIENCE_S) == 7
    assert await process.stop(PATIENCE_S) == 7, "stopping twice is the same"
    assert process.returncode == 7 and "engine starts" in log.read_text()


async def test_an_engine_gets_its_own_key_and_nobody_elses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("INFERLOOP_API_KEY", "INFERLOOP_API_KEY_B", "VLLM_API_KEY", "API_KEY"):
        monkeypatch.setenv(name, "sk-outside")
    told = tmp_path / "environment"
    program = f"import json, os; open({str(told)!r}, 'w').write(json.dumps(dict(os.environ)))"
    for key in (None, Secret("sk-own")):
        spec = replace(spec_of(program), api_key=key)
        process = await ReplicaProcess.start(spec, log_path=tmp_path / "log")
        assert process.at.api_key == key and await process.wait() == 0
        environment = json.loads(told.read_text())
        assert "sk-outside" not in environment.values()
        assert environment.get("INFERLOOP_API_KEY") == (None if key is None else "sk-own")


async def test_stop_takes_the_whole_tree_even_daemonized_children(tmp_path: Path) -> None:
    process = await ReplicaProcess.start_ready(spec_of(SERVER, "--child"), log_path=tmp_path / "log")
    tree = below(process.guard_pid)
    assert len(tree) == 2, "the engine and the daemon it left"
    await process.stop(PATIENCE_S)
    assert_gone(tree)


async def test_a_stubborn_engine_is_killed_after_the_grace_time(tmp_path: Path) -> None:
    process = await ReplicaProcess.start_ready(spec_of(SERVER, "--stubborn", "--child"), log_path=tmp_path / "log")
    tree = below(process.guard_pid)
    assert await process.stop(0.2) == -signal.SIGKILL
    assert_gone(tree)


async def test_cancelling_a_stop_kills_at_once(tmp_path: Path) -> None:
    process = await ReplicaProcess.start_ready(spec_of(SERVER, "--stubborn"), log_path=tmp_path / "log")
    stopping = asyncio.create_task(process.stop(600))
    await asyncio.sleep(0.1)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    assert await process.wait() == -signal.SIGKILL


async def test_memory_is_of_the_whole_tree_and_a_dead_engine_has_none(tmp_path: Path) -> None:
    process = await ReplicaProcess.start_ready(spec_of(SERVER, "--child"), log_path=tmp_path / "log")
    alone = psutil.Process(process.pid).memory_info().rss
    assert process.memory_bytes() >= alone > 1 << 20
    os.kill(process.pid, signal.SIGKILL)
    await process.wait()
    with pytest.raises(LaunchError, match="-9"):
        process.memory_bytes()


async def test_a_killed_engine_is_noticed_and_what_it_left_is_gone(tmp_path: Path) -> None:
    process = await ReplicaProcess.start_ready(spec_of(SERVER, "--child"), log_path=tmp_path / "log")
    tree = below(process.guard_pid)
    os.kill(process.pid, signal.SIGKILL)
    assert await asyncio.wait_for(process.wait(), PATIENCE_S) == -signal.SIGKILL
    assert_gone(tree)


async def test_killing_the_guard_kills_the_engine(tmp_path: Path) -> None:
    process = await ReplicaProcess.start_ready(spec_of(SERVER), log_path=tmp_path / "log")
    tree = below(process.guard_pid)
    os.kill(process.guard_pid, signal.SIGKILL)
    await asyncio.wait_for(process.wait(), PATIENCE_S)
    assert_gone(tree)


async def test_an_engine_that_exits_early_is_a_launch_error_with_its_last_words(tmp_path: Path) -> None:
    program = "import sys; print('no such model: tiny', file=sys.stderr); sys.exit(3)"
    process = await ReplicaProcess.start(spec_of(program), log_path=tmp_path / "log", replica_id="r1")
    with pytest.raises(LaunchError, match=r"(?s)r1.*exited with code 3.*no such model: tiny"):
        await process.wait_ready()
    assert await process.stop() == 3


async def test_of_an_engine_that_refuses_a_flag_its_own_line_is_told(tmp_path: Path) -> None:
    program = (
        "import argparse; argparse.ArgumentParser('engine', usage='engine ' + '[--flag] ' * 30).parse_args(['--no'])"
    )
    with pytest.raises(LaunchError, match=r"its log ends:\nengine: error: unrecognized arguments: --no$") as told:
        await ReplicaProcess.start_ready(spec_of(program), log_path=tmp_path / "log")
    assert told.value.exit_code == UsageError.exit_code


async def test_an_engine_that_never_gets_ready_is_a_launch_error(tmp_path: Path) -> None:
    spec, log = spec_of("import time; print('loading', flush=True); time.sleep(600)"), tmp_path / "log"
    clock = HurryingClock(3600.0, lambda: "loading" in log_tail(log))
    before = psutil.Process().children()
    with pytest.raises(LaunchError, match=r"(?s)not ready within 60 s.*loading"):
        await ReplicaProcess.start_ready(spec, log_path=log, clock=clock)
    assert not [p for p in psutil.Process().children() if p not in before and p.status() != psutil.STATUS_ZOMBIE]


async def test_a_program_that_does_not_exist_is_a_launch_error(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="cannot execute /no/such/engine"):
        await ReplicaProcess.start_ready(LaunchSpec("test", ("/no/such/engine",), "none"), log_path=tmp_path / "log")


async def test_another_programs_server_on_our_port_does_not_make_us_ready(tmp_path: Path) -> None:
    other = await ReplicaProcess.start_ready(spec_of(SERVER), log_path=tmp_path / "other")
    idle = LaunchSpec("test", (sys.executable, "-c", "import time; time.sleep(600)"), "none")
    clock = HurryingClock(1.0, lambda: True)
    process = await ReplicaProcess.start(idle, log_path=tmp_path / "log", port=other.port, clock=clock)
    with pytest.raises(LaunchError, match="another program's"):
        await process.wait_ready(5.0)
    await process.stop(0)
    await other.stop(PATIENCE_S)


async def test_a_port_lost_in_a_race_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    thief = bind_listener("127.0.0.1", 0)
    stolen = int(thief.getsockname()[1])
    ports: list[int] = []

    def first_stolen() -> int:
        ports.append(stolen if not ports else reserve_port())
        return ports[-1]

    monkeypatch.setattr("inferloop.fleet.act.process.reserve_port", lambda host: first_stolen())
    process = await ReplicaProcess.start_ready(spec_of(SERVER), log_path=tmp_path / "log")
    assert process.port == ports[1] != stolen
    await process.stop(PATIENCE_S)
    thief.close()


async def test_port_and_environment_reach_the_engine(tmp_path: Path) -> None:
    program = "import os, sys; print(sys.argv[1], os.environ['ENGINE_PORT'], os.environ['MODE'])"
    argv = (sys.executable, "-c", program, "--port={port}")
    spec = LaunchSpec("test", argv, "none", env={"ENGINE_PORT": "{port}", "MODE": "{replica}"})
    process = await ReplicaProcess.start(spec, log_path=tmp_path / "log")
    await process.wait()
    assert log_tail(tmp_path / "log") == f"--port={process.port} {process.port} replica"


OWNER = """
import asyncio, sys
from pathlib import Path
from inferloop.backends.protocols import LaunchSpec
from inferloop.fleet.act.process import ReplicaProcess
async def main():
    spec = LaunchSpec("test", (sys.executable, "-c", sys.argv[1], "{port}", "--stubborn", "--child"), "none")
    process = await ReplicaProcess.start_ready(spec, log_path=Path(sys.argv[2]))
    print(process.guard_pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


def test_kill_9_of_the_owner_leaves_no_orphan(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", OWNER, SERVER, str(tmp_path / "log")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with subprocess.Popen(argv, stdout=subprocess.PIPE, env=environment) as owner:
        assert owner.stdout is not None
        guard = psutil.Process(int(owner.stdout.readline()))
        tree = [guard, *below(guard.pid)]
        assert len(tree) == 3
        owner.kill()
    assert_gone(tree)


def test_killing_the_guard_kills_the_engine_even_when_the_owner_cannot_act(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", OWNER, SERVER, str(tmp_path / "log")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with subprocess.Popen(argv, stdout=subprocess.PIPE, env=environment) as owner:
        assert owner.stdout is not None
        guard = psutil.Process(int(owner.stdout.readline()))
        engine = guard.children()[0]
        daemons = [p for p in below(guard.pid) if p != engine]
        owner.send_signal(signal.SIGSTOP)
        guard.kill()
        assert_gone([engine])
        owner.kill()
    for daemon in daemons:  # out of the engine's session and nobody left to know of them
        daemon.kill()


FORKING_OWNER = OWNER.replace(
    "    print(process.guard_pid",
    "    import os, time\n    if os.fork() == 0:\n        time.sleep(600)\n    print(process.guard_pid",
)


def test_a_forked_copy_of_the_owner_does_not_keep_the_engine_alive(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", FORKING_OWNER, SERVER, str(tmp_path / "log")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with subprocess.Popen(argv, stdout=subprocess.PIPE, env=environment) as owner:
        assert owner.stdout is not None
        guard = psutil.Process(int(owner.stdout.readline()))
        tree = [guard, *below(guard.pid)]
        copies = [p for p in below(owner.pid) if p not in tree]
        assert len(copies) == 1
        owner.kill()
        assert_gone(tree)
        copies[0].kill()


def test_an_owner_who_has_gone_before_the_engine_runs_leaves_nothing() -> None:
    """The guard cannot tell it the pid then; its own death would leave what the engine had started until then."""
    ours, theirs = socket.socketpair()
    ours.close()
    engine = [sys.executable, "-c", "import time; time.sleep(600)"]
    with theirs:
        fd = theirs.fileno()
        argv = [sys.executable, "-I", "-S", guard.__file__, str(fd), "--", *engine]
        ended = subprocess.run(argv, pass_fds=(fd,), capture_output=True, timeout=PATIENCE_S, check=False)
    assert (ended.returncode, ended.stderr) == (-signal.SIGKILL, b"")


def test_works_on_uvloop_outside_the_main_thread(tmp_path: Path) -> None:
    import threading

    import uvloop

    codes: list[int] = []

    async def run() -> None:
        process = await ReplicaProcess.start_ready(spec_of(SERVER), log_path=tmp_path / "log")
        codes.append(await process.stop(PATIENCE_S))

    def in_thread() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run())

    thread = threading.Thread(target=in_thread)
    thread.start()
    thread.join()
    assert codes == [7]


def test_the_tail_of_a_log_is_bounded(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("".join(f"line {i}\n" for i in range(100_000)))
    assert log_tail(tmp_path / "log", 2) == "line 99998\nline 99999"
    assert log_tail(tmp_path / "absent") == ""
