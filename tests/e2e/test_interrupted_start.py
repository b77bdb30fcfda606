"""Ctrl-C before any verb runs: the command is still importing what it needs."""

from __future__ import annotations

import subprocess
import sys

import pytest

LATE = """
import sys
slow = sys.argv[1]
class Slow:
    def find_spec(self, name, path, target=None):
        if name == slow:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Slow())
sys.argv = ["inferloop", "check", "c.yaml"]
from inferloop.__main__ import main
main()
"""


@pytest.mark.parametrize("module", ["inferloop.cli.main", "inferloop.cli.check"])
def test_ctrl_c_while_importing_is_one_line_and_130(module: str) -> None:
    done = subprocess.run([sys.executable, "-c", LATE, module], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")
