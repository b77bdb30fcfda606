"""THE serving identity: everything that decides what text comes out, and its digest. Defined here once.

Two replicas with equal digests answer alike; every event and every run carries the digest. Replica counts, ports
and logging are not part of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from inferloop.core.digest import digest_of


@dataclass(frozen=True, slots=True)
class ServingIdentity:
    """All digests are sha256 hex. `config` holds the engine settings that can change tokens (dtype, determinism,
    chunk sizes, speculation), as plain JSON values."""

    model_id: str
    weights_digest: str
    precision: str
    engine: str
    engine_revision: str
    tokenizer_digest: str
    template_digest: str
    stop_token_ids: tuple[int, ...] = ()
    sampling_defaults: dict[str, float | int | None] = field(default_factory=dict)
    tool_schema_digest: str | None = None
    adapter_digest: str | None = None
    config: dict[str, str | int | float | bool | None] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """sha256 hex over every field."""
        return digest_of(self)

    @property
    def short(self) -> str:
        """The first 12 hex digits, for people and folder names."""
        return self.digest[:12]
