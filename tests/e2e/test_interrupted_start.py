"""Ctrl-C before any verb runs: the command is still importing what it needs."""

from __future__ import annotations

import subprocess
import sys

LATE = """
import sys
class Slow:
    def find_spec(self, name, path, target=None):
        if name == "inferloop.cli.main":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Slow())
from inferloop.__main__ import main
main()
"""


def test_ctrl_c_while_importing_is_one_line_and_130() -> None:
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")
