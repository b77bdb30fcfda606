"""Processes seen and held from outside, children too."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil
from tests.waiting import wait_until

from inferloop.fleet.act.tree import ProcessTree

PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "print('on', flush=True)\\nwhile True: pass"])
child.wait()
"""


def test_a_spinning_child_is_seen_held_and_let_go() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        processes: list[psutil.Process] = []
        try:
            assert parent.stdout is not None and parent.stdout.readline() == b"on\n"
            tree = ProcessTree(parent.pid)
            processes = [psutil.Process(parent.pid), *psutil.Process(parent.pid).children()]
            assert len(processes) == 2 and tree.memory_bytes() > 0
            begin = tree.cpu_s()
            wait_until(lambda: tree.cpu_s() > begin + 0.05)
            tree.suspend()
            tree.suspend()
            wait_until(lambda: all(p.status() == psutil.STATUS_STOPPED for p in processes))
            held = tree.cpu_s()
            time.sleep(0.2)
            assert tree.cpu_s() == held
            tree.resume()
            wait_until(lambda: tree.cpu_s() > held + 0.05)
        finally:
            for process in processes:
                process.kill()
    assert tree.cpu_s() == 0.0 and tree.memory_bytes() == 0, "gone is nothing"
    tree.suspend()
    tree.resume()
