"""The native runner: one call into C++ computes a whole step, without the interpreter and without torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from inferloop.core.cores import usable_cores
from inferloop.core.digest import canonical_json
from inferloop.core.errors import EnvironmentLacksError, UsageError
from inferloop.engine.compute.adapter import Adapter
from inferloop.engine.compute.native import _native
from inferloop.engine.compute.native.adapters import PackedAdapter, pack_adapter
from inferloop.engine.compute.native.config import NativeConfig
from inferloop.engine.compute.native.level import best_isa
from inferloop.engine.compute.native.memory import BLOCK_SIZE, block_bytes, expert_bytes, partial_bytes
from inferloop.engine.compute.native.pack import Progress, pack_model
from inferloop.engine.compute.native.packed import PackedModel
from inferloop.engine.compute.native.program import check_runs, program_of
from inferloop.engine.compute.native.revisions import ARITHMETIC, LAYOUT
from inferloop.engine.compute.room import check_room, no_room
from inferloop.engine.compute.runner import GiveUp, RunnerInfo, never
from inferloop.engine.schedule.step import Float32, Float64, StepPlan, StepResult, TokenLogprob, UInt8
from inferloop.models.digests import weights_digest
from inferloop.models.headers import ModelHeader
from inferloop.models.resolve import ModelFiles

_ACTIVATIONS = {"group": "q8", "bf16": "bf16", "f32": "fp32"}


class NativeRunner:
    """A sequence's bits depend on its prompt and parameters alone: not on its neighbours, on how its prompt was cut, on
    what was cached or preempted, or on the number of threads. `submit` computes; `wait` hands out."""

    def __init__(self, header: ModelHeader, packed: PackedModel, config: NativeConfig) -> None:
        """`packed` is the model of `header` as `config.weights` asks for it. Use `load` for model files."""
        check_runs(header)
        self._header, self._packed = header, packed
        shape = header.shape
        isa = config.isa or best_isa()
        of_block = block_bytes(shape, config.kv)
        num_blocks = config.num_blocks or config.kv_memory_bytes // of_block
        if num_blocks < 1:
            raise UsageError(f"the KV memory of {config.kv_memory_bytes} bytes holds no block of {of_block} bytes")
        num_threads = usable_cores() if config.num_threads is None else config.num_threads
        if num_threads < 1:
            raise UsageError(f"a step needs a thread, not {num_threads}")
        num_positions = min(shape.context_length, num_blocks * BLOCK_SIZE)
        step_bytes = partial_bytes(shape, num_positions, num_threads) + expert_bytes(shape, num_threads)
        check_room(num_blocks * of_block, step_bytes)
        program = program_of(header, num_positions, packed.vectors.get("rope_factors"))
        try:
            self._engine = _native.Engine(packed, program, isa, config.kv, num_blocks, num_threads)
        except MemoryError as problem:
            raise no_room(num_blocks * of_block, str(problem)) from problem
        except RuntimeError as problem:
            raise EnvironmentLacksError(
                f"the system does not give {num_threads} threads: {problem}", fix="Choose fewer, with --threads."
            ) from problem
        activations = " and ".join(sorted({_ACTIVATIONS[matrix.format] for matrix in packed.matrices.values()}))
        dtype = f"{packed.precision} weights, {activations} activations, {config.kv} kv"
        revision = f"{ARITHMETIC}.{LAYOUT}+{isa}"
        self._info = RunnerInfo(
            name="native",
            revision=revision,
            device="cpu",
            dtype=dtype,
            deterministic=True,
            vocab_size=shape.vocab_size,
            context_length=shape.context_length,
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks,
            hidden_size=shape.hidden_size,
            can_give_up=True,
            weight_bytes=sum(matrix.num_bytes for matrix in packed.matrices.values())
            + sum(vector.nbytes for vector in packed.vectors.values()),
            kv_bytes=num_blocks * of_block,
            block_bytes=of_block,
            block_layout=canonical_json(
                {
                    "revision": revision,
                    "dtype": dtype,
                    "block_size": BLOCK_SIZE,
                    "shape": shape,
                    "rope": header.rope,
                    "structure": header.structure,
                    "norm_eps": header.norm_eps,
                }
            ),
            takes_adapters=True,
        )
        self._submitted: StepPlan | None = None
        self._given_up = False

    @classmethod
    def load(
        cls,
        files: ModelFiles,
        config: NativeConfig,
        *,
        digest: str | None = None,
        cache_dir: Path | None = None,
        progress: Progress | None = None,
    ) -> NativeRunner:
        """Pack the weights into the cache (None: the user's), or map what was packed before; set the KV memory apart.
        `digest` is the weights', where it is known.

        Raises UsageError for a KV memory that holds nothing, EnvironmentLacksError without room for it, ModelFileError
        for files that cannot be read or that this runner has no kernels for.
        """
        check_runs(files.header)
        digest = digest or weights_digest(files, cache_dir=cache_dir)
        packed = pack_model(files.header, config.weights, digest=digest, cache_dir=cache_dir, progress=progress)
        return cls(files.header, packed, config)

    @property
    def info(self) -> RunnerInfo:
        return self._info

    def submit(self, plan: StepPlan, give_up: GiveUp = never) -> None:
        """Compute and sample one step. At most one is in flight. Gives up between layers."""
        assert self._submitted is None, "wait for the step in flight first"
        engine = self._engine
        self._given_up = not engine.layers(plan, None if give_up is never else give_up.cell)
        if not self._given_up:
            mask = plan.sampling.mask
            engine.sample(None if mask is None else mask.result())
        self._submitted = plan

    def wait(self) -> StepResult:
        """The oldest submitted step: per sequence, its tokens up to and including the first that is no right draft."""
        plan, self._submitted = self._submitted, None
        assert plan is not None, "nothing was submitted"
        try:
            return StepResult.of_given_up(plan) if self._given_up else self._result(plan)
        finally:
            self._engine.forget()

    def prepare_adapter(self, adapter: Adapter) -> PackedAdapter:
        """Packed for the products that it changes. Raises ModelFileError for what their formats cannot hold."""
        return pack_adapter(adapter, self._header, self._packed)

    def set_adapter(self, slot: int, prepared: object | None) -> None:
        """`prepared` is what `prepare_adapter` gave; None empties the slot."""
        assert prepared is None or isinstance(prepared, PackedAdapter)
        self._engine.set_adapter(slot, prepared)

    def logits(self, plan: StepPlan) -> Float32:
        """Logits (rows, vocab) of every token of a plan, unprocessed; writes the KV memory as `submit` does. For
        checking this runner and others against each other."""
        out = np.empty((plan.num_tokens, self._info.vocab_size), np.float32)
        self._engine.logits(plan, out)
        self._engine.forget()
        return out

    def profile(self) -> dict[str, list[tuple[int, int]]]:
        """Where the time went since this was last asked, the first time nowhere: by phase, each thread's ticks of work
        and of waiting for the others at its end."""
        return self._engine.profile()

    def _result(self, plan: StepPlan) -> StepResult:
        """Nearly always nothing but tokens. Every line here is slow, because a step has swept the caches."""
        engine = self._engine
        offsets = np.empty(plan.num_sequences + 1, np.int32)
        token_ids = np.empty(engine.num_sampled, np.int32)
        count = engine.tokens(offsets, token_ids)
        if count < len(token_ids):
            token_ids = token_ids[:count]
        if not (engine.wants_logprobs or plan.saves or plan.prompt_rows is not None or plan.pooled is not None):
            return StepResult(plan.step_id, offsets, token_ids)
        logprobs, prompt_logprobs = self._scores()
        return StepResult(
            step_id=plan.step_id,
            offsets=offsets,
            token_ids=token_ids,
            logprobs=logprobs,
            saved=self._save(plan),
            prompt_logprobs=prompt_logprobs,
            pooled=self._pooled(plan),
        )

    def _scores(self) -> tuple[tuple[tuple[TokenLogprob, ...], ...] | None, tuple[TokenLogprob, ...]]:
        """Of each sequence's accepted tokens, None when nobody asked, and of prompt rows."""
        sequences, prompt = self._engine.scores()
        logprobs = None
        if self._engine.wants_logprobs and self._engine.num_sampled:
            logprobs = tuple(tuple(TokenLogprob(chosen, top) for chosen, top, _ in rows) for rows in sequences)
        return logprobs, tuple(TokenLogprob(chosen, top, rank=rank) for chosen, top, rank in prompt)

    def _save(self, plan: StepPlan) -> tuple[UInt8, ...]:
        if not plan.saves or not len(plan.saves[0]):
            return ()
        # An array each, so that those that are kept do not keep the rest of them in memory.
        rows = [np.empty(self._info.block_bytes, np.uint8) for _ in plan.saves[0]]
        self._engine.save(plan.saves[0], rows)
        return tuple(rows)

    def _pooled(self, plan: StepPlan) -> Float64 | None:
        if plan.pooled is None or not len(plan.pooled):
            return None
        out = np.empty((len(plan.pooled), self._info.hidden_size), np.float64)
        self._engine.pooled(out)
        return out
