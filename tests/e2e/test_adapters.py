"""Adapters on the real model, with `inferloop serve` as a process: start, list, stream, load, replace, unload."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.adapters import write_adapter

from inferloop.backends.http import HttpClient
from inferloop.models.resolve import ModelFiles

SERVE = [sys.executable, "-m", "inferloop", "serve"]
MESSAGES = [{"role": "user", "content": "Name three animals that live in the sea."}]


@pytest.fixture(scope="module")
def folder(embedded_model: ModelFiles, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("pirate", "poet", "sailor")):
        write_adapter(folder / name, embedded_model.header, seed=seed, rank=8 - seed, alpha=16.0, spread=0.03)
    return folder


@contextmanager
def served(model: ModelFiles, *flags: str) -> Iterator[str]:
    command = [*SERVE, str(model.path), "--served-model-name", "base", "--port", "0", "--enable-lora", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        assert line, process.stderr.read()
        yield f"http://127.0.0.1:{json.loads(line)['port']}"
    finally:
        process.kill()
        process.communicate()


async def post(client: HttpClient, path: str, **body: Any) -> tuple[int, Any]:
    response = await client.request("POST", path, body=json.dumps(body).encode())
    return response.status, await response.json()


async def streamed(client: HttpClient, model: str) -> str:
    body = {"model": model, "messages": MESSAGES, "max_tokens": 24, "temperature": 0, "stream": True}
    response = await client.request("POST", "/v1/chat/completions", body=json.dumps(body).encode())
    assert response.status == 200
    lines = [line.removeprefix("data: ") for line in (await response.read()).decode().split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    chunks = [json.loads(line) for line in lines]
    assert {chunk["model"] for chunk in chunks} == {model}
    return "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"])


async def test_adapters_come_and_go_while_others_stream(embedded_model: ModelFiles, folder: Path) -> None:
    flags = ("--lora-modules", f"pirate={folder / 'pirate'}", "--lora-dir", str(folder), "--max-loras", "2")
    with served(embedded_model, *flags, "--deterministic") as url:
        client = HttpClient(url)
        try:
            models = await (await client.request("GET", "/v1/models")).json()
            assert [(m["id"], m.get("parent")) for m in models["data"]] == [("base", None), ("pirate", "base")]
            alone = {name: await streamed(client, name) for name in ("base", "pirate")}
            assert (await post(client, "/v1/load_lora_adapter", lora_name="poet", lora_path="poet"))[0] == 200
            alone["poet"] = await streamed(client, "poet")
            assert len(set(alone.values())) == 3

            names = ["poet", "base", "pirate", "poet", "pirate", "base", "poet"]
            together = await asyncio.gather(*(streamed(client, name) for name in names))
            assert together == [alone[name] for name in names]

            streams = [asyncio.create_task(streamed(client, name)) for name in names]
            replaced = {"lora_name": "poet", "lora_path": str(folder / "sailor"), "load_inplace": True}
            status, card = await post(client, "/v1/load_lora_adapter", **replaced)
            assert (status, card["root"]) == (200, str(folder / "sailor"))
            for name, text in zip(names, await asyncio.gather(*streams), strict=True):
                assert text == alone[name] or name == "poet"  # which may have begun after the change
            assert await streamed(client, "poet") not in alone.values()

            status, error = await post(client, "/v1/load_lora_adapter", lora_name="third", lora_path="sailor")
            assert (status, error["error"]["code"]) == (400, "too_many_adapters")
            assert (await post(client, "/v1/unload_lora_adapter", lora_name="poet"))[0] == 200
            status, error = await post(client, "/v1/completions", model="poet", prompt="x")
            assert (status, error["error"]["code"]) == (404, "model_not_found")
            assert await streamed(client, "pirate") == alone["pirate"]
            assert (await post(client, "/v1/load_lora_adapter", lora_name="poet", lora_path="poet"))[0] == 200
            assert await streamed(client, "poet") == alone["poet"]
        finally:
            await client.close()


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (("--max-lora-rank", "7"), 3, "has rank 8, this server takes up to 7"),
        (("--max-loras", "1", "--lora-modules", "b=x"), 2, "names 2 adapters, --max-loras allows 1"),
        (("--lora-dir", "/nowhere/at/all"), 2, "is no folder"),
        (("--lora-modules", "a=x"), 2, "'a' is given twice"),
        (("--lora-modules", "x"), 2, "must be NAME=PATH"),
        (("--lora-modules", '{"name": "b", "path": "x", "size": 3}'), 2, "unknown key 'size'"),
        (("--backend", "scripted"), 2, "--enable-lora needs --backend embedded"),
    ],
)
def test_a_server_does_not_start_with_adapters_that_cannot_be(
    flags: tuple[str, ...], code: int, message: str, embedded_model: ModelFiles, folder: Path
) -> None:
    command = [*SERVE, str(embedded_model.path), "--port", "0", "--enable-lora"]
    command += ["--lora-modules", f"a={folder / 'pirate'}", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == code
    assert message in " ".join(done.stderr.split())
