"""One request, several answers: which prompt and seed each choice has, and all of them as one stream.

Choice `prompt_index * n + k` is the k-th of the n choices of one prompt, as with OpenAI.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

from inferloop.backends.protocols import Delta, GenerateRequest, Generator
from inferloop.core.request import Sampling
from inferloop.serve.errors import NOT_FAULTS
from inferloop.serve.wire import Call

_Item = tuple[int, Delta] | BaseException | None


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


async def generate_all(
    generator: Generator, requests: Sequence[GenerateRequest]
) -> AsyncGenerator[tuple[int, Delta], None]:
    """Deltas of all requests as they come, with the request's place. Ends when all have ended.

    The first failure of any is raised. However it ends, also by `aclose`, no request is left in the generator.
    """
    if len(requests) == 1:
        async with contextlib.aclosing(generator.generate(requests[0])) as deltas:
            async for delta in deltas:
                yield 0, delta
        return
    # Not bounded: what is not read yet is bounded by max_tokens, as it is inside the generator for one request.
    inbox: asyncio.Queue[_Item] = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(generator, i, request, inbox)) for i, request in enumerate(requests)]
    try:
        num_open = len(tasks)
        while num_open:
            item = await inbox.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(generator: Generator, index: int, request: GenerateRequest, inbox: asyncio.Queue[_Item]) -> None:
    try:
        async with contextlib.aclosing(generator.generate(request)) as deltas:
            async for delta in deltas:
                inbox.put_nowait((index, delta))
    except BaseException as error:
        inbox.put_nowait(error)
        if isinstance(error, NOT_FAULTS):
            raise
    else:
        inbox.put_nowait(None)
