"""OpenVINO GenAI with continuous batching.

Spec: model (a GGUF or a directory of its IR), threads, properties (of the plugin), scheduler (fields of its config).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import openvino
import openvino_genai
from lab.peers.point import Timing
from lab.peers.protocol import Spec, serve

STEP = 16
"""Tokens of a text whose logits are told, at once."""


class OpenVino:
    def __init__(self, spec: Spec) -> None:
        config = openvino_genai.SchedulerConfig()
        for name, value in spec["scheduler"].items():
            setattr(config, name, value)
        self._spec = spec
        self._properties = properties = {"INFERENCE_NUM_THREADS": spec["threads"], **spec["properties"]}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(spec["model"], config, "CPU", properties)
        self.version = f"openvino-genai {openvino_genai.__version__.split('-')[0]}"
        self.flags = f"{properties} {spec['scheduler']}"
        self.vocab_size = spec["vocab_size"]
        self._num_sent = 0

    def run(self, prompts: Sequence[Sequence[int]], num_output: int) -> Timing:
        wanted = openvino_genai.GenerationConfig(max_new_tokens=num_output, ignore_eos=True, do_sample=False)
        first, last, counts = [0.0] * len(prompts), [0.0] * len(prompts), [0] * len(prompts)
        begin = time.perf_counter()
        handles = []
        for prompt in prompts:
            self._num_sent += 1
            ids = openvino.Tensor(np.asarray([prompt], np.int64))
            handles.append(self._pipeline.add_request(self._num_sent, ids, wanted))
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            now = time.perf_counter() - begin
            for i, handle in enumerate(handles):
                while handle.can_read():
                    for output in handle.read().values():
                        first[i] = first[i] or now
                        last[i] = now
                        counts[i] += len(output.generated_ids)
        return Timing(first, last, counts)

    def logits(self, token_ids: Sequence[int], to: Path) -> None:
        """The pipeline tells sampled tokens only: its model is saved beside `to` and compiled again by itself."""
        model = Path(self._spec["model"])
        copy = to.parent / model.name
        if not copy.exists():
            copy.symlink_to(model)
            openvino_genai.LLMPipeline(copy, "CPU", enable_save_ov_model=True)
        compiled = openvino.Core().compile_model(to.parent / "openvino_model.xml", "CPU", self._properties)
        request, num, parts = compiled.create_infer_request(), len(token_ids), []
        for begin in range(0, num, STEP):  # so that what lies in KV memory is read from there
            end = min(num, begin + STEP)
            inputs = {
                "input_ids": np.asarray([token_ids[begin:end]], np.int64),
                "attention_mask": np.ones((1, end), np.int64),
                "position_ids": np.arange(begin, end, dtype=np.int64)[None],
                "beam_idx": np.zeros(1, np.int32),
            }
            parts.append(request.infer(inputs)["logits"][0].astype(np.float32))
        np.save(to, np.concatenate(parts))


if __name__ == "__main__":
    serve(OpenVino)
