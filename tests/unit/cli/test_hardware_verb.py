"""`inferloop hardware` as people and scripts use it; how fast the machine is does not matter."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from inferloop.cli import hardware as verb
from inferloop.cli.main import app
from inferloop.core.errors import EnvironmentLacksError
from inferloop.core.hardware import MeasuredHardware
from inferloop.core.units import MIB
from inferloop.engine.compute.native import hardware as measuring
from inferloop.plan.roofline import Roofs
from inferloop.records.fingerprint import fingerprint
from inferloop.records.nvml import nvidia_devices

THREADS = sorted({1, fingerprint().num_cores})
QUICK_SETS = list(measuring.QUICK_SETS)


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["hardware", *arguments], env={"COLUMNS": "200"}, catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def measured_json(*arguments: str) -> dict[str, Any]:
    (line,) = invoke("--json", *arguments).splitlines()
    found: dict[str, Any] = json.loads(line)
    return found


@pytest.fixture
def without_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "_extension", lambda: None)


def test_every_size_is_read_with_one_thread_and_with_all() -> None:
    found = measured_json("--quick")
    assert found["machine"]["cpu_model"] == fingerprint().cpu_model
    reads = found["measured"]["bandwidth"]
    got = [(b["num_threads"], b["working_set_bytes"]) for b in reads]
    assert got == [(n, size) for n in THREADS for size in QUICK_SETS]
    assert all(0 < b["bytes_per_s"] <= b["best_bytes_per_s"] for b in reads)
    assert found["measured"]["num_samples"] >= 3
    assert 0 <= found["measured"]["others_share"] <= 1


def test_peaks_are_of_every_way_to_multiply_that_the_machine_has() -> None:
    native = pytest.importorskip("inferloop.engine.compute.native._native")
    found = measured_json("--quick")["measured"]
    ways = [tuple(each) for each in native.hardware.multipliers()]
    assert [(p["num_threads"], p["isa"], p["kind"]) for p in found["peaks"]] == [(n, *w) for n in THREADS for w in ways]
    assert all(0 < p["ops_per_s"] <= p["best_ops_per_s"] for p in found["peaks"])
    assert (found["method"], found["best_isa"]) == ("native", native.best_isa())


@pytest.mark.usefixtures("without_extension")
def test_without_the_extension_reading_alone_is_measured_and_that_is_said() -> None:
    found = measured_json("--quick")
    assert found["measured"]["method"] == "numpy"
    assert found["measured"]["peaks"] == []
    assert len(found["measured"]["bandwidth"]) == len(THREADS) * len(QUICK_SETS)
    assert any("native extension is missing" in note for note in found["notes"])
    with pytest.raises(EnvironmentLacksError):
        Roofs.measured(measuring.measure(QUICK_SETS, 0.0), THREADS[-1])


def test_people_get_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    found = replace(measuring.measure(QUICK_SETS, 0.0), others_share=0.5, huge_page_bytes=0)
    monkeypatch.setattr(measuring, "measure", lambda: found)
    out = invoke()
    for text in ("Reading memory, GB/s", "276.0 MiB", "Multiplying and adding", "fp32", "0% of the memory read", "50%"):
        assert text in out


def test_memory_is_kept_to_a_quarter_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=400 * MIB))
    found = measuring.measure(QUICK_SETS, 0.0)
    assert sorted({b.working_set_bytes for b in found.bandwidth}) == [2 * MIB, 28 * MIB, 96 * MIB]
    assert found.memory_bytes == 96 * MIB
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=MIB))
    assert measuring.measure(QUICK_SETS, 0.0).memory_bytes == 2 * MIB


class _Clock:
    """A second passes whenever it is asked."""

    def __init__(self) -> None:
        self.now = 0

    def now_ns(self) -> int:
        self.now += 1_000_000_000
        return self.now


def test_samples_take_turns_until_the_time_is_up_and_three_at_least() -> None:
    taken: list[str] = []

    def sample(name: str) -> float:
        taken.append(name)
        return float(len(taken))

    samples = {"a": lambda: sample("a"), "b": lambda: sample("b")}
    found = measuring._take_turns(samples, 0.0, _Clock())  # type: ignore[arg-type]
    assert taken == ["a", "b"] * 3
    assert found == {"a": [1.0, 3.0, 5.0], "b": [2.0, 4.0, 6.0]}
    assert len(measuring._take_turns(samples, 6.5, _Clock())["a"]) > 3  # type: ignore[arg-type]


def test_devices_are_told_where_nvml_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    class NVMLError(Exception):
        pass

    nvml = SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlSystemGetDriverVersion=lambda: "570.1",
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda i: i,
        nvmlDeviceGetName=lambda h: "NVIDIA Example",
        nvmlDeviceGetMemoryInfo=lambda h: SimpleNamespace(total=80 << 30),
        nvmlDeviceGetCudaComputeCapability=lambda h: (9, 0),
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    (device,) = nvidia_devices() or ()
    assert (device.name, device.memory_bytes, device.compute_capability) == ("NVIDIA Example", 80 << 30, "9.0")
    found = replace(_nothing_measured(), others_share=0.0)
    monkeypatch.setattr(measuring, "measure", lambda: found)
    assert "NVIDIA Example, 80.0 GiB, CUDA 9.0" in invoke()

    def fail() -> None:
        raise NVMLError

    monkeypatch.setattr(nvml, "nvmlInit", fail)
    assert nvidia_devices() is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvidia_devices() is None


def _nothing_measured() -> MeasuredHardware:
    return MeasuredHardware("native", "scalar", 3, 1, None, 0.0, (), ())


def test_what_lies_in_huge_pages_is_read_from_the_system(tmp_path: Any) -> None:
    arena = importlib.import_module("inferloop.engine.compute.native.arena")
    table = tmp_path / "smaps"
    table.write_text(
        "7f0000000000-7f0000400000 rw-p 00000000 00:00 0\nSize: 4096 kB\nAnonHugePages:      2048 kB\n"
        "7f0000400000-7f0000800000 rw-p 00000000 00:00 0\nAnonHugePages:      4096 kB\n"
    )
    assert arena.huge_page_bytes(0x7F0000000000, 4 * MIB, table) == 2 * MIB
    assert arena.huge_page_bytes(0x7F0000000000, 8 * MIB, table) == 6 * MIB
    assert arena.huge_page_bytes(0x7F0000800000, MIB, table) == 0
    assert arena.huge_page_bytes(0, 1, tmp_path / "absent") is None


def test_the_verb_has_an_example() -> None:
    assert "Example: inferloop hardware" in (verb.hardware.__doc__ or "")
