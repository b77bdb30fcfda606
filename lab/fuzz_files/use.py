"""What is done with a model's files before and while it serves, and the bounds that hold while it is.

A way of using them is a generator: before each part of the work it tells what that may allocate beside ALLOWED_TIMES
the files.
"""

from __future__ import annotations

import functools
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from lab.fuzz_files.samples import directories

from inferloop.core.errors import InferloopError
from inferloop.core.request import Sampling
from inferloop.engine.compute.adapter import load_adapter
from inferloop.engine.compute.native.config import NativeConfig
from inferloop.engine.compute.native.pack import pack_model
from inferloop.engine.compute.native.program import check_runs
from inferloop.engine.compute.native.runner import NativeRunner
from inferloop.engine.compute.runner import AdapterRunner, Runner
from inferloop.engine.compute.torch.config import TorchConfig
from inferloop.engine.compute.torch.parallel.split import header_of_share, share_of
from inferloop.engine.compute.torch.runner import TorchRunner
from inferloop.engine.compute.torch.weights import load_weights
from inferloop.engine.config import EngineConfig
from inferloop.engine.schedule.scheduler import Scheduler
from inferloop.engine.schedule.sequence import SequenceSpec
from inferloop.engine.schedule.step import NO_ADAPTER
from inferloop.engine.text.codec import Codec
from inferloop.engine.text.tokenizer import load_tokenizer
from inferloop.models.adapters.read import read_adapter
from inferloop.models.resolve import ModelFiles, resolve

MESSAGES = [{"role": "system", "content": "s"}, {"role": "user", "content": "ab 12 <end> 世"}]
PROMPT = (1, 2, 3, 2, 1)
ALLOWED_TIMES = 4
ALLOWED_GGUF_BYTES, ALLOWED_BYTES = 2 << 20, 8 << 20
"""What may be allocated: so many times the files, and so much that any model takes."""
ALLOWED_CHAT_BYTES = 128 << 20
"""By a chat template, whose bound is that of the longest prompt."""
MAX_RANK = 16
_BLOCKS = 4

Use = Callable[[Path], Iterator[int]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """`error`: the typed error that refused it, or None when all went well. `bug`: what must not be."""

    error: str | None
    allowed_bytes: int
    bug: str | None = None


def in_native(path: Path) -> Iterator[int]:
    """Header, tokenizer, a text, all weights packed, a few tokens where the kernels run it; then a chat."""
    yield ALLOWED_GGUF_BYTES if path.is_file() else ALLOWED_BYTES
    files = resolve(str(path))
    tokenizer = load_tokenizer(files)
    tokenizer.decode(tokenizer.encode("ab 12 <end> 世", allow_special=True), skip_special=False)
    packed = pack_model(files.header, "stored")
    check_runs(files.header)
    generate(NativeRunner(files.header, packed, NativeConfig(num_blocks=_BLOCKS, num_threads=1)))
    yield ALLOWED_CHAT_BYTES
    codec = Codec(files)  # which tries the template
    if codec.template is not None:
        codec.encode_chat(MESSAGES, max_tokens=10_000)


def in_torch(path: Path) -> Iterator[int]:
    """A few tokens in each precision, and both halves of the model as two processes would load them."""
    yield ALLOWED_BYTES
    files = resolve(str(path))
    for config in _torch_configs():
        generate(TorchRunner.load(files, config))
    for rank in range(2):
        half = header_of_share(files.header, share_of(files.header, rank, 2))
        load_weights(half, dtype=config.torch_dtype, device=torch.device("cpu"))


def as_adapter(path: Path) -> Iterator[int]:
    """Put beside a sound model in every form that a runner holds it in, and a few tokens through it."""
    files, runners = _base()
    yield ALLOWED_BYTES
    loaded = load_adapter(read_adapter(path, files.header, max_rank=MAX_RANK))
    for runner in runners:
        runner.set_adapter(0, runner.prepare_adapter(loaded))
        try:
            generate(runner, slot=0)
        finally:
            runner.set_adapter(0, None)


USES: dict[str, Use] = {"gguf": in_native, "directory": in_native, "torch": in_torch, "adapter": as_adapter}


def generate(runner: Runner, slot: int = NO_ADAPTER) -> None:
    """Three tokens, greedy and drawn."""
    info = runner.info
    scheduler = Scheduler(EngineConfig().for_runner(info))
    prompt = tuple(token % info.vocab_size for token in PROMPT)[: max(info.context_length - 1, 1)]
    for i, temperature in enumerate((0.0, 0.9)):
        sampling = Sampling(temperature=temperature, max_tokens=3, num_logprobs=1)
        scheduler.add(SequenceSpec(str(i), prompt, sampling, seed=i, adapter_slot=slot))
    while scheduler.request_ids:
        plan = scheduler.schedule()
        assert plan is not None
        runner.submit(plan)
        scheduler.commit(plan, runner.wait())


def judge(path: Path, use: Use) -> Outcome:
    """Use what lies there, and look at what that raises and allocates (as Python and numpy tell it)."""
    given = path.stat().st_size if path.is_file() else sum(f.lstat().st_size for f in path.iterdir())
    error = bug = None
    allowed = most = 0

    def end_part(next_allowed: int) -> None:
        nonlocal allowed, most, bug
        peak = tracemalloc.get_traced_memory()[1]
        if allowed and bug is None and peak > allowed:
            bug = f"{peak} bytes were allocated for {given} bytes of files"
        allowed, most = next_allowed, max(most, next_allowed)
        tracemalloc.reset_peak()

    tracemalloc.start()
    try:
        for beside in use(path):
            end_part(ALLOWED_TIMES * given + beside)
    except InferloopError as problem:
        error = f"{type(problem).__name__}: {problem}"
    except BaseException as problem:  # MemoryError and panics of libraries too
        bug = f"{type(problem).__name__}: {str(problem)[:300]}"
    end_part(0)
    tracemalloc.stop()
    return Outcome(error, most, bug)


def _torch_configs() -> list[TorchConfig]:
    common = TorchConfig(num_blocks=_BLOCKS)
    return [replace(common, dtype="fp32", deterministic=True), common]


@functools.cache
def _base() -> tuple[ModelFiles, list[AdapterRunner]]:
    with tempfile.TemporaryDirectory() as folder:
        for name, data in directories()[0].items():
            (Path(folder) / name).write_bytes(data)
        files = resolve(folder)
        runners: list[AdapterRunner] = [TorchRunner.load(files, config) for config in _torch_configs()]
        common = NativeConfig(num_blocks=_BLOCKS, num_threads=1)
        for native in (common, replace(common, weights="int8")):
            packed = pack_model(files.header, native.weights)
            runners += [NativeRunner(files.header, packed, native)]
    return files, runners
