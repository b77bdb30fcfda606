"""The workload contract as values. `contract.load` makes them from files; nothing else parses contracts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from inferloop.core.digest import digest_of, plain
from inferloop.core.slo import Slo

Archetype = Literal["chat", "agent", "batch"]
PRECISIONS = (
    *("fp32", "bf16", "fp16", "fp8", "int8"),
    *("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "iq4_nl", "iq4_xs", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k"),
)
CAPTURE_LEVELS = ("none", "token_ids", "text")


@dataclass(frozen=True, slots=True)
class Distribution:
    """A quantity known by some of its quantiles: ((0.5, 1200.0), (0.95, 8000.0)), ascending in both.

    A constant is one point. `contract.quantile.QuantileFunction` turns it into a sampler.
    """

    points: tuple[tuple[float, float], ...]

    def at(self, quantile: float) -> float | None:
        """The declared value at exactly this quantile, if any."""
        return next((value for q, value in self.points if q == quantile), None)


@dataclass(frozen=True, slots=True)
class Rate:
    """Arrival rate in queries per second. p95 and peak are of 1-minute counts over `window`."""

    avg: float
    p95: float
    peak: float
    window: str = "7d"


@dataclass(frozen=True, slots=True)
class Ramp:
    """The rate rises (or falls) from one share of what is asked to another in `seconds`, and then stays."""

    shape: Literal["linear", "exponential"]
    start: float
    seconds: float
    end: float = 1.0


@dataclass(frozen=True, slots=True)
class RateProfile:
    """The course of the rate over time in a file; see `contract.course`. Times are multiplied by `time_scale`.

    `path` is where the file was found and no part of the meaning; `digest` is of what it holds.
    """

    file: str
    path: str
    time_scale: float = 1.0
    digest: str = ""


@dataclass(frozen=True, slots=True)
class TraceSource:
    """Recorded requests to replay; see `contract.trace`. Times are multiplied by `time_scale`, below 1 is faster.

    `max_context`: a request that is longer than the target takes is shortened (clip) or left out (skip). `path` is
    where the file was found and no part of the meaning; `digest` is of what it holds.
    """

    file: str
    path: str
    format: str = "auto"
    time_scale: float = 1.0
    max_requests: int | None = None
    max_context: Literal["clip", "skip"] = "clip"
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """How arrivals are spread: poisson | gamma (with cv) | constant | burst | closed (with users) | trace.

    A closed loop has `users` who each ask, wait for the answer, pause for `think_ms` and ask again.
    """

    process: str = "poisson"
    cv: float = 1.0
    ramp: Ramp | None = None
    users: int | None = None
    think_ms: Distribution | None = None
    trace: TraceSource | None = None


@dataclass(frozen=True, slots=True)
class TrafficClass:
    """A part of the mix with its own lengths; `share` of all queries."""

    name: str
    share: float
    input_tokens: Distribution
    output_tokens: Distribution
    prefix_reuse: float


@dataclass(frozen=True, slots=True)
class Traffic:
    """`classes` is never empty: a contract without a mix has the one class "default".

    Queries come in conversations of `turns`, with pauses of `think_ms`, when turns are declared, and each turn takes
    `queries_per_request` with tools of `tool_ms` between them, when those are. Rates and lengths are of queries.
    """

    qps: Rate
    arrivals: Arrivals
    input_tokens: Distribution
    output_tokens: Distribution
    prefix_reuse: float
    classes: tuple[TrafficClass, ...]
    queries_per_request: Distribution | None = None
    tool_ms: Distribution | None = None
    rate_profile: RateProfile | None = None
    turns: Distribution | None = None
    think_ms: Distribution | None = None


@dataclass(frozen=True, slots=True)
class Precision:
    """None means as stored in the model's files."""

    weights: str | None = None
    activations: str | None = None
    kv: str | None = None


@dataclass(frozen=True, slots=True)
class ModelRef:
    """Catalogue name, local directory, GGUF file or hub id; and the precision it is to run in."""

    id: str
    precision: Precision = Precision()


@dataclass(frozen=True, slots=True)
class Price:
    """Dollars for a million tokens: of input that is computed, of input that the prefix cache had, of output."""

    input: float
    cached_input: float
    output: float

    def usd(self, num_input: int, num_cached: int, num_output: int) -> float:
        """What an answer costs; `num_cached` of the `num_input` tokens came from the cache."""
        computed = max(0, num_input - num_cached)
        return (computed * self.input + num_cached * self.cached_input + num_output * self.output) / 1e6


@dataclass(frozen=True, slots=True)
class NamedModel:
    """One of several models of a service, under the name by which requests, answers and events call it. `replicas` says
    how many are started; of the default model, that is found out by measuring."""

    name: str
    ref: ModelRef
    price: Price | None = None
    replicas: int = 1


@dataclass(frozen=True, slots=True)
class RoutingRule:
    """Requests of one traffic class begin at `model`. `expect` is what their answers have to be, whatever the requests
    themselves ask for."""

    traffic_class: str
    model: str
    expect: Literal["json", "tool_call"] | None = None


@dataclass(frozen=True, slots=True)
class EvalTag:
    """A check of answers by its name. All parts of `contains` occur, none of `lacks` does, and `regex` is found."""

    name: str
    contains: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    regex: str | None = None


@dataclass(frozen=True, slots=True)
class Escalation:
    """An answer of `source` that fails one of the checks is asked for again at the first of `to`, and so on; at most
    `max_hops` models are asked in all. Each check that is off is False, None or empty.

    `low_logprob` is the mean natural log-probability of the answer's tokens below which it counts as unsure;
    `unavailable`: no answer could be had at all. The last model's answer is not checked: there is nobody left to ask.
    """

    source: str
    to: tuple[str, ...]
    max_hops: int
    invalid_json: bool = False
    refused_tool: bool = False
    low_logprob: float | None = None
    eval_tags: tuple[str, ...] = ()
    unavailable: bool = False


@dataclass(frozen=True, slots=True)
class Routing:
    """Which of `models` answers a request: the rule of its class says, else `default`."""

    models: tuple[NamedModel, ...]
    default: str
    rules: tuple[RoutingRule, ...] = ()
    eval_tags: tuple[EvalTag, ...] = ()
    escalation: Escalation | None = None

    def model(self, name: str) -> NamedModel:
        """Raises KeyError."""
        found = next((m for m in self.models if m.name == name), None)
        if found is None:
            raise KeyError(name)
        return found


@dataclass(frozen=True, slots=True)
class QualityGate:
    """A suite (resolved path) whose score must reach `minimum`; `allowed_loss` is against a baseline run.

    `name` is the suite as the contract's folders know it (`evals/assistant.yaml`), the same on every machine.
    """

    suite: str
    minimum: float = 1.0
    allowed_loss: float | None = None
    name: str = ""


@dataclass(frozen=True, slots=True)
class CostCap:
    usd_per_hour: float | None = None
    usd_per_mtok: float | None = None


@dataclass(frozen=True, slots=True)
class Privacy:
    capture: str = "none"
    retain_days: int = 30


@dataclass(frozen=True, slots=True)
class Contract:
    """One service's promise. `source` is the file it came from and is not part of the digest.

    `model` is the one that is measured and judged; with a `routing`, its default.
    """

    version: int
    service: str
    archetype: Archetype
    model: ModelRef
    traffic: Traffic
    slo: Slo
    sla: Slo | None = None
    quality: QualityGate | None = None
    cost: CostCap | None = None
    privacy: Privacy = Privacy()
    routing: Routing | None = None
    source: str | None = None

    @property
    def digest(self) -> str:
        """sha256 of the meaning: equal contracts in YAML, TOML, JSON or the short form have equal digests, wherever
        their folder lies. What a trace and a profile hold is part of it."""
        quality = self.quality and replace(self.quality, suite=self.quality.name or self.quality.suite)
        flow = self.traffic
        trace = flow.arrivals.trace and replace(flow.arrivals.trace, path="")
        profile = flow.rate_profile and replace(flow.rate_profile, path="")
        flow = replace(flow, arrivals=replace(flow.arrivals, trace=trace), rate_profile=profile)
        meaning: dict[str, Any] = plain(replace(self, source=None, quality=quality, traffic=flow))
        if self.routing is None:
            del meaning["routing"]  # a contract of one model means what it meant before there could be several
        return digest_of(meaning)
