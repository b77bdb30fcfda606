"""A tokenizer where Hugging Face's libraries look for one when they are offline, made of a GGUF file's vocabulary."""

from __future__ import annotations

import json
from pathlib import Path

import gguf

_CONTROL = 3  # a token's type in GGUF


NAME = "inferloop/lab"
_REVISION = "0" * 40


def write_tokenizer(source: Path, home: Path) -> None:
    """Put the byte-level BPE vocabulary of `source` into `home`, for HF_HOME, as the repository NAME. Kept if there."""
    repository = home / "hub" / f"models--{NAME.replace('/', '--')}"
    target = repository / "snapshots" / _REVISION
    if (repository / "refs" / "main").exists():
        return
    fields = gguf.GGUFReader(source).fields
    meta = {
        name.removeprefix("tokenizer."): fields[name].contents() for name in fields if name.startswith("tokenizer.")
    }
    tokens: list[str] = meta["ggml.tokens"]
    special = [i for i, kind in enumerate(meta["ggml.token_type"]) if kind == _CONTROL]
    same = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    target.mkdir(parents=True, exist_ok=True)
    model = {"type": "BPE", "vocab": {t: i for i, t in enumerate(tokens)}, "merges": meta["ggml.merges"]}
    (target / "tokenizer.json").write_text(
        json.dumps(
            {
                "version": "1.0",
                "added_tokens": [{"id": i, "content": tokens[i], **same} for i in special],
                "pre_tokenizer": {
                    "type": "Sequence",
                    "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
                },
                "decoder": byte_level,
                "model": model,
            }
        )
    )
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    config = {key: tokens[meta[f"ggml.{name}_token_id"]] for key, name in names.items()}
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": meta["chat_template"]}
    (target / "tokenizer_config.json").write_text(json.dumps(config | {"model_max_length": 8192}))
    (target / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": len(tokens)}))
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text(_REVISION)
