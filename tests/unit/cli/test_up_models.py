"""What `up` makes of a contract with several models."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from inferloop.cli import wire
from inferloop.cli.up_models import judge_memory, replicas_beside, told_of_the_unmeasured
from inferloop.contract.load import parse
from inferloop.core.shape import ModelShape
from inferloop.core.units import GIB
from inferloop.fleet.decide.fit import MachineCapacity

SHAPE = ModelShape("llama", 2, 64, 4, 4, 16, 128, 1000, 2048, tied_embeddings=True)
CONTRACT: dict[str, Any] = {
    "service": "desk",
    "traffic": {"qps": 1, "input_tokens": {"p50": 30}, "output_tokens": {"p50": 8}},
    "models": {"cheap": "small", "strong": {"id": "large", "replicas": 3}, "giant": "huge"},
    "routing": {"default": "cheap"},
}


def test_the_models_beside_the_measured_one_are_started_as_often_as_is_said() -> None:
    contract = parse(CONTRACT)
    assert replicas_beside(contract) == {"strong": 3, "giant": 1}
    told = told_of_the_unmeasured(contract)
    assert told == "only cheap was measured: whether 3 x strong, 1 x giant carry what is sent there is not known"
    alone = parse({key: CONTRACT[key] for key in ("service", "traffic")} | {"model": "small"})
    assert replicas_beside(alone) == {} and told_of_the_unmeasured(alone) is None


def test_all_of_their_replicas_have_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "memory_needs", lambda model, header: (4 * GIB, 1000.0))
    one: Any = SimpleNamespace(header=SimpleNamespace(shape=SHAPE))
    contract, files = parse(CONTRACT), dict.fromkeys(("cheap", "strong", "giant"), one)
    fits = judge_memory(contract, files, MachineCapacity(64 * GIB, 2), kv_memory_mib=128)
    assert fits.gate.verdict == "pass" and "3 x strong: " in fits.gate.reason
    assert fits.others_bytes > 4 * 4 * GIB
    assert judge_memory(contract, files, MachineCapacity(18 * GIB, 2), kv_memory_mib=128).gate.verdict == "fail"


def test_the_kv_memory_that_replicas_set_aside_has_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "memory_needs", lambda model, header: (4 * GIB, 1000.0))
    one: Any = SimpleNamespace(header=SimpleNamespace(shape=SHAPE))
    contract = parse({key: CONTRACT[key] for key in ("service", "traffic")} | {"model": "small"})
    for kv_memory_mib, verdict in ((128, "pass"), (3000, "pass"), (7000, "fail")):
        gate = judge_memory(contract, {"small": one}, MachineCapacity(10 * GIB, 2), kv_memory_mib).gate
        assert gate.verdict == verdict and "KV memory" in gate.reason
    assert gate.reason.endswith("in 9.0 GiB usable: 2.3 GiB short")  # 4 + 0.5 + 7000/1024 - 9
