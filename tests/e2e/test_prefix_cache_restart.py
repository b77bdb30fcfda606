"""The prefix cache on disk with the real model: a replica that is killed starts from what it had computed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from inferloop.models.resolve import ModelFiles

PREAMBLE = "You answer questions about the opening hours of a small library. It is open from Monday to Friday. " * 3
BLOCK_TOKENS = 16


@contextmanager
def served(model: ModelFiles, folder: Path) -> Iterator[str]:
    """The URL of a server that keeps computed prompts in `folder`; killed in the end."""
    command = [sys.executable, "-m", "inferloop", "serve", str(model.path), "--port", "0", "--deterministic"]
    process = subprocess.Popen(
        [*command, "--prefix-cache-dir", str(folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        assert line, process.stderr.read()
        yield f"http://127.0.0.1:{json.loads(line)['port']}"
    finally:
        process.kill()
        process.communicate()


def ask(url: str, salt: str) -> tuple[str, int, int]:
    """(the answer, tokens of the prompt, tokens of it that were cached)."""
    messages = [{"role": "system", "content": PREAMBLE}, {"role": "user", "content": "Is it open on Sunday?"}]
    body = {"model": "m", "messages": messages, "max_tokens": 4, "temperature": 0, "cache_salt": salt}
    with urllib.request.urlopen(f"{url}/v1/models", timeout=60) as answer:
        body["model"] = json.load(answer)["data"][0]["id"]
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        found: dict[str, Any] = json.load(answer)
    usage = found["usage"]
    text = found["choices"][0]["message"]["content"]
    return text, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def tier(url: str, name: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    (value,) = [line for line in lines if line.startswith(f"inferloop_prefix_cache_tier_{name}_total")]
    return float(value.rpartition(" ")[2])


def blocks_in(folder: Path) -> set[Path]:
    return set(folder.rglob("*.kv"))


def wait_for_blocks(folder: Path, num: int) -> set[Path]:
    deadline = time.monotonic() + 60
    while len(found := blocks_in(folder)) < num:
        assert time.monotonic() < deadline, f"{len(found)} of {num} blocks were stored"
        time.sleep(0.02)
    return found


def test_a_killed_replica_starts_from_what_it_had_computed(embedded_model: ModelFiles, tmp_path: Path) -> None:
    with served(embedded_model, tmp_path) as url:
        cold, num_tokens, num_cached = ask(url, "one")
        num_blocks = num_tokens // BLOCK_TOKENS
        assert num_cached == 0 and num_blocks >= 4 and num_tokens % BLOCK_TOKENS
        before = wait_for_blocks(tmp_path, num_blocks)
        assert ask(url, "two") == (cold, num_tokens, 0)
        of_two = wait_for_blocks(tmp_path, len(before) + num_blocks) - before
        assert tier(url, "hits") == 0
    # On top, one block of the second tenant's prompt is damaged.
    damaged = min(of_two, key=lambda path: path.stat().st_mtime_ns)
    raw = bytearray(damaged.read_bytes())
    raw[len(raw) // 2] ^= 0x40
    damaged.write_bytes(raw)
    with served(embedded_model, tmp_path) as url:
        assert ask(url, "one") == (cold, num_tokens, num_blocks * BLOCK_TOKENS)
        assert tier(url, "hits") == num_blocks * BLOCK_TOKENS
        healed, _, num_cached = ask(url, "two")
        assert healed == cold
        assert num_cached < num_blocks * BLOCK_TOKENS and tier(url, "damaged_blocks") == 1
        assert tier(url, "hits") == num_blocks * BLOCK_TOKENS + num_cached
