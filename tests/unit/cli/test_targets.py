"""What may stand after --target, and how a target is entered."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from inferloop.cli.main import app
from inferloop.cli.wire import (
    Entry,
    check_target,
    embedded_spec,
    endpoint,
    is_url,
    target_flags,
    tpot_objective_ms,
)
from inferloop.contract.workload import ModelRef
from inferloop.core.errors import UsageError
from inferloop.core.secret import Secret
from inferloop.core.slo import Objective, Slo

PEM = Path(__file__).parents[2] / "localhost.pem"


@pytest.fixture(autouse=True)
def _no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("INFERLOOP_API_KEY", "INFERLOOP_API_KEY_B", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000", "https://api.example.org/v1/", "http://[::1]:80"])
def test_urls(url: str) -> None:
    assert is_url(url)
    check_target(url, Entry())


@pytest.mark.parametrize("name", ["embedded", "localhost:8000", "", "ftp://x"])
def test_names(name: str) -> None:
    assert not is_url(name)


@pytest.mark.parametrize("broken", ["http://", "http://h:port", "http://h:99999", "http://[::1", "https:///x"])
def test_half_a_url_is_told(broken: str) -> None:
    with pytest.raises(UsageError, match="not a complete URL"):
        check_target(broken, Entry())


def test_a_replica_is_told_the_tightest_time_per_token_of_the_contract() -> None:
    slo = Slo((Objective("ttft_ms", 0.95, 9.0), Objective("tpot_ms", 0.5, 30.0), Objective("tpot_ms", 0.95, 40.0)))
    assert tpot_objective_ms(slo) == 30.0
    assert tpot_objective_ms(Slo((Objective("ttft_ms", 0.95, 9.0),))) is None
    argv = embedded_spec(ModelRef("m"), None, tpot_objective_ms=tpot_objective_ms(slo)).argv
    assert argv[argv.index("--tpot-objective-ms") + 1] == "30.0"
    assert "--tpot-objective-ms" not in embedded_spec(ModelRef("m"), None, tpot_objective_ms=None).argv


@pytest.mark.parametrize("entry", [Entry(ca_file=PEM), Entry(insecure=True)])
@pytest.mark.parametrize("target", ["embedded", "scripted", "http://127.0.0.1:1"])
def test_questions_of_certificates_need_https(target: str, entry: Entry) -> None:
    with pytest.raises(UsageError, match=r"https|no certificate"):
        check_target(target, entry)
    check_target("https://127.0.0.1:1", entry)


def test_an_authority_that_cannot_be_read_is_told_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.pem"):
        check_target("https://x", Entry(ca_file=tmp_path / "none.pem"))


def test_keys_come_from_the_environment_and_go_where_they_belong(monkeypatch: pytest.MonkeyPatch) -> None:
    assert endpoint("https://x", Entry()).api_key is None
    monkeypatch.setenv("OPENAI_API_KEY", "theirs")
    assert endpoint("https://x", Entry()).api_key is None, "it is meant for nobody else's server"
    assert endpoint("https://notopenai.com", Entry()).api_key is None
    assert endpoint("http://api.openai.com", Entry()).api_key is None
    assert endpoint("https://api.openai.com/v1", Entry()).api_key == Secret("theirs")
    monkeypatch.setenv("INFERLOOP_API_KEY", " ours\n")
    assert endpoint("https://api.openai.com/v1", Entry()).api_key == Secret("ours")
    assert endpoint("http://x", Entry()).api_key == Secret("ours")
    monkeypatch.setenv("INFERLOOP_API_KEY_B", "second")
    assert endpoint("http://x", Entry(label="A")).api_key == Secret("ours")
    assert endpoint("http://x", Entry(label="B")).api_key == Secret("second")
    monkeypatch.setenv("INFERLOOP_API_KEY", "first,second")
    assert endpoint("http://x", Entry()).api_key == Secret("first"), "a server takes both"
    monkeypatch.setenv("INFERLOOP_API_KEY", "")
    assert endpoint("http://x", Entry()).api_key is None


@pytest.mark.parametrize("flag", ["api_key_file=/x", "--api-key-file=/x", "api_key=hush"])
@pytest.mark.parametrize("target", ["embedded", "vllm"])
def test_what_is_launched_for_a_run_asks_for_no_key(target: str, flag: str) -> None:
    with pytest.raises(UsageError, match="asks for no API key") as refused:
        target_flags(f"{target} {flag}", Entry())
    assert "hush" not in str(refused.value)


def test_flags_are_for_what_is_launched() -> None:
    assert target_flags("embedded kv_dtype=int8 --deterministic", Entry()) == (
        "embedded",
        {"kv_dtype": "int8", "deterministic": True},
    )
    assert target_flags("embedded tensor_parallel=2 memory_mib=64", Entry())[1] == {
        "tensor_parallel_size": "2",
        "kv_memory_mib": "64",
    }
    with pytest.raises(UsageError, match="flags are for"):
        target_flags("http://h:1 a=1", Entry())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("embedded kv_dtype=int9", "'int9' is not one of"),
        ("embedded threads=0", "--threads"),
        ("embedded nosuch=1", "No such option: --nosuch"),
        ("scripted ttft=5", "did you mean ttft_ms"),
        ("openvino nosuch=1", "No such option: --nosuch"),
        ("vllm threads=two", "target vllm: threads=two is no whole number"),
        ("localhost:8000", "did you mean 'http://localhost:8000'"),
    ],
)
def test_a_wrong_target_is_told_before_anything_is_started(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=re.escape(says)):
        target_flags(text, Entry())


CONTRACT = (
    "{model: %s, qps: {avg: 1}, input_tokens: 30, output_tokens: 8, prefix_reuse: 0, slo: {ttft_p95_ms: 900}, "
    "service: s}"
)


@pytest.mark.parametrize(
    ("verb", "target", "model", "says"),
    [
        ("up", "nosuch", "smollm2-135m-instruct", "--target nosuch"),
        ("up", "embedded", "smolm2-135m-instruct", "did you mean 'smollm2-135m-instruct'"),
        ("up", "embedded", "/nosuch.gguf", "/nosuch.gguf: no such file"),
        ("bench", "embedded", "/nosuch.gguf", "/nosuch.gguf: no such file"),
        ("bench", "trtllm", "smollm2-135m-instruct", "trtllm is not installed"),
        ("bench", "http://127.0.0.1:9", "m", "http://127.0.0.1:9 does not answer"),
        ("bench", "scripted --profile", "m", "plays traffic.rate_profile"),
        ("compare", "scripted,http://127.0.0.1:9", "m", "http://127.0.0.1:9 does not answer"),
        ("compare", "scripted,trtllm", "smollm2-135m-instruct", "trtllm is not installed"),
    ],
)
def test_what_is_wrong_is_told_before_anything_says_that_work_begins(
    verb: str, target: str, model: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # so that no .peers are found
    (tmp_path / "c.yaml").write_text(CONTRACT % model)
    option = "--targets" if verb == "compare" else "--target"
    result = CliRunner().invoke(app, [verb, "c.yaml", option, *target.split()])
    told = " ".join(result.stderr.split())
    assert told.startswith("error: ") and says in told and result.exit_code in (2, 3)
    assert not (tmp_path / "runs").exists()
