"""On what and with what a number was measured: processor, memory, devices, system, packages, source revision."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import psutil

from inferloop.records.processor import Cache, caches, huge_pages, model_and_flags

FLAGS_THAT_MATTER = (
    *("avx2", "avx512f", "avx512bw", "avx512_vnni", "avx_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_int8", "amx_bf16", "asimd", "asimddp", "i8mm", "bf16", "sve"),
)
PACKAGES_THAT_MATTER = (
    *("torch", "numpy", "tokenizers", "gguf", "safetensors", "jinja2", "pyarrow", "uvloop", "httptools", "starlette"),
    *("uvicorn", "msgspec", "bokeh", "transformers", "llguidance", "openvino", "vllm", "sglang", "ray"),
)


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """All that may change a measurement. Plain values, ready for JSON."""

    cpu_model: str
    cpu_flags: tuple[str, ...]
    num_cores: int
    """Logical cores that this process may use."""
    num_physical_cores: int | None
    caches: tuple[Cache, ...]
    memory_bytes: int
    huge_pages: str | None
    """When the kernel gives huge pages: always, madvise (when asked) or never."""
    devices: tuple[str, ...]
    system: str
    python: str
    packages: dict[str, str]
    inferloop_version: str
    git_revision: str | None
    git_dirty: bool | None


@lru_cache(maxsize=1)
def fingerprint() -> Fingerprint:
    """Of this process on this machine; read once."""
    model, flags = model_and_flags()
    revision, dirty = source_revision(Path(__file__).resolve().parent.parent)
    return Fingerprint(
        cpu_model=model,
        cpu_flags=tuple(f for f in FLAGS_THAT_MATTER if f in flags),
        num_cores=len(os.sched_getaffinity(0)),
        num_physical_cores=psutil.cpu_count(logical=False),
        caches=caches(),
        memory_bytes=psutil.virtual_memory().total,
        huge_pages=huge_pages(),
        devices=_nvidia_devices(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=f"{platform.python_implementation()} {platform.python_version()}",
        packages={name: version for name in PACKAGES_THAT_MATTER if (version := _version(name))},
        inferloop_version=_version("inferloop") or "unknown",
        git_revision=revision,
        git_dirty=dirty,
    )


def source_revision(folder: Path) -> tuple[str | None, bool | None]:
    """(commit, whether tracked files under `folder` differ from it); (None, None) outside a git checkout."""
    commit = _git(folder, "rev-parse", "HEAD")
    tracked = _git(folder, "ls-files", "--error-unmatch", "__init__.py")
    if commit is None or tracked is None:  # an installed copy inside somebody else's repository
        return None, None
    changes = _git(folder, "status", "--porcelain", "--", ".")
    return commit, None if changes is None else bool(changes)


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _nvidia_devices() -> tuple[str, ...]:
    found = []
    for info in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        try:
            model = re.search(r"^Model:\s*(.+)$", info.read_text(), re.MULTILINE)
        except OSError:
            continue
        found.append(model.group(1).strip() if model else "NVIDIA device")
    return tuple(found)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
