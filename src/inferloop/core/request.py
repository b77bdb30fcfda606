"""What a request is, before and after tokenization."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from inferloop.core.ids import TraceContext

FinishReason = Literal["stop", "length", "abort", "error"]
Thinking = Literal["no", "may", "opened"]
GrammarKind = Literal["json_object", "json_schema", "regex", "lark"]
Role = Literal["system", "user", "assistant"]
BATCH_PRIORITY = 1 << 20
"""From here on a request is background work, which nobody waits for. Lower goes first."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the whole answer has to be. `text` is the schema (as JSON), the expression or the grammar; json_object,
    any object at all, needs none."""

    kind: GrammarKind
    text: str = ""
    param: str = field(default="grammar", compare=False)
    """The request's field that it came in; errors name it."""
    thinking: Thinking = "no"
    """Whether reasoning in think tags stands before what the grammar binds; `opened`: the prompt ends inside them."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen. Already validated: values are finite and in range.

    temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off. `seed` None means a fresh one per request.
    `max_tokens` None means what remains of the context, 0 that the prompt is computed and nothing generated.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    cut_max_tokens: bool = False
    """`max_tokens` is a default that the caller did not choose: what does not fit is cut, not refused."""
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_logprobs: int | None = None
    """None: not asked for. n >= 0: the chosen token's log-probability and the n most likely ones."""
    num_prompt_logprobs: int | None = None
    """The same for the prompt's own tokens, each after those before it: by the model alone, whatever is set here."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True)
class AdapterUse:
    """The low-rank adapter that a request goes through: where the runner has it, and the digest of its content, which
    is what tells it apart. Whoever makes one keeps the adapter there until the request has ended."""

    slot: int
    digest: str


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """One sequence to generate, as the engine sees it: ids in, ids out."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling
    trace: TraceContext
    t_engine_in_ns: int
    priority: int = 0
    cache_salt: str = ""
    sheddable: bool = True
    """May be given up when its first token would come too late; not if it is one part of a larger answer."""
    pool: bool = False
    """Nothing is generated: the sum of the prompt's last hidden states is wanted."""
    adapter: AdapterUse | None = None


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a prompt: the first `num_tokens` tokens of the one endless text that `key` alone determines.

    Consecutive segments of one role make one message; what a chat template puts around a message counts towards its
    tokens.
    """

    key: int
    num_tokens: int
    role: Role = "user"


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """One request of a sampled workload: when, how long and what it repeats; no text.

    `at_s` is seconds after the start of the window or, when `after` is the index of an earlier request, after that
    one's end: the time that a user thinks or a tool runs. Requests of one `session` are the turns of a conversation:
    when one fails, those after it are never sent. Without a session the next is sent whatever became of the one before.
    Requests whose leading segments are equal begin with the same tokens; a later turn of a conversation begins with
    all segments of the one before, then what was answered. The last segment is the user's.
    """

    index: int
    at_s: float
    segments: tuple[Segment, ...]
    output_tokens: int
    traffic_class: str = "default"
    after: int | None = None
    session: int | None = None

    @property
    def input_tokens(self) -> int:
        return sum(segment.num_tokens for segment in self.segments)
