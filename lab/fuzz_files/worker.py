"""One process that tries case after case within bounds, and tells a line of JSON for each that breaks them."""

from __future__ import annotations

import json
import random
import re
import resource
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lab.fuzz_files import adapter_cases, directory_cases, gguf_cases
from lab.fuzz_files.directory_cases import Files
from lab.fuzz_files.samples import adapters, directories, directory_of_experts, gguf_files
from lab.fuzz_files.use import USES, judge

MEMORY_BYTES = 1 << 30
"""Address space beyond what the interpreter and the libraries have."""
ALLOWED_RESIDENT_BYTES = 32 << 20
"""By which the process may grow, beyond what Python and numpy may allocate: weights, keys and values of runners."""
CPU_S = 20.0
"""For one case; then the process ends, by a signal."""
_SECOND_READER = ("VmHWM", "VmRSS")


def make(kind: str, scratch: Path) -> Callable[[random.Random | None], Path]:
    """A function that writes a case into `scratch`; of None a sound one."""
    files, folders = list[bytes](), list[Files]()
    damage = directory_cases.case
    if kind in ("gguf", "torch"):
        files = gguf_files(scratch)
    if kind == "directory":
        folders = directories()
    if kind == "torch":
        folders = [weights_alone(model) for model in (*directories(), directory_of_experts())]
    if kind == "adapter":
        folders, damage = adapters(), adapter_cases.case

    def write(rng: random.Random | None) -> Path:
        if files and (rng is None or not folders or rng.random() < 0.5):
            return _one_file(scratch, files[0] if rng is None else gguf_cases.case(rng, files))
        return _folder(scratch, folders[0] if rng is None else damage(rng, folders))

    return write


def weights_alone(model: Files) -> Files:
    """What a runner reads."""
    return {name: data for name, data in model.items() if name == "config.json" or "safetensors" in name}


def _one_file(scratch: Path, data: bytes) -> Path:
    path = scratch / "case.gguf"
    path.write_bytes(data)
    return path


def _folder(scratch: Path, files: Files) -> Path:
    path = scratch / "case"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    for name, data in files.items():
        (path / name).write_bytes(data)
    return path


def rng_of(seed: int, number: int) -> random.Random:
    return random.Random(f"{seed} {number}")


def work(kind: str, seed: int, first: int, last: int, seconds: float, current: Path) -> None:
    """From case number `first` up to `last`. `current` always holds the one being tried, for whoever finds us dead."""
    bound()
    torch.set_num_threads(1)
    outcomes: Counter[str] = Counter()
    most, number = 0, first
    with tempfile.TemporaryDirectory(prefix="inferloop-fuzz-") as folder, current.open("r+b") as told:
        write = make(kind, Path(folder))
        judge(write(None), USES[kind])  # what libraries set up once is nobody's fault
        deadline = time.monotonic() + seconds
        while number < last and time.monotonic() < deadline:
            told.seek(0)
            told.write(number.to_bytes(8, "little"))
            told.flush()
            path = write(rng_of(seed, number))
            before = _status()["VmRSS"]
            Path("/proc/self/clear_refs").write_text("5")
            signal.setitimer(signal.ITIMER_PROF, CPU_S)
            found = judge(path, USES[kind])
            signal.setitimer(signal.ITIMER_PROF, 0)
            grown = _status()["VmHWM"] - before
            most = max(most, grown)
            outcomes[_kind(found.error)] += 1
            bug = found.bug
            if bug is None and grown > found.allowed_bytes + ALLOWED_RESIDENT_BYTES:
                bug = f"the process grew by {grown} bytes"
            if bug is not None:
                _tell({"case": number, "bug": bug})
            number += 1
    _tell({"next": number, "outcomes": dict(outcomes), "most_resident": most})


def bound() -> None:
    """Of this process, from here on."""
    size = _status()["VmSize"] + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _status() -> dict[str, int]:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {name: 1024 * int(lines[name].split()[0]) for name in ("VmSize", *_SECOND_READER)}


def _kind(error: str | None) -> str:
    """An error without what is particular to its case."""
    if error is None:
        return "success"
    return re.sub(r"[\d.]+|'.*?'", "#", error.rpartition("/")[2].partition(": ")[2] or error)[:40]


def _tell(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)
