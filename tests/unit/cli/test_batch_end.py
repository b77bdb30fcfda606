"""The end of `inferloop batch`: what was answered is counted once, and nobody's file is written over."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from inferloop.backends.scripted import Script, ScriptedGenerator
from inferloop.cli import batch, batch_files
from inferloop.cli.batch_client import BatchClient
from inferloop.cli.main import app
from inferloop.cli.wire import Entry
from inferloop.core.errors import RecordWriteError
from inferloop.records.sink import DropSink
from inferloop.serve.app import build_app
from inferloop.serve.batch.folder import Folder
from inferloop.serve.batch.service import BatchConfig
from inferloop.serve.config import ServeConfig
from inferloop.serve.run import serving


def write(path: Path, *bodies: dict[str, Any]) -> Path:
    rows = [
        {
            "custom_id": f"c{i}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "m", "prompt": "x", **body},
        }
        for i, body in enumerate(bodies)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


async def test_answers_that_a_killed_run_had_written_already_count_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, too_long = {"max_tokens": 2}, {"max_tokens": 10**6}
    output, folder = tmp_path / "out.jsonl", tmp_path / "out.jsonl.batch"
    source = batch_files.read_input(write(tmp_path / "in.jsonl", good, too_long, good), with_default_model=False)
    generator = ScriptedGenerator(Script(ttft_ms=1, tpot_ms=0.1), model_id="m")
    merge = batch_files.merge

    def killed_between(source: Any, parts: list[Path], target: Path) -> int:
        if target != output:
            raise KeyboardInterrupt
        return merge(source, parts, target)

    with contextlib.closing(Folder(tmp_path / "jobs")) as jobs:
        server = build_app(generator, ServeConfig(), DropSink(), batch=BatchConfig(jobs))
        async with serving(server) as url:
            with batch_files.held(folder, output):
                with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
                    patched.setattr(batch_files, "merge", killed_between)
                    await batch._run(batch._job(source, output, folder, "m"), url, Entry(), "m", None)
                job = batch._job(source, output, folder, "m")
                summary = batch._summary(job, await batch._run(job, url, Entry(), "m", None), 1.0)
    assert {name: summary[name] for name in ("rows", "completed", "failed", "kept")} == {
        "rows": 3, "completed": 2, "failed": 1, "kept": 2,
    }  # fmt: skip
    assert [json.loads(line)["custom_id"] for line in output.read_text().splitlines()] == ["c0", "c2"]
    assert [json.loads(line)["custom_id"] for line in job.errors.read_text().splitlines()] == ["c1"]


async def test_a_disk_without_room_for_the_answers_is_told(tmp_path: Path) -> None:
    with contextlib.closing(Folder(tmp_path)) as jobs:
        server = build_app(ScriptedGenerator(model_id="m"), ServeConfig(), DropSink(), batch=BatchConfig(jobs))
        async with serving(server) as url:
            client = BatchClient(url)
            file_id = await client.upload(write(tmp_path / "in.jsonl", {}))
            with pytest.raises(RecordWriteError, match="No space left"):
                await client.download(file_id, Path("/dev/full"))
            await client.close()


@pytest.mark.parametrize("name", ["out.jsonl", "out.errors.jsonl"])
def test_the_output_is_not_written_over_the_input(tmp_path: Path, name: str) -> None:
    file = write(tmp_path / name, {})
    text = file.read_text()
    done = CliRunner().invoke(
        app, ["batch", str(file), "--target", "scripted", "--output", str(tmp_path / "out.jsonl"), "--json"]
    )
    assert done.exit_code == 2 and "written over" in json.loads(done.stdout)["error"]["message"]
    assert file.read_text() == text and [path.name for path in tmp_path.iterdir()] == [name]
