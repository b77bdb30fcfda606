"""`inferloop serve --tensor-parallel-size 2` over HTTP: the answers of one process, and its end with a rank."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from inferloop.backends.http import HttpClient
from inferloop.backends.native_load import load_native
from inferloop.backends.native_options import NativeOptions
from inferloop.models.resolve import ModelFiles
from inferloop.records.sink import DropSink
from inferloop.serve.app import build_app
from inferloop.serve.config import ServeConfig
from inferloop.serve.run import serving

LONG = 4000
"""More tokens than anybody waits for."""


def ask(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "prompt": "The capital of France is", "temperature": 0, **fields}).encode()


async def answer(client: HttpClient, **fields: Any) -> Any:
    response = await client.request("POST", "/v1/completions", body=ask(max_tokens=10, **fields))
    assert response.status == 200
    return await response.json()


@contextlib.contextmanager
def split_server(model: Path, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Two ranks; its port comes to port.json in `folder`, and what it says to log."""
    command = [sys.executable, "-m", "inferloop", "serve", str(model), "--served-model-name", "m", "--port", "0"]
    command += ["--port-file", str(folder / "port.json"), "--kv-memory-mib", "64"]
    command += ["--compute", "torch", "--dtype", "fp32", "--tensor-parallel-size", "2"]
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stderr=log) as process:
        try:
            yield process
        finally:
            process.kill()


def url_of(process: subprocess.Popen[bytes], port_file: Path) -> str:
    """Once it is ready."""
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and process.poll() is None:
        if port_file.exists():
            url = f"http://127.0.0.1:{json.loads(port_file.read_text())['port']}"
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health/ready", timeout=30):
                return url
        time.sleep(0.1)
    raise AssertionError("not ready")


async def test_two_ranks_answer_as_one_and_end_together(embedded_model: ModelFiles, tmp_path: Path) -> None:
    with split_server(embedded_model.path, tmp_path) as process:
        client = HttpClient(await asyncio.to_thread(url_of, process, tmp_path / "port.json"))
        split = await answer(client)
        again = await answer(client, seed=1)
        identity = await (await client.request("GET", "/identity")).json()
        stream = await client.request("POST", "/v1/completions", body=ask(max_tokens=LONG, stream=True))
        data = [await stream.next_bytes() or b"" for _ in range(2)]  # it is under way
        [guard] = psutil.Process(process.pid).children()
        [rank] = guard.children()
        os.kill(rank.pid, signal.SIGKILL)
        while chunk := await stream.next_bytes():
            data.append(chunk)
        await client.close()
        code = await asyncio.to_thread(process.wait, 120)
    assert code == 1
    told = (tmp_path / "log").read_text()
    assert f"rank 1 of 2 (pid {rank.pid}) was killed by SIGKILL: this replica cannot go on" in told
    assert not psutil.pid_exists(rank.pid)
    assert b"[DONE]" not in b"".join(data) and b'"error"' in b"".join(data[-2:])
    options = NativeOptions(compute="torch", dtype="fp32", kv_memory_mib=64)
    one = load_native(embedded_model, options, served_name="m")
    one.start()
    try:
        async with serving(build_app(one, ServeConfig(), DropSink()), wait_ready=True) as url:
            client = HttpClient(url)
            alone = await answer(client)
            alone_identity = await (await client.request("GET", "/identity")).json()
            await client.close()
    finally:
        await asyncio.to_thread(one.stop)
    assert split["choices"][0]["text"] == again["choices"][0]["text"] == alone["choices"][0]["text"]
    assert [i["config"]["tensor_parallel_size"] for i in (identity, alone_identity)] == [2, 1]
    assert identity["digest"] != alone_identity["digest"]
