"""Contracts load from three formats and two forms; whatever is wrong is named with file, line, key."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inferloop.contract.describe import describe
from inferloop.contract.load import load, parse
from inferloop.contract.model_ref import split_model
from inferloop.contract.workload import Contract, Distribution, Precision, Rate
from inferloop.core.errors import ContractError, ContractProblemsError, UsageError
from inferloop.core.slo import Objective

FULL_YAML = """\
version: 1
service: assistant
model: {id: tiny, precision: {weights: int8, kv: bf16}}
traffic:
  qps: {avg: 18, p95: 42, peak: 90}
  input_tokens: {p50: 1200, p95: 8e3}
  output_tokens: {p95: 1200, p50: 180}
  prefix_reuse: 0.55
slo:
  ttft_ms: {p95: 450}
  tpot_ms: {p95: 40}
  error_rate: 0.001
  window: 4w
quality: {suite: evals/assistant.yaml, minimum: 0.9}
"""

FULL_TOML = """\
version = 1
service = "assistant"
[model]
id = "tiny"
precision = {kv = "bf16", weights = "int8"}
[traffic]
qps = {avg = 18, p95 = 42.0, peak = 90}
input_tokens = {p50 = 1200, p95 = 8000}
output_tokens = {p50 = 180, p95 = 1200}
prefix_reuse = 0.55
[slo]
ttft_ms.p95 = 450
tpot_ms = {p95 = 40}
error_rate = 1e-3
window = "28d"
[quality]
suite = "assistant"
minimum = 0.9
"""

SEED: dict[str, Any] = {
    "model": "candidate-bf16",
    "qps": {"avg": 18, "p95": 42, "peak": 90},
    "input_tokens": {"p50": 1200, "p95": 8000},
    "output_tokens": {"p50": 180, "p95": 1200},
    "prefix_reuse": 0.55,
    "slo": {"ttft_p95_ms": 450, "tpot_p95_ms": 40},
    "quality_gate": "assistant",
}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project folder, and the current one, so that nothing else is found."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evals").mkdir()
    (tmp_path / "evals" / "assistant.yaml").write_text("version: 1\n")
    (tmp_path / "contracts").mkdir()
    return tmp_path


def write(root: Path, name: str, text: str) -> Path:
    path = root / "contracts" / name
    path.write_text(text)
    return path


def minimal(**changes: Any) -> dict[str, Any]:
    """A short contract without a gate, with some keys replaced; None removes a key."""
    result = {k: v for k, v in SEED.items() if k != "quality_gate"} | changes
    return {k: v for k, v in result.items() if v is not None}


def complaint(content: dict[str, Any] | str) -> str:
    with pytest.raises(ContractError) as caught:
        parse(content)
    return str(caught.value)


def test_three_formats_are_one_contract(root: Path) -> None:
    from_yaml = load(write(root, "a.yaml", FULL_YAML))
    from_toml = load(write(root, "a.toml", FULL_TOML))
    from_json = load(write(root, "a.json", json.dumps(describe(from_yaml))))
    assert from_yaml.digest == from_toml.digest == from_json.digest
    assert from_yaml.source == str(root / "contracts" / "a.yaml")
    assert from_yaml.traffic.input_tokens == Distribution(((0.5, 1200.0), (0.95, 8000.0)))
    assert from_yaml.model.precision == Precision("int8", None, "bf16")
    assert from_yaml.slo.window_s == 28 * 86400


def test_short_form_means_the_full_form(root: Path) -> None:
    short = parse(SEED, base=root)
    full = {
        "model": {"id": "candidate", "precision": "bf16"},
        "traffic": {k: SEED[k] for k in ("qps", "input_tokens", "output_tokens", "prefix_reuse")},
        "slo": {"ttft_ms": {"p95": 450}, "tpot_ms": {"p95": 40}},
        "quality": {"suite": "evals/assistant.yaml"},
    }
    assert parse(full, base=root) == short
    assert short.slo.objectives == (Objective("ttft_ms", 0.95, 450.0), Objective("tpot_ms", 0.95, 40.0))
    assert short.traffic.qps == Rate(18, 42, 90)
    assert [c.name for c in short.traffic.classes] == ["default"]


def test_digest_ignores_where_the_folder_lies(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    (other / "evals").mkdir()
    (other / "evals" / "assistant.yaml").write_text("version: 1\n")
    here, there = parse(SEED, base=root), parse(SEED, base=other)
    assert here.quality != there.quality
    assert here.digest == there.digest


def test_digest_changes_with_what_a_trace_or_a_profile_holds(tmp_path: Path) -> None:
    trace = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,374,44\n"
    profile = "seconds,qps\n0,1\n10,2\n"
    changes: dict[str, tuple[dict[str, Any], str, str]] = {
        "trace.csv": ({"arrivals": {"process": "trace", "file": "trace.csv"}}, trace, trace + trace.splitlines()[1]),
        "profile.csv": ({"rate_profile": "profile.csv"}, profile, profile + "20,3\n"),
    }
    for name, (change, one, other) in changes.items():
        found = []
        for text in (one, one, other):
            (tmp_path / name).write_text(text)
            found.append(parse({"model": "m", "qps": 1, "input_tokens": 9, "output_tokens": 9} | change, base=tmp_path))
        assert found[0].digest == found[1].digest != found[2].digest


def test_digest_changes_with_the_meaning(root: Path) -> None:
    changes: list[dict[str, Any]] = [{"prefix_reuse": 0.5}, {"quality_gate": None}, {"archetype": "batch"}]
    digests = {parse(SEED | c, base=root).digest for c in [{}, *changes]}
    assert len(digests) == 4


def test_suite_that_does_not_resolve_says_where_it_looked(root: Path) -> None:
    with pytest.raises(ContractError) as caught:
        parse(SEED | {"quality_gate": "application_eval_v12"}, base=root / "contracts")
    text = str(caught.value)
    assert "application_eval_v12" in text and str(root / "evals" / "application_eval_v12.yaml") in text
    assert "known suites: assistant" in text
    with pytest.raises(ContractError, match="did you mean assistant"):
        parse(SEED | {"quality_gate": "asistant"}, base=root)


@pytest.mark.parametrize(
    ("text", "model_id", "weights"),
    [
        ("candidate-and-precision", "candidate-and-precision", None),
        ("smollm2-135m-instruct-q4_1", "smollm2-135m-instruct", "q4_1"),
        ("a-int8-bf16", "a-int8", "bf16"),
        ("./models/tiny-bf16", "./models/tiny-bf16", None),
        ("org/Model-FP8", "org/Model-FP8", None),
        ("-bf16", "-bf16", None),
        ("tiny-Q4_1.gguf", "tiny-Q4_1.gguf", None),
    ],
)
def test_model_text_splits_at_the_last_precision(text: str, model_id: str, weights: str | None) -> None:
    model = split_model(text)
    assert (model.id, model.precision.weights) == (model_id, weights)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"prefix_reus": 0.1}, "prefix_reus: is not a known key (did you mean prefix_reuse?)"),
        ({"qps": {"avg": 1, "peek": 3}}, "qps.peek: is not a known key (did you mean peak?)"),
        ({"qps": {"p95": 3}}, "qps.avg: is required"),
        ({"qps": None}, "contract: qps: is required"),
        ({"model": None}, "model: is required"),
        ({"qps": {"avg": 5, "p95": 4}}, "below avg"),
        ({"qps": {"avg": 5, "peak": 4}}, "below p95"),
        ({"qps": -1}, "qps: must be more than 0, not -1"),
        ({"qps": float("nan")}, "qps: must be a finite number"),
        ({"qps": {"avg": float("inf")}}, "qps.avg: must be a finite number"),
        ({"qps": True}, "qps: must be a number, not the truth value true"),
        ({"qps": "18"}, "write 18, without quotes"),
        ({"qps": "1_000"}, "write 1000, without quotes"),
        ({"prefix_reuse": "55%"}, "write 0.55"),
        ({"slo": {"ttft_p95_ms": "450 ms"}}, "write 450; the unit belongs to the key"),
        ({"model": "a\nb"}, "must be printable on one line"),
        ({"model": "\ud800"}, "half of a surrogate pair"),
        ({"qps": 10**400}, "must be at most"),
        ({"input_tokens": {"p50": 100, "p95": 50}}, "p95 is 50, below p50 which is 100"),
        ({"input_tokens": {"mean": 100}}, "a mean says nothing about the tail"),
        ({"input_tokens": {"95": 100}}, "input_tokens.95: is not a percentile (write p95)"),
        ({"input_tokens": {"P95": 100}}, "write p95"),
        ({"ttft_ms": {"p95": 100}}, "ttft_ms: is not a known key here (it belongs under slo)"),
        ({"input_tokens": {"p101": 100}}, "input_tokens.p101: is not a percentile"),
        ({"input_tokens": {"p50": 1, "p50.0": 2}}, "is the same percentile as p50"),
        ({"input_tokens": {"p50": 0}}, "must be at least 1"),
        ({"input_tokens": {}}, "holds no percentile"),
        ({"output_tokens": [1, 2]}, "output_tokens: must be a number, not a list"),
        ({"prefix_reuse": 1}, "must be below 1"),
        ({"prefix_reuse": -0.1}, "must be at least 0"),
        ({"model": {"id": "x", "precision": "int9"}}, "did you mean int8? valid: fp32, bf16"),
        ({"model": {"id": "x", "precision": {"kv": "fp17"}}}, "model.precision.kv"),
        ({"model": 7}, "model: must be a word, not 7"),
        ({"archetype": "chatbot"}, "did you mean chat? valid: chat, agent, batch"),
        ({"version": 2}, "version 2 is not known"),
        ({"service": "../x"}, "service: '../x' must be letters"),
        ({"slo": {"ttft_p95_ms": 450, "ttft_ms": {"p95": 4}}}, "is already given under ttft_ms"),
        ({"slo": {"tftt_p95_ms": 450}}, "slo.tftt_p95_ms: is not a known key"),
        ({"slo": {"ttft_ms": 450}}, "must say at which percentile"),
        ({"slo": {"ttft_ms": {"p100": 450}}}, "p99.9 is the most one can ask"),
        ({"slo": {"ttft_ms": {"p95": 0}}}, "must be more than 0"),
        ({"slo": {"ttft_ms": {"p50": 500, "p95": 300}}}, "below p50"),
        ({"slo": {"ttft_p95_ms": 40, "network_ms": 40}}, "network_ms alone takes 40 ms"),
        ({"slo": {"window": "28x"}}, "must be a duration like 28d"),
        ({"slo": {"scope": ["paid"]}}, "'paid' is not known"),
        ({"slo": {"error_rate": 1.5}}, "must be at most 1"),
        ({"arrivals": "poison"}, "did you mean poisson?"),
        ({"arrivals": {"process": "gamma"}}, "arrivals.cv: is required"),
        ({"arrivals": {"cv": 2}}, "has no meaning for poisson"),
        ({"arrivals": {"process": "trace", "file": "no.csv"}}, "no such file"),
        ({"arrivals": {"process": "trace"}}, "arrivals.file: is required"),
        ({"arrivals": {"process": "poisson", "file": "a.csv"}}, "arrivals.file: has no meaning for poisson arrivals"),
        ({"arrivals": {"process": "closed"}}, "arrivals.users: is required"),
        ({"arrivals": {"process": "closed", "users": 1.5}}, "arrivals.users: must be a whole number, not 1.5"),
        ({"arrivals": {"process": "closed", "users": 0}}, "arrivals.users: must be at least 1"),
        ({"arrivals": {"users": 4}}, "arrivals.users: has no meaning for poisson arrivals (it is for closed)"),
        (
            {"arrivals": {"process": "burst", "ramp": {"from": 0, "over": 9}}},
            "it is for poisson and gamma and constant",
        ),
        ({"arrivals": {"ramp": {"over": "9s"}}}, "arrivals.ramp.from: is required"),
        ({"arrivals": {"ramp": {"from": 0, "over": "9s", "shape": "exponential"}}}, "an exponential never leaves 0"),
        ({"arrivals": {"ramp": {"from": 0, "over": "soon"}}}, "arrivals.ramp.over: must be a duration"),
        ({"arrivals": {"process": "closed", "users": 2, "think": 5}}, "did you mean think_ms?"),
        ({"think_ms": 400}, "think_ms: has no meaning without turns"),
        ({"turns": 0.5}, "turns: must be at least 1"),
        ({"turns": 2e4}, "turns: must be at most 1000"),
        ({"rate_profile": "none.csv"}, "rate_profile: no such file: none.csv"),
        ({"rate_profile": {"file": "none.csv", "scale": 2}}, "did you mean time_scale?"),
        ({"privacy": {"capture": "all"}}, "valid: none, token_ids, text"),
        ({"privacy": {"retain_days": 1.5}}, "must be whole days"),
        ({"cost": {"usd_per_hour": 0}}, "must be more than 0"),
        ({"quality": {"suite": "x", "minimum": 2}}, "quality.minimum: must be at most 1"),
    ],
)
def test_bad_values_are_named(change: dict[str, Any], expected: str) -> None:
    assert expected in complaint(minimal(**change))


@pytest.mark.parametrize(
    ("classes", "expected"),
    [
        ([{"name": "a", "share": 0.5}], "the shares add up to 0.5"),
        ([{"name": "a", "share": 0.5}, {"name": "a", "share": 0.5}], "class a is given twice"),
        ([{"name": "a"}], "classes[0].share: is required"),
        ([{"name": "a b", "share": 1}], "must be letters"),
        ("a", "must be a list"),
        ([{"name": "a", "share": 1, "inputs": 3}], "classes[0].inputs: is not a known key"),
    ],
)
def test_bad_classes_are_named(classes: Any, expected: str) -> None:
    assert expected in complaint(minimal(classes=classes))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "is no rate profile"),
        ("time,rate\n0,1\n", "p.csv:1: is no rate profile (the first line is hour,qps or seconds,qps)"),
        ("seconds,qps\n0,1\n", "needs two rows"),
        ("seconds,qps\n1,1\n2,1\n", "p.csv:2: seconds must begin at 0, not 1"),
        ("seconds,qps\n0,1\n\n9,x\n", "p.csv:4: qps: must be a number, not 'x'"),
        ("seconds,qps\n0,1\n9\n", "p.csv:3: qps: must be a number, not nothing"),
        ("seconds,qps\n0,1\n9,-1\n", "p.csv:3: qps: must be 0 or more, not -1"),
        ("seconds,qps\n0,1\n9,1\n9,2\n", "p.csv:4: must come after 9, not at 9"),
        ("seconds,qps\n0,0\n9,0\n", "has no rate above 0"),
        ("hour,qps\n0,1\n1,2\n", "must have the hours 0 to 23 or 0 to 167"),
    ],
)
def test_a_bad_profile_is_named_with_file_and_line(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "p.csv").write_text(text)
    with pytest.raises(ContractError) as caught:
        parse(minimal(rate_profile="p.csv"), base=tmp_path)
    assert expected in str(caught.value) and "rate_profile" in str(caught.value)


def test_files_of_a_contract_may_lie_anywhere(tmp_path: Path) -> None:
    digests = set()
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "p.csv").write_text("seconds,qps\n0,1\n60,3\n")
        (tmp_path / name / "t.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n")
        trace = {"process": "trace", "file": "t.csv", "time_scale": 0.5, "max_requests": 9, "max_context": "skip"}
        made = parse(minimal(rate_profile="p.csv", arrivals=trace), base=tmp_path / name)
        assert made.traffic.arrivals.trace is not None and made.traffic.arrivals.trace.format == "azure"
        assert parse(describe(made), base=tmp_path / name) == made
        digests.add(made.digest)
    assert len(digests) == 1


def test_every_problem_is_told_at_once_in_order(root: Path) -> None:
    path = write(root, "bad.yaml", FULL_YAML.replace("peak: 90", "peak: .nan").replace("slo:", "slos:"))
    with pytest.raises(ContractProblemsError) as caught:
        load(path)
    assert [(p.line, p.key) for p in caught.value.problems] == [(5, "traffic.qps.peak"), (9, "slos")]
    assert str(caught.value).splitlines()[0].startswith(f"{path}:5: traffic.qps.peak: must be a finite number")


@pytest.mark.parametrize(
    ("name", "text", "line", "key"),
    [
        ("a.yaml", "model: x\nqps: 1\nqps: 2\n", 3, "qps"),
        ("a.yaml", "model: [x\n", 2, None),
        ("a.yaml", "model: x\n---\nmodel: y\n", 3, None),
        ("a.yaml", "a: &a [*a]\n", 1, None),
        ("a.yaml", "model: !!python/object:os.system x\n", 1, "model"),
        ("a.toml", 'model = "x"\nqps = 1\nqps = 2\n', 3, None),
        ("a.toml", 'model = "x"\n[traffic]\ninput_tokens = 1\noutput_tokens = 1\nqps = inf\n', 5, "traffic.qps"),
        ("a.toml", "model = 2026-01-01\n", 1, "model"),
        ("a.json", '{"model": "x",\n "qps": 1,\n "qps": 2}', 3, "qps"),
        ("a.json", '{"model": "a:b\\"c",\n "input_tokens": 1, "output_tokens": 1, "qps":\n NaN}', 2, "qps"),
        ("a.json", '{"model": "x",}', 1, None),
        ("a.json", '{"qps": 1,\n "model": "\\ud800"}', 2, "model"),
        ("a.yaml", 'qps: 1\nmodel: "\\ud800"\n', 2, "model"),
    ],
)
def test_lines_are_named_in_every_format(root: Path, name: str, text: str, line: int, key: str | None) -> None:
    path = write(root, name, text)
    with pytest.raises(ContractError) as caught:
        load(path)
    assert (caught.value.file, caught.value.line) == (str(path), line), str(caught.value)
    assert key is None or caught.value.key == key


def test_yaml_words_and_numbers_are_those_of_yaml_1_2() -> None:
    rest = "\ninput_tokens: 10\noutput_tokens: 0o17\nprefix_reuse: 0\n"
    contract = parse("model: on\nservice: no\nqps: 1e3" + rest)
    assert (contract.model.id, contract.service, contract.traffic.qps.avg) == ("on", "no", 1000.0)
    assert contract.traffic.output_tokens.at(0.5) == 15.0


@pytest.mark.parametrize(
    "make",
    [
        lambda p: p,
        lambda p: p.mkdir() or p,
        lambda p: p.with_suffix(".ini"),
    ],
)
def test_what_is_no_contract_file_is_wrong_usage(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    path = make(tmp_path / "contract.yaml")
    (tmp_path / "contracts.yaml").write_text("")
    (tmp_path / "contract.ini").write_text("")
    with pytest.raises(UsageError) as caught:
        load(path)
    assert str(path) in str(caught.value)
    if not path.exists():
        assert "contracts.yaml?" in str(caught.value)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "is empty"),
        (b"# only a comment\n", "is empty"),
        (b"- a\n- b\n", "must be a mapping"),
        (b"hello", "must be a mapping"),
        (b"\x89PNG\r\n\x1a\n", "not UTF-8"),
        (b"GGUF\0\0\0", "binary"),
        (b"x: " + b"[" * 5000, "nested too deeply"),
        (b"a: &a [1,1,1,1,1,1,1,1,1]\n" + b"".join(b"%c: &%c [%s]\n" % (
            c, c, b",".join([b"*%c" % (c - 1)] * 9)) for c in range(98, 108)), "too deeply"),
    ],
)  # fmt: skip
def test_broken_files_are_bad_contracts(tmp_path: Path, data: bytes, expected: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(data)
    with pytest.raises(ContractError) as caught:
        load(path)
    assert expected in str(caught.value)


def test_classes_inherit_and_their_order_has_no_meaning() -> None:
    long = {"name": "long", "share": 0.25, "input_tokens": {"p50": 4000, "p95": 9000}, "prefix_reuse": 0}
    short = {"name": "short", "share": 0.75}
    one, two = parse(minimal(classes=[long, short])), parse(minimal(classes=[short, long]))
    assert one == two
    assert one.traffic.classes[0].output_tokens == one.traffic.output_tokens
    assert (one.traffic.classes[0].prefix_reuse, one.traffic.classes[1].prefix_reuse) == (0.0, 0.55)
    assert parse(describe(one)) == one


def test_example_of_every_key_survives_the_round_trip(root: Path) -> None:
    (root / "weekday.csv").write_text("seconds,qps\n0,1\n60,3\n")
    everything = describe(parse(SEED, base=root))
    everything["traffic"] |= {
        "rate_profile": {"file": "weekday.csv", "time_scale": 0.5},
        "turns": {"p50": 2, "p95": 6},
        "think_ms": {"p50": 5000},
        "arrivals": {"process": "gamma", "cv": 2.5},
        "queries_per_request": {"p50": 1, "p99.9": 3},
        "tool_ms": {"p0": 0, "p100": 4000},
        "classes": [{"name": "a", "share": 1 / 3}, {"name": "b", "share": 2 / 3, "prefix_reuse": 0.1}],
    }
    everything["slo"] |= {"scope": ["a"], "network_ms": 40, "window": "1500ms", "error_rate": 0.001}
    everything |= {"sla": {"ttlt_p99_ms": 30000}, "cost": {"usd_per_mtok": 0.6}, "privacy": {"capture": "text"}}
    contract: Contract = parse(everything, base=root)
    assert parse(describe(contract), base=root) == contract
    assert parse(json.dumps(describe(contract)), fmt="json", base=root) == contract


def test_the_two_forms_do_not_mix() -> None:
    content = {"model": "m", "traffic": {"qps": 1, "input_tokens": 3, "output_tokens": 3}, "qps": 2}
    assert "qps: is not a known key here (it belongs under traffic)" in complaint(content)
