"""Every architecture as transformers computes it: logits of whole prompts and through paged decode, and greedy text.

Weights are tiny and random, and windows shorter than the prompts. GGUF files are written with the names that the gguf
package has for the tensors, and with what converters do to them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from tests.adapters import prepared, write_adapter
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask
from transformers.models.llama.modeling_llama import eager_attention_forward

from inferloop.core.digest import digest_of
from inferloop.core.errors import ModelFileError
from inferloop.core.request import Sampling
from inferloop.engine.compute.torch.config import TorchConfig
from inferloop.engine.compute.torch.runner import TorchRunner
from inferloop.engine.schedule.policy import ScheduleConfig
from inferloop.engine.schedule.scheduler import Scheduler
from inferloop.engine.schedule.sequence import SequenceSpec
from inferloop.engine.schedule.step import NO_ADAPTER
from inferloop.models.adapters.read import MODULES
from inferloop.models.headers import read_header
from inferloop.models.resolve import open_files

RandomModel = Callable[..., Any]
Variant = tuple[str, dict[str, Any]]

ISAS: tuple[Any, ...] = ("scalar", "avx2", "avx512", "avx512_bf16", "amx")
WITH_EXPERTS = ("mixtral", "qwen3_moe")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
PROMPT = tuple(np.random.default_rng(1).integers(3, 131, 90).tolist())
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 40, "sliding_window": 24, "pad_token_id": 0}
GEMMA3: dict[str, Any] = {
    **GEMMA,
    "num_hidden_layers": 7,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 50_000.0, "factor": 4.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1_000.0},
    },
}
UNTIED = {"tie_word_embeddings": False}
"""A model whose two are one mostly repeats itself."""
MIXTRAL = {**UNTIED, "num_local_experts": 5, "num_experts_per_tok": 2}
QWEN3_MOE = {**UNTIED, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "head_dim": 32}
VARIANTS: dict[str, Variant] = {
    "llama": ("llama", {}),
    "llama, two matrices of tokens": ("llama", UNTIED),
    "mistral": ("mistral", {**UNTIED, "sliding_window": 24}),
    "mistral without a window": ("mistral", {**UNTIED, "sliding_window": None}),
    "qwen2": ("qwen2", UNTIED),
    "qwen2, window from layer 1": (
        "qwen2",
        {**UNTIED, "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {**UNTIED, "head_dim": 32}),
    "gemma2": ("gemma2", {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}),
    "gemma2 without caps": ("gemma2", {**GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3": ("gemma3_text", GEMMA3),
    "gemma3 with a cap": ("gemma3_text", {**GEMMA3, "final_logit_softcapping": 5.0, "tie_word_embeddings": False}),
    "mixtral": ("mixtral", MIXTRAL),
    "mixtral with a window": ("mixtral", {**MIXTRAL, "sliding_window": 24, "num_local_experts": 3}),
    "qwen3_moe": ("qwen3_moe", {**QWEN3_MOE, "norm_topk_prob": True}),
    "qwen3_moe, some layers, as they are": (
        "qwen3_moe",
        {**QWEN3_MOE, "num_hidden_layers": 5, "decoder_sparse_step": 2, "mlp_only_layers": [1]},
    ),
}


def load(path: Path, **options: Any) -> TorchRunner:
    defaults: dict[str, Any] = {"dtype": "fp32", "num_blocks": 64, "block_size": 8}
    return TorchRunner.load(open_files("tiny", path), TorchConfig(**(defaults | options)))


def run(
    runner: Any, budget: int, max_tokens: int = 1, num_logprobs: int | None = None
) -> tuple[torch.Tensor, list[int], list[float]]:
    """Logits of every position computed in steps of at most `budget` tokens, the greedy answer, and its
    log-probabilities."""
    info = runner.info
    scheduler = Scheduler(
        ScheduleConfig(
            vocab_size=info.vocab_size,
            context_length=info.context_length,
            block_size=info.block_size,
            num_blocks=info.num_blocks,
            max_step_tokens=budget,
        )
    )
    wanted = Sampling(temperature=0.0, max_tokens=max_tokens, num_logprobs=num_logprobs)
    scheduler.add(SequenceSpec("a", PROMPT, wanted))
    logits, tokens, logprobs = list[torch.Tensor](), list[int](), list[float]()
    while scheduler.request_ids:
        plan = scheduler.schedule()
        assert plan is not None
        logits.append(torch.as_tensor(runner.logits(plan)))
        runner.submit(plan)
        for update in scheduler.commit(plan, runner.wait()):
            tokens += update.token_ids
            logprobs += [value.chosen for value in update.logprobs or ()]
    return torch.cat(logits), tokens, logprobs


def logits_of(model: Any, *, kv_in_bf16: bool = False) -> torch.Tensor:
    """`kv_in_bf16`: keys and values are rounded, as a cache of bf16 keeps them; not of models with soft caps."""
    if kv_in_bf16:
        name = "kv_in_bf16"
        AttentionInterface.register(name, attention_of_rounded)
        AttentionMaskInterface.register(name, eager_mask)
        model.set_attn_implementation(name)
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([PROMPT])).logits[0]
    return logits


def attention_of_rounded(module: Any, q: Any, k: Any, v: Any, mask: Any, **more: Any) -> Any:
    return eager_attention_forward(module, q, k.bfloat16().float(), v.bfloat16().float(), mask, **more)


def assert_same(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert float((got - expected).abs().max()) < 1e-4 * float(expected.std())


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_greedy_text_equal_transformers(variant: str, random_model: RandomModel, tmp_path: Path) -> None:
    family, config = VARIANTS[variant]
    model = random_model(tmp_path, family, **config)
    expected = logits_of(model)
    for deterministic in (False, True):
        runner = load(tmp_path, deterministic=deterministic)
        for budget in (len(PROMPT), 64, 7, 1):
            assert_same(run(runner, budget)[0], expected)
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        ids = torch.tensor([PROMPT])
        answer = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False)
    answer = answer[0, len(PROMPT) :].tolist()
    assert len(set(answer)) > 1 or variant == "llama"
    assert run(load(tmp_path), 64, max_tokens=40)[1] == answer


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_native_runner_computes_the_same(variant: str, random_model: RandomModel, tmp_path: Path) -> None:
    """But for keys and values in bf16, which is what the bounds are for; to the bit, however the prompt is cut. What is
    sampled from is what `logits` tells. Rounding sends rows to other experts where these are nearly equal, so models
    with experts are compared with what rounds the same; but for levels that attend in bf16 throughout, far closer."""
    _native = pytest.importorskip("inferloop.engine.compute.native._native")
    from inferloop.engine.compute.native.config import NativeConfig
    from inferloop.engine.compute.native.runner import NativeRunner

    family, config = VARIANTS[variant]
    has_experts = family in WITH_EXPERTS
    expected = logits_of(random_model(tmp_path, family, **config), kv_in_bf16=has_experts)
    scale, files = float(expected.std()), open_files("tiny", tmp_path)
    chosen = float(torch.log_softmax(expected[-1], -1).max())
    for isa in ISAS[: ISAS.index(_native.best_isa()) + 1]:
        wanted = NativeConfig(weights="fp32", num_blocks=64, num_threads=2, isa=isa)
        runner = NativeRunner.load(files, wanted, cache_dir=tmp_path / "cache")
        whole, *others = (run(runner, budget)[0] for budget in (len(PROMPT), 64, 7, 1))
        bound = 0.002 if has_experts and "16" not in isa and isa != "amx" else 0.03
        assert float((whole - expected).abs().max()) < bound * scale, isa
        assert all(torch.equal(other, whole) for other in others)
        assert run(runner, 64, num_logprobs=0)[2] == [pytest.approx(chosen, abs=0.03 * scale)]


def test_gains_are_packed_as_the_architecture_has_them(random_model: RandomModel, tmp_path: Path) -> None:
    """Beside each other, since the weights' digest does not know of which they are."""
    pytest.importorskip("inferloop.engine.compute.native._native")
    from inferloop.engine.compute.native.pack import pack_model

    random_model(tmp_path, "gemma3_text", **GEMMA3)
    header = read_header(tmp_path)
    plain = replace(header, structure=replace(header.structure, norm_offset=0.0))
    gains = [
        pack_model(one, "fp32", digest="0" * 64, cache_dir=tmp_path / "cache").vectors["layers.0.fed_norm"]
        for one in (header, plain, header)
    ]
    np.testing.assert_array_equal(gains[0], gains[1] + 1)
    np.testing.assert_array_equal(gains[0], gains[2])


def test_what_the_native_runner_has_no_kernels_for_is_named(random_model: RandomModel, tmp_path: Path) -> None:
    pytest.importorskip("inferloop.engine.compute.native._native")
    from inferloop.engine.compute.native.program import check_runs

    random_model(tmp_path, "qwen3_moe", **{**QWEN3_MOE, "moe_intermediate_size": 48})
    with pytest.raises(ModelFileError, match="multiple of 32 for the feed-forward size of experts, which is 48"):
        check_runs(read_header(tmp_path))
    # That of layers that are not there is nobody's.
    random_model(tmp_path / "odd", "qwen3_moe", **{**QWEN3_MOE, "intermediate_size": 50})
    check_runs(read_header(tmp_path / "odd"))


@pytest.mark.parametrize("variant", ["mistral", "gemma2", "gemma3", "mixtral", "qwen3_moe"])
def test_neighbours_and_cuts_change_no_bit_in_deterministic_mode(
    variant: str, random_model: RandomModel, tmp_path: Path
) -> None:
    family, config = VARIANTS[variant]
    random_model(tmp_path, family, **config)
    runner = load(tmp_path, deterministic=True)
    whole, *others = (run(runner, budget)[0] for budget in (len(PROMPT), 17, 1))
    assert all(torch.equal(other, whole) for other in others)


@pytest.mark.parametrize(
    ("compute", "variant"),
    [
        ("torch", "gemma3"),
        ("torch", "mixtral with a window"),
        ("native", "mistral"),
        ("native", "gemma2"),
        ("native", "mixtral with a window"),
        ("native", "qwen3_moe"),
    ],
)
def test_answers_are_those_alone_among_others_preempted_cached_and_through_an_adapter(
    compute: str, variant: str, random_model: RandomModel, tmp_path: Path
) -> None:
    """All at once: windows that prompts and cached beginnings outgrow, caps, lengths that differ, few blocks."""
    family, config = VARIANTS[variant]
    random_model(tmp_path / "model", family, **config)
    header = read_header(tmp_path / "model")
    modules = ATTENTION if family in WITH_EXPERTS else MODULES
    adapter = write_adapter(tmp_path / "a", header, modules=modules)

    def load_with(num_blocks: int) -> Any:
        if compute == "torch":
            runner: Any = load(tmp_path / "model", num_blocks=2 * num_blocks)
        else:
            pytest.importorskip("inferloop.engine.compute.native._native")
            from inferloop.engine.compute.native.config import NativeConfig
            from inferloop.engine.compute.native.runner import NativeRunner

            wanted = NativeConfig(weights="fp32", num_blocks=num_blocks, num_threads=2)
            runner = NativeRunner.load(open_files("tiny", tmp_path / "model"), wanted, cache_dir=tmp_path / "cache")
        runner.set_adapter(0, prepared(runner, header, adapter))
        return runner

    other = PROMPT[:48] + PROMPT[:20]
    asked = [(PROMPT, NO_ADAPTER), (PROMPT, 0), (other, NO_ADAPTER), (PROMPT[:30], 0), (PROMPT[:7], NO_ADAPTER)]
    roomy = load_with(16)
    alone = [together(roomy, [one], budget=256)[0][0] for one in asked]
    assert len(set(alone)) == len(alone)
    answers, num_preemptions, num_cached = together(load_with(14), asked * 2, budget=29)
    assert answers == alone * 2
    assert num_preemptions > 0 and num_cached > 0


def together(
    runner: Any, asked: list[tuple[tuple[int, ...], int]], budget: int
) -> tuple[list[tuple[int, ...]], int, int]:
    """Greedy answers to prompts through slots, in steps of at most `budget` tokens; how often somebody was preempted,
    and how many tokens were cached."""
    info = runner.info
    scheduler = Scheduler(
        ScheduleConfig(
            vocab_size=info.vocab_size,
            context_length=112,
            block_size=info.block_size,
            num_blocks=info.num_blocks,
            max_step_tokens=budget,
        )
    )
    sampling = Sampling(temperature=0.0, max_tokens=14, ignore_eos=True)
    for i, (prompt, slot) in enumerate(asked):
        namespace = () if slot == NO_ADAPTER else ("adapter", str(slot))
        scheduler.add(SequenceSpec(str(i), prompt, sampling, arrived_ms=i, namespace=namespace, adapter_slot=slot))
    tokens: list[tuple[int, ...]] = [()] * len(asked)
    num_cached = 0
    while scheduler.request_ids:
        plan = scheduler.schedule()
        assert plan is not None
        runner.submit(plan)
        for update in scheduler.commit(plan, runner.wait()):
            tokens[int(update.request_id)] += tuple(update.token_ids)
            if update.finish_reason is not None:
                num_cached += update.num_cached_tokens
        scheduler.check()
    return tokens, scheduler.num_preemptions, num_cached


@pytest.mark.parametrize("variant", ["gemma2", "gemma3", "mixtral", "qwen3_moe"])
def test_bf16_is_close(variant: str, random_model: RandomModel, tmp_path: Path) -> None:
    family, config = VARIANTS[variant]
    expected = logits_of(random_model(tmp_path, family, **config))
    got = run(load(tmp_path, dtype="bf16"), len(PROMPT))[0].float()
    assert float((got - expected).abs().mean()) < 0.05 * float(expected.std())


def old_spelling(config: dict[str, Any]) -> dict[str, Any]:
    """How Gemma 3's configurations were written first."""
    ropes = config.pop("rope_parameters")
    del config["layer_types"]
    full = ropes["full_attention"]
    scaling = {"rope_type": "linear", "factor": full["factor"]}
    bases = {"rope_theta": full["rope_theta"], "rope_local_base_freq": ropes["sliding_attention"]["rope_theta"]}
    return {**config, **bases, "rope_scaling": scaling, "sliding_window_pattern": 6}


def test_old_spellings_and_nested_configs_say_the_same(random_model: RandomModel, tmp_path: Path) -> None:
    random_model(tmp_path, *VARIANTS["gemma3"][:1], **GEMMA3)
    new = read_header(tmp_path)
    file = tmp_path / "config.json"
    older = old_spelling(json.loads(file.read_text()))
    file.write_text(json.dumps(older))
    old = read_header(tmp_path)
    assert (old.structure, old.rope) == (new.structure, new.rope)
    file.write_text(json.dumps({"model_type": "gemma3", "vision_config": {}, "text_config": older}))
    assert read_header(tmp_path).structure == new.structure


def identity_of(path: Path) -> str:
    """What of it comes from the header."""
    header = read_header(path)
    return digest_of([header.shape, header.rope, header.norm_eps, header.structure])


@pytest.mark.parametrize(
    ("variant", "change"),
    [
        ("gemma2", {"query_pre_attn_scalar": 41}),
        ("gemma2", {"sliding_window": 25}),
        ("gemma2", {"attn_logit_softcapping": 3.0}),
        ("gemma2", {"final_logit_softcapping": None}),
        ("gemma3", {"layer_types": ["sliding_attention"] * 7}),
        ("gemma3", {"rope_parameters": {**GEMMA3["rope_parameters"], "sliding_attention": {"rope_theta": 2_000.0}}}),
        ("mixtral", {"num_experts_per_tok": 1}),
        ("qwen3_moe", {"norm_topk_prob": False}),
    ],
)
def test_what_config_json_says_decides_whose_blocks_can_be_gone_on_from(
    variant: str, change: dict[str, Any], random_model: RandomModel, tmp_path: Path
) -> None:
    """The same weights compute something else, and are another service."""
    family, config = VARIANTS[variant]
    random_model(tmp_path, family, **config)
    before, layout = identity_of(tmp_path), load(tmp_path).info.block_layout
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    assert identity_of(tmp_path) != before
    assert load(tmp_path).info.block_layout != layout


@pytest.mark.parametrize(
    ("variant", "change", "named"),
    [
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3", {"layer_types": ["chunked_attention"] * 7}, "chunked_attention"),
        ("gemma3", {"layer_types": ["full_attention"]}, "layer_types"),
        ("gemma3", {"hidden_activation": "gelu"}, "hidden_activation"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        ("gemma2", {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping"),
        ("mistral", {"attention_sinks": 4}, "attention_sinks"),
        ("mistral", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mscale": 0.7}}, "mscale"),
        ("mixtral", {"num_experts_per_tok": 6}, "num_experts_per_tok"),
        ("mixtral", {"num_local_experts": 4_000_000_000}, "implies"),
        ("mixtral", {"num_local_experts": 4}, "mlp.gate"),
        ("qwen3_moe", {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size"),
    ],
)
def test_what_would_be_computed_otherwise_is_refused_by_name(
    variant: str, change: dict[str, Any], named: str, random_model: RandomModel, tmp_path: Path
) -> None:
    family, config = VARIANTS[variant]
    random_model(tmp_path, family, **config)
    read_header(tmp_path)
    file = tmp_path / "config.json"
    said = json.loads(file.read_text())
    if "rope_scaling" in change:
        del said["rope_parameters"]
    file.write_text(json.dumps({**said, **change}))
    with pytest.raises(ModelFileError) as caught:
        read_header(tmp_path)
    assert named in str(caught.value)


def test_a_tensor_of_a_layer_that_nobody_reads_is_refused(random_model: RandomModel, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    random_model(tmp_path)
    file = str(tmp_path / "model.safetensors")
    save_file({**load_file(file), "model.layers.1.self_attn.sinks": torch.zeros(4)}, file)
    with pytest.raises(ModelFileError, match=r"layers\.1\.self_attn\.sinks"):
        read_header(tmp_path)


def write_gguf(model: Any, path: Path, arch: gguf.MODEL_ARCH, *, edit: Callable[[Any], None] | None = None) -> None:
    """`model` as the converters of llama.cpp write it: gains of Gemma's norms with 1 added, rows of llama's q and k
    with the two halves of a head taken in turn, experts stacked."""
    config = model.config
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if edit is not None:
        edit(writer)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        module = name.split(".")[-2]
        if arch in (gguf.MODEL_ARCH.GEMMA2, gguf.MODEL_ARCH.GEMMA3) and "norm" in name:
            values = values + 1
        if arch is gguf.MODEL_ARCH.LLAMA and module in heads:
            values = values.reshape(heads[module], 2, -1, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)
        parts = {name: values}
        if name.endswith("experts.gate_up_proj"):
            stem = name.removesuffix("gate_up_proj")
            parts = dict(zip((f"{stem}gate_proj", f"{stem}up_proj"), np.split(values, 2, 1), strict=True))
        for part, array in parts.items():
            known = names.get_name(part, try_suffixes=(".weight", ".bias"))
            assert known is not None, part
            full = known if known.endswith(("weight", "bias")) else known + ".weight"
            writer.add_tensor(full, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_of_gemma3_is_the_same_model(random_model: RandomModel, tmp_path: Path) -> None:
    """Whose files say neither which layers are local, nor their base, nor the scale: all have the same."""
    config = {**GEMMA3, "query_pre_attn_scalar": 32}
    ropes = {"full_attention": {"rope_type": "default", "rope_theta": 50_000.0}}
    ropes["sliding_attention"] = {"rope_type": "default", "rope_theta": 10_000.0}
    model = random_model(tmp_path, "gemma3_text", **{**config, "rope_parameters": ropes})

    def edit(writer: Any) -> None:
        writer.add_sliding_window(24)
        writer.add_rope_freq_base(50_000.0)

    path = tmp_path / "tiny.gguf"
    write_gguf(model, path, gguf.MODEL_ARCH.GEMMA3, edit=edit)
    assert read_header(path).structure.windows == (24, 24, 24, 24, 24, None, 24)
    for budget in (len(PROMPT), 7):
        assert_same(run(load(path), budget)[0], logits_of(model))


def test_a_gguf_of_gemma3_may_say_more(random_model: RandomModel, tmp_path: Path) -> None:
    config = {**GEMMA3, "query_pre_attn_scalar": 32, "num_hidden_layers": 3, "final_logit_softcapping": 5.0}
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    model = random_model(tmp_path, "gemma3_text", **{**config, "layer_types": kinds})

    def edit(writer: Any) -> None:
        writer.add_sliding_window(24)
        writer.add_sliding_window_pattern([True, False, False])
        writer.add_rope_freq_base(50_000.0)
        writer.add_rope_freq_base_swa(1_000.0)
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)
        writer.add_final_logit_softcapping(5.0)

    path = tmp_path / "tiny.gguf"
    write_gguf(model, path, gguf.MODEL_ARCH.GEMMA3, edit=edit)
    assert_same(run(load(path), 64)[0], logits_of(model))


def test_a_gguf_of_gemma2_is_the_same_model(random_model: RandomModel, tmp_path: Path) -> None:
    caps = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}
    model = random_model(tmp_path, "gemma2", **{**GEMMA, **caps, "query_pre_attn_scalar": 32})

    def edit(writer: Any) -> None:
        writer.add_sliding_window(24)
        writer.add_attn_logit_softcapping(2.0)
        writer.add_final_logit_softcapping(5.0)

    path = tmp_path / "tiny.gguf"
    write_gguf(model, path, gguf.MODEL_ARCH.GEMMA2, edit=edit)
    assert_same(run(load(path), 64)[0], logits_of(model))


def test_what_the_first_files_of_gemma2_leave_out_is_as_all_have_it(random_model: RandomModel, tmp_path: Path) -> None:
    """llama.cpp's converter wrote neither caps nor window at first."""
    model = random_model(tmp_path, "gemma2", **{**GEMMA, "query_pre_attn_scalar": 32, "sliding_window": 4096})
    path = tmp_path / "tiny.gguf"
    write_gguf(model, path, gguf.MODEL_ARCH.GEMMA2)
    header = read_header(path)
    assert header.structure.windows == (4096, None)
    assert_same(run(load(path), 64)[0], logits_of(model))


def test_a_window_that_mistral_does_not_say_is_not_one_that_it_denies(
    random_model: RandomModel, tmp_path: Path
) -> None:
    random_model(tmp_path, "mistral", sliding_window=None)
    assert read_header(tmp_path).structure.windows == ()
    file = tmp_path / "config.json"
    said = json.loads(file.read_text())
    del said["sliding_window"]
    file.write_text(json.dumps(said))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path).sliding_window
    assert read_header(tmp_path).structure.windows == (theirs, theirs) == (4096, 4096)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_a_gguf_with_experts_is_the_same_model(family: str, random_model: RandomModel, tmp_path: Path) -> None:
    config = {**(MIXTRAL if family == "mixtral" else QWEN3_MOE), "norm_topk_prob": True, "head_dim": 32}
    model = random_model(tmp_path, family, **config)

    def edit(writer: Any) -> None:
        writer.add_expert_count(5 if family == "mixtral" else 6)
        writer.add_expert_used_count(2 if family == "mixtral" else 3)
        writer.add_rope_freq_base(model.config.rope_parameters["rope_theta"])
        if family == "qwen3_moe":
            writer.add_expert_feed_forward_length(64)

    path = tmp_path / "tiny.gguf"
    write_gguf(model, path, gguf.MODEL_ARCH.LLAMA if family == "mixtral" else gguf.MODEL_ARCH.QWEN3MOE, edit=edit)
    assert read_header(path).shape.architecture == family
    assert_same(run(load(path), 64)[0], logits_of(model))


@pytest.mark.parametrize(
    ("count", "used", "named"), [(6, 2, "6 experts"), (5, 7, "expert_used_count"), (0, 2, "mlp.gate_proj")]
)
def test_a_gguf_whose_experts_do_not_fit_is_refused(
    count: int, used: int, named: str, random_model: RandomModel, tmp_path: Path
) -> None:
    model = random_model(tmp_path, "mixtral", **MIXTRAL, head_dim=32)

    def edit(writer: Any) -> None:
        writer.add_expert_count(count)
        writer.add_expert_used_count(used)

    path = tmp_path / "tiny.gguf"
    write_gguf(model, path, gguf.MODEL_ARCH.LLAMA, edit=edit)
    with pytest.raises(ModelFileError, match=named):
        read_header(path)


def test_a_gguf_of_countless_tiny_experts_is_refused_before_they_are_listed(tmp_path: Path) -> None:
    """Each would take more memory than it has bytes."""
    num = 100_000
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "llama")
    for key, value in {"block_count": 1, "embedding_length": 2, "feed_forward_length": 1, "context_length": 8}.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_head_count(1)
    writer.add_expert_count(num)
    writer.add_expert_used_count(1)
    writer.add_tensor("token_embd.weight", np.zeros((4, 2), np.float32))
    writer.add_tensor("blk.0.ffn_gate_exps.weight", np.zeros((num, 1, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelFileError, match="ffn_gate_exps"):
        read_header(tmp_path / "tiny.gguf")


def test_all_parameters_are_counted(random_model: RandomModel, tmp_path: Path) -> None:
    """By the shape, without head norms and biases, and by the runner, of the experts too."""
    model = random_model(tmp_path, "mixtral", **MIXTRAL)
    num_params = sum(p.numel() for p in model.parameters())
    assert read_header(tmp_path).shape.num_params == num_params
    assert load(tmp_path).info.weight_bytes == 4 * num_params
