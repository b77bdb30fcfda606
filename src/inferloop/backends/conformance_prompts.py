"""The checks of what is asked about prompts rather than answers: their log-probabilities, and their vectors."""

from __future__ import annotations

import base64
import math
import struct
from typing import Any

from inferloop.backends.conformance_target import COMPLETIONS, RefusedCheckError, Target, completion, require

EMBEDDINGS = "/v1/embeddings"
_BESIDE_OTHERS = 0.5
"""By how much a log-probability may differ where the same is computed in another batch, in 16 bits."""
_TEXT = "The river rises in the hills, passes three old mills and a town, and meets the sea behind the dunes. "


async def check_echo_logprobs(t: Target) -> None:
    """A prompt's own log-probabilities, which a prefix cache must not change, nor make of another prompt's."""
    cold = await _echoed(t, _TEXT * 4)
    for name, prompt in (("asked again", _TEXT * 4), ("with a shared beginning", _TEXT * 2 + "Why?")):
        values = await _echoed(t, prompt)
        num_same = len(cold) if prompt == _TEXT * 4 else len(values) - 4
        worst = max(abs(a - b) for a, b in zip(cold[:num_same], values[:num_same], strict=True))
        require(worst < _BESIDE_OTHERS, f"{name}, a log-probability differs by {worst:g}")


async def _echoed(t: Target, prompt: str) -> list[float]:
    answer = await t.post(COMPLETIONS, completion(prompt, echo=True, logprobs=1, max_tokens=1))
    if answer.status == 400 and answer.error["param"] in ("echo", "logprobs"):
        raise RefusedCheckError(answer.error["message"])
    require(answer.status == 200, f"HTTP {answer.status}: {answer.body[:300]!r}")
    choice, usage = answer.json["choices"][0], answer.json["usage"]
    require(choice["text"].startswith(prompt), "the text does not begin with the prompt")
    logprobs = choice["logprobs"]
    told: list[float | None] = logprobs["token_logprobs"][: usage["prompt_tokens"]]
    first, values = told[0], [value for value in told[1:] if value is not None]
    require(first is None and logprobs["top_logprobs"][0] is None, "something comes before the first token")
    num = usage["prompt_tokens"] + usage["completion_tokens"]
    for column in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        require(len(logprobs[column]) == num, f"{len(logprobs[column])} {column} for {num} tokens")
    require(len(values) == len(told) - 1, "a log-probability is missing")
    require(all(value <= 1e-6 for value in values), "a log-probability above 0")
    return values


async def check_embeddings(t: Target) -> None:
    """Vectors in the order of their texts, the same in both encodings; what does not fit is refused at once."""
    texts = ["The cat sleeps.", _TEXT, "The cat sleeps."]
    answer = await t.post(EMBEDDINGS, {"input": texts, "encoding_format": "float"})
    if answer.status in (404, 405) or (answer.status == 400 and answer.error["code"] == "unsupported_endpoint"):
        raise RefusedCheckError(f"{EMBEDDINGS} is not offered (HTTP {answer.status})")
    require(answer.status == 200, f"HTTP {answer.status}: {answer.body[:300]!r}")
    entries = answer.json["data"]
    require([entry["index"] for entry in entries] == [0, 1, 2], f"{len(entries)} vectors, out of order")
    vectors = [entry["embedding"] for entry in entries]
    require(len(set(map(len, vectors))) == 1, "vectors of several sizes")
    require(_cosine(vectors[0], vectors[2]) > 0.99 > _cosine(vectors[0], vectors[1]), "equal texts are not alike")
    usage = answer.json["usage"]
    require(usage["prompt_tokens"] == usage["total_tokens"] > 0, f"usage {usage}")
    coded = (await t.ok(EMBEDDINGS, {"input": texts[0], "encoding_format": "base64"}))["data"][0]["embedding"]
    data = base64.b64decode(coded)
    decoded = struct.unpack(f"<{len(data) // 4}f", data)
    require(_cosine(list(decoded), vectors[0]) > 0.99, "base64 is another vector")
    for wrong in ({"input": ""}, {"input": texts, "dimensions": 10**6}, {"input": texts, "no_such_parameter": 1}):
        refused = await t.post(EMBEDDINGS, wrong)
        require(refused.status == 400 and bool(refused.error["param"]), f"{wrong}: HTTP {refused.status}")


def _cosine(a: list[Any], b: list[Any]) -> float:
    product = sum(x * y for x, y in zip(a, b, strict=True))
    return float(product / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b)))
