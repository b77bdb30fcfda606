"""A target that has no /tokenize, measured with the tokenizer of a model that is here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send
from tests.e2e.test_secured_targets import PEM, Door, behind, bench_words, inferloop
from tests.unit.conftest import TINY_CONFIG, tiny_tokenizer

from inferloop.backends.scripted import Script, ScriptedGenerator
from inferloop.records.run import open_run
from inferloop.records.sink import DropSink
from inferloop.serve.app import build_app
from inferloop.serve.config import ServeConfig

TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
"""Counts as the scripted backend does."""


def without_tokenize(app: ASGIApp) -> ASGIApp:
    async def asked(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == "/tokenize":
            scope = {**scope, "path": "/nothing"}
        await app(scope, receive, send)

    return asked


@pytest.fixture
def door() -> Iterator[Door]:
    generator = ScriptedGenerator(Script(ttft_ms=2, tpot_ms=0.5), model_id="demo")
    with behind(Door(without_tokenize(build_app(generator, ServeConfig(), DropSink())))) as found:
        yield found


def text_files(folder: Path, template: str) -> str:
    """A directory without weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY_CONFIG))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "chat_template": template}))
    tiny_tokenizer(adds_bos=False).save(str(folder / "tokenizer.json"))
    return str(folder)


def test_the_right_one_gives_exact_prompts_and_a_wrong_one_voids(
    tmp_path: Path, door: Door, contract_file: Path
) -> None:
    words = [*bench_words(contract_file, tmp_path, door.url), "--ca-file", str(PEM)]
    none = inferloop(tmp_path, *words)
    assert none.code == 3 and "no usable /tokenize (HTTP 404)" in none.message and "--tokenizer" in none.out

    right = text_files(tmp_path / "right", TEMPLATE)
    told = inferloop(tmp_path, *words, "--tokenizer", right)
    assert told.code in (0, 1, 4), told.err
    summary = json.loads(told.out)
    assert not any("tokens" in reason for reason in summary["reasons"])
    record = open_run(Path(summary["run"]))
    assert record.header.options["tokenizer"] == right
    assert any(record.points().values())

    wrong = text_files(tmp_path / "wrong", TEMPLATE.replace("<s>", "<s><s><s><s><s><s><s><s>"))
    told = inferloop(tmp_path, *words, "--tokenizer", wrong)
    assert told.code == 4
    assert any("prompt" in reason for reason in json.loads(told.out)["reasons"])
    assert door.entered.count("/tokenize") == 1, "where none was named"


def test_what_is_no_model_is_told_before_anything_begins(tmp_path: Path, door: Door, contract_file: Path) -> None:
    words = [*bench_words(contract_file, tmp_path, door.url), "--ca-file", str(PEM), "--tokenizer"]
    told = inferloop(tmp_path, *words, "./absent")
    assert told.code != 0 and "absent: no such file" in told.message and not door.entered
    words = [*bench_words(contract_file, tmp_path, "embedded"), "--tokenizer", "smollm2-135m-instruct"]
    told = inferloop(tmp_path, *words)
    assert (told.code, "--tokenizer is for a URL" in told.message) == (2, True)
