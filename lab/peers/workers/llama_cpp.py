"""llama.cpp through its C API: many sequences in one batch, as its own batched benchmark does it.

Spec: model (a GGUF), threads, flash (attention), kv (a ggml type), unified (one KV buffer for all sequences), ubatch,
contexts: [[sequences, tokens of each], ...]; a run takes the first that it fits into. A prompt goes in whole, all
sequences are prefilled before the first of them goes on, and the likeliest token is taken from the logits with numpy.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp as lib
import numpy as np
from lab.peers.point import Timing
from lab.peers.protocol import Spec, serve
from numpy.typing import NDArray

BATCH = 2048
KV_TYPES = {"f16": lib.GGML_TYPE_F16, "q8_0": lib.GGML_TYPE_Q8_0, "bf16": 30}
"""The package has no name for bf16."""


class LlamaCpp:
    def __init__(self, spec: Spec) -> None:
        lib.llama_backend_init()
        self._spec = spec
        self._model = lib.llama_model_load_from_file(spec["model"].encode(), lib.llama_model_default_params())
        if not self._model:
            raise ValueError(f"{spec['model']} cannot be loaded")
        self.vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        self._contexts = [(num, length, self._context(num, length)) for num, length in spec["contexts"]]
        self._batch = lib.llama_batch_init(BATCH, 0, 1)
        info = lib.llama_print_system_info().decode().replace(" = 1", "").replace(" |", "").strip()
        self.version = f"llama-cpp-python {lib.__version__} ({info})"
        self.flags = (
            f"{Path(spec['model']).name}, flash attention {'on' if spec['flash'] else 'off'}, KV {spec['kv']}"
            f"{' unified' if spec['unified'] else ''}, ubatch {spec['ubatch']}, {spec['threads']} threads"
        )

    def _context(self, num: int, length: int) -> Any:
        kv_type = KV_TYPES[self._spec["kv"]]
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_seq_max = num * length, num
        params.n_batch, params.n_ubatch = BATCH, self._spec["ubatch"]
        params.n_threads = params.n_threads_batch = self._spec["threads"]
        params.flash_attn_type = (
            lib.LLAMA_FLASH_ATTN_TYPE_ENABLED if self._spec["flash"] else lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        params.type_k = params.type_v = kv_type
        params.kv_unified = self._spec["unified"]
        params.no_perf = True
        context = lib.llama_init_from_model(self._model, params)
        if not context:
            raise ValueError(f"no context of {num} x {length} tokens")
        return context

    def run(self, prompts: Sequence[Sequence[int]], num_output: int) -> Timing:
        num, longest = len(prompts), len(prompts[0]) + num_output
        fitting = [c for most, length, c in self._contexts if num <= most and longest <= length]
        if not fitting:
            raise ValueError(f"no context holds {num} x {longest} tokens")
        context = fitting[0]
        lib.llama_memory_clear(lib.llama_get_memory(context), False)
        begin = time.perf_counter()
        first, tokens = self._prefill(context, prompts, begin)
        last = first
        for step in range(num_output - 1):
            rows = [(token, len(prompts[i]) + step, i, True) for i, token in enumerate(tokens)]
            self._decode(context, rows)
            tokens = [self._likeliest(context, i) for i in range(num)]
            last = [time.perf_counter() - begin] * num
        return Timing(first, last, [num_output] * num)

    def _prefill(self, context: Any, prompts: Sequence[Sequence[int]], begin: float) -> tuple[list[float], list[int]]:
        """(seconds to the first token, that token) of each."""
        first, tokens = [], []
        rows = [
            (token, position, i, position == len(prompt) - 1)
            for i, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        for low in range(0, len(rows), BATCH):
            part = rows[low : low + BATCH]
            self._decode(context, part)
            for i, (_, _, _, wanted) in enumerate(part):
                if wanted:
                    tokens.append(self._likeliest(context, i))
                    first.append(time.perf_counter() - begin)
        return first, tokens

    def _decode(self, context: Any, rows: Sequence[tuple[int, int, int, bool]]) -> None:
        """Rows of (token, position, sequence, whether its logits are wanted)."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, owner, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, owner
        if lib.llama_decode(context, batch) != 0:
            raise ValueError("llama_decode says no")

    def _row(self, context: Any, i: int) -> NDArray[np.float32]:
        address = ctypes.cast(lib.llama_get_logits_ith(context, i), ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(address, (self.vocab_size,))

    def _likeliest(self, context: Any, i: int) -> int:
        return int(self._row(context, i).argmax())

    def logits(self, token_ids: Sequence[int], to: Path) -> None:
        context = self._context(1, len(token_ids))
        self._decode(context, [(token, position, 0, True) for position, token in enumerate(token_ids)])
        np.save(to, np.stack([self._row(context, i) for i in range(len(token_ids))]))
        lib.llama_free(context)


if __name__ == "__main__":
    serve(LlamaCpp)
