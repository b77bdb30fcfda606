"""What an engine may take and keep."""

from __future__ import annotations

from dataclasses import dataclass

from inferloop.engine.compute.runner import RunnerInfo
from inferloop.engine.schedule.policy import ScheduleConfig, default_waiting_tokens


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """`max_step_tokens`: token budget of a step; `max_sequences`: most that run together; `max_waiting`: most that
    queue behind them. `eos_token_ids` end a sequence unless it ignores them. `context_length` below the model's own
    bounds prompt and output together. `share_prefixes`: keep what finished sequences computed, and let those that begin
    alike start from it. `max_waiting_tokens` bounds the prompts that queue (None: by the KV memory). With
    `tpot_objective_ms` a step prefills beside decodes only what lets it keep to that; with `max_ttft_ms` whoever can no
    longer have a first token so soon is given up instead of waiting."""

    eos_token_ids: tuple[int, ...] = ()
    context_length: int | None = None
    max_step_tokens: int = 256
    max_sequences: int = 32
    max_waiting: int = 256
    max_waiting_tokens: int | None = None
    share_prefixes: bool = True
    tpot_objective_ms: float | None = None
    max_ttft_ms: float | None = None

    def for_runner(self, info: RunnerInfo) -> ScheduleConfig:
        """The limits of this engine around one runner."""
        context_length = min(info.context_length, self.context_length or info.context_length)
        num_kv_tokens = info.num_blocks * info.block_size
        return ScheduleConfig(
            vocab_size=info.vocab_size,
            context_length=context_length,
            block_size=info.block_size,
            num_blocks=info.num_blocks,
            num_kv_groups=len(info.kv_group_windows),
            eos_token_ids=self.eos_token_ids,
            max_step_tokens=self.max_step_tokens,
            max_sequences=self.max_sequences,
            max_waiting=self.max_waiting,
            max_waiting_tokens=self.max_waiting_tokens or default_waiting_tokens(context_length, num_kv_tokens),
            share_prefixes=self.share_prefixes,
        )
