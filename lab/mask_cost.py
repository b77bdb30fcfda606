"""What structured output costs a step: the masks of 32 sequences, computed while nothing else of the batch goes on.

    python lab/mask_cost.py --sequences 32 --steps 150

Each sequence walks through a grammar at random among the allowed tokens, which is harder on the parser than a model's
text; one that has ended starts anew. Per grammar and step: the time to fill all rows, and to take in all tokens, as CPU
time of the thread that does it, so that other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator

import numpy as np

from inferloop.core.request import Grammar
from inferloop.engine.text.codec import Codec
from inferloop.models.resolve import resolve


def grammars() -> Iterator[tuple[str, Grammar]]:
    rng = random.Random(0)
    leaf = {"type": "array", "items": {"enum": [f"value {k}" for k in range(20)]}}
    text = {"type": ["string", "null"], "pattern": "^[a-z]{1,20}@[a-z]+$"}
    group = {"type": "object", "properties": {f"f{j}": text if j % 2 else leaf for j in range(6)}}
    words = ["".join(rng.choices("abcdefghijklmnop ", k=14)) for _ in range(3500)]
    expression = 'start: sum\nsum: product ("+" product)*\nproduct: atom ("*" atom)*\natom: /[0-9]+/ | "(" sum ")"'
    yield "any object", Grammar("json_object")
    yield "schema of 30 KB", schema({"type": "object", "properties": {f"group {i}": group for i in range(50)}})
    yield "any of 200 objects", schema({"anyOf": [named(i) for i in range(200)]})
    yield "3,500 choices", Grammar("regex", "|".join(words))
    yield "nested repetition", Grammar("regex", "([a-z]{1,50} ){1,60}x")
    yield "any text of 1 to 4000", Grammar("regex", "(?s:.{1,4000})")
    yield "recursive expression", Grammar("lark", expression)


def schema(value: object) -> Grammar:
    return Grammar("json_schema", json.dumps(value))


def named(i: int) -> dict[str, object]:
    fields = {"kind": {"const": f"kind {i}"}, "note": {"type": "string"}, f"only {i}": {"type": "number"}}
    return {"type": "object", "properties": fields, "required": ["kind"], "additionalProperties": False}


def walk(codec: Codec, grammar: Grammar, num_sequences: int, num_steps: int) -> tuple[list[float], list[float]]:
    """Milliseconds per step: to fill all rows, to take in all tokens."""
    rng = random.Random(1)
    end = codec.tokenizer.eos_token_ids[0]
    masks = [codec.compile_grammar(grammar) for _ in range(num_sequences)]
    rows = np.zeros((num_sequences, -(-codec.tokenizer.vocab_size // 32)), np.uint32)
    fills, accepts = list[float](), list[float]()
    for _ in range(num_steps):
        start = time.thread_time()
        for mask, row in zip(masks, rows, strict=True):
            mask.fill(row)
        filled = time.thread_time()
        fills.append((filled - start) * 1e3)
        bits = np.unpackbits(rows.view(np.uint8), axis=1, bitorder="little")
        chosen = [rng.choice(np.flatnonzero(row)) for row in bits]
        start = time.thread_time()
        for mask, token in zip(masks, chosen, strict=True):
            mask.accept([int(token)])
        accepts.append((time.thread_time() - start) * 1e3)
        masks = [
            codec.compile_grammar(grammar) if token == end or mask.failed else mask
            for mask, token in zip(masks, chosen, strict=True)
        ]
    return fills, accepts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--steps", type=int, default=150)
    options = parser.parse_args()
    codec = Codec(resolve(options.model))
    codec.compile_grammar(Grammar("regex", "a"))  # prepares the vocabulary
    print(f"{f'ms per step of {options.sequences}':26}  fill p50     p99     max  accept p50     p99")
    for name, grammar in grammars():
        fills, accepts = walk(codec, grammar, options.sequences, options.steps)
        fill, accept = np.percentile(fills, [50, 99, 100]), np.percentile(accepts, [50, 99])
        print(f"{name:26}{fill[0]:10.2f}{fill[1]:8.2f}{fill[2]:8.2f}{accept[0]:12.2f}{accept[1]:8.2f}")


if __name__ == "__main__":
    main()
