"""transformers, with a plain loop around the model: quicker than its generate().

Spec: model (a Hugging Face directory), threads, dtype, prefill_rows (sequences that are prefilled together).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from lab.peers.point import Timing
from lab.peers.protocol import Spec, serve


class Transformers:
    def __init__(self, spec: Spec) -> None:
        torch.set_num_threads(spec["threads"])
        dtype = getattr(torch, spec["dtype"])
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(spec["model"], dtype=dtype).eval()
        self.version = f"transformers {transformers.__version__}, torch {torch.__version__}"
        self.flags = f"{spec['dtype']}, sdpa, {spec['threads']} threads"
        self.vocab_size = int(self._model.config.vocab_size)

    @torch.inference_mode()
    def run(self, prompts: Sequence[Sequence[int]], num_output: int) -> Timing:
        begin = time.perf_counter()
        ids = torch.tensor(prompts)
        cache = None
        moments = []
        for _ in range(num_output):
            found = self._model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, ids = found.past_key_values, found.logits[:, -1].argmax(-1, keepdim=True)
            ids.tolist()
            moments.append(time.perf_counter() - begin)
        num = len(prompts)
        return Timing([moments[0]] * num, [moments[-1]] * num, [num_output] * num)

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int], to: Path) -> None:
        np.save(to, self._model(torch.tensor([list(token_ids)])).logits[0].float().numpy())


if __name__ == "__main__":
    serve(Transformers)
