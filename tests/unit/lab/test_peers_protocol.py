"""Both sides of the lines of JSON between the measurement and an engine's process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from lab.peers.point import Point
from lab.peers.protocol import PeerError, Worker
from tests.waiting import PATIENCE_S, wait_until

ROOT = Path(__file__).parents[3]
FAKE = """
import os
import sys
import time

import numpy as np

from lab.peers.point import Timing
from lab.peers.protocol import serve


class Fake:
    version, flags, memory = "fake 1", "none", {"weight_bytes": 7}

    def __init__(self, spec):
        print("an engine that prints")
        os.write(1, b"even past Python\\n")
        self.vocab_size = spec["vocab_size"]
        if self.vocab_size == 2:
            self.logits = None

    def run(self, prompts, num_output):
        if prompts[0] == [0]:
            raise RuntimeError("no")
        if len(prompts) == 4:
            print("begun", flush=True)
            time.sleep(600)
        if len(prompts) == 3:
            os._exit(7)
        given = num_output - (len(prompts) == 2)
        return Timing([0.25] * len(prompts), [1.0] * len(prompts), [given] * len(prompts))

    def logits(self, token_ids, to):
        np.save(to, np.eye(self.vocab_size, dtype=np.float32)[token_ids])


serve(Fake)
"""

TOLD = {"version": "fake 1", "flags": "none", "memory": {"weight_bytes": 7}}

TOOL = """
import sys
from pathlib import Path

from lab.peers.point import Point
from lab.peers.protocol import Worker

with Worker([sys.executable, sys.argv[1]], log=Path(sys.argv[2])) as worker:
    worker.load({"vocab_size": 5})
    print(worker._process.pid, flush=True)
    worker.run(Point(4, 4, 16), seed=1)
"""


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    with Worker([sys.executable, str(script)], log=tmp_path / "log", env={"PYTHONPATH": str(ROOT)}) as found:
        yield found


def test_an_engine_is_loaded_and_asked(worker: Worker, tmp_path: Path) -> None:
    assert worker.load({"vocab_size": 5}) == {**TOLD, "vocab_size": 5}
    timing, peak_rss_mib = worker.run(Point(1, 4, 16), seed=1)
    assert timing.output_tok_s == 16.0 and timing.ttft_ms == 250.0
    assert peak_rss_mib > 5
    worker.logits([3, 1], tmp_path / "logits.npy")
    assert np.load(tmp_path / "logits.npy").argmax(-1).tolist() == [3, 1]
    assert "an engine that prints" in worker.log.read_text() and "past Python" in worker.log.read_text()


def test_an_engine_that_cannot_goes_on_with_the_next(worker: Worker) -> None:
    with pytest.raises(PeerError, match="load comes first"):
        worker.run(Point(1, 4, 16), seed=1)
    worker.load({"vocab_size": 1})
    with pytest.raises(PeerError, match="RuntimeError: no"):
        worker.run(Point(1, 1, 16), seed=1)
    assert worker.run(Point(1, 4, 16), seed=1)[0].counts == [16]


def test_an_engine_without_logits_says_so(worker: Worker, tmp_path: Path) -> None:
    worker.load({"vocab_size": 2})
    with pytest.raises(PeerError, match="fake 1 has no way to tell logits"):
        worker.logits([0, 1], tmp_path / "logits.npy")


def test_an_engine_that_does_less_than_it_was_asked_is_found_out(worker: Worker) -> None:
    worker.load({"vocab_size": 5})
    with pytest.raises(PeerError, match=r"\[15, 15\] tokens"):
        worker.run(Point(2, 4, 16), seed=1)


def test_an_engine_that_dies_is_told_with_its_log(worker: Worker) -> None:
    worker.load({"vocab_size": 5})
    with pytest.raises(PeerError, match=r"ended with 7.*log"):
        worker.run(Point(3, 4, 16), seed=1)


def test_an_engine_that_hangs_is_ended(worker: Worker) -> None:
    worker.load({"vocab_size": 5})
    with pytest.raises(PeerError, match="ended with -9"):
        worker.run(Point(4, 4, 16), seed=1, timeout_s=0.5)


def test_an_engine_ends_with_the_measurement(tmp_path: Path) -> None:
    """Although it is in the middle of an answer."""
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-c", TOOL, str(script), str(tmp_path / "log")]
    tool = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True)
    assert tool.stdout is not None
    with tool.stdout:
        engine = psutil.Process(int(tool.stdout.readline()))
        wait_until(lambda: "begun" in (tmp_path / "log").read_text())
        tool.kill()
        tool.wait()
    _, left = psutil.wait_procs([engine], timeout=PATIENCE_S)
    assert not left
