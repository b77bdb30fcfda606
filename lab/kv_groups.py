"""What keys and values of layers with a window would take if they were let go once no query sees them any more.

    python -m lab.kv_groups gemma3-270m /models/Mistral-7B-v0.1 --memory-gib 24
    python -m lab.kv_groups --mistral-7b

One group: all layers keep all tokens, as it is. Two: layers with a window keep whole blocks of its last tokens, and of
the chunk that is being computed. Of each context length the bytes of a sequence, and how many fit beside the weights.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from inferloop.core.shape import ModelShape
from inferloop.models.resolve import resolve

BLOCK, CHUNK = 16, 512
"""Tokens of a block, and computed at once of a prompt."""
MISTRAL = ModelShape("mistral", 32, 4096, 32, 8, 128, 14_336, 32_000, 32_768, False)
"""7B v0.1, whose window is 4096 in every layer (https://arxiv.org/abs/2310.06825)."""


def sequence_bytes(shape: ModelShape, windows: Sequence[int | None], length: int, *, groups: int) -> int:
    """bf16; `windows` of each layer."""
    total = 0
    for heads, window in zip(shape.kv_heads, windows, strict=True):
        kept = length if window is None or groups == 1 else min(length, window + CHUNK + BLOCK)
        total += -(-kept // BLOCK) * BLOCK * 2 * heads * shape.head_dim * 2
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--mistral-7b", action="store_true", help="its shape, without its files, weights in bf16")
    parser.add_argument("--memory-gib", type=float, default=24.0)
    parser.add_argument("--share", type=float, default=0.9, help="of that for weights, keys and values")
    parser.add_argument("--contexts", type=int, nargs="*", default=[1024, 4096, 8192, 32_768])
    options = parser.parse_args()
    found: list[tuple[str, ModelShape, tuple[int | None, ...], int]] = []
    if options.mistral_7b:
        found.append(("mistral-7b", MISTRAL, (4096,) * MISTRAL.num_layers, 2 * MISTRAL.num_params))
    for name in options.models:
        header = resolve(name).header
        windows = tuple(header.structure.window(i) for i in range(header.shape.num_layers))
        found.append((name, header.shape, windows, sum(t.num_bytes for t in header.tensors.values())))
    for name, shape, windows, weights in found:
        room = options.memory_gib * options.share * 2**30 - weights
        local = sum(window is not None for window in windows)
        print(
            f"{name}: {local} of {len(windows)} layers have a window, {shape.kv_bytes_per_token('bf16'):g} B per token"
        )
        for length in options.contexts:
            one, two = (sequence_bytes(shape, windows, length, groups=n) for n in (1, 2))
            print(
                f"  {length:6}: {one / 2**20:7.1f} MiB, of which {1 - two / one:4.0%} nobody reads; "
                f"{int(room // one)} sequences fit, {int(room // two)} in two groups"
            )


if __name__ == "__main__":
    main()
