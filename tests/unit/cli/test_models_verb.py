"""`inferloop models` as people and scripts use it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from inferloop.catalog.models import known_models
from inferloop.cli.main import app
from inferloop.models.resolve import ModelFiles

NAME = "smollm2-135m-instruct"


@pytest.fixture
def cache(embedded_model: ModelFiles) -> str:
    """The cache in which the session's model lies: <cache>/models/<name>/<file>."""
    return str(embedded_model.path.parents[2])


def invoke(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["models", *arguments], env={"COLUMNS": "300"})
    return result.exit_code, result.stdout, result.stderr


def object_of(output: str) -> dict[str, Any]:
    (line,) = output.splitlines()
    value: dict[str, Any] = json.loads(line)
    return value


def test_list_says_what_is_cached_and_where(cache: str, embedded_model: ModelFiles, tmp_path: Path) -> None:
    code, out, _ = invoke("list", "--json", "--cache-dir", cache)
    (row,) = [m for m in object_of(out)["models"] if m["name"] == NAME]
    assert code == 0
    assert (row["cached"], row["path"], row["license"]) == (True, str(embedded_model.path), "Apache-2.0")
    row = object_of(invoke("list", "--json", "--cache-dir", str(tmp_path))[1])["models"][0]
    assert (row["cached"], row["path"], row["file_bytes"]) == (False, None, 98_362_432)


def test_list_reads_as_a_table(tmp_path: Path) -> None:
    code, out, _ = invoke("list", "--cache-dir", str(tmp_path))
    assert code == 0
    assert all(word in out for word in (NAME, "135 M", "8192", "93.8 MiB", "Apache-2.0"))


def test_fetch_of_a_cached_model_gives_its_path(cache: str, embedded_model: ModelFiles) -> None:
    code, out, err = invoke("fetch", NAME, "--cache-dir", cache)
    assert (code, err) == (0, "")
    assert str(embedded_model.path) in out
    assert object_of(invoke("fetch", NAME, "--json", "--cache-dir", cache)[1])["path"] == str(embedded_model.path)


def test_verify_hashes_what_is_cached(cache: str) -> None:
    code, out, _ = invoke("verify", NAME, "--json", "--cache-dir", cache)
    assert code == 0
    assert object_of(out)["sha256"] == known_models()[NAME].file_sha256


def test_verify_of_an_absent_model_says_how_to_get_it(tmp_path: Path) -> None:
    code, out, err = invoke("verify", NAME, "--json", "--cache-dir", str(tmp_path))
    assert code == 3
    assert f"inferloop models fetch {NAME}" in " ".join(err.split())
    assert object_of(out)["error"]["type"] == "ModelFileError"


def test_terms_are_shown_and_wanted_before_anything_is_fetched(tmp_path: Path) -> None:
    """By the verb as by whoever names the model elsewhere."""
    terms = "Gemma Terms of Use, https://ai.google.dev/gemma/terms"
    code, _, err = invoke("fetch", "gemma3-270m", "--cache-dir", str(tmp_path))
    assert code == 3
    assert err.startswith("Gemma 3 270M") and terms in err and "--accept-terms" in err
    served = CliRunner().invoke(app, ["serve", "gemma3-270m", "--port", "0", "--cache-dir", str(tmp_path)])
    assert served.exit_code == 3
    assert "inferloop models fetch gemma3-270m --accept-terms" in " ".join(served.stderr.split())
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("verb", ["fetch", "verify"])
def test_a_misspelt_name_gets_the_nearest_one(verb: str) -> None:
    code, _, err = invoke(verb, "smolm2-135m-instruct")
    assert code == 2
    assert f"did you mean '{NAME}'" in " ".join(err.split())
