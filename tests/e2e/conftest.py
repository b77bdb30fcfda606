"""What the tests of verbs share."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

_OF_THE_MACHINE = ("schedule not honoured", "the load generator", "the client stalled", "Little's law")


def tiny_contract() -> dict[str, Any]:
    """A chat service that a scripted target keeps with ease: short prompts, short answers."""
    return {
        "version": 1,
        "service": "tiny",
        "archetype": "chat",
        "model": {"id": "demo"},
        "traffic": {
            "qps": {"avg": 20, "p95": 40, "peak": 50},
            "input_tokens": {"p50": 50, "p95": 80},
            "output_tokens": {"p50": 4, "p95": 8},
            "prefix_reuse": 0,
        },
        "slo": {"ttft_ms": {"p95": 2000}},
    }


@pytest.fixture
def contract() -> dict[str, Any]:
    return tiny_contract()


@pytest.fixture
def contract_file(tmp_path: Path, contract: dict[str, Any]) -> Path:
    file = tmp_path / "contract.json"
    file.write_text(json.dumps(contract))
    return file


@pytest.fixture
def only_busy() -> Callable[[Sequence[str]], bool]:
    """Whether a run is void for nothing but a machine that had no time to send as planned: that is no fault of what is
    under test, and what was recorded stays comparable with what is told."""

    def check(reasons: Sequence[str]) -> bool:
        return bool(reasons) and all(any(word in reason for word in _OF_THE_MACHINE) for reason in reasons)

    return check
