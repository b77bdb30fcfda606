"""What `inferloop batch` asks for, and how answers are put together."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from inferloop.cli.batch_files import answered_in, held, merge, read_input, write_rest
from inferloop.core.errors import UsageError

URL = "/v1/completions"


def row(name: str, **body: Any) -> str:
    return json.dumps({"custom_id": name, "method": "POST", "url": URL, "body": {"prompt": name, **body}})


def answers(*names: str, tag: str = "") -> str:
    return "".join(json.dumps({"custom_id": name, "response": None, "tag": tag}) + "\n" for name in names)


def test_the_rest_keeps_its_lines_and_gets_the_model(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join([row("a", seed=1.0), "", row("b", model="x"), row("c", big=12345678901234567890)]))
    source = read_input(path, with_default_model=True)
    assert (source.endpoint, set(source.models), source.num_unnamed) == (URL, {"x"}, 2)
    rest = tmp_path / "rest.jsonl"
    num, digest = write_rest(source, {"a": (0, 0)}, "m", rest)
    lines = rest.read_text().split("\n")
    assert num == 2 and lines[:2] == ["", ""]
    assert [json.loads(line)["body"]["model"] for line in lines[2:4]] == ["x", "m"]
    assert '"big":12345678901234567890' in lines[3]  # numbers are the user's, to the last digit
    assert write_rest(source, {}, "m", rest) == (3, digest)
    assert write_rest(source, {}, "other", rest)[1] != digest


def test_every_wrong_line_is_told_before_a_server_is_needed(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join([row("a", model="m"), "{", row("a", model="m"), row("b")]))
    with pytest.raises(UsageError) as caught:
        read_input(path, with_default_model=False)
    told = str(caught.value).splitlines()
    assert [line.split(": ")[0] for line in told] == [f"{path}:{n}" for n in (2, 3, 4)]
    assert "--model" in told[2]
    with pytest.raises(UsageError, match="No such file"):
        read_input(tmp_path / "none.jsonl", with_default_model=False)


def test_merge_keeps_the_order_of_the_input_and_the_latest_answer(tmp_path: Path) -> None:
    path, old, new = (tmp_path / name for name in ("in.jsonl", "old.jsonl", "new.jsonl"))
    path.write_text("\n".join(row(name, model="m") for name in "abcd"))
    source = read_input(path, with_default_model=False)
    old.write_text(answers("c", "a", tag="old"))
    new.write_text(answers("d", "c", tag="new").rstrip("\n"))
    assert merge(source, [old, new, tmp_path / "none.jsonl"], old) == 3
    found = [json.loads(line) for line in old.read_text().splitlines()]
    assert [(line["custom_id"], line["tag"]) for line in found] == [("a", "old"), ("c", "new"), ("d", "new")]
    assert set(answered_in(old)) == {"a", "c", "d"}
    assert merge(source, [tmp_path / "none.jsonl"], tmp_path / "out.jsonl") == 0
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize("text", ["my notes", row("a"), '{"custom_id": ' + "[" * 10_000])
def test_an_output_that_is_something_else_is_left_alone(tmp_path: Path, text: str) -> None:
    """Another input above all: its rows look as if they had been answered."""
    path = tmp_path / "notes.txt"
    path.write_text(text + "\n")
    with pytest.raises(UsageError, match="not the output of a batch"):
        answered_in(path)
    with pytest.raises(UsageError, match="Is a directory"):
        answered_in(tmp_path)


def test_a_byte_order_mark_hides_no_row(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("\ufeff" + row("a", model="m") + "\n" + row("b", model="m"))
    source = read_input(path, with_default_model=False)
    assert write_rest(source, {}, None, tmp_path / "rest.jsonl")[0] == 2
    assert (tmp_path / "rest.jsonl").read_text().startswith('{"custom_id"')


def test_one_run_at_a_time_has_the_folder(tmp_path: Path) -> None:
    folder, output = tmp_path / "deep" / "out.batch", tmp_path / "out.jsonl"
    with held(folder, output), pytest.raises(UsageError, match="another run"), held(folder, output):
        raise AssertionError("two at once")
    assert not folder.exists()  # nothing was put into it
    with held(folder, output):
        (folder / "run.json").touch()
    with held(folder, output):
        assert (folder / "run.json").exists()
        shutil.rmtree(folder)  # what a run does at its end
        with held(folder, output):
            pass
    with pytest.raises(UsageError, match="--output"), held(Path("/dev/null/out.batch"), output):
        raise AssertionError("no folder")
