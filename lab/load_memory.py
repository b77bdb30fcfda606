"""How much memory loading a model takes beyond what it keeps.

    python -m lab.load_memory MODEL... [--runners torch:bf16 torch:fp32 native:auto] [--shards 4] [--rounds 2]

MODEL is as for `inferloop serve`. Each load is a process of its own, watched from outside every millisecond: the
system's own high-water mark of resident memory from after the imports on, and the most that was seen of its two parts,
memory of its own (anonymous) and pages of files that it has mapped (which the system can take back, and other processes
share). All are told beyond what there was before loading, and as a share of the weights as the runner keeps them. Files
that are read, and not mapped, lie in the page cache of the system and in nobody's resident memory.

A native runner packs the first time and maps what it packed from then on: that is the second round. `--shards N` cuts a
directory's weights into N files first.
"""

from __future__ import annotations

import argparse
import json
import select
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from inferloop.core.units import MIB
from inferloop.models.headers.directory import weight_files
from inferloop.models.headers.safetensors import read_safetensors

_EVERY_S = 0.001
_SMALL_KV_MIB = 1


@dataclass(frozen=True, slots=True)
class Seen:
    """Bytes beyond those before loading, and seconds."""

    peak: int
    anonymous: int
    files: int
    kept: int
    weights: int
    seconds: float

    def row(self) -> str:
        share = [f"{100 * n / self.weights:5.0f} %" for n in (self.peak, self.anonymous, self.files, self.kept)]
        return f"{self.weights / MIB:7.1f} MiB  {'  '.join(share)}  {self.seconds:6.2f} s"


def watch(model: str, runner: str, cache: str) -> Seen:
    """Load once and look on."""
    argv = [sys.executable, "-m", "lab.load_memory", "--one", model, runner, cache]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()  # it has imported everything
        status = Path(f"/proc/{process.pid}/status")
        Path(f"/proc/{process.pid}/clear_refs").write_text("5")  # the high-water mark begins here
        before = resident(status)
        process.stdin.write("go\n")
        process.stdin.flush()
        began, most = time.monotonic(), before
        while not select.select([process.stdout], [], [], _EVERY_S)[0]:
            now = resident(status)
            most = {name: max(most[name], now[name]) for name in most}
        seconds, after = time.monotonic() - began, resident(status)
        answer = process.stdout.readline()
        process.stdin.close()
    if not answer:
        raise SystemExit(f"{runner} {model}: it ended with {process.returncode}")
    return Seen(
        after["VmHWM"] - before["VmRSS"],
        most["RssAnon"] - before["RssAnon"],
        most["RssFile"] - before["RssFile"],
        after["VmRSS"] - before["VmRSS"],
        json.loads(answer),
        seconds,
    )


def resident(status: Path) -> dict[str, int]:
    """Bytes."""
    fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
    names = ("VmHWM", "VmRSS", "RssAnon", "RssFile")
    return {name: 1024 * int(fields.get(name, "0").split()[0]) for name in names}  # who has ended has none


def load_one(model: str, runner: str, cache: str) -> None:
    """In the process that is watched. Prints a line when it may begin, and the bytes of the weights when it is done."""
    from inferloop.backends.native_choice import load_runner
    from inferloop.backends.native_options import NativeOptions
    from inferloop.models.digests import weights_digest
    from inferloop.models.resolve import resolve

    compute, dtype = runner.split(":")
    if compute == "torch":
        import inferloop.engine.compute.torch.runner
    else:
        import inferloop.engine.compute.native.runner  # noqa: F401
    files = resolve(model)
    weights_digest(files)
    print("ready", flush=True)
    sys.stdin.readline()
    options = NativeOptions(
        compute="torch" if compute == "torch" else "native",
        dtype=dtype,
        kv_memory_mib=_SMALL_KV_MIB,
        cache_dir=Path(cache),
        num_threads=2,
    )
    made = load_runner(files, options)
    print(json.dumps(made.info.weight_bytes), flush=True)
    sys.stdin.readline()


def sharded(model: str, num: int, target: Path) -> str:
    """The directory again, with its tensors dealt out to `num` files and an index of them."""
    source = Path(model)
    tensors = [info for file in weight_files(source) for info in read_safetensors(file).values()]
    words = {"bf16": "BF16", "fp32": "F32", "fp16": "F16"}
    index: dict[str, str] = {}
    total = sum(info.num_bytes for info in tensors)
    parts: list[list[int]] = [[] for _ in range(num)]
    done = 0
    for i, info in enumerate(tensors):
        parts[min(num - 1, done * num // total)].append(i)
        done += info.num_bytes
    for k, part in enumerate(parts):
        file, header, begin = target / f"model-{k + 1:05}-of-{num:05}.safetensors", {}, 0
        for i in part:
            info = tensors[i]
            ends = [begin, begin + info.num_bytes]
            header[info.name] = {"dtype": words[info.dtype], "shape": list(info.shape), "data_offsets": ends}
            begin, index[info.name] = ends[1], file.name
        text = json.dumps(header).encode()
        with file.open("wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            for i in part:
                with tensors[i].file.open("rb") as stored:
                    stored.seek(tensors[i].offset)
                    out.write(stored.read(tensors[i].num_bytes))
    (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    for other in source.iterdir():
        if other.suffix in (".json", ".jinja"):
            (target / other.name).write_bytes(other.read_bytes())
    return str(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--runners", nargs="+", default=["torch:bf16", "torch:fp32", "native:auto"])
    parser.add_argument("--shards", type=int)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        load_one(*options.one)
        return
    print("weights as kept, then beyond what there was before: peak, of its own, of mapped files, kept")
    with tempfile.TemporaryDirectory(prefix="inferloop-load-") as scratch:
        for model in options.models:
            if options.shards:
                target = Path(scratch) / "shards" / str(len(list(Path(scratch).iterdir())))
                target.mkdir(parents=True)
                model = sharded(model, options.shards, target)
            for runner in options.runners:
                with tempfile.TemporaryDirectory(prefix="inferloop-pack-") as cache:
                    for round_number in range(options.rounds):
                        seen = watch(model, runner, cache)
                        print(f"{seen.row()}  {runner}, round {round_number + 1}: {model}", flush=True)


if __name__ == "__main__":
    main()
