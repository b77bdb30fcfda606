"""What is told of prompts and ids: `echo` with log-probabilities, `prompt_logprobs`, `return_token_ids`; through HTTP,
on an engine whose every value is known."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from inferloop.backends import bytecodec
from inferloop.backends.http import HttpClient
from inferloop.backends.native import NativeGenerator
from inferloop.backends.protocols import Prompt
from inferloop.backends.scripted import Script, ScriptedGenerator
from inferloop.engine.compute.echo import EchoRunner, continuation, prompt_logprob
from inferloop.records.sink import JsonlSink
from inferloop.serve import extras
from inferloop.serve.app import build_app
from inferloop.serve.config import ServeConfig
from inferloop.serve.run import serving

Native = Callable[..., contextlib.AbstractAsyncContextManager[NativeGenerator]]
VOCAB = bytecodec.VOCAB_SIZE
TEXT = "Une journée d'été, très longue, à l'ombre des marronniers: ça va."
IDS = list(TEXT.encode())


class Client:
    def __init__(self, http: HttpClient) -> None:
        self._http = http

    async def post(self, body: dict[str, Any]) -> tuple[int, bytes]:
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        sent = json.dumps({"model": "m", "ignore_eos": True, **body}).encode()
        response = await self._http.request("POST", path, body=sent)
        return response.status, await response.read()

    async def whole(self, **body: Any) -> Any:
        status, data = await self.post(body)
        assert status == 200, data
        return json.loads(data)

    async def chunks(self, **body: Any) -> list[Any]:
        status, data = await self.post({**body, "stream": True})
        assert status == 200, data
        *events, done, rest = data.decode().split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]

    async def refused(self, **body: Any) -> tuple[str, str]:
        status, data = await self.post(body)
        assert status == 400, data
        error = json.loads(data)["error"]
        return error["param"], error["code"]


@pytest.fixture
async def client(native: Native, tmp_path: Path) -> AsyncIterator[Client]:
    runner = EchoRunner(vocab_size=VOCAB, num_blocks=64, block_size=8)
    async with (
        native(runner, max_step_tokens=20) as generator,
        serving(build_app(generator, ServeConfig(), JsonlSink(tmp_path / "e.jsonl")), wait_ready=True) as url,
    ):
        http = HttpClient(url)
        yield Client(http)
        await http.close()


def truth(ids: list[int], num_top: int) -> tuple[list[float | None], list[dict[str, float] | None]]:
    values: list[float | None] = [None]
    tops: list[dict[str, float] | None] = [None]
    for i in range(1, len(ids)):
        row = prompt_logprob(ids[:i], ids[i], num_top, VOCAB)
        values.append(row.chosen)
        names = {bytecodec.token_bytes(ids[i]).decode("utf-8", "replace"): row.chosen}
        for token, value in row.top:
            name = bytecodec.token_bytes(token).decode("utf-8", "replace")
            names[name] = max(value, names.get(name, value))
        tops.append(names)
    return values, tops


async def test_echo_has_the_prompts_logprobs_cold_and_cached(client: Client) -> None:
    half = TEXT[:33] + " suite"
    for text, k in ((TEXT, 1), (TEXT, 3), (half, 1), (TEXT, 0)):
        answer = await client.whole(prompt=text, echo=True, logprobs=k, max_tokens=1)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        [choice] = answer["choices"]
        logprobs, ids = choice["logprobs"], list(text.encode())
        values, tops = truth(ids, k)
        assert choice["text"].startswith(text)
        assert logprobs["token_logprobs"][:-1] == values and logprobs["token_logprobs"][-1] == 0.0
        assert logprobs["top_logprobs"][:-1] == tops
        assert len(logprobs["tokens"]) == len(ids) + 1


async def test_offsets_are_places_in_the_text(client: Client) -> None:
    [choice] = (await client.whole(prompt=TEXT, echo=True, logprobs=0, max_tokens=3))["choices"]
    logprobs = choice["logprobs"]
    expected = [len(TEXT.encode()[: i + 1].decode("utf-8", "ignore")) for i in range(-1, len(IDS) - 1)]
    assert logprobs["text_offset"][: len(IDS)] == [0, *expected[1:]]
    assert logprobs["text_offset"][len(IDS)] == len(TEXT)
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert token == "\ufffd" or choice["text"][offset] == token


async def test_scoring_alone(client: Client) -> None:
    answer = await client.whole(prompt=[TEXT, "x"], echo=True, logprobs=2, max_tokens=0)
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["prompt_tokens"] == len(IDS) + 1
    long, short = answer["choices"]
    assert (long["text"], long["finish_reason"]) == (TEXT, "length")
    assert (long["logprobs"]["token_logprobs"], long["logprobs"]["top_logprobs"]) == truth(IDS, 2)
    assert short["logprobs"] == {"tokens": ["x"], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [0]}
    plain = await client.whole(prompt=TEXT, echo=True, max_tokens=0)
    assert (plain["choices"][0]["text"], plain["choices"][0]["logprobs"]) == (TEXT, None)


@pytest.mark.parametrize("max_tokens", [0, 1, 4])
async def test_a_stream_joins_to_the_whole(client: Client, max_tokens: int) -> None:
    body = {"prompt": [TEXT, "été"], "n": 2, "echo": True, "logprobs": 1, "max_tokens": max_tokens, "seed": 3}
    whole = await client.whole(**body)
    parts: list[list[Any]] = [[], [], [], []]
    for chunk in await client.chunks(**body):
        for choice in chunk["choices"]:
            parts[choice["index"]].append(choice)
    for choice, seen in zip(whole["choices"], parts, strict=True):
        assert "".join(part["text"] for part in seen) == choice["text"]
        assert seen[0]["logprobs"]["token_logprobs"][0] is None, "the first chunk has the prompt"
        for column, values in choice["logprobs"].items():
            assert [v for part in seen for v in (part["logprobs"] or {}).get(column, [])] == values
        assert [part["finish_reason"] for part in seen if part["finish_reason"]] == ["length"]


@pytest.mark.parametrize("n", [1, 3])
async def test_prompt_logprobs_by_token_id(client: Client, n: int) -> None:
    expected: list[Any] = [None]
    for i in range(1, len(IDS)):
        row = prompt_logprob(IDS[:i], IDS[i], 2, VOCAB)
        expected.append(
            {str(IDS[i]): (row.chosen, row.rank)} | {str(t): (v, k + 1) for k, (t, v) in enumerate(row.top)}
        )
    answer = await client.whole(prompt=TEXT, prompt_logprobs=2, max_tokens=2, n=n, seed=1)
    assert len(answer["choices"]) == n
    for choice in answer["choices"]:
        told = choice["prompt_logprobs"]
        assert [row and {k: (v["logprob"], v["rank"]) for k, v in row.items()} for row in told] == expected
        assert told[1][str(IDS[1])]["decoded_token"] == "n"
        assert choice["logprobs"] is None
    both = await client.whole(prompt=TEXT, prompt_logprobs=2, echo=True, logprobs=0, max_tokens=1)
    assert both["choices"][0]["prompt_logprobs"] == answer["choices"][0]["prompt_logprobs"]
    assert [len(top) for top in both["choices"][0]["logprobs"]["top_logprobs"][1:]] == [1] * len(IDS)


async def test_prompt_logprobs_of_a_chat(client: Client) -> None:
    messages = [{"role": "user", "content": "été"}]
    ids = list(bytecodec.render(Prompt(messages=tuple(messages))))
    answer = await client.whole(messages=messages, prompt_logprobs=0, return_token_ids=True, max_tokens=2, n=2)
    assert answer["prompt_token_ids"] == ids
    told = answer["prompt_logprobs"]
    assert told[0] is None and [int(key) for row in told[1:] for key in row] == ids[1:]
    assert [v["logprob"] for row in told[1:] for v in row.values()] == truth(ids, 0)[0][1:]
    assert [choice["token_ids"] for choice in answer["choices"]] == [continuation(ids, 2, VOCAB)] * 2
    plain = await client.whole(messages=messages, max_tokens=2)
    assert not {"prompt_token_ids", "prompt_logprobs"} & set(plain) and "token_ids" not in plain["choices"][0]


@pytest.mark.parametrize("echo", [False, True])
async def test_token_ids_whole_and_streamed(client: Client, echo: bool) -> None:
    """Also where a stop string ends inside what one step gave, and where text is held back."""
    prompts, expected = ["x", "xy"], []
    for prompt in prompts:
        ids = continuation(list(prompt.encode()), 12, VOCAB)
        expected.append(ids)
    stop = [bytecodec.decode(expected[0][4:6])]
    shared: dict[str, Any] = {"prompt": prompts, "max_tokens": 12, "return_token_ids": True, "echo": echo, "stop": stop}
    whole = await client.whole(**shared)
    seen: list[list[Any]] = [[], []]
    for chunk in await client.chunks(**shared):
        for choice in chunk["choices"]:
            seen[choice["index"]].append(choice)
    for i, (prompt, choice) in enumerate(zip(prompts, whole["choices"], strict=True)):
        assert choice["prompt_token_ids"] == list(prompt.encode())
        assert choice["token_ids"] == expected[i][: len(choice["token_ids"])]
        assert choice["finish_reason"] == ("stop" if i == 0 else "length")
        assert len(choice["token_ids"]) == (6 if i == 0 else 12)
        first, *rest = seen[i]
        assert first["prompt_token_ids"] == list(prompt.encode())
        assert not any("prompt_token_ids" in part for part in rest)
        assert [t for part in seen[i] for t in part.get("token_ids", [])] == choice["token_ids"]
        assert "".join(part["text"] for part in seen[i]) == choice["text"]


async def test_token_ids_of_a_streamed_chat(client: Client) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 6, "return_token_ids": True}
    ids = list(bytecodec.render(Prompt(messages=tuple(body["messages"]))))
    first, *rest = await client.chunks(**body)
    assert first["prompt_token_ids"] == ids and first["choices"][0]["delta"]["role"] == "assistant"
    assert not any("prompt_token_ids" in chunk for chunk in rest)
    told = [t for chunk in rest for choice in chunk["choices"] for t in choice.get("token_ids", [])]
    assert told == continuation(ids, 6, VOCAB)


async def test_what_cannot_be_told_is_refused_by_name(client: Client) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}]}
    assert await client.refused(prompt="x", max_tokens=0) == ("max_tokens", "invalid_value")
    assert await client.refused(**chat, max_tokens=0) == ("max_tokens", "invalid_value")
    assert await client.refused(prompt="x", prompt_logprobs=1, stream=True) == ("prompt_logprobs", "invalid_value")
    assert await client.refused(**chat, prompt_logprobs=1, stream=True) == ("prompt_logprobs", "invalid_value")
    for bad in (-1, 21, True, 1.5):
        assert (await client.refused(prompt="x", prompt_logprobs=bad))[0] == "prompt_logprobs"
    too_long = await client.refused(prompt=[1] * 257, echo=True, max_tokens=0)
    assert too_long == ("prompt", "context_length_exceeded")
    full = await client.whole(prompt=[1] * 256, echo=True, max_tokens=0)
    assert full["usage"]["prompt_tokens"] == 256


async def test_a_backend_that_cannot_says_so(tmp_path: Path) -> None:
    generator = ScriptedGenerator(Script(ttft_ms=1, tpot_ms=1), model_id="m")
    async with serving(build_app(generator, ServeConfig(), JsonlSink(tmp_path / "e.jsonl"))) as url:
        http = HttpClient(url)
        client = Client(http)
        unsupported = "unsupported_parameter"
        assert await client.refused(prompt="x", echo=True, logprobs=1) == ("echo", unsupported)
        assert await client.refused(prompt="x", echo=True, max_tokens=0) == ("max_tokens", unsupported)
        assert await client.refused(prompt="x", prompt_logprobs=1) == ("prompt_logprobs", unsupported)
        await http.close()


@pytest.mark.parametrize("asked", [{"echo": True, "logprobs": 2}, {"prompt_logprobs": 2}])
async def test_what_is_told_of_prompts_is_written_beside_the_event_loop(
    client: Client, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any]
) -> None:
    threads: list[int] = []

    def watched(token_id: int, read: Callable[[int], bytes] = bytecodec.token_bytes) -> bytes:
        threads.append(threading.get_ident())
        return read(token_id)

    monkeypatch.setattr(bytecodec, "token_bytes", watched)
    await client.whole(prompt=TEXT, max_tokens=0, **asked)
    if "echo" in asked:
        await client.chunks(prompt=TEXT, max_tokens=0, **asked)
    assert threads and threading.get_ident() not in threads


@pytest.mark.parametrize(
    ("asked", "field"), [({"echo": True, "logprobs": 1}, "logprobs"), ({"prompt_logprobs": 1}, "prompt_logprobs")]
)
async def test_an_answer_holds_only_so_many(
    client: Client, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], field: str
) -> None:
    monkeypatch.setattr(extras, "MAX_PROMPT_LOGPROBS", 2 * 2 * 2 * (len(IDS) - 1))
    body = {"prompt": [IDS, IDS], "max_tokens": 1, **asked}
    assert len((await client.whole(**body, n=2))["choices"]) == 4
    assert await client.refused(**body, n=3) == (field, "invalid_value")
    rows = (await client.whole(prompt=IDS, max_tokens=1, prompt_logprobs=1, n=2))["choices"]
    assert rows[0]["prompt_logprobs"] == rows[1]["prompt_logprobs"] and len(rows[1]["prompt_logprobs"]) == len(IDS)
