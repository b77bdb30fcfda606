"""Which runner computes: the native one wherever it can be, torch with a word of warning elsewhere."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from inferloop.backends.native_choice import load_runner, pack_ahead, why_not_native
from inferloop.backends.native_options import NativeOptions
from inferloop.cli.wire import memory_needs, precision_flags
from inferloop.contract.workload import ModelRef, Precision
from inferloop.core.errors import EnvironmentLacksError, ModelFileError, UsageError
from inferloop.core.units import MIB
from inferloop.engine.compute.native.hardware import measure
from inferloop.models.resolve import ModelFiles, open_files


@pytest.fixture
def options(tmp_path: Path) -> NativeOptions:
    return NativeOptions(kv_memory_mib=1, num_threads=1, cache_dir=tmp_path / "cache")


@pytest.fixture
def odd(tiny_directory: Callable[..., Path]) -> ModelFiles:
    """Its heads are too narrow for native kernels."""
    return open_files("odd", tiny_directory())


@pytest.fixture
def fitting(tiny_directory: Callable[..., Path]) -> ModelFiles:
    pytest.importorskip("inferloop.engine.compute.native._native")
    folder = tiny_directory("fitting", hidden_size=32, head_dim=16, intermediate_size=32)
    old = load_file(str(folder / "model.safetensors"))
    rng = np.random.default_rng(0)
    sizes = {16: 32, 8: 32, 4: 16, 12: 32, 258: 258}
    new = {name: rng.standard_normal([sizes[n] for n in w.shape], dtype=np.float32) for name, w in old.items()}
    save_file(new, str(folder / "model.safetensors"))
    return open_files("fitting", folder)


def test_native_computes_what_it_can(
    options: NativeOptions, fitting: ModelFiles, caplog: pytest.LogCaptureFixture
) -> None:
    info = load_runner(fitting, options).info
    assert (info.name, info.dtype, info.deterministic) == ("native", "bf16 weights, bf16 activations, bf16 kv", True)
    assert load_runner(fitting, replace(options, device="cpu:0")).info.name == "native"
    info = load_runner(fitting, replace(options, dtype="int8", kv_dtype="int8", compute="native")).info
    assert info.dtype == "int8 weights, q8 activations, int8 kv"
    assert not caplog.records
    with pytest.raises(UsageError, match="did you mean int8"):
        load_runner(fitting, replace(options, dtype="int88"))
    with pytest.raises(UsageError, match="bf16, int8, not 'fp32'"):
        load_runner(fitting, replace(options, kv_dtype="fp32"))


def test_packing_is_told_the_first_time_and_can_be_done_ahead(
    options: NativeOptions, fitting: ModelFiles, odd: ModelFiles, tmp_path: Path
) -> None:
    told: list[tuple[str, int, int]] = []

    def tell(*news: Any) -> None:
        told.append(news)

    pack_ahead(fitting, "int8", options.cache_dir, tell)
    assert {stage for stage, _, _ in told} == {"hash", "pack"}
    packed = [num for stage, num, _ in told if stage == "pack"]
    assert packed == sorted(packed) and packed[0] > 0 and packed[-1] <= told[-1][2]
    num_told = len(told)
    load_runner(fitting, replace(options, dtype="int8"), tell)
    assert len(told) == num_told
    load_runner(fitting, options, tell)
    assert [stage for stage, _, _ in told[num_told:]] == ["pack"] * len(packed), "its digest is known by now"
    num_told = len(told)
    pack_ahead(odd, "auto", tmp_path / "other", tell)
    (tmp_path / "file").write_text("no folder can be here")
    pack_ahead(fitting, "auto", tmp_path / "file", tell)
    assert "pack" not in {stage for stage, _, _ in told[num_told:]} and not (tmp_path / "other").exists()


def test_torch_computes_the_rest_and_says_what_is_lost(
    options: NativeOptions, odd: ModelFiles, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        info = load_runner(odd, options).info
    assert (info.name, info.dtype, info.deterministic) == ("torch", "bf16", False)
    (said,) = caplog.messages
    assert "heads of a multiple of 16, these are of 4" in said and "held in bf16" in said
    with pytest.raises(ModelFileError, match="multiple of 16"):
        load_runner(odd, replace(options, compute="native"))
    with pytest.raises(UsageError, match="computes in bf16 or fp32, not 'int8'"):
        load_runner(odd, replace(options, dtype="int8"))
    with pytest.raises(UsageError, match="not in int8"):
        load_runner(odd, replace(options, kv_dtype="int8"))


def test_torch_when_it_is_asked_for(
    options: NativeOptions, fitting: ModelFiles, caplog: pytest.LogCaptureFixture
) -> None:
    info = load_runner(fitting, replace(options, compute="torch", deterministic=True)).info
    assert (info.name, info.dtype, info.deterministic) == ("torch", "fp32", True)
    assert not caplog.records


def test_a_bound_that_names_no_instruction_set_is_not_passed_over(
    fitting: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = pytest.importorskip("inferloop.engine.compute.native._native")

    def refuse() -> str:
        raise ValueError("INFERLOOP_MAX_CPU_ISA is sse9")

    monkeypatch.setattr(native, "best_isa", refuse)
    with pytest.raises(UsageError, match="sse9"):
        why_not_native(fitting.header)


def test_a_device_or_an_extension_that_is_not_there(
    options: NativeOptions, fitting: ModelFiles, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(UsageError, match="on the cpu, not on cuda"):
        load_runner(fitting, replace(options, compute="native", device="cuda"))
    package = sys.modules["inferloop.engine.compute.native"]
    monkeypatch.delattr(package, "_native")
    monkeypatch.setitem(sys.modules, "inferloop.engine.compute.native._native", None)
    assert isinstance(why_not_native(fitting.header), EnvironmentLacksError)
    with pytest.raises(EnvironmentLacksError, match="not built"):
        load_runner(fitting, replace(options, compute="native"))
    with caplog.at_level(logging.WARNING):
        assert load_runner(fitting, replace(options, deterministic=True)).info.name == "torch"
    (said,) = caplog.messages
    assert "not built" in said and "held in fp32" in said and ".." not in said and "use --compute torch" not in said


@pytest.mark.parametrize("built", ["1.0.1", None])
def test_an_extension_of_other_sources_is_not_used(
    built: str | None,
    options: NativeOptions,
    fitting: ModelFiles,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    native = pytest.importorskip("inferloop.engine.compute.native._native")
    monkeypatch.delattr(native, "revisions")
    if built is not None:
        monkeypatch.setattr(native, "revisions", built, raising=False)
    with pytest.raises(EnvironmentLacksError, match=r"other sources.*scripts/build-native"):
        load_runner(fitting, replace(options, compute="native"))
    with caplog.at_level(logging.WARNING):
        assert load_runner(fitting, options).info.name == "torch"
    (said,) = caplog.messages
    assert "built from other sources" in said and "held in bf16" in said
    assert measure([MIB], 0.0, threads=[1]).method == "numpy"


def test_with_neither_both_are_named_and_nothing_is_promised(
    options: NativeOptions, odd: ModelFiles, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in [name for name in sys.modules if name.startswith("inferloop.engine.compute.torch.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(EnvironmentLacksError, match=r"torch is not installed, and .*multiple of 16.*pip install"):
        load_runner(odd, options)
    assert not caplog.messages


def test_a_contract_names_a_precision_that_can_be(fitting: ModelFiles, odd: ModelFiles) -> None:
    def flags(*precision: str | None) -> dict[str, object]:
        return dict(precision_flags(ModelRef("m", Precision(*precision))))

    assert flags(None, None, None) == {}
    assert flags("bf16", "bf16", "bf16") == {"dtype": "bf16", "kv_dtype": "bf16"}
    assert flags("fp32", "fp32", "fp32") == {"dtype": "fp32", "compute": "torch"}
    assert flags("int8", None, "int8") == {"dtype": "int8", "kv_dtype": "int8"}
    for wrong in (("q4_k", None, None), ("bf16", "int8", None), (None, "bf16", None), ("bf16", None, "fp32")):
        with pytest.raises(UsageError, match=r"model\.precision"):
            flags(*wrong)


def test_memory_is_reckoned_by_what_will_compute(fitting: ModelFiles, odd: ModelFiles, options: NativeOptions) -> None:
    from inferloop.engine.compute.native.pack import pack_model

    int8, fp32 = Precision("int8", None, "int8"), Precision("fp32", "fp32", "fp32")

    def of_pool(kv: str) -> float:
        info = load_runner(fitting, replace(options, kv_dtype=kv)).info
        assert info.kv_bytes is not None
        return info.kv_bytes / info.num_blocks / info.block_size

    packed = pack_model(fitting.header, "stored").buffer.nbytes
    assert memory_needs(ModelRef("m"), fitting.header) == (packed, of_pool("bf16"))
    packed = pack_model(fitting.header, "int8").buffer.nbytes
    assert memory_needs(ModelRef("m", int8), fitting.header) == (packed, of_pool("int8"))
    shape, other = fitting.header.shape, odd.header.shape
    assert memory_needs(ModelRef("m", fp32), fitting.header) == (4 * shape.num_params, shape.kv_bytes_per_token("fp32"))
    assert memory_needs(ModelRef("m"), odd.header) == (2 * other.num_params, other.kv_bytes_per_token("bf16"))
