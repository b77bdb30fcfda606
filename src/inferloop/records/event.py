"""One row per attempt at a replica, one row per request at the gateway; joined by trace id.

Times are monotonic nanoseconds of the host that wrote the row, anchored once by `t_wall_ns`; never subtract times of
two hosts. None means "not reached" or "not known", never zero. No field holds text or token ids: captured content
lives in another file, which `content_ref` names.
"""

from __future__ import annotations

from dataclasses import dataclass

from inferloop.core.request import FinishReason

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaEvent:
    """What one replica did for one attempt. Written exactly once, on success, error and abort alike.

    error_class is None on success; else http_4xx, overloaded, engine, timeout, disconnect,
    unread, cancelled or drain.
    token_offsets_us[i] is when output token i was emitted, in microseconds after the first one; tokens emitted
    together share an offset. t_wall_ns is the wall clock at t_engine_in_ns. identity_digest is
    models.identity.ServingIdentity.digest of the configuration that answered.

    An attempt with several choices (n, several prompts) is one row still. num_input_tokens and num_cached_tokens count
    every prompt once, num_output_tokens the tokens of all choices, and token_offsets_us has them merged in order of
    time, so its gaps are not those of one choice. First and last token are those of the whole answer; tokenize, queue
    and prefill are of the choice with the first token; preemptions and detokenize_ms are sums. finish_reason is length
    when any choice ended so.
    """

    event_id: str
    trace_id: str
    span_id: str
    request_id: str
    identity_digest: str
    model_id: str
    t_engine_in_ns: int
    t_wall_ns: int
    finish_reason: FinishReason
    attempt: int = 1
    parent_id: str | None = None
    service: str | None = None
    traffic_class: str | None = None
    tenant_hash: str | None = None
    consent: tuple[str, ...] = ()
    replica: str | None = None
    node: str | None = None
    region: str | None = None
    hardware: str | None = None
    device_ids: tuple[str, ...] = ()
    t_tokenized_ns: int | None = None
    t_scheduled_ns: int | None = None
    t_first_token_ns: int | None = None
    t_last_token_ns: int | None = None
    t_sent_ns: int | None = None
    tokenize_ms: float | None = None
    queue_ms: float | None = None
    prefill_ms: float | None = None
    decode_ms: float | None = None
    detokenize_ms: float | None = None
    preempted_ms: float = 0.0
    num_preemptions: int = 0
    num_input_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    token_offsets_us: tuple[int, ...] = ()
    error_class: str | None = None
    status: int | None = None
    sampling_digest: str | None = None
    eval_tags: tuple[str, ...] = ()
    feedback: float | None = None
    cold_start_ms: float | None = None
    inclusion_probability: float = 1.0
    content_ref: str | None = None
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class HopEvent:
    """One model asked for one request, where a service has several. A replica's row joins by its parent_id, which is
    this span_id; this parent_id is the request's own span.

    route says why this model: default, class <name>, named, or escalated:<checks that the answer before failed>; why
    says how its replica was chosen. Tokens are what the answer's usage says, None where it came to none; cost_usd is
    those at the contract's price.
    """

    model: str
    route: str
    span_id: str
    parent_id: str
    t_start_ns: int
    t_end_ns: int
    replica: str | None = None
    identity_digest: str | None = None
    why: str | None = None
    num_retries: int = 0
    status: int | None = None
    error_class: str | None = None
    failed_checks: tuple[str, ...] = ()
    delivered: bool = False
    num_input_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_output_tokens: int | None = None
    cost_usd: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayEvent:
    """What the gateway saw of one request. `attempts` of the replicas join by trace id.

    why says how the replica was chosen; resume_points are the output token counts at which a stream was taken up
    again on another replica. admission is accepted, queued or refused:<reason>. parent_id is the caller's span.

    Where a service has several models, model, replica and identity_digest are of the answer that was delivered, hops
    tells of every model that was asked, in order, and cost_usd is the sum of what is known of theirs.
    escalation_missed says why an answer that failed its checks was delivered although another model was left to ask.
    """

    event_id: str
    trace_id: str
    span_id: str
    request_id: str
    t_router_in_ns: int
    t_wall_ns: int
    status: int | None
    parent_id: str | None = None
    t_first_byte_ns: int | None = None
    t_last_byte_ns: int | None = None
    network_ms: float | None = None
    service: str | None = None
    traffic_class: str | None = None
    tenant_hash: str | None = None
    model: str | None = None
    replica: str | None = None
    identity_digest: str | None = None
    """As the replica that answered told it; None when none did, or when it does not say."""
    why: str | None = None
    num_retries: int = 0
    resume_points: tuple[int, ...] = ()
    admission: str = "accepted"
    error_class: str | None = None
    hops: tuple[HopEvent, ...] = ()
    escalation_missed: str | None = None
    cost_usd: float | None = None
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What was said in one choice of an attempt, when the contract's privacy allows to keep it; one row for each choice
    that was begun. `text` fields only at level text."""

    event_id: str
    input_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    input_text: str | None = None
    output_text: str | None = None
    choice: int = 0
    schema_version: int = SCHEMA_VERSION
