"""What the HTTP side of one replica needs to know. Nothing here changes tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from inferloop.core.ids import new_id
from inferloop.core.units import MIB
from inferloop.serve.keys import ApiKeys


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """`metric_aliases` "vllm" adds the vllm:* names. `capture` none | token_ids | text decides whether `content_path`
    is written at all; events never hold content."""

    replica: str = field(default_factory=lambda: new_id("replica"))
    service: str | None = None
    metric_aliases: str | None = None
    capture: str = "none"
    content_path: Path | None = None
    drain_timeout_s: float = 30.0
    request_timeout_s: float | None = None
    """The longest that a request may take, from its first byte on; None: as long as it wants."""
    max_body_bytes: int = 8 * MIB
    adapter_folder: Path | None = None
    """Adapters below it may be loaded, and any unloaded, over HTTP; None: none."""
    keys: ApiKeys | None = None
    """Whoever asks needs one of them; None: nobody does."""
    node: str | None = None
    region: str | None = None
    hardware: str | None = None
    device_ids: tuple[str, ...] = ()
