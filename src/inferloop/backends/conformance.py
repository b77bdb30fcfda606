"""Does a server speak the API that inferloop relies on? Plain check functions over a URL, the same for every engine.

A check passes, fails with a reason, or finds that the server refuses the feature by design (it says so with an error
instead of a wrong answer), which is honest and therefore not a failure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from inferloop.backends.conformance_checks import CHECKS
from inferloop.backends.conformance_target import FailedCheckError, RefusedCheckError, Target
from inferloop.backends.endpoint import Endpoint
from inferloop.backends.http import HttpClient, HttpError
from inferloop.backends.protocols import Capability

Outcome = Literal["passed", "failed", "refused"]
Check = Callable[[Target], Awaitable[None]]

__all__ = ["CHECKS", "Check", "CheckResult", "Outcome", "Target", "by_design", "run_check", "run_checks"]


@dataclass(frozen=True, slots=True)
class CheckResult:
    """`reason` says what was wrong or what is refused; empty when passed."""

    name: str
    outcome: Outcome
    reason: str = ""


async def run_checks(
    at: Endpoint | str, model: str, *, checks: Sequence[Check] = CHECKS, timeout_s: float = 60.0
) -> list[CheckResult]:
    """Run the checks one after the other against a server that is ready. `timeout_s` bounds each one."""
    client = HttpClient(at)
    try:
        return [await run_check(check, Target(client, model), timeout_s=timeout_s) for check in checks]
    finally:
        await client.close()


async def run_check(check: Check, target: Target, *, timeout_s: float = 60.0) -> CheckResult:
    name = check.__name__.removeprefix("check_")
    try:
        async with asyncio.timeout(timeout_s):
            await check(target)
    except RefusedCheckError as refusal:
        return CheckResult(name, "refused", str(refusal))
    except FailedCheckError as failure:
        return CheckResult(name, "failed", str(failure))
    except TimeoutError:
        return CheckResult(name, "failed", f"no end within {timeout_s:g} s")
    except HttpError as error:
        return CheckResult(name, "failed", f"{error.kind}: {error}")
    except (KeyError, IndexError, TypeError, ValueError) as error:
        return CheckResult(name, "failed", f"unexpected shape of an answer: {type(error).__name__}: {error}")
    return CheckResult(name, "passed")


CAPABILITY_OF = {
    "prompt_usage": "tokenize",
    "token_prompt": "tokenize",
    "detokenize": "tokenize",
    "logprobs": "logprobs",
    "echo_logprobs": "prompt_logprobs",
    "embeddings": "embeddings",
    "metrics": "metrics",
}
"""What of an engine's capabilities a check is about, where it is about one that engines may lack."""


def by_design(results: Sequence[CheckResult], capabilities: Mapping[str, Capability]) -> list[CheckResult]:
    """The same results, where what failed for a capability that the engine is known to lack is refused by design."""
    told = []
    for result in results:
        lacks = capabilities.get(CAPABILITY_OF.get(result.name, ""))
        if result.outcome == "failed" and lacks is not None and lacks.support == "no":
            result = replace(result, outcome="refused", reason=f"by design: {lacks.why}")
        told.append(result)
    return told
