"""The render endpoints show exactly what the same body brings to the engine, and refuse what is refused there."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from inferloop.backends.http import HttpClient
from inferloop.backends.native import NativeGenerator
from inferloop.backends.protocols import Delta, GenerateRequest, Generator, GeneratorInfo
from inferloop.engine.compute.echo import EchoRunner
from inferloop.engine.stats import EngineStats
from inferloop.engine.text.codec import Codec
from inferloop.models.resolve import resolve
from inferloop.records.event import Content
from inferloop.records.sink import Record
from inferloop.serve.app import build_app
from inferloop.serve.config import ServeConfig
from inferloop.serve.run import serving

Native = Callable[..., contextlib.AbstractAsyncContextManager[NativeGenerator]]

TURNS = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)
TEMPLATES = {"none": TURNS, "one": "{{ bos_token }}" + TURNS, "two": "{{ bos_token }}{{ bos_token }}" + TURNS}
SWITCHED = (
    "{{ bos_token }}" + TURNS + "{% if enable_thinking is defined and not enable_thinking %}-{% endif %}"
    "{% if not tags is defined %}{% set tags = [] %}{% endif %}{{ tags | join }}"
)
BOS, EOS = 256, 257
HI = [{"role": "user", "content": "hi"}]
IDS = [BOS, *b"user:hi", EOS, *b">"]
PATHS = {"messages": "/v1/chat/completions", "prompt": "/v1/completions", "input": "/v1/responses"}


@dataclass
class ListSink:
    records: list[Record] = field(default_factory=list)

    def write(self, record: Record) -> None:
        self.records.append(record)

    def close(self) -> None:
        pass


@dataclass
class Served:
    client: HttpClient
    generator: Generator
    sink: ListSink
    content: ListSink

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        answer = await self.client.request("POST", path, body=json.dumps({"model": "m", **body}).encode())
        return answer.status, await answer.json()

    async def render(self, **body: Any) -> Any:
        status, told = await self.post(path_of(body) + "/render", body)
        assert status == 200, told
        return told

    async def prompts_of(self, **body: Any) -> tuple[list[list[int]], Any]:
        """The ids that reached the engine, and the answer's usage."""
        self.content.records.clear()
        status, told = await self.post(path_of(body), body)
        assert status == 200, told
        rows = [row for row in self.content.records if isinstance(row, Content)]
        return [list(row.input_token_ids) for row in rows], told["usage"]


def path_of(body: dict[str, Any]) -> str:
    return next(path for name, path in PATHS.items() if name in body)


@contextlib.asynccontextmanager
async def serve(generator: Generator, folder: Path) -> AsyncIterator[Served]:
    sink, content = ListSink(), ListSink()
    config = ServeConfig(capture="token_ids", content_path=folder / "content.jsonl")
    async with serving(build_app(generator, config, sink, content_sink=content), wait_ready=True) as url:
        client = HttpClient(url)
        try:
            yield Served(client, generator, sink, content)
        finally:
            await client.close()


@pytest.fixture
def tiny(native: Native, tiny_directory: Callable[..., Path], tmp_path: Path) -> Any:
    """tiny(template): the engine over a byte tokenizer that puts <s> before every text, served."""

    @contextlib.asynccontextmanager
    async def running(template: str = "one", context_length: int = 64) -> AsyncIterator[Served]:
        codec = Codec(resolve(str(tiny_directory(template=TEMPLATES.get(template, template)))))
        runner = EchoRunner(vocab_size=258, context_length=context_length, num_blocks=250)
        async with native(runner, codec) as generator, serve(generator, tmp_path) as served:
            yield served

    return running


@pytest.mark.parametrize("template", TEMPLATES)
async def test_there_is_one_bos_on_every_path(tiny: Any, template: str) -> None:
    """A chat, responses, and completions of the rendered text and of the ids, shown and generated and counted."""
    async with tiny(template) as s:
        chat = await s.render(messages=HI)
        assert chat["token_ids"] == IDS and chat["num_tokens"] == len(IDS)
        assert chat["prompt"].count("<s>") == list(TEMPLATES).index(template), "the text is as the template printed it"
        for body in ({"messages": HI}, {"input": "hi"}, {"prompt": chat["prompt"]}, {"prompt": chat["token_ids"]}):
            told = await s.render(**body)
            shown = told[0] if "prompt" in body else told
            limit = {"max_output_tokens" if "input" in body else "max_tokens": 1}
            prompts, usage = await s.prompts_of(**body, **limit)
            assert prompts == [shown["token_ids"]] == [IDS], body
            assert usage.get("prompt_tokens", usage.get("input_tokens")) == shown["num_tokens"]
        for body in ({"messages": HI}, {"prompt": chat["prompt"]}):
            assert (await s.post("/tokenize", body))[1]["tokens"] == IDS


async def test_ids_equal_those_of_transformers(
    tiny_directory: Callable[..., Path], native: Native, tmp_path: Path
) -> None:
    from transformers import PreTrainedTokenizerFast

    folder = tiny_directory(template=TEMPLATES["one"])
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        bos_token="<s>",
        eos_token="</s>",
        chat_template=TEMPLATES["one"],
    )
    chats = [HI, [*HI, {"role": "assistant", "content": "b\n"}, {"role": "user", "content": "世界"}]]
    async with (
        native(EchoRunner(vocab_size=258), Codec(resolve(str(folder)))) as generator,
        serve(generator, tmp_path) as s,
    ):
        for chat in chats:
            expected = theirs.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
            told = await s.render(messages=chat)
            assert told["token_ids"] == expected and expected.count(BOS) == 1
            assert told["prompt"] == theirs.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)


async def test_sampling_is_shown_with_every_default_filled_in(tiny: Any) -> None:
    async with tiny() as s:
        plain = await s.render(messages=HI)
        assert plain["sampling_params"] == {
            "n": 1, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": None,
            "max_tokens": 64 - len(IDS), "min_tokens": 0, "stop": [], "stop_token_ids": [], "ignore_eos": False,
            "logprobs": None, "prompt_logprobs": None, "presence_penalty": 0.0, "frequency_penalty": 0.0,
            "repetition_penalty": 1.0, "logit_bias": {}, "grammar": None,
        }  # fmt: skip
        assert (plain["model"], plain["max_model_len"]) == ("m", 64)
        assert (plain["stream"], plain["cache_salt"], plain["priority"]) == (False, None, 0)
        schema = {"type": "object", "properties": {"b": {"type": "null"}, "a": {"type": "null"}}}
        told = await s.render(
            messages=HI, max_tokens=9, seed=3, stop="x", top_k=-1, logit_bias={"7": 2}, logprobs=True, n=2, stream=True,
            cache_salt="s", priority=4, structured_outputs={"json": schema},
        )  # fmt: skip
        params = told["sampling_params"]
        assert (params["max_tokens"], params["seed"], params["stop"], params["n"]) == (9, 3, ["x"], 2)
        assert (params["logit_bias"], params["logprobs"], params["top_k"]) == ({"7": 2.0}, 0, 0)
        assert (params["grammar"]["kind"], json.loads(params["grammar"]["text"])) == ("json_schema", schema)
        assert (told["stream"], told["cache_salt"], told["priority"]) == (True, "s", 4)


async def test_max_tokens_is_what_the_engine_generates_at_most(tiny: Any) -> None:
    async with tiny() as s:
        for body in ({"messages": HI}, {"prompt": "x" * 10}, {"prompt": "x" * 55}, {"messages": HI, "max_tokens": 7}):
            told = await s.render(**body)
            shown = told[0] if "prompt" in body else told
            _, usage = await s.prompts_of(**body, ignore_eos=True)
            assert usage["completion_tokens"] == shown["sampling_params"]["max_tokens"], body


async def test_every_prompt_is_shown(tiny: Any) -> None:
    async with tiny() as s:
        told = await s.render(prompt=["a", "bc"], n=2)
        assert [(one["prompt"], one["token_ids"]) for one in told] == [("a", [BOS, 97]), ("bc", [BOS, 98, 99])]
        assert [one["sampling_params"]["n"] for one in told] == [2, 2]
        [by_ids] = await s.render(prompt=[97, 98])
        assert (by_ids["prompt"], by_ids["token_ids"]) == ("ab", [97, 98])


REFUSED: list[dict[str, Any]] = [
    {"messages": HI, "temperature": 3}, {"messages": HI, "no_such": 1}, {"messages": []}, {"prompt": ""},
    {"messages": HI, "model": "other"}, {"messages": [{"role": "user", "content": "x" * 99}]},
    {"messages": HI, "max_tokens": 60}, {"prompt": "x" * 64}, {"prompt": ["a", "x" * 64]}, {"prompt": [999]},
    {"messages": HI, "structured_outputs": {"json": {"type": "object", "if": {}}}},
    {"prompt": "x", "structured_outputs": {"regex": "(?=a)"}}, {"input": "x" * 99},
    {"input": "x", "max_output_tokens": 60}, {"input": "x", "store": True},
]  # fmt: skip


async def test_what_is_refused_is_refused_with_the_same_words(tiny: Any) -> None:
    async with tiny() as s:
        for body in REFUSED:
            path = path_of(body)
            refused, shown = await s.post(path, body), await s.post(path + "/render", body)
            assert refused == shown and refused[0] in (400, 404), body


async def test_nothing_is_generated_and_no_event_is_left(tiny: Any) -> None:
    async with tiny() as s:
        before = s.generator.describe()[1]
        for body in ({"messages": HI}, {"prompt": "x"}, {"input": "x"}):
            await s.render(**body)
        assert s.generator.describe()[1] == before and s.sink.records == s.content.records == []


async def test_tokenize_shows_parts_of_what_reaches_the_engine(tiny: Any) -> None:
    async def tokens(**body: Any) -> Any:
        status, told = await s.post("/tokenize", body)
        assert status == 200 and told["count"] == len(told["tokens"]) and told["max_model_len"] == 64
        return told["tokens"]

    async with tiny("none") as s:
        assert await tokens(messages=HI) == await tokens(messages=HI, add_generation_prompt=True) == IDS
        assert await tokens(messages=HI, add_generation_prompt=False) == IDS[:-1]
        assert await tokens(messages=HI, add_special_tokens=False) == IDS
        assert await tokens(prompt="hi") == await tokens(prompt="hi", add_special_tokens=True) == [BOS, *b"hi"]
        assert await tokens(prompt="hi", add_special_tokens=False) == [*b"hi"]
        assert await tokens(prompt="<s>hi", add_special_tokens=False) == [BOS, *b"hi"]
        _, told = await s.post("/tokenize", {"prompt": "hé", "return_token_strs": True})
        assert told["token_strs"] == ["<s>", "h", "\ufffd", "\ufffd"]
        for field_, body in (
            ("add_special_tokens", {"messages": HI, "add_special_tokens": True}),
            ("add_generation_prompt", {"prompt": "x", "add_generation_prompt": True}),
            ("continue_final_message", {"messages": HI, "continue_final_message": True}),
            ("prompt", {"prompt": "", "add_special_tokens": False}),
        ):
            status, told = await s.post("/tokenize", body)
            assert (status, told["error"]["param"]) == (400, field_)


async def test_tools_are_part_of_the_prompt_on_every_path(tiny: Any) -> None:
    function = {"name": "f", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": function}]
    async with tiny("one", context_length=1000) as s:
        chat = await s.render(messages=HI, tools=tools, tool_choice="none")
        responses = await s.render(input="hi", tools=[{"type": "function", **function}], tool_choice="none")
        _, told = await s.post("/tokenize", {"messages": HI, "tools": tools})
        prompts, _ = await s.prompts_of(messages=HI, tools=tools, tool_choice="none", max_tokens=1)
        assert chat["token_ids"] == responses["token_ids"] == told["tokens"] == prompts[0]
        assert chat["prompt"] == responses["prompt"] and '"name": "f"' in chat["prompt"]


async def test_variables_for_the_chat_template_are_the_same_on_every_path(tiny: Any) -> None:
    async with tiny(SWITCHED) as s:
        for variables, shown in (
            ({}, ""),
            (None, ""),
            ({"enable_thinking": True}, ""),
            ({"enable_thinking": False}, "-"),
            ({"enable_thinking": False, "tags": ["a", "b"]}, "-ab"),
        ):
            body = {"messages": HI, "chat_template_kwargs": variables}
            chat, (_, told) = await s.render(**body), await s.post("/tokenize", body)
            assert chat["prompt"] == f"<s>user:hi</s>>{shown}"
            prompts, _ = await s.prompts_of(**body, max_tokens=1)
            assert chat["token_ids"] == told["tokens"] == prompts[0] == [*IDS, *shown.encode()]


DEEP: Any = 0
for _ in range(70):
    DEEP = [DEEP]
WRONG_VARIABLES: list[tuple[Any, str]] = [
    ([], ""),
    ({"messages": []}, ".messages"),
    ({"add_generation_prompt": False}, ".add_generation_prompt"),
    ({"documents": []}, ".documents"),
    ({"bos_token": "x"}, ".bos_token"),
    ({"raise_exception": 1}, ".raise_exception"),
    ({"enable_thinkin": False}, ".enable_thinkin"),
    ({"enable_thinking": DEEP}, ".enable_thinking"),
    ({"tags": ["x" * 70_000]}, ""),
]


@pytest.mark.parametrize(("variables", "where"), WRONG_VARIABLES, ids=[str(i) for i in range(len(WRONG_VARIABLES))])
async def test_wrong_variables_are_refused_by_name(tiny: Any, variables: Any, where: str) -> None:
    async with tiny(SWITCHED) as s:
        body = {"messages": HI, "chat_template_kwargs": variables, "max_tokens": 1}
        answers = [await s.post(path, body) for path in (PATHS["messages"], PATHS["messages"] + "/render")]
        del body["max_tokens"]
        answers.append(await s.post("/tokenize", body))
        for status, told in answers:
            assert (status, told["error"]["param"]) == (400, f"chat_template_kwargs{where}"), told
        status, told = await s.post("/tokenize", {"prompt": "x", "chat_template_kwargs": {"enable_thinking": False}})
        assert (status, told["error"]["param"]) == (400, "chat_template_kwargs")


@pytest.mark.parametrize(
    ("limits", "body", "param"),
    [
        ({"max_sequences": 2, "max_waiting": 1}, {"messages": HI, "n": 4}, "n"),
        ({"max_sequences": 2, "max_waiting": 1}, {"prompt": ["a", "b", "c", "d"]}, "prompt"),
        ({"max_sequences": 2, "max_waiting_tokens": 35}, {"messages": HI, "n": 5}, "n"),
        ({"max_sequences": 2, "max_waiting_tokens": 35}, {"messages": HI, "n": 5, "stream": True}, "n"),
    ],
)
async def test_choices_that_never_fit_together_are_refused_before_any_is_queued(
    native: Native, tmp_path: Path, limits: dict[str, int], body: dict[str, Any], param: str
) -> None:
    async with native(**limits) as generator, serve(generator, tmp_path) as s:
        before = generator.describe()[1]
        for path in (path_of(body), path_of(body) + "/render"):
            status, told = await s.post(path, {**body, "max_tokens": 2})
            assert (status, told["error"]["param"]) == (400, param), told
        assert generator.describe()[1] == before


async def test_a_backend_without_its_tokenizer_says_so(native: Native, tmp_path: Path) -> None:
    class Plain:
        def __init__(self, inner: Generator) -> None:
            self._inner = inner

        def describe(self) -> tuple[GeneratorInfo, EngineStats]:
            return self._inner.describe()

        def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
            return self._inner.generate(request)

    async with native() as inner, serve(Plain(inner), tmp_path) as s:
        status, told = await s.post("/v1/completions/render", {"prompt": "x"})
    assert (status, told["error"]["code"]) == (400, "unsupported_endpoint")
