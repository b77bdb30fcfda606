"""Adapters over HTTP with a tiny model: what they are called, who gets which, when they come and go, and that what is
cached through one is never met through another."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.adapters import write_adapter
from tests.waiting import PATIENCE_S, until, until_async

from inferloop.backends.http import HttpClient
from inferloop.backends.native import NativeGenerator
from inferloop.backends.native_load import load_native
from inferloop.backends.native_options import NativeOptions
from inferloop.core.errors import ModelFileError, UsageError
from inferloop.engine.compute.torch.runner import TorchRunner
from inferloop.engine.schedule.step import StepResult
from inferloop.models.headers import read_header
from inferloop.models.resolve import open_files
from inferloop.records.event import ReplicaEvent
from inferloop.serve.app import build_app
from inferloop.serve.config import ServeConfig
from inferloop.serve.run import serving

PROMPT = "The quick brown fox jumps over the lazy dog, again and again."


class Events:
    """A sink that keeps them."""

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def write(self, row: Any) -> None:
        self.rows.append(row)

    def close(self) -> None:
        pass


class Server:
    def __init__(self, client: HttpClient, events: Events, native: NativeGenerator) -> None:
        self.client, self._events, self.native = client, events, native

    @property
    def events(self) -> list[ReplicaEvent]:
        return self._events.rows

    async def call(self, path: str, **body: Any) -> tuple[int, Any, str | None]:
        """Status, body, and the identity that the response tells."""
        method = "POST" if body else "GET"
        response = await self.client.request(method, path, body=json.dumps(body).encode() if body else b"")
        return response.status, await response.json(), response.header("x-inferloop-identity")

    async def complete(self, model: str, **fields: Any) -> Any:
        wanted = {"model": model, "prompt": PROMPT, "max_tokens": 16, "temperature": 0, "ignore_eos": True, **fields}
        status, answer, _ = await self.call("/v1/completions", **wanted)
        assert status == 200, answer
        return answer

    async def text(self, model: str, **fields: Any) -> str:
        text: str = (await self.complete(model, **fields))["choices"][0]["text"]
        return text

    async def cached(self, model: str, **fields: Any) -> int:
        usage = (await self.complete(model, **fields))["usage"]
        cached: int = usage["prompt_tokens_details"]["cached_tokens"]
        return cached

    async def load(self, name: str, path: str, **fields: Any) -> tuple[int, Any]:
        status, answer, _ = await self.call("/v1/load_lora_adapter", lora_name=name, lora_path=path, **fields)
        return status, answer

    async def unload(self, name: str) -> int:
        status, _, _ = await self.call("/v1/unload_lora_adapter", lora_name=name)
        return status

    async def names(self) -> list[str]:
        _, listed, _ = await self.call("/v1/models")
        return [model["id"] for model in listed["data"]]


Serve = Callable[..., contextlib.AbstractAsyncContextManager[Server]]


@pytest.fixture
def folder(tmp_path: Path, tiny_directory: Callable[..., Path]) -> Path:
    """Adapters a, b and c of the model "tiny" beside it."""
    header = read_header(tiny_directory(max_position_embeddings=512))
    for seed, name in enumerate("abc"):
        write_adapter(tmp_path / "adapters" / name, header, seed=seed, rank=2 + seed, spread=1.0)
    return tmp_path / "adapters"


@pytest.fixture
def serve(tmp_path: Path, folder: Path) -> Serve:
    """serve(**options of NativeOptions): the model "m" and its adapters over HTTP."""

    @contextlib.asynccontextmanager
    async def run(runtime: bool = True, **options: Any) -> AsyncIterator[Server]:
        chosen: dict[str, Any] = {"max_adapters": 3, "kv_memory_mib": 1, "num_threads": 1, "cache_dir": tmp_path / "c"}
        native = load_native(
            open_files("tiny", tmp_path / "tiny"),
            NativeOptions(compute="torch", dtype="fp32", **(chosen | options)),
            served_name="m",
        )
        native.start()
        sink = Events()
        try:
            config = ServeConfig(adapter_folder=folder if runtime else None)
            async with serving(build_app(native, config, sink)) as url:
                client = HttpClient(url)
                try:
                    yield Server(client, sink, native)
                finally:
                    await client.close()
        finally:
            await asyncio.to_thread(native.stop)

    return run


async def test_a_name_selects_its_adapter_and_the_answer_tells_it(serve: Serve, folder: Path) -> None:
    async with serve(adapters=(("A", folder / "a"), ("B", folder / "b")), deterministic=True) as server:
        texts = [await server.text(model) for model in ("m", "A", "B")]
        assert len(set(texts)) == 3
        assert await asyncio.gather(*(server.text(model) for model in ("m", "A", "B", "A", "m"))) == [
            *texts,
            texts[1],
            texts[0],
        ]
        status, listed, base_identity = await server.call("/v1/models")
        base, first, second = listed["data"]
        assert status == 200 and (base["id"], first["id"], second["id"]) == ("m", "A", "B")
        assert "parent" not in base and (first["parent"], first["root"]) == ("m", str(folder / "a"))
        assert (await server.call("/v1/models/B"))[1] == second
        assert len({base["identity_digest"], first["identity_digest"], second["identity_digest"]}) == 3
        assert base["identity_digest"] == base_identity

        answer = await server.complete("A")
        assert answer["model"] == "A"
        chat: dict[str, Any] = {"max_tokens": 2, "stream": False}
        _, answer, told = await server.call("/v1/completions", model="B", prompt="x", **chat)
        assert (answer["model"], told) == ("B", second["identity_digest"])
        _, _, told = await server.call("/v1/completions", model="m", prompt="x", **chat)
        assert told == base_identity
        seen = {(event.model_id, event.identity_digest) for event in server.events}
        assert seen == {(model["id"], model["identity_digest"]) for model in listed["data"]}
        _, identity, _ = await server.call("/identity?model=A")
        assert identity["digest"] == first["identity_digest"] and len(identity["adapter_digest"]) == 64
        assert (await server.call("/identity"))[1]["adapter_digest"] is None


async def test_other_endpoints_know_the_names_too(serve: Serve, folder: Path) -> None:
    async with serve(adapters=(("A", folder / "a"),)) as server:
        vectors = []
        for model in ("m", "A"):
            status, answer, _ = await server.call("/v1/embeddings", model=model, input=PROMPT)
            assert (status, answer["model"]) == (200, model)
            vectors.append(answer["data"][0]["embedding"])
            status, answer, _ = await server.call("/tokenize", model=model, prompt="ab")
            assert (status, answer["tokens"]) == (200, [256, 97, 98])
            _, [rendered], _ = await server.call("/v1/completions/render", model=model, prompt="ab")
            assert rendered["model"] == model
        assert vectors[0] != vectors[1]
        asked: tuple[tuple[str, dict[str, Any]], ...] = (
            ("/v1/completions", {"prompt": "x"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
            ("/v1/responses", {"input": "x"}),
            ("/v1/embeddings", {"input": "x"}),
            ("/tokenize", {"prompt": "x"}),
        )
        for path, body in asked:
            status, answer, _ = await server.call(path, model="B", **body)
            assert (status, answer["error"]["code"]) == (404, "model_not_found"), path


async def test_load_list_unload(serve: Serve) -> None:
    async with serve() as server:
        plain = await server.text("m")
        status, loaded = await server.load("A", "a")
        assert (status, loaded["id"], loaded["parent"]) == (200, "A", "m")
        adapted = await server.text("A")
        assert adapted != plain and await server.names() == ["m", "A"]
        assert (await server.load("A", "b"))[1]["error"]["code"] == "adapter_exists"
        assert await server.text("A") == adapted
        assert await server.unload("A") == 200 and await server.names() == ["m"]
        assert await server.unload("A") == 404
        assert (await server.call("/v1/completions", model="A", prompt="x"))[0] == 404
        assert await server.text("m") == plain
        assert (await server.load("A", "b"))[0] == 200
        other = await server.text("A")
        assert other not in (plain, adapted)
        assert (await server.load("A", "a", load_inplace=True))[0] == 200
        assert await server.text("A") == adapted


async def test_what_lies_outside_of_the_folder_is_not_loaded(serve: Serve, folder: Path, tmp_path: Path) -> None:
    outside = write_adapter(tmp_path / "outside", read_header(tmp_path / "tiny"))
    (folder / "link").symlink_to(outside)
    (folder / "half").mkdir()
    (folder / "half/adapter_config.json").write_bytes((outside / "adapter_config.json").read_bytes())
    (folder / "half/adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")
    async with serve() as server:
        for path in (
            "../outside",
            str(outside),
            "link",
            "half",
            "none",
            "a/adapter_config.json",
            "/etc",
            "\0",
            "a/../../outside",
        ):
            status, answer = await server.load("A", path)
            assert (status, answer["error"]["code"]) == (404, "adapter_not_found"), path
        assert (await server.load("A", str(folder / "a")))[0] == 200
        assert await server.names() == ["m", "A"]


async def test_refusals_name_the_field_and_leave_everything_as_it_was(serve: Serve, folder: Path) -> None:
    (folder / "empty").mkdir()
    write_adapter(folder / "dora", read_header(folder.parent / "tiny"), use_dora=True)
    async with serve(max_adapters=2) as server:
        for name, path, status, code in (
            ("A", "empty", 400, "bad_adapter"),
            ("A", "dora", 400, "bad_adapter"),
            ("m", "a", 400, "invalid_value"),
            ("\n", "a", 400, "invalid_value"),
            ("x" * 257, "a", 400, "invalid_value"),
        ):
            got, answer = await server.load(name, path)
            assert (got, answer["error"]["code"]) == (status, code)
        assert "DoRA is not supported" in (await server.load("A", "dora"))[1]["error"]["message"]
        assert await server.names() == ["m"]
        assert [(await server.load(name, name))[0] for name in "abc"] == [200, 200, 400]
        assert (await server.load("c", "c"))[1]["error"]["code"] == "too_many_adapters"
        assert await server.unload("a") == 200 and (await server.load("c", "c"))[0] == 200


async def test_nothing_is_loaded_over_http_unless_a_folder_is_named(serve: Serve, folder: Path) -> None:
    async with serve(runtime=False, adapters=(("A", folder / "a"),)) as server:
        assert (await server.load("B", str(folder / "b")))[1]["error"]["code"] == "adapters_not_enabled"
        assert await server.unload("A") == 501
        assert await server.names() == ["m", "A"]
    async with serve(max_adapters=0) as server:
        assert (await server.load("A", "a"))[0] == 501
        assert "/v1/load_lora_adapter" not in (await server.call("/openapi.json"))[1]["paths"]
    async with serve() as server:
        assert "/v1/unload_lora_adapter" in (await server.call("/openapi.json"))[1]["paths"]


async def test_an_answer_ends_on_the_adapter_that_it_began_with(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaced by another of the same name, or unloaded, while it runs."""
    steps, wait, num_given, num_taken = threading.Semaphore(0), TorchRunner.wait, 0, 0

    def gated(self: TorchRunner) -> StepResult:
        nonlocal num_taken
        assert steps.acquire(timeout=PATIENCE_S)
        num_taken += 1
        return wait(self)

    async def stepping_until(is_so: Callable[[], Awaitable[bool]]) -> None:
        """Not more steps than it takes: no next one is allowed before the one before has begun."""

        async def is_so_or_step() -> bool:
            nonlocal num_given
            if await is_so():
                return True
            if num_taken == num_given:
                num_given += 1
                steps.release()
            return False

        await until_async(is_so_or_step)

    async with serve(max_adapters=1, deterministic=True) as server:

        async def are_running(num: int) -> bool:
            return bool((await server.call("/health/progress"))[1]["running"] == num)

        async def are_there(num: int) -> bool:
            told = (await server.call("/health/progress"))[1]
            return bool(told["running"] + told["waiting"] == num)

        async def did_errands() -> bool:
            return not server.native._engine._errands

        await server.load("A", "b")
        second = await server.text("A", max_tokens=60)
        await server.load("A", "a", load_inplace=True)
        first = await server.text("A", max_tokens=60)
        assert first != second
        monkeypatch.setattr(TorchRunner, "wait", gated)
        begun = asyncio.create_task(server.text("A", max_tokens=60))
        await until_async(lambda: are_running(1))  # and stands in its first step from here on
        replaced = asyncio.create_task(server.load("A", "b", load_inplace=True))
        await until(lambda: server.native._engine._errands)
        await stepping_until(did_errands)
        assert (await replaced)[0] == 200
        later = asyncio.create_task(server.text("A", max_tokens=60))
        await until_async(lambda: are_there(2))
        await stepping_until(lambda: are_running(2))
        assert await server.unload("A") == 200
        assert (await server.call("/v1/completions", model="A", prompt="x"))[0] == 404
        # both still hold their weights, and there is room for as many as may have a name
        assert (await server.load("A", "c"))[1]["error"]["code"] == "overloaded"
        steps.release(10_000)
        assert (await begun, await later) == (first, second)
        assert (await server.load("A", "a"))[0] == 200
        assert await server.text("A", max_tokens=60) == first


async def test_what_is_cached_through_one_is_not_met_through_another(serve: Serve) -> None:
    """Not by a salt that is spelt like an adapter, not by the model alone, not by another of the same name; but by the
    same content under another name."""
    async with serve() as server:
        await server.load("X", "a")
        assert await server.cached("X") == 0
        assert await server.cached("X") >= 32
        assert await server.cached("m") == 0
        assert await server.cached("m", cache_salt="X") == 0
        assert await server.cached("X", cache_salt="X") == 0
        assert await server.cached("X", cache_salt="X") >= 32
        fresh = await server.text("X")
        await server.unload("X")
        await server.load("X", "b")
        assert await server.cached("X") == 0
        assert await server.text("X") != fresh
        await server.load("Y", "a")
        assert await server.cached("Y") >= 32
        assert await server.text("Y") == fresh


async def test_blocks_on_disk_are_those_of_their_adapter(serve: Serve, folder: Path, tmp_path: Path) -> None:
    kept: dict[str, Any] = {"prefix_folder": tmp_path / "prefixes", "prefix_disk_mib": 16}
    async with serve(adapters=(("A", folder / "a"),), **kept) as server:
        expected = await server.text("A"), await server.text("m")
    async with serve(adapters=(("A", folder / "b"), ("same", folder / "a")), **kept) as server:
        assert await server.cached("A") == 0
        assert await server.cached("same") >= 32 and await server.cached("m") >= 32
        assert (await server.text("same"), await server.text("m")) == expected


def test_adapters_named_at_the_start_are_checked_there(folder: Path, tmp_path: Path) -> None:
    def load(**options: Any) -> None:
        small = NativeOptions(compute="torch", dtype="fp32", kv_memory_mib=1, cache_dir=tmp_path / "c", **options)
        load_native(open_files("tiny", tmp_path / "tiny"), small)

    with pytest.raises(UsageError, match="2 adapters are more than 1"):
        load(max_adapters=1, adapters=(("A", folder / "a"), ("B", folder / "b")))
    with pytest.raises(UsageError, match="'tiny' is the name of the model itself"):
        load(max_adapters=1, adapters=(("tiny", folder / "a"),))
    with pytest.raises(ModelFileError, match="not a PEFT adapter directory"):
        load(max_adapters=1, adapters=(("A", folder),))
    with pytest.raises(ModelFileError, match="has rank 4, this server takes up to 3"):
        load(max_adapters=1, max_adapter_rank=3, adapters=(("C", folder / "c"),))
