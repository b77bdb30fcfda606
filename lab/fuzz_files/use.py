"""What is done with a model's files before it serves, and the bounds that hold while it is."""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass
from pathlib import Path

from inferloop.core.errors import InferloopError
from inferloop.engine.compute.native.pack import _filler
from inferloop.engine.compute.native.packfile import pack_in_memory
from inferloop.engine.compute.native.plan import plan_packing
from inferloop.engine.text.codec import Codec
from inferloop.engine.text.tokenizer import load_tokenizer
from inferloop.models.resolve import ModelFiles, resolve

MESSAGES = [{"role": "system", "content": "s"}, {"role": "user", "content": "ab 12 <end> 世"}]
ALLOWED_TIMES = 4
ALLOWED_BYTES = {"gguf": 2 << 20, "directory": 8 << 20}
"""What may be allocated: so many times the files, and so much that any model takes."""
ALLOWED_CHAT_BYTES = 128 << 20
"""By a chat template, whose bound is that of the longest prompt."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """`error`: the typed error that refused it, or None when all went well. `bug`: what must not be."""

    error: str | None
    peak_bytes: int
    bug: str | None = None


def load(path: Path) -> ModelFiles:
    """Header, tokenizer, a text, and all weights packed. Raises InferloopError."""
    files = resolve(str(path))
    tokenizer = load_tokenizer(files)
    tokenizer.decode(tokenizer.encode("ab 12 <end> 世", allow_special=True), skip_special=False)
    plan = plan_packing(files.header, "stored")
    pack_in_memory(plan.layout, _filler(plan, files.header, "stored", None))
    return files


def judge(path: Path) -> Outcome:
    """Load what lies there and ask it, and look at what that raises and allocates (as Python and numpy tell it)."""
    given = path.stat().st_size if path.is_file() else sum(f.stat().st_size for f in path.iterdir())
    error = bug = None
    peaks, allowed = [0], [ALLOWED_BYTES["gguf" if path.is_file() else "directory"], ALLOWED_CHAT_BYTES]
    tracemalloc.start()
    try:
        files = load(path)
        peaks = [tracemalloc.get_traced_memory()[1]]
        tracemalloc.reset_peak()
        codec = Codec(files)  # which tries the template
        if codec.template is not None:
            codec.encode_chat(MESSAGES, max_tokens=10_000)
    except InferloopError as problem:
        error = f"{type(problem).__name__}: {problem}"
    except BaseException as problem:  # MemoryError and panics of libraries too
        bug = f"{type(problem).__name__}: {str(problem)[:300]}"
    last = tracemalloc.get_traced_memory()[1]
    peaks = [last] if peaks == [0] else [*peaks, last]
    tracemalloc.stop()
    for peak, beside in zip(peaks, allowed, strict=False):
        if bug is None and peak > ALLOWED_TIMES * given + beside:
            bug = f"{peak} bytes were allocated for {given} bytes of files"
    return Outcome(error, max(peaks), bug)
