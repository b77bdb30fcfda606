"""Small random models of transformers, for whoever computes with our own engine what it computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

RandomModel = Callable[..., Any]

_CONFIG: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture(scope="session")
def random_model() -> RandomModel:
    """random_model(path, family="llama", **config) -> the transformers model, fp32, which is saved at `path` too.

    Two layers and 131 tokens unless `config` has it otherwise. Biases and norms are random like all else, so each is
    seen to be used, and the matrices are large enough that the answers depend on what was read."""

    def make(path: Path, family: str = "llama", **config: Any) -> Any:
        settings = transformers.AutoConfig.for_model(family, **(_CONFIG | config))
        settings._attn_implementation = "eager"
        torch.manual_seed(5)
        model = transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.float32).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias") or "norm" in name:
                    parameter.add_(torch.randn_like(parameter) * 0.2)
                elif parameter.dim() >= 2:
                    parameter.mul_(4)
        model.save_pretrained(path)
        return model

    return make
