"""Faults that other engines are known for, asked of ours: the real model in deterministic mode, over HTTP, with the
right answers."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import PATIENCE_S, until_async, until_idle

from inferloop.backends.http import HttpClient
from inferloop.backends.serve_process import launch_spec
from inferloop.fleet.act.process import ReplicaProcess
from inferloop.models.resolve import ModelFiles

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
CONTEXT_LENGTH = 512


@pytest.fixture(scope="module")
def url(embedded_model: ModelFiles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A replica of its own, in the mode that promises equal answers."""
    options = {"deterministic": True, "context_length": CONTEXT_LENGTH, "kv_memory_mib": 64, "threads": 1}
    spec = launch_spec(str(embedded_model.path), {**options, "served_model_name": "m"}, drain_timeout_s=5)
    folder: Path = tmp_path_factory.mktemp("known_faults")
    with asyncio.Runner() as runner:
        process = runner.run(ReplicaProcess.start_ready(spec, log_path=folder / "log"))
        try:
            yield process.url
        finally:
            returncode = runner.run(process.stop())
    assert returncode == 0, (folder / "log").read_text()


@pytest.fixture
async def client(url: str) -> AsyncIterator[HttpClient]:
    made = HttpClient(url)
    yield made
    await made.close()


async def post(client: HttpClient, path: str, **fields: Any) -> tuple[int, Any]:
    body = json.dumps({"model": "m", **fields}).encode()
    response = await client.request("POST", path, body=body, timeout_s=120)
    return response.status, await response.json()


async def complete(client: HttpClient, prompt: Any, **fields: Any) -> dict[str, Any]:
    """The whole answer to a greedy completion, unless told otherwise."""
    status, answer = await post(client, COMPLETIONS, prompt=prompt, **{"temperature": 0, **fields})
    assert status == 200, answer
    found: dict[str, Any] = answer
    return found


async def stream(client: HttpClient, prompt: str, **fields: Any) -> tuple[list[str], str | None]:
    """(deltas, finish reason)."""
    body = {"model": "m", "prompt": prompt, "temperature": 0, "stream": True, **fields}
    response = await client.request("POST", COMPLETIONS, body=json.dumps(body).encode(), timeout_s=120)
    assert response.status == 200
    blocks = (await response.read()).decode().split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    choices = [json.loads(block.removeprefix("data: "))["choices"][0] for block in blocks[:-2]]
    return [choice["text"] for choice in choices if choice["text"]], choices[-1]["finish_reason"]


@pytest.mark.parametrize("stop", ["F G H", "H", " I J", "never"])
async def test_no_character_of_a_stop_reaches_a_stream(client: HttpClient, stop: str) -> None:
    """Over several tokens, inside a token, at a token's edge; and what might become a stop is not held for longer."""
    prompt = "Here is the English alphabet: A B C"
    full = (await complete(client, prompt, max_tokens=12))["choices"][0]["text"]
    whole = (await complete(client, prompt, max_tokens=12, stop=[stop]))["choices"][0]
    deltas, finish = await stream(client, prompt, max_tokens=12, stop=[stop])
    expected = (full.split(stop)[0], "stop" if stop in full else "length")
    assert (whole["text"], whole["finish_reason"]) == ("".join(deltas), finish) == expected
    assert stop not in whole["text"]
    if stop == "never":
        plain, _ = await stream(client, prompt, max_tokens=12)
        assert len(deltas) == len(plain), "text was held back that no stop begins with"


@pytest.mark.parametrize("max_tokens", [*range(9, 14), 24])
async def test_other_scripts_stream_whole_and_a_cut_character_is_flushed_once(
    client: HttpClient, max_tokens: int
) -> None:
    prompt = "Repeat: 삼겹살 김치 👩‍👩‍👧‍👦 ñandú. Repeated: 삼겹살 김치 👩‍👩‍👧‍👦 ñandú. Repeated:"
    answer = await complete(client, prompt, max_tokens=max_tokens, return_token_ids=True)
    deltas, finish = await stream(client, prompt, max_tokens=max_tokens)
    choice = answer["choices"][0]
    assert "".join(deltas) == choice["text"] and finish == choice["finish_reason"]
    _, told = await post(client, "/detokenize", tokens=choice["token_ids"])
    assert choice["text"] == told["prompt"] and any(ord(c) > 0x7F for c in choice["text"])
    assert choice["text"].count("\ufffd") <= 1 and "\ufffd" not in choice["text"][:-1]


async def test_a_seeded_answer_does_not_depend_on_company(client: HttpClient) -> None:
    seeded = {"seed": 42, "temperature": 0.8, "max_tokens": 12}
    alone = (await complete(client, "Once upon a time", **seeded))["choices"]
    for mates_seed in (None, None, None, 7):
        mate = complete(client, "A long time ago", temperature=0.8, max_tokens=16, seed=mates_seed)
        both = await asyncio.gather(complete(client, "Once upon a time", **seeded), mate)
        assert both[0]["choices"] == alone


async def test_a_cached_beginning_changes_no_token(client: HttpClient) -> None:
    """Cold under a salt of its own, three times under another one, and again in the middle of others."""
    prompt = "The museum of trains is open from Monday to Friday, and the guide says: " * 6
    ask = {"max_tokens": 12, "logprobs": 1, "return_token_ids": True}
    cold = await complete(client, prompt, cache_salt="cold", **ask)
    warm = [await complete(client, prompt, cache_salt="warm", **ask) for _ in range(3)]
    crowd = await asyncio.gather(*(complete(client, prompt, cache_salt="warm", **ask) for _ in range(3)))
    assert all(answer["choices"] == cold["choices"] for answer in [*warm, *crowd])
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in warm]
    num_prompt = cold["usage"]["prompt_tokens"]
    assert cached[0] == 0 and all(num_prompt - 17 < num < num_prompt for num in cached[1:])


async def test_prompt_log_probabilities_are_those_of_a_cold_run(client: HttpClient) -> None:
    """A prompt of some 200 tokens, twice; then one that shares its first half."""
    half = "Steam engines pull trains over bridges and through tunnels. " * 9
    for prompt in (half * 2, half + "And then something else happens. " * 10):
        ask = {"echo": True, "logprobs": 1, "max_tokens": 1}
        cold = await complete(client, prompt, cache_salt=f"cold {len(prompt)}", **ask)
        warm = [await complete(client, prompt, **ask) for _ in range(2)]
        assert cold["usage"]["prompt_tokens"] > 150
        assert all(answer["choices"] == cold["choices"] for answer in warm)
        told = cold["choices"][0]["logprobs"]
        assert told["token_logprobs"][0] is None and None not in told["token_logprobs"][1:]
        assert len(told["tokens"]) == cold["usage"]["prompt_tokens"] + 1


OUT_OF_PLACE: list[tuple[str, Any]] = [
    ("stop_token_ids", [10**7]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [49152]),
    ("stop_token_ids", list(range(5000))),
    ("logit_bias", {"99999999": 5}),
    ("logit_bias", {"49152": 5}),
    ("logit_bias", {"AI": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"5": 1e9}),
    ("logit_bias", {str(i): 1 for i in range(5000)}),
    ("allowed_token_ids", list(range(5000))),
    ("top_k", 9_999_999),
    ("top_k", -2),
    ("temperature", -1),
    ("top_p", 0),
    ("min_p", 2),
    ("n", 10_000),
    ("max_tokens", 2**70),
    ("min_tokens", 2**40),
    ("seed", 2**70),
    ("priority", 10**9),
    ("repetition_penalty", 0),
    ("presence_penalty", 1e300),
]


async def test_parameters_out_of_place_are_refused_by_name_and_cost_nobody_else(client: HttpClient) -> None:
    ask = {"max_tokens": 30, "ignore_eos": True}
    alone = await stream(client, "The first railway", **ask)
    healthy = asyncio.create_task(stream(client, "The first railway", **ask))
    for field, value in OUT_OF_PLACE:
        for path, prompt in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": [{"role": "user", "content": "x"}]})):
            status, answer = await post(client, path, **{"max_tokens": 2, **prompt, field: value})
            assert status == 400, (field, answer)
            assert (answer["error"]["param"] or "").split("[")[0].split(".")[0] == field, (field, answer)
    for number in (b"NaN", b"Infinity", b"-Infinity", b"1e999"):
        body = b'{"model": "m", "prompt": "x", "temperature": %b}' % number
        response = await client.request("POST", COMPLETIONS, body=body)
        assert (response.status, (await response.json())["error"]["param"]) == (400, "temperature"), number
    assert await healthy == alone
    assert (await client.get_json("/health/progress", timeout_s=PATIENCE_S))["alive"]


EMPTY: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {"prompt": ""}, "prompt"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": [""]}, "prompt[0]"),
    (COMPLETIONS, {"prompt": ["x", ""]}, "prompt[1]"),
    (COMPLETIONS, {"prompt": [[]]}, "prompt[0]"),
    (COMPLETIONS, {"prompt": [[1], []]}, "prompt[1]"),
    (CHAT, {"messages": []}, "messages"),
    (RESPONSES, {"input": ""}, "input"),
    (RESPONSES, {"input": []}, "input"),
    ("/v1/embeddings", {"input": ""}, "input"),
    ("/v1/embeddings", {"input": []}, "input"),
    ("/v1/embeddings", {"input": ["x", ""]}, "input[1]"),
    ("/v1/embeddings", {"input": [[]]}, "input[0]"),
    ("/v1/completions/render", {"prompt": ""}, "prompt"),
    ("/v1/chat/completions/render", {"messages": []}, "messages"),
    ("/tokenize", {"messages": []}, "messages"),
    ("/tokenize", {"prompt": ""}, "prompt"),
]


@pytest.mark.parametrize(("path", "fields", "param"), EMPTY)
async def test_an_empty_prompt_is_refused_by_name(
    client: HttpClient, path: str, fields: dict[str, Any], param: str
) -> None:
    status, answer = await post(client, path, **fields)
    assert (status, answer["error"]["param"]) == (400, param)
    assert (await complete(client, "A B C", max_tokens=1))["usage"]["completion_tokens"] == 1


async def test_an_empty_message_is_a_message(client: HttpClient) -> None:
    """Its template puts tokens around it, so there is something to answer."""
    for content in ("", [{"type": "text", "text": ""}], []):
        status, answer = await post(client, CHAT, messages=[{"role": "user", "content": content}], max_tokens=2)
        assert (status, answer["usage"]["completion_tokens"]) == (200, 2), answer


@pytest.mark.parametrize("num_prompt", range(CONTEXT_LENGTH - 2, CONTEXT_LENGTH + 2))
@pytest.mark.parametrize("max_tokens", [0, 1, 2, 10**9, None])
async def test_prompts_around_the_limit_are_answered_or_refused_at_once(
    client: HttpClient, num_prompt: int, max_tokens: int | None
) -> None:
    asked = {} if max_tokens is None else {"max_tokens": max_tokens}
    status, answer = await post(client, COMPLETIONS, prompt=[28] * num_prompt, ignore_eos=True, temperature=0, **asked)
    left = CONTEXT_LENGTH - num_prompt
    if max_tokens == 0:
        # nothing was asked of the prompt either
        assert (status, answer["error"]["param"]) == (400, "max_tokens" if left >= 0 else "prompt")
    elif left >= (max_tokens or 1):
        assert status == 200 and answer["usage"]["completion_tokens"] == min(left, max_tokens or 16)
    else:
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert answer["error"]["param"] == ("prompt" if left <= 0 else "max_tokens")


async def idle(client: HttpClient) -> dict[str, float]:
    """Wait until nobody is here any more; the gauges and counters then."""
    await until_idle(client)
    lines = (await (await client.request("GET", "/metrics")).read()).decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


async def test_whoever_ends_early_is_gone_with_all_choices_and_nobody_else_notices(client: HttpClient) -> None:
    """By leaving, by a timeout, by cancelling; streamed and not; queued, prefilling in chunks, decoding."""
    rng = random.Random(20)
    steady = "The three longest rivers of Europe are"
    alone, _ = await stream(client, steady, max_tokens=24)
    before = await idle(client)

    def ask(i: int, way: str, after_s: float) -> asyncio.Task[tuple[int, bytes]]:
        """For as many tokens as there is room for: none is complete before it is ended."""
        num_words = rng.choice((1, 60, 300))
        fields = {"prompt": f"{i} " + "word " * num_words, "max_tokens": CONTEXT_LENGTH - 20 - num_words}
        body = {"model": "m", "ignore_eos": True, "n": rng.choice((1, 4)), "stream": i % 2 == 0, **fields}
        headers = {"x-request-id": f"ends-{i}"}
        if way == "timeout":
            headers["x-request-timeout-ms"] = str(int(after_s * 1000))

        async def asking() -> tuple[int, bytes]:
            answer = await client.request(
                "POST", COMPLETIONS, body=json.dumps(body).encode(), headers=headers.items(), timeout_s=120
            )
            return answer.status, await answer.read()

        return asyncio.create_task(asking())

    async def all_here() -> bool:
        """The server knows of all who will leave: of who never came it counts nothing."""
        progress = await client.get_json("/health/progress", timeout_s=PATIENCE_S)
        return bool(progress["in_flight"] == len(leavers))

    async def end(i: int, way: str, after_s: float, call: asyncio.Task[tuple[int, bytes]]) -> None:
        async def is_cancelled() -> bool:
            told = await client.request("POST", f"/v1/requests/ends-{i}/cancel", body=b"")
            answer = await told.json()
            return told.status == 200 and answer["num_cancelled"] == 1

        if way != "timeout":
            await asyncio.sleep(after_s)
        if way == "leave":
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            return
        if way == "cancel":
            await until_async(is_cancelled)  # it may not have arrived yet
        status, told = await call
        code, name = (408, b"timeout") if way == "timeout" else (499, b"cancelled")
        assert (status == code or b'"code":"%b"' % name in told) and b"[DONE]" not in told

    ways = [(i, way, rng.uniform(0.02, 0.6)) for i, way in enumerate(("leave", "timeout", "cancel") * 4)]
    leavers: list[tuple[int, str, float, asyncio.Task[tuple[int, bytes]]]] = []
    for one in ways[::3]:
        leavers.append((*one, ask(*one)))
        await until_async(all_here)
    beside = asyncio.create_task(stream(client, steady, max_tokens=24))
    others = [(*one, ask(*one)) for one in ways if one[1] != "leave"]
    await asyncio.gather(*(end(*one) for one in [*leavers, *others]))
    assert (await beside)[0] == alone
    after = await idle(client)
    for gauge in ("kv_usage_ratio", "queue_tokens", "requests_running", "requests_waiting"):
        assert [value for name, value in after.items() if name.startswith(f"inferloop_{gauge}{{")] == [0.0], gauge
    for why, num in (("disconnect", 4), ("timeout", 4), ("cancelled", 4)):
        name = next(n for n in after if n.startswith("inferloop_requests_cut_short_total") and f'"{why}"' in n)
        assert after[name] - before[name] == num

    question = "remember this beginning " * 12
    call = asyncio.create_task(post(client, COMPLETIONS, prompt=question, max_tokens=300, ignore_eos=True))
    steps = after[next(name for name in after if name.startswith("inferloop_engine_steps_total"))]

    async def is_under_way() -> bool:
        progress = await client.get_json("/health/progress", timeout_s=PATIENCE_S)
        return bool(progress["step_counter"] >= steps + 6)

    await until_async(is_under_way)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await idle(client)
    usage = (await complete(client, question, max_tokens=1))["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] - 17
