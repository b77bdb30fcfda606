"""Run a suite against a URL. Nothing a case does can take it out of the count."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from inferloop.backends.endpoint import Endpoint
from inferloop.backends.entry import check_entry, unusable
from inferloop.backends.http import HttpClient, HttpError
from inferloop.contract.workload import QualityGate
from inferloop.core.errors import UsageError
from inferloop.evals.ask import Asker, CaseSkippedError
from inferloop.evals.gate import judge
from inferloop.evals.scorer import Observation, Score, score
from inferloop.evals.suite import Case, Suite
from inferloop.evals.tally import Tally


@dataclass(frozen=True, slots=True)
class CaseResult:
    """One case's outcome; `text` is what the model answered, when it did."""

    case: Case
    score: Score
    text: str | None = None


@dataclass(frozen=True, slots=True)
class EvalRun:
    """A suite's results at one target, in the suite's order."""

    suite: Suite
    target: str
    model: str
    results: tuple[CaseResult, ...]
    identity: Mapping[str, Any] | None = None
    """The serving identity that the target tells of itself, with its digest; None when it tells none."""
    notes: tuple[str, ...] = ()

    @property
    def identity_digest(self) -> str | None:
        return None if self.identity is None else str(self.identity["digest"])

    @property
    def tally(self) -> Tally:
        return Tally.of(result.score for result in self.results)

    @property
    def by_tag(self) -> dict[str, Tally]:
        tags = sorted({tag for result in self.results for tag in result.case.tags})
        return {tag: Tally.of(r.score for r in self.results if tag in r.case.tags) for tag in tags}

    def summary(self, gate: QualityGate | None = None) -> dict[str, Any]:
        """The `eval` object of summary.json, as plain JSON values. Without a gate the verdict is "not declared"."""
        tally = self.tally
        judged = judge(gate, tally) if gate else None
        return {
            "verdict": judged.verdict if judged else "not declared",
            "reasons": list(judged.reasons) if judged else [],
            "notes": list(self.notes),
            "minimum": gate.minimum if gate else None,
            "suite": {"name": self.suite.name, "version": self.suite.version, "digest": self.suite.digest},
            "target": self.target,
            "model": self.model,
            "identity_digest": self.identity_digest,
            "cases": tally.counts,
            "score": tally.score,
            "interval": list(tally.interval),
            "bounds": {"worst": tally.worst, "best": tally.best},
            "mde": tally.mde,
            "by_tag": {tag: {**t.counts, "score": t.score} for tag, t in self.by_tag.items()},
            "results": [_row(result) for result in self.results],
        }


async def run_suite(
    suite: Suite,
    at: Endpoint | str,
    *,
    model: str | None = None,
    concurrency: int = 4,
    timeout_s: float = 60.0,
    on_result: Callable[[CaseResult], None] | None = None,
) -> EvalRun:
    """Ask every case of `suite`, at most `concurrency` at once. `model` None: the first that the target lists.

    `on_result` is called as each case ends. Raises UsageError for a model that the target does not list,
    EnvironmentLacksError when the target does not say which model it has, is not trusted, or wants a key that we have
    not; after that every failure is a result.
    """
    if concurrency < 1:
        raise ValueError(f"concurrency must be >= 1, got {concurrency}")
    client = HttpClient(at)
    try:
        name = await _model(client, model)
        await check_entry(client)
        asker = Asker(client, name, timeout_s=timeout_s)
        free = asyncio.Semaphore(concurrency)

        async def one(case: Case) -> CaseResult:
            async with free:
                result = await _run_case(asker, case)
            if on_result is not None:
                on_result(result)
            return result

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(case)) for case in suite.cases]
        results, identity = tuple(task.result() for task in tasks), await _identity(client)
        return EvalRun(suite, client.endpoint.url, name, results, identity, client.endpoint.caveats)
    finally:
        await client.close()


async def _run_case(asker: Asker, case: Case) -> CaseResult:
    try:
        seen = await asker.observe(case)
    except HttpError as error:
        return CaseResult(case, Score("errored", None, f"{error.kind}: {error}"))
    except CaseSkippedError as error:
        return CaseResult(case, Score("skipped", None, str(error)))
    return CaseResult(case, score(case, seen), _text(seen))


def _text(seen: Observation) -> str | None:
    return seen.reply.text if seen.reply else None


async def _model(client: HttpClient, asked: str | None) -> str:
    """The one that was asked for, or the first that is listed. A target that lists none may have what is asked for."""
    try:
        names = [str(entry["id"]) for entry in (await client.get_json("/v1/models"))["data"]]
        first = names[0]
    except (HttpError, KeyError, IndexError, TypeError) as error:
        if asked is not None:
            return asked
        told = error if isinstance(error, HttpError) else HttpError("protocol", "/v1/models lists no model")
        raise unusable(client.endpoint, told) from error
    if asked is not None and asked not in names:
        raise UsageError(f"{client.endpoint.url}: no model {asked!r} (it has: {', '.join(names)})")
    return asked or first


async def _identity(client: HttpClient) -> dict[str, Any] | None:
    try:
        told = await client.get_json("/identity")
    except (HttpError, ValueError):
        return None
    return told if isinstance(told, dict) and isinstance(told.get("digest"), str) else None


def _row(result: CaseResult) -> dict[str, Any]:
    case = result.case
    return {
        "id": case.id,
        "kind": case.kind,
        "tags": list(case.tags),
        "status": result.score.status,
        "score": result.score.value,
        "reason": result.score.reason,
        "why": case.why,
        "digest": case.digest,
        "text": result.text,
    }
