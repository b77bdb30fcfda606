"""Damaged and hostile model files and adapters, against everything that reads them and computes with them.

    python -m lab.fuzz_files gguf|directory|torch|adapter [--minutes 5] [--seed 1]
    python -m lab.fuzz_files gguf --seed 1 --case 4711 --keep bad.gguf      tries one again, and keeps it

`gguf` and `directory` are for the native runner, `torch` has both formats, and `adapter` is of adapters for a sound
model in both runners. Each case is a small sound model or adapter with some of its numbers, texts or bytes changed. It
must end in a typed error, or in what can be used: header, tokenizer, all weights, a few tokens, chat template. A
process with bounded address space tries one after the other; it is a fault when a case raises anything else, takes over
20 s of processor time, allocates more than 4 times its files (and 2 MiB; a directory 8; to render its chat template
128), or ends the process. Ends with 0 only when there was none.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from lab.fuzz_files import KINDS


def run(kind: str, seed: int, seconds: float, most_cases: int = 1 << 62) -> tuple[int, Counter[str], list[str]]:
    """Cases tried, how they ended, and the faults. Ends after so many seconds or cases."""
    bugs: list[str] = []
    outcomes: Counter[str] = Counter()
    first = most = 0
    deadline = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        current = Path(folder) / "current"
        current.write_bytes(bytes(8))
        while first < most_cases and (left := deadline - time.monotonic()) > 0:
            argv = [sys.executable, "-m", "lab.fuzz_files", kind, "--seed", str(seed), "--first", str(first)]
            argv += ["--cases", str(most_cases), "--seconds", str(left), "--current", str(current)]
            done = subprocess.run(argv, capture_output=True, text=True, check=False)
            told: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
            bugs += [f"case {found['case']}: {found['bug']}" for found in told if "bug" in found]
            if told and "next" in told[-1]:
                first = told[-1]["next"]
                outcomes.update(told[-1]["outcomes"])
                most = max(most, told[-1]["most_resident"])
            else:
                number = int.from_bytes(current.read_bytes(), "little")
                bugs.append(f"case {number}: the process ended with {done.returncode}: {done.stderr[-300:]}")
                first = number + 1
    outcomes["most resident bytes"] = most
    return first, outcomes, bugs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--cases", type=int, default=1 << 62, help="end after so many")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", type=int)
    parser.add_argument("--keep", type=Path)
    for hidden in ("--first", "--seconds", "--current"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.current or options.case is not None:
        from lab.fuzz_files.use import USES, judge  # torch, of which whoever starts the others has no need
        from lab.fuzz_files.worker import bound, make, rng_of, work
    if options.current:
        first, seconds = int(options.first), float(options.seconds)
        work(options.kind, options.seed, first, options.cases, seconds, Path(options.current))
        return 0
    if options.case is not None:
        with tempfile.TemporaryDirectory() as folder:
            path = make(options.kind, Path(folder))(rng_of(options.seed, options.case))
            if options.keep:
                shutil.copytree(path, options.keep) if path.is_dir() else shutil.copy(path, options.keep)
            bound()
            print(judge(path, USES[options.kind]))
        return 0
    num, outcomes, bugs = run(options.kind, options.seed, 60 * options.minutes, options.cases)
    print(f"{options.kind}: {num} cases with seed {options.seed}, {len(bugs)} faults")
    for name, count in outcomes.most_common(25):
        print(f"{count:8d}  {name}")
    for bug in bugs:
        print(f"FAULT {bug}", file=sys.stderr)
    return 1 if bugs else 0


if __name__ == "__main__":
    sys.exit(main())
