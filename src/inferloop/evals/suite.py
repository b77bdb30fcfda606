"""A quality suite as values. `evals.load` makes them from files; nothing else parses suites.

A case saves its input, the behaviour it expects, how that is scored, and why a failure matters.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from inferloop.core.digest import digest_of

CaseKind = Literal["exact", "contains", "regex", "json", "protocol", "template"]
KINDS: tuple[CaseKind, ...] = ("exact", "contains", "regex", "json", "protocol", "template")

PROTOCOL_KEYS = (
    "status",
    "param",
    "text",
    "lacks",
    "finish_reason",
    "prompt_tokens",
    "completion_tokens",
    "usage_exact",
    "stream_equal",
    "round_trip",
)
"""What a protocol case may expect; each key is one check, all must hold:

    status             HTTP status of the answer
    param              the field that an error object names
    text               the whole answer
    lacks              strings that must not occur in the answer (a stop string is never leaked)
    finish_reason      stop | length
    prompt_tokens      usage, exactly
    completion_tokens  usage, exactly
    usage_exact        usage.prompt_tokens is what /tokenize counts, and the total is the sum of its parts
    stream_equal       streaming the same request gives the same text, finish reason and usage
    round_trip         /detokenize of /tokenize of the prompt is the prompt
"""


@dataclass(frozen=True, slots=True)
class Case:
    """One input with its expectation. Exactly one of `messages` and `prompt` is set.

    `expect` by kind: exact, regex: text; contains: texts; json: any JSON value; template: token ids; protocol: a
    mapping over PROTOCOL_KEYS. `sampling` and `request` are fields of the request body; `request` may be wrong on
    purpose (a null value removes the field).
    """

    id: str
    kind: CaseKind
    why: str
    expect: Any
    messages: tuple[dict[str, Any], ...] | None = None
    prompt: str | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    request: dict[str, Any] = field(default_factory=dict)
    tags: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """sha256 of all that decides the score; the explanation and the tags may be reworded freely."""
        return digest_of(replace(self, why="", tags=()))

    @property
    def body(self) -> dict[str, Any]:
        """The request body, without the model's name."""
        start = {"messages": list(self.messages)} if self.messages is not None else {"prompt": self.prompt}
        body = {**start, "temperature": 0, **self.sampling, **self.request}
        return {name: value for name, value in body.items() if value is not None}

    @property
    def endpoint(self) -> str:
        return "/v1/chat/completions" if self.messages is not None else "/v1/completions"


@dataclass(frozen=True, slots=True)
class Suite:
    """`source` is the file it came from and is not part of the digest."""

    name: str
    version: int
    cases: tuple[Case, ...]
    description: str = ""
    source: str | None = None

    @property
    def digest(self) -> str:
        """sha256 over name, version and the cases' digests, in order."""
        return digest_of([self.name, self.version, [case.digest for case in self.cases]])
