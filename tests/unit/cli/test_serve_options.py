"""What the flags of `serve` mean to the engine."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from inferloop.cli import serve_run
from inferloop.cli.main import app
from inferloop.cli.serve_run import Asked
from inferloop.models.resolve import ModelFiles


@pytest.mark.parametrize(
    ("flags", "chosen"),
    [
        ([], ("auto", "auto", "auto", False)),
        (["--deterministic"], ("auto", "auto", "auto", True)),
        (["--compute", "torch", "--dtype", "fp32"], ("torch", "fp32", "auto", False)),
        (["--compute", "native", "--dtype", "int8", "--kv-dtype", "int8"], ("native", "int8", "int8", False)),
    ],
)
def test_what_computes_and_in_what_arrives(
    flags: list[str], chosen: tuple[str, str, str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Asked] = []
    monkeypatch.setattr(serve_run, "run", seen.append)
    result = CliRunner().invoke(app, ["serve", "m", *flags])
    assert result.exit_code == 0, result.output
    options = seen[0].options
    assert (options.compute, options.dtype, options.kv_dtype, options.deterministic) == chosen


@pytest.mark.parametrize(
    ("flags", "parsers"),
    [
        ([], ("auto", "auto")),
        (["--tool-call-parser", "llama3_json", "--reasoning-parser", "think"], ("llama3_json", "think")),
        (["--tool-call-parser", "none", "--reasoning-parser", "none"], ("none", "none")),
    ],
)
def test_parsers_have_vllms_names(flags: list[str], parsers: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Asked] = []
    monkeypatch.setattr(serve_run, "run", seen.append)
    result = CliRunner().invoke(app, ["serve", "m", *flags])
    assert result.exit_code == 0, result.output
    options = seen[0].options
    assert (options.tool_call_parser, options.reasoning_parser) == parsers


def test_a_second_tier_of_the_prefix_cache_needs_the_first(tmp_path: Path) -> None:
    for flags in (["--prefix-cache-dir", str(tmp_path)], ["--prefix-cache-memory-mib", "64"]):
        result = CliRunner().invoke(app, ["serve", "m", "--no-enable-prefix-caching", *flags])
        assert result.exit_code == 2
        assert "--enable-prefix-caching" in result.output


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--compute", "native"], "the native engine computes in one process"),
        (["--tensor-parallel-size", "12"], "9 heads and 48 units of the feed-forward can be split over 1 to 9 ranks"),
        (["--prefix-cache-memory-mib", "1"], "the prefix cache is kept in the KV memory only"),
        (["--enable-lora"], "adapters are computed in one process"),
        (["--device", "cuda:1"], "of which each rank takes one"),
        (["--backend", "scripted"], "a script has none"),
        (["--backend", "openvino"], "has no tensor parallel size"),
    ],
)
def test_what_ranks_cannot_share_is_refused_before_one_is_started(
    flags: list[str], says: str, embedded_model: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> None:
        raise AssertionError("started")

    monkeypatch.setattr("inferloop.fleet.act.ranks.RankProcesses", refused)
    command = ["serve", str(embedded_model.path), "--port", "0", "--tensor-parallel-size", "2", *flags]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    assert says in " ".join(result.output.split())


def test_queue_pace_and_time_flags_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Asked] = []
    monkeypatch.setattr(serve_run, "run", seen.append)
    flags = ["--max-num-waiting-tokens", "1000", "--tpot-objective-ms", "40", "--max-ttft-ms", "900"]
    result = CliRunner().invoke(app, ["serve", "m", *flags, "--request-timeout-s", "30"])
    assert result.exit_code == 0, result.output
    options = seen[0].options
    assert (options.max_waiting_tokens, options.tpot_objective_ms, options.max_ttft_ms) == (1000, 40.0, 900.0)
    assert seen[0].config.request_timeout_s == 30.0
    assert CliRunner().invoke(app, ["serve", "m", "--tpot-objective-ms", "0"]).exit_code == 2


@pytest.mark.parametrize("flag", ["--context-length", "--max-model-len"])
def test_a_context_beyond_the_models_own_is_refused_before_it_is_loaded(
    flag: str, embedded_model: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr("inferloop.backends.native_load.load_native", refused)
    result = CliRunner().invoke(app, ["serve", str(embedded_model.path), "--port", "0", flag, "8193"])
    assert result.exit_code == 2
    assert "--context-length 8193" in result.output and "8192 tokens" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--backend", "scripted", "--script", "ttft_ms"], "must be KEY=VALUE"),
        (["--backend", "scripted", "--script", "ttft=3"], "did you mean ttft_ms?"),
        (["--backend", "openvino", "--engine-packages", "not/here"], "--engine-packages not/here: is no folder"),
        (["--backend", "scripted", "--batch-dir", __file__], "cannot be used: File exists"),
    ],
)
def test_a_wrong_value_is_told_with_its_flag(flags: list[str], says: str) -> None:
    result = CliRunner().invoke(app, ["serve", "m", "--port", "0", *flags])
    assert (result.exit_code, says in " ".join(result.output.split())) == (2, True), result.output


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--request-timeout-s", "inf"),
        ("--request-timeout-s", "1e300"),
        ("--tpot-objective-ms", "inf"),
        ("--max-ttft-ms", "inf"),
        ("--drain-timeout-s", "inf"),
        ("--max-num-seqs", "99999999999"),
    ],
)
def test_what_no_clock_or_memory_can_hold_is_refused_by_name(
    flag: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve_run, "run", lambda _: None)
    result = CliRunner().invoke(app, ["serve", "m", flag, value])
    assert (result.exit_code, flag in result.output) == (2, True), result.output
