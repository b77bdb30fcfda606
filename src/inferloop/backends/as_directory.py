"""A GGUF file as the Hugging Face directory that some engines read alone: the same weights, in bf16.

Rounding to bf16 changes a little of what 4- and 8-bit formats hold; the directory's digest is another one, so an
identity says which of the two was served.
"""

from __future__ import annotations

import json
import secrets
import shutil
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as Inner
from tokenizers import processors

from inferloop.core.errors import ModelFileError
from inferloop.engine.compute.rope import inverse_frequencies
from inferloop.engine.compute.stored import half_split, read_tensor
from inferloop.engine.text.tokenizer import Tokenizer, load_tokenizer
from inferloop.models.cache import cache_root
from inferloop.models.digests import weights_digest
from inferloop.models.headers.header import ModelHeader, TensorInfo
from inferloop.models.headers.tensors import expected_shapes
from inferloop.models.resolve import ModelFiles, open_files

_FORM = "bf16-2"
"""With another number whenever what is written changes."""
_FACTORS = "rope_freqs.weight"


def as_directory(files: ModelFiles, *, cache_dir: Path | None = None) -> ModelFiles:
    """`files` itself when it is a directory, else a converted copy in the cache, made once.

    Raises ModelFileError for a model that cannot be written so: one of another family than llama, or whose positions
    are scaled otherwise than Llama 3 scales them.
    """
    if files.kind == "hf":
        return files
    header = files.header
    named = expected_shapes(header.shape, header.structure).keys() | {_FACTORS}
    odd = header.tensors.keys() - named - {"lm_head.weight"}
    if header.shape.architecture != "llama" or header.shape.experts is not None or header.rope.kind != "none" or odd:
        raise ModelFileError(
            f"{files.path}: an engine that reads model directories alone was asked for, and only plain models of the "
            "llama family are converted from GGUF; give the path of the model's own directory"
        )
    target = cache_root(cache_dir) / "directories" / f"{weights_digest(files, cache_dir=cache_dir)[:16]}-{_FORM}"
    if not (target / "config.json").exists():
        part = target.with_name(f"{target.name}.{secrets.token_hex(4)}.part")
        part.mkdir(parents=True)
        try:
            _write(files, part)
            part.replace(target)
        except OSError as problem:
            if not (target / "config.json").exists():  # else another process was faster
                raise ModelFileError(f"{target}: cannot be written: {problem}") from problem
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return open_files(files.model_id, target)


def _write(files: ModelFiles, folder: Path) -> None:
    header = files.header
    _write_weights(header, folder / "model.safetensors")
    tokenizer = load_tokenizer(files)
    (folder / "tokenizer.json").write_text(_with_bos(tokenizer), encoding="utf-8")
    told: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": header.shape.context_length,
        "clean_up_tokenization_spaces": False,
        **tokenizer.special_texts,
    }
    if header.chat_template is not None:
        told["chat_template"] = header.chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(told), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(_config(header), indent=1), encoding="utf-8")


def _with_bos(tokenizer: Tokenizer) -> str:
    """What a GGUF file says by a key, a tokenizer.json says by what it puts around a text."""
    bos, bos_id = tokenizer.special_texts.get("bos_token"), tokenizer.bos_token_id
    if not tokenizer.adds_bos or bos is None or bos_id is None:
        return tokenizer.to_json()
    inner = Inner.from_str(tokenizer.to_json())
    inner.post_processor = processors.TemplateProcessing(single=[bos, "$A"], special_tokens=[(bos, bos_id)])
    return str(inner.to_str())


def _rope_scaling(header: ModelHeader) -> dict[str, Any] | None:
    """GGUF files of Llama 3.1 and later hold the divisors of the frequencies, which are made of four numbers, three of
    them the same in all releases. Raises ModelFileError for divisors that are not made so."""
    if header.rope.factors_tensor is None:
        return None
    info = header.tensors[header.rope.factors_tensor]
    divisors = read_tensor(info)
    scaled = replace(
        header.rope,
        kind="llama3",
        factor=float(divisors.max()),
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_context_length=8192,
        factors_tensor=None,
    )
    length = header.shape.context_length
    wanted = inverse_frequencies(header.rope, length) / divisors
    if not np.allclose(inverse_frequencies(scaled, length), wanted, rtol=1e-4, atol=0):
        raise ModelFileError(
            f"{info.file}: {info.name} is not how Llama 3 scales positions, so no directory can say it"
        )
    return {
        "rope_type": "llama3",
        "factor": scaled.factor,
        "low_freq_factor": scaled.low_freq_factor,
        "high_freq_factor": scaled.high_freq_factor,
        "original_max_position_embeddings": scaled.original_context_length,
    }


def _config(header: ModelHeader) -> dict[str, Any]:
    shape, eos, scaling = header.shape, list(header.eos_token_ids), _rope_scaling(header)
    return {
        **({} if scaling is None else {"rope_scaling": scaling}),
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.context_length,
        "rms_norm_eps": header.norm_eps,
        "rope_theta": header.rope.theta,
        "hidden_act": "silu",
        "tie_word_embeddings": shape.tied_embeddings,
        "bos_token_id": header.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos,
    }


def _write_weights(header: ModelHeader, path: Path) -> None:
    """A tensor at a time, in the order of the header: the whole model is never in memory."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for info in _written(header):
        begin, end = end, end + 2 * int(np.prod(info.shape, dtype=np.int64))
        entries[info.name] = {"dtype": "BF16", "shape": list(info.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for info in _written(header):
            file.write(to_bf16(half_split(read_tensor(info), info, header.shape.head_dim)).tobytes())


def _written(header: ModelHeader) -> Iterator[TensorInfo]:
    names = expected_shapes(header.shape, header.structure)
    return (info for name, info in header.tensors.items() if name in names)


def to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Rounded to nearest, ties to even. Values are finite."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded: NDArray[np.uint16] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return rounded
