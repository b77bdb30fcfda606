"""Targets behind TLS that want a key: what gets in, what is told when not, and where the key is never found."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from inferloop.backends.scripted import Script, ScriptedGenerator
from inferloop.records.run import open_run
from inferloop.records.sink import DropSink
from inferloop.serve.app import build_app
from inferloop.serve.batch.folder import Folder
from inferloop.serve.batch.service import BatchConfig
from inferloop.serve.config import ServeConfig

PEM = Path(__file__).parents[1] / "localhost.pem"
KEY = "sk-ours-4f1d88e2b7"
SUITE = """
suite: tiny
version: 1
cases:
  - {id: any, kind: regex, why: it answers, prompt: a, expect: ".*"}
"""


@dataclass
class Door:
    """Before an app: lets in who has the key, and tells the others, as careless servers do, what they came with."""

    app: ASGIApp
    open_paths: tuple[str, ...] = ()
    key: str = KEY
    url: str = ""
    refused: list[str] = field(default_factory=list)
    entered: list[str] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            came_with = dict(scope["headers"]).get(b"authorization", b"")
            if came_with != f"Bearer {self.key}".encode() and scope["path"] not in self.open_paths:
                self.refused.append(scope["path"])
                text = json.dumps({"error": {"message": f"not with {came_with.decode()}"}}).encode()
                head = [(b"content-type", b"application/json"), (b"content-length", str(len(text)).encode())]
                await send({"type": "http.response.start", "status": 401, "headers": head})
                await send({"type": "http.response.body", "body": text})
                return
            self.entered.append(scope["path"])
        await self.app(scope, receive, send)


@contextlib.contextmanager
def behind(door: Door) -> Iterator[Door]:
    """The door over TLS, served by a thread."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        config = uvicorn.Config(door, ssl_certfile=PEM, log_level="critical", lifespan="on")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        door.url = f"https://127.0.0.1:{sock.getsockname()[1]}"
        try:
            yield door
        finally:
            server.should_exit = True
            thread.join(60)
            assert not thread.is_alive()


@contextlib.contextmanager
def a_door(jobs_folder: Path, key: str = KEY) -> Iterator[Door]:
    generator = ScriptedGenerator(Script(ttft_ms=2, tpot_ms=0.5), model_id="demo")
    with contextlib.closing(Folder(jobs_folder)) as jobs:
        app = build_app(generator, ServeConfig(), DropSink(), batch=BatchConfig(jobs))
        with behind(Door(app, key=key)) as found:
            yield found


@pytest.fixture
def door(tmp_path: Path) -> Iterator[Door]:
    with a_door(tmp_path / "jobs") as found:
        yield found


@dataclass
class Told:
    code: int
    out: str
    err: str
    commands: set[str]
    """Command lines of the verb's processes that were seen while it ran."""

    @property
    def message(self) -> str:
        return str(json.loads(self.out)["error"]["message"])


def inferloop(tmp_path: Path, *words: str, key: str | None = KEY, **more: str) -> Told:
    env = {k: v for k, v in os.environ.items() if not k.endswith("_API_KEY") and "_API_KEY_" not in k}
    env |= more | ({} if key is None else {"INFERLOOP_API_KEY": key})
    out, err = tmp_path / "out.txt", tmp_path / "err.txt"
    commands: set[str] = set()
    with out.open("w") as stdout, err.open("w") as stderr:
        command = [sys.executable, "-m", "inferloop", *words, "--json"]
        process = psutil.Popen(command, stdout=stdout, stderr=stderr, env=env)
        deadline = time.monotonic() + 240
        while process.poll() is None:
            with contextlib.suppress(psutil.Error):
                commands |= {" ".join(p.cmdline()) for p in (process, *process.children(recursive=True))}
            if time.monotonic() > deadline:
                process.kill()
            time.sleep(0.02)
    return Told(process.returncode, out.read_text(), err.read_text(), commands)


def assert_nowhere(secret: str, told: Told, *folders: Path) -> None:
    assert secret not in told.out and secret not in told.err
    assert told.commands and not any(secret in command for command in told.commands)
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert files
    for path in files:
        assert secret.encode() not in path.read_bytes(), path


def bench_words(file: Path, tmp_path: Path, url: str) -> list[str]:
    return [
        "bench",
        str(file),
        "--target",
        url,
        "--runs-dir",
        str(tmp_path / "runs"),
        "--points",
        "0",
        "--budget-s",
        "6",
    ]


def test_bench_gets_in_and_leaves_no_key_behind(tmp_path: Path, door: Door, contract_file: Path) -> None:
    told = inferloop(tmp_path, *bench_words(contract_file, tmp_path, door.url), "--ca-file", str(PEM))
    summary = json.loads(told.out)
    assert [point["errors"]["by_class"] for point in summary["points"]] == [{}] * len(summary["points"])
    assert not door.refused and door.entered.count("/v1/chat/completions") > 20
    assert any("inferloop.bench.sender" in command for command in told.commands), "the key went to other processes"
    assert_nowhere(KEY, told, tmp_path / "runs")
    assert not any("certificate" in note for note in summary["notes"])


def test_a_wrong_key_is_one_line_before_any_load(tmp_path: Path, door: Door, contract_file: Path) -> None:
    wrong = "sk-wrong-99aa77"
    told = inferloop(tmp_path, *bench_words(contract_file, tmp_path, door.url), "--ca-file", str(PEM), key=wrong)
    assert told.code == 3
    assert "does not know the API key (HTTP 401)" in told.message and "INFERLOOP_API_KEY" in told.message
    assert not door.entered and len(door.refused) == 1
    assert not (tmp_path / "runs").exists()
    assert_nowhere(wrong, told, tmp_path)
    none = inferloop(tmp_path, *bench_words(contract_file, tmp_path, door.url), "--ca-file", str(PEM), key=None)
    assert (none.code, "asks for an API key" in none.message) == (3, True)


def test_a_list_of_models_that_is_open_to_all_does_not_deceive(tmp_path: Path, door: Door, contract_file: Path) -> None:
    door.open_paths = ("/v1/models", "/identity", "/tokenize")
    told = inferloop(tmp_path, *bench_words(contract_file, tmp_path, door.url), "--insecure", key=None)
    assert (told.code, "asks for an API key" in told.message) == (3, True)
    assert door.refused == ["/v1/chat/completions"]


def test_a_certificate_is_trusted_named_or_waived(tmp_path: Path, door: Door, contract_file: Path) -> None:
    words = bench_words(contract_file, tmp_path, door.url)
    strict = inferloop(tmp_path, *words)
    assert strict.code == 3 and "--ca-file" in strict.message and "certificate is not trusted" in strict.message
    assert not door.entered and not door.refused
    loose = inferloop(tmp_path, *words, "--insecure")
    summary = json.loads(loose.out)
    assert any("certificate was not checked" in note for note in summary["notes"])
    record = open_run(Path(summary["run"]))
    assert record.header.options["insecure"] is True
    assert "certificate was not checked" in (record.path / "report.html").read_text()


def test_eval_gets_in_too(tmp_path: Path, door: Door) -> None:
    suite = tmp_path / "tiny.yaml"
    suite.write_text(SUITE)
    words = ["eval", str(suite), "--target", door.url, "--runs-dir", str(tmp_path / "runs")]
    told = inferloop(tmp_path, *words, "--insecure")
    assert told.code == 0, told.err
    summary = json.loads(told.out)
    assert summary["cases"]["scored"] == 1 and "not checked" in summary["notes"][0]
    assert "not checked" in (Path(summary["run"]) / "report.html").read_text()
    assert_nowhere(KEY, told, tmp_path / "runs")
    refused = inferloop(tmp_path, *words, "--ca-file", str(PEM), "--model", "demo", key=None)
    assert (refused.code, "asks for an API key" in refused.message) == (3, True)
    distrusted = inferloop(tmp_path, *words, "--model", "demo")
    assert (distrusted.code, "--ca-file" in distrusted.message) == (3, True)


def test_batch_gets_in_too(tmp_path: Path, door: Door) -> None:
    body = {"model": "demo", "prompt": "x", "max_tokens": 2}
    rows = [{"custom_id": f"c{i}", "method": "POST", "url": "/v1/completions", "body": body} for i in range(3)]
    file, work = tmp_path / "in.jsonl", tmp_path / "work"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    work.mkdir()
    words = ["batch", str(file), "--target", door.url, "--output", str(work / "out.jsonl")]
    refused = inferloop(tmp_path, *words, "--ca-file", str(PEM), key=None)
    assert (refused.code, "asks for an API key" in refused.message) == (3, True)
    distrusted = inferloop(tmp_path, *words)
    assert (distrusted.code, "--ca-file" in distrusted.message) == (3, True)
    told = inferloop(tmp_path, *words, "--ca-file", str(PEM))
    assert told.code == 0, told.err
    summary: dict[str, Any] = json.loads(told.out)
    assert (summary["completed"], summary["failed"]) == (3, 0)
    assert_nowhere(KEY, told, work)


def test_compare_gets_in_beside_a_target_that_it_launches(tmp_path: Path, door: Door, contract_file: Path) -> None:
    targets = f"scripted,{door.url}"
    words = ["compare", str(contract_file), "--targets", targets, "--runs-dir", str(tmp_path / "runs")]
    words += ["--rates", "20", "--rounds", "2", "--window-s", "0.5", "--insecure"]
    told = inferloop(tmp_path, *words)
    summary = json.loads(told.out)
    assert not door.refused and {p["target"] for p in summary["points"]} <= {"A", "B"}
    assert any("certificate was not checked" in note for note in summary["notes"])
    assert all(not p["errors"]["by_class"] for p in summary["points"])
    assert_nowhere(KEY, told, tmp_path / "runs")


def test_each_target_of_a_comparison_gets_its_own_key(tmp_path: Path, door: Door, contract_file: Path) -> None:
    """The second its own, the third what all have: nobody sees a key that is meant for somebody else."""
    second = "sk-second-77c01f"
    with a_door(tmp_path / "jobs2", second) as other, a_door(tmp_path / "jobs3") as third:
        targets = f"{door.url},{other.url},{third.url}"
        words = ["compare", str(contract_file), "--targets", targets, "--runs-dir", str(tmp_path / "runs")]
        words += ["--rates", "20", "--rounds", "2", "--window-s", "0.5", "--insecure"]
        told = inferloop(tmp_path, *words, INFERLOOP_API_KEY_B=second)
        summary = json.loads(told.out)
        assert not door.refused and not other.refused and not third.refused
        assert all(d.entered.count("/v1/chat/completions") > 10 for d in (door, other, third))
        assert [t["label"] for t in summary["targets"]] == ["A", "B", "C"]
        for key in (KEY, second):
            assert_nowhere(key, told, tmp_path / "runs")

        refused = inferloop(tmp_path, *words)
        assert (refused.code, "does not know the API key (HTTP 401)" in refused.message) == (3, True)
        assert other.url in refused.message and "INFERLOOP_API_KEY" in refused.message and KEY not in refused.message
