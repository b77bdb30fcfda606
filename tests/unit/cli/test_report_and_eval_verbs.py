"""`inferloop report` and `inferloop eval` as a user calls them."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from inferloop.cli.main import app
from inferloop.records.run import RunWriter, open_run

SUITE = """
suite: tiny
version: 1
cases:
  - {id: right, kind: exact, why: w, prompt: a, expect: A, tags: [x]}
  - {id: wrong, kind: exact, why: it matters, prompt: b, expect: A}
"""


class Upper(http.server.BaseHTTPRequestHandler):
    """Answers a completion with its prompt in capitals."""

    def reply(self, status: int, value: object) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        known = {"/v1/models": {"data": [{"id": "upper"}]}, "/identity": {"digest": "ab" * 32}}
        self.reply(200 if self.path in known else 404, known.get(self.path, {}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.reply(200, {"choices": [{"text": body["prompt"].upper(), "finish_reason": "stop"}]})

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def target() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Upper)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(SUITE)
    return path


@pytest.mark.parametrize(("minimum", "code", "verdict"), [("0.5", 0, "pass"), ("0.6", 1, "fail")])
def test_eval_leaves_a_run_with_its_report(
    tmp_path: Path, target: str, suite: Path, minimum: str, code: int, verdict: str
) -> None:
    told = CliRunner().invoke(
        app,
        ["eval", str(suite), "--target", target, "--minimum", minimum, "--runs-dir", str(tmp_path / "runs"), "--json"],
    )
    assert told.exit_code == code, told.output
    summary = json.loads(told.stdout)
    assert (summary["kind"], summary["verdict"], summary["score"]) == ("eval", verdict, 0.5)
    record = open_run(Path(summary["run"]))
    assert record.complete and record.header.verb == "eval" and record.header.verdict == verdict
    assert record.header.identity == {"model_id": "upper", "digest": "ab" * 32}
    page = (record.path / "report.html").read_text()
    assert "it matters" in page and "got &#39;B&#39;, expected &#39;A&#39;" in page


def test_eval_without_a_gate_is_negative_when_a_case_is_wrong(tmp_path: Path, target: str, suite: Path) -> None:
    told = CliRunner().invoke(app, ["eval", str(suite), "--target", target, "--runs-dir", str(tmp_path / "runs")])
    assert told.exit_code == 1
    assert "wrong: wrong: got 'B', expected 'A'" in told.stderr
    assert "gate: not declared" in told.stdout


def test_bench_needs_the_targets_tokenizer_and_says_so_before_it_begins(tmp_path: Path, target: str) -> None:
    contract = tmp_path / "c.yaml"
    contract.write_text("{model: m, qps: 1, input_tokens: 30, output_tokens: 8, slo: {ttft_p95_ms: 900}, service: s}")
    told = CliRunner().invoke(app, ["bench", str(contract), "--target", target, "--runs-dir", str(tmp_path / "runs")])
    assert told.exit_code == 3 and f"error: {target} has no usable /tokenize (HTTP 200)" in told.stderr
    assert "seed" not in told.stderr and not (tmp_path / "runs").exists()


def test_eval_of_a_dead_target_leaves_a_readable_run(tmp_path: Path, suite: Path) -> None:
    runs = tmp_path / "runs"
    told = CliRunner().invoke(app, ["eval", str(suite), "--target", "http://127.0.0.1:9", "--runs-dir", str(runs)])
    assert told.exit_code == 3 and "does not answer" in told.stderr
    (folder,) = runs.iterdir()
    assert open_run(folder).status == "interrupted"
    written = CliRunner().invoke(app, ["report", str(folder)])
    assert written.exit_code == 0
    assert "it was interrupted" in (folder / "report.html").read_text()


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (200, b"<html>hello</html>", "not JSON: <html>hello</html>"),
        (404, b"nope", "HTTP 404: nope"),
        (200, b"[1]", "no model"),
    ],
)
def test_eval_of_something_else_says_what_answered(
    tmp_path: Path, suite: Path, monkeypatch: pytest.MonkeyPatch, target: str, status: int, body: bytes, says: str
) -> None:
    def answer(self: Upper) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    monkeypatch.setattr(Upper, "do_GET", answer)
    told = CliRunner().invoke(app, ["eval", str(suite), "--target", target, "--runs-dir", str(tmp_path), "--json"])
    assert told.exit_code == 3
    message = json.loads(told.stdout)["error"]["message"]
    assert says in message and "check the URL" in message


def test_eval_names_what_is_wrong_with_its_arguments(tmp_path: Path, suite: Path) -> None:
    told = CliRunner().invoke(app, ["eval", str(suite), "--target", "localhost:8000"])
    assert told.exit_code == 2 and "did you mean 'http://localhost:8000'" in told.stderr
    suite.write_text(SUITE.replace("kind: exact", "kind: exakt", 1))
    told = CliRunner().invoke(app, ["eval", str(suite), "--target", "http://x", "--runs-dir", str(tmp_path / "r")])
    assert told.exit_code == 2 and "did you mean exact" in told.stderr
    assert not (tmp_path / "r").exists(), "nothing is written for a suite that cannot be read"


def test_report_refuses_what_it_cannot_show(tmp_path: Path) -> None:
    told = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert told.exit_code != 0 and "not a run folder" in told.stderr
    (tmp_path / "file").write_text("")
    told = CliRunner().invoke(app, ["report", str(tmp_path / "file")])
    assert told.exit_code == 2 and "not a run folder" in told.stderr
    with RunWriter(tmp_path / "runs", verb="bench", service="s") as writer:
        pass
    with RunWriter(tmp_path / "runs", verb="compare", service="s") as other:
        pass
    two = CliRunner().invoke(app, ["report", str(writer.path), str(other.path)])
    assert two.exit_code == 2 and "runs of bench or up stand side by side" in two.stderr
    three = CliRunner().invoke(app, ["report", *[str(writer.path)] * 3])
    assert three.exit_code == 2 and "--merge" in three.stderr
    into = CliRunner().invoke(app, ["report", str(writer.path), "-o", str(tmp_path)])
    assert into.exit_code == 2 and "is a directory" in into.stderr


def test_report_writes_where_it_is_told_and_says_so(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "runs", verb="bench", service="s") as writer:
        pass
    goal = tmp_path / "deep" / "r.html"
    told = CliRunner().invoke(app, ["report", str(writer.path), "-o", str(goal), "--json"])
    assert told.exit_code == 0, told.output
    assert json.loads(told.stdout)["report"] == str(goal) and goal.read_text().startswith("<!doctype html>")
