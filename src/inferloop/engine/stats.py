"""What an engine says of itself at one moment; /metrics and /health/progress are made from it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TierStats:
    """The second tier of the prefix cache. `queries` and `hits` count tokens, of prompts beyond what the first tier
    had; the other counters bytes and blocks. `dropped_blocks` were not saved because the disk was behind,
    `damaged_blocks` were found unreadable and removed, `failures` are reads and writes that the system refused."""

    queries: int = 0
    hits: int = 0
    memory_bytes: int = 0
    disk_bytes: int = 0
    loaded_bytes: int = 0
    saved_bytes: int = 0
    dropped_blocks: int = 0
    damaged_blocks: int = 0
    failures: int = 0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot. Whoever was submitted and has not ended is running or waiting, also while a step hangs; the rest is
    as of the last step begun. Counters never decrease."""

    num_running: int = 0
    num_waiting: int = 0
    step_counter: int = 0
    kv_blocks_total: int = 0
    kv_blocks_used: int = 0
    num_preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    tier: TierStats | None = None
    """None: there is no second tier."""
    num_background_waiting: int = 0
    """Of those that wait, the ones that are background work."""
    queue_tokens: int = 0
    """Of the prompts that wait."""
    alive: bool = True
