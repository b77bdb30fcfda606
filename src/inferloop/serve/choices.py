"""One request, several answers: which prompt and seed each choice has, and all of them as one stream.

Choice `prompt_index * n + k` is the k-th of the n choices of one prompt, as with OpenAI.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import replace

from inferloop.backends.protocols import GenerateRequest, Generator, Pusher, Take
from inferloop.core.request import Sampling
from inferloop.serve.wire import Call


def choice_sampling(sampling: Sampling, k: int) -> Sampling:
    """Sampling of the k-th choice of a prompt. Choice 0 is what a request for one choice gets; without a seed every
    choice draws its own in the engine."""
    if sampling.seed is None or k == 0:
        return sampling
    mixed = hashlib.blake2b(b"choice %d of seed %d" % (k, sampling.seed), digest_size=8)
    return replace(sampling, seed=int.from_bytes(mixed.digest(), "little"))


def spread(call: Call, request: GenerateRequest) -> list[GenerateRequest]:
    """One request per choice, in the order of their indices; `request` has all that they share.

    In a whole answer the first choice of a prompt finds out about the prompt for all of them; choices that stream wait
    for nobody.
    """
    several = [choice_sampling(call.sampling, k) for k in range(call.num_per_prompt)]
    if not call.stream:
        several[1:] = [replace(sampling, num_prompt_logprobs=None) for sampling in several[1:]]
    requests = [replace(request, prompt=prompt, sampling=sampling) for prompt in call.prompts for sampling in several]
    # The first token of all is the first choice's, so that it alone decides whether the answer is in time.
    return [replace(one, sheddable=i == 0) for i, one in enumerate(requests)]


async def generate_all(generator: Generator, requests: Sequence[GenerateRequest], take: Take) -> None:
    """`take` gets the deltas of all requests as they come; see Pusher, whose `push` this is for every generator. One
    that is no Pusher is asked for each choice by a task of its own."""
    if isinstance(generator, Pusher):
        await generator.push(requests, take)
        return
    if len(requests) == 1:
        await _pump(generator, 0, requests[0], take)
        return
    tasks = [asyncio.create_task(_pump(generator, i, request, take)) for i, request in enumerate(requests)]
    try:
        for ended in asyncio.as_completed(tasks):
            await ended
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(generator: Generator, index: int, request: GenerateRequest, take: Take) -> None:
    async with contextlib.aclosing(generator.generate(request)) as deltas:
        async for delta in deltas:
            take(index, delta)
