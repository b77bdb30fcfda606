"""The two ways to be a backend: generate in this process, or be launched as a process that speaks HTTP."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from msgspec import Struct

from inferloop.core.ids import TraceContext
from inferloop.core.request import FinishReason, Sampling
from inferloop.core.secret import Secret
from inferloop.engine.schedule.step import Float32, TokenLogprob
from inferloop.engine.stats import EngineStats
from inferloop.engine.text.answer import PLAIN_STYLE, AnswerStyle
from inferloop.models.identity import ServingIdentity


@dataclass(frozen=True, slots=True)
class Prompt:
    """Exactly one of the first three is set. Messages are OpenAI chat messages, already checked; their `tools`, in
    OpenAI's form too, are shown to the model. `variables` are for their chat template to read, beside what it is always
    given."""

    messages: tuple[dict[str, Any], ...] | None = None
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    tools: tuple[dict[str, Any], ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class ServedAdapter:
    """A low-rank adapter that requests may name as their model. One that is loaded later under the same name is
    another, whatever it holds. `digest`: of its content; `identity`: of the model with it."""

    name: str
    path: Path
    identity: ServingIdentity
    digest: str
    rank: int


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A validated request at the door of a Generator."""

    request_id: str
    trace: TraceContext
    prompt: Prompt
    sampling: Sampling
    t_engine_in_ns: int
    priority: int = 0
    cache_salt: str = ""
    """Prompts share what is cached only with prompts under the same salt."""
    sheddable: bool = True
    """See TokenRequest."""
    n: int = 1
    """How many choices of this prompt come at once, this one included."""
    num_choices: int = 1
    """The same of all prompts of one HTTP request."""
    adapter: ServedAdapter | None = None


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Where the time of one request went; monotonic ns of the replica's host. None: that stage was not reached."""

    t_engine_in_ns: int
    t_tokenized_ns: int | None = None
    t_scheduled_ns: int | None = None
    t_first_token_ns: int | None = None
    t_last_token_ns: int | None = None
    detokenize_ns: int = 0
    preempted_ns: int = 0
    num_preemptions: int = 0


class Delta(Struct, frozen=True, gc=False):
    """A piece of the answer. `text` may be empty while bytes of a character or a possible stop string are held back.

    The first delta of a request has `prompt_token_ids` and `times` as far as known; the last one has `finish_reason`
    and the final `times`.
    """

    text: str
    token_ids: tuple[int, ...]
    t_ns: int
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    """When asked for, in the first delta: of the prompt's tokens from the second on."""
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """Which stop string or stop token id ended it; None for the model's own end token or a length stop."""
    times: StageTimes | None = None


@dataclass(frozen=True, slots=True)
class EmbedRequest:
    """A validated prompt to make one vector of; ids as `TextCodec.render` gives them."""

    request_id: str
    trace: TraceContext
    token_ids: tuple[int, ...]
    t_engine_in_ns: int
    t_tokenized_ns: int
    priority: int = 0
    cache_salt: str = ""
    adapter: ServedAdapter | None = None


@dataclass(frozen=True, slots=True)
class Embedding:
    """`vector` (EmbeddingInfo.size,) is the mean of the prompt's last hidden states, after the final norm, scaled to
    length 1. `t_ns`: when it was there."""

    vector: Float32
    t_ns: int
    times: StageTimes


@dataclass(frozen=True, slots=True)
class EmbeddingInfo:
    """`size` of every vector, and the longest prompt that gives one."""

    size: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class GeneratorInfo:
    """What a Generator is and can take."""

    model_id: str
    context_length: int
    identity: ServingIdentity
    vocab_size: int
    structured_output: bool = False
    """Takes requests with `sampling.grammar`."""
    answer_style: AnswerStyle = PLAIN_STYLE
    """How reasoning and calls stand in its answers."""
    fixed_answer: bool = False
    """Says the same to every request, so that no answer can or need be forced."""
    scoring: bool = False
    """Takes requests with `sampling.num_prompt_logprobs`, and with max_tokens 0."""
    embedding: EmbeddingInfo | None = None
    """What is known when it is an Embedder as well."""
    adapters: Mapping[str, ServedAdapter] = field(default_factory=dict)
    """Those loaded now, by name."""
    takes_adapters: bool = False
    """It is an AdapterHost."""


class Generator(Protocol):
    """Generates in this process. Closing the iterator early (aclose) aborts the request."""

    def describe(self) -> tuple[GeneratorInfo, EngineStats]: ...

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        """Raises RequestError (before any work) for what cannot be served, OverloadedError when the queue is full."""
        ...


@dataclass(frozen=True, slots=True)
class Preview:
    """What a request comes to when it is generated: its prompt as text and as the ids that the engine gets, and how
    many tokens it may generate at most."""

    text: str
    token_ids: tuple[int, ...]
    max_tokens: int


@runtime_checkable
class TextCodec(Protocol):
    """What a Generator with a real tokenizer offers beside generating: for /tokenize, /detokenize and render."""

    def render(
        self,
        prompt: Prompt,
        *,
        add_generation_prompt: bool = True,
        add_special_tokens: bool = True,
        max_tokens: int | None = None,
    ) -> tuple[int, ...]:
        """The ids of a prompt: as `generate` has them, or a conversation without what begins the answer, or a text
        without the tokens that begin every text. What is more than `max_tokens` however it is cut may be refused with a
        ContextLengthError instead of being tokenized."""
        ...

    async def preview(self, request: GenerateRequest) -> Preview:
        """Do all that `generate` does before the engine has the request, and raise the same errors."""
        ...

    def decode(self, token_ids: tuple[int, ...]) -> str: ...

    def token_bytes(self, token_id: int) -> bytes:
        """One token alone, its leading space kept, for log-probabilities; often a part of a character only."""
        ...


@runtime_checkable
class Embedder(Protocol):
    """What a Generator whose `GeneratorInfo.embedding` is set offers beside generating. Cancelling aborts."""

    async def embed(self, request: EmbedRequest) -> Embedding:
        """Raises RequestError (before any work) for what cannot be served, OverloadedError when the queue is full."""
        ...


Take = Callable[[int, Delta], None]
"""Takes a delta of one of several requests, which the number tells."""


@runtime_checkable
class Pusher(Protocol):
    """What a Generator offers beside generating that takes several requests at once, and hands deltas on where they
    come up instead of waking somebody for each."""

    async def push(self, requests: Sequence[GenerateRequest], take: Take) -> None:
        """Generate for all, which are of one priority: all get a place in the queue, or none does. `take` is called on
        the event loop, outside of any task, and does not wait.

        Returns when all have ended. Raises as `generate` does, and the first failure of any request or of `take`.
        However it ends, cancelled too, no request is left and `take` is not called any more.
        """
        ...


@runtime_checkable
class AdapterHost(Protocol):
    """What a Generator offers beside generating whose `GeneratorInfo.takes_adapters`. Both change what `describe` tells
    next; answers that have begun keep what they began with."""

    async def load_adapter(self, name: str, path: Path, *, replaces: bool = False) -> ServedAdapter:
        """Raises RequestError for a name that is taken (unless `replaces`) or a limit that is reached, ModelFileError
        for files that are no adapter of this model, OverloadedError when there is no room yet."""
        ...

    async def unload_adapter(self, name: str) -> None:
        """Raises RequestError when there is none of this name."""
        ...


Support = Literal["yes", "no", "partial"]


@dataclass(frozen=True, slots=True)
class Capability:
    """Whether an engine does something, and where it does not, or not all of it, why."""

    support: Support
    why: str = ""


YES = Capability("yes")


@dataclass(frozen=True, slots=True)
class ReadyProbe:
    """Ready when GET `path` answers 200 within `timeout_s` of the start."""

    path: str = "/health/ready"
    timeout_s: float = 120.0


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """A launched engine as a VALUE. fleet/act/process runs it; in `argv` and `env` "{port}" stands for the
    port, and "{replica}" for the replica's name, until it is `filled`.

    `context_length` is what the engine takes when it is known from here; `exact_length` are the fields of a request
    body that make an answer as long as `max_tokens` says, for engines that do not know `ignore_eos`. `settings` are
    what the flags come to, its own defaults included, in the same words for all: threads, KV, batch limits.
    `api_key`: what our own serve is to ask its callers for.
    """

    backend: str
    argv: tuple[str, ...]
    model_id: str
    env: dict[str, str] = field(default_factory=dict)
    ready: ReadyProbe = ReadyProbe()
    capabilities: dict[str, Capability] = field(default_factory=dict)
    drain_timeout_s: float = 30.0
    version: str = ""
    metrics_path: str | None = "/metrics"
    context_length: int | None = None
    exact_length: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    api_key: Secret | None = None

    def filled(self, port: int, replica: str) -> LaunchSpec:
        """As one replica is started."""

        def fill(text: str) -> str:
            return text.replace("{port}", str(port)).replace("{replica}", replica)

        env = {name: fill(value) for name, value in self.env.items()}
        return replace(self, argv=tuple(fill(word) for word in self.argv), env=env)
