"""Logits -> tokens: bias, penalties, mask, temperature, top-k, top-p, min-p, then Gumbel-max with the counter RNG.

Every filter is a threshold on logit / temperature, so entries equal to the last one kept are kept as well. The noise
is drawn only for entries that survive and can still win (engine.compute.philox); the smallest id wins a tie.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from inferloop.engine.compute.philox import GUMBEL_MAX, GUMBEL_MIN, gumbel_all
from inferloop.engine.compute.torch.noise import gumbel
from inferloop.engine.schedule.step import Float32, Int32, Int64, StepPlan, TokenLogprob

_REACH = GUMBEL_MAX - GUMBEL_MIN
_DENSE_SHARE = 16
"""On CPU, when more than one in so many entries survive, the noise of the whole vocabulary is cheaper."""
_TOP_P_FIRST = 1024
"""How many of the largest logits are looked at before all are sorted to find where top-p cuts."""
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_FORBIDDEN = torch.from_numpy(np.where(_BITS == 1, np.float32(0), np.float32(-np.inf)))
"""Row b: what is added to the logits of the eight tokens whose byte of the mask is b. Looking it up and adding takes a
tenth of the time that filling in by a mask of booleans does on CPU."""


@dataclass(frozen=True, slots=True)
class SampleRows:
    """The rows to sample: which token of the step, of which sequence of the plan, after how many accepted drafts, and
    the absolute position that the sampled token will have."""

    flat: Int64
    owners: Int64
    num_accepted: Int64
    positions: Int64


def sample_rows(plan: StepPlan) -> SampleRows:
    """One row for each finished sequence and one more for each of its drafts."""
    owners = np.flatnonzero(plan.sample_rows >= 0)
    counts = plan.num_drafts[owners].astype(np.int64) + 1
    ahead = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    owners = np.repeat(owners, counts)
    flat = plan.sample_rows[owners].astype(np.int64) + ahead
    positions = plan.first_positions[owners] + (flat - plan.offsets[owners]) + 1
    return SampleRows(flat, owners, ahead, positions)


def in_parts(rows: SampleRows, size: int) -> Iterator[tuple[slice, SampleRows]]:
    """Up to `size` rows each, and where they stand among all."""
    for start in range(0, len(rows.flat), size):
        part = slice(start, start + size)
        yield part, SampleRows(rows.flat[part], rows.owners[part], rows.num_accepted[part], rows.positions[part])


def sample(logits: Tensor, plan: StepPlan, rows: SampleRows) -> tuple[Tensor, Tensor]:
    """logits (rows, vocab) -> (token ids (rows,), the processed logits before temperature). `logits` may be changed."""
    logits = _process(logits, plan, rows)
    greedy = logits.max(-1).indices  # the first of equals; argmax is several times slower in bf16 on CPU
    temperature = plan.sampling.temperature[rows.owners]
    random = np.flatnonzero(temperature > 0)
    if not len(random):
        return greedy, logits
    chosen = torch.from_numpy(random).to(logits.device)
    greedy[chosen] = _draw(logits[chosen].float(), plan, rows, random)
    return greedy, logits


def _process(logits: Tensor, plan: StepPlan, rows: SampleRows) -> Tensor:
    columns, device = plan.sampling, logits.device
    if columns.bias is None and columns.penalties is None and columns.mask is None:
        return logits
    logits = logits.float()
    if columns.bias is not None:
        for row, owner in enumerate(rows.owners):
            low, high = columns.bias.offsets[owner], columns.bias.offsets[owner + 1]
            ids = torch.from_numpy(columns.bias.ids[low:high].astype(np.int64)).to(device)
            logits[row].index_add_(0, ids, torch.from_numpy(columns.bias.values[low:high]).to(device))
    if columns.penalties is not None:
        for row in range(len(rows.owners)):
            _penalize(logits[row], plan, int(rows.owners[row]), int(rows.flat[row]), int(rows.num_accepted[row]))
    if columns.mask is not None:
        octets = torch.from_numpy(columns.mask.result()[rows.owners].view(np.uint8).astype(np.int32)).to(device)
        forbidden = F.embedding(octets, _FORBIDDEN.to(device)).view(len(octets), -1)
        logits += forbidden[:, : logits.shape[1]]
    return logits


def _penalize(row: Tensor, plan: StepPlan, owner: int, flat: int, num_accepted: int) -> None:
    """Repetition (seen at all: divide or multiply), then presence and frequency (of the output). Changes `row`."""
    columns = plan.sampling
    assert columns.penalties is not None and columns.presence is not None
    assert columns.frequency is not None and columns.repetition is not None
    low, high = columns.penalties.offsets[owner], columns.penalties.offsets[owner + 1]
    counts = dict(
        zip(columns.penalties.ids[low:high].tolist(), columns.penalties.values[low:high].tolist(), strict=True)
    )
    if not counts:
        return
    for draft in plan.token_ids[flat - num_accepted + 1 : flat + 1].tolist():
        counts[draft] = counts.get(draft, 0.0) + 1.0
    ids = torch.tensor(list(counts), dtype=torch.int64, device=row.device)
    seen = torch.tensor(list(counts.values()), dtype=torch.float32, device=row.device)
    repetition = float(columns.repetition[owner])
    values = row[ids]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values = values - float(columns.presence[owner]) * (seen > 0) - float(columns.frequency[owner]) * seen
    row[ids] = values


def _draw(logits: Tensor, plan: StepPlan, rows: SampleRows, random: Int64) -> Tensor:
    """Gumbel-max over what the filters leave; logits (n, vocab) fp32 of the rows `random`."""
    columns, device = plan.sampling, logits.device
    owners = rows.owners[random]
    scaled = logits / torch.from_numpy(columns.temperature[owners]).to(device)[:, None]
    threshold = _threshold(scaled, columns.top_k[owners], columns.top_p[owners], columns.min_p[owners])
    survives = scaled >= threshold[:, None]
    noisy = torch.full_like(scaled, float("-inf"))
    if device.type == "cpu" and int(survives.sum()) * _DENSE_SHARE > survives.numel():
        for row, (seed, position) in enumerate(zip(columns.seed[owners], rows.positions[random], strict=True)):
            noise = torch.from_numpy(gumbel_all(int(seed), int(position), scaled.shape[1]))
            noisy[row] = torch.where(survives[row], scaled[row] + noise, float("-inf"))
        return noisy.max(-1).indices
    which, ids = torch.nonzero(survives, as_tuple=True)
    seeds = torch.from_numpy(columns.seed[owners].view(np.int64)).to(device)
    positions = torch.from_numpy(rows.positions[random]).to(device)
    noisy[which, ids] = scaled[which, ids] + gumbel(seeds[which], positions[which], ids)
    return noisy.max(-1).indices


def _threshold(scaled: Tensor, top_k: Int32, top_p: Float32, min_p: Float32) -> Tensor:
    """Per row, the smallest logit / temperature that stays in the draw."""
    best = scaled.max(-1).values
    threshold = torch.full_like(best, float("-inf"))
    if (min_p > 0).any():
        with np.errstate(divide="ignore"):
            threshold = torch.maximum(threshold, best + torch.from_numpy(np.log(min_p)).to(scaled.device))
    if (top_k > 0).any():
        k = torch.from_numpy(np.where(top_k > 0, top_k, scaled.shape[1]).astype(np.int64)).to(scaled.device)
        limit = min(int(top_k.max()), scaled.shape[1])
        largest = scaled.topk(limit, dim=-1).values
        kth = largest.gather(1, (k.clamp(max=limit) - 1)[:, None])[:, 0]
        threshold = torch.maximum(threshold, torch.where(k <= limit, kth, float("-inf")))
    if (top_p < 1).any():
        cut = _top_p_cut(scaled, threshold, torch.from_numpy(top_p).to(scaled.device))
        threshold = torch.maximum(threshold, cut)
    return torch.maximum(threshold, best - _REACH)


def _top_p_cut(scaled: Tensor, threshold: Tensor, top_p: Tensor) -> Tensor:
    """The smallest value of the shortest run of largest values whose probability reaches top_p of what the
    filters before it left."""
    weights = torch.exp(scaled - scaled.max(-1, keepdim=True).values)
    kept = torch.where(scaled >= threshold[:, None], weights, 0.0)
    target = top_p * kept.sum(-1)
    largest, order = scaled.topk(min(_TOP_P_FIRST, scaled.shape[1]), dim=-1)
    mass = weights.gather(1, order).cumsum(-1)
    if bool((mass[:, -1] < target).any()):
        largest, order = scaled.sort(dim=-1, descending=True)
        mass = weights.gather(1, order).cumsum(-1)
    num_before = (mass < target[:, None]).sum(-1).clamp(max=largest.shape[1] - 1)
    cut = largest.gather(1, num_before[:, None])[:, 0]
    return torch.where(top_p < 1, cut, float("-inf"))


def logprobs_of(logits: Tensor, ids: Tensor, num_top: list[int]) -> list[TokenLogprob | None]:
    """Natural log-probabilities per row, of the processed logits before temperature; None where num_top is -1."""
    asked = [row for row, num in enumerate(num_top) if num >= 0]
    found: list[TokenLogprob | None] = [None] * len(num_top)
    if not asked:
        return found
    index = torch.tensor(asked, device=logits.device)
    table = torch.log_softmax(logits[index].float(), -1)
    chosen = table.gather(1, ids[index][:, None])[:, 0].tolist()
    widest = min(max(num_top), table.shape[-1])
    values, top_ids = (t.tolist() for t in table.topk(widest, dim=-1))
    for i, row in enumerate(asked):
        top = tuple(zip(top_ids[i][: num_top[row]], values[i][: num_top[row]], strict=True))
        found[row] = TokenLogprob(chosen[i], top)
    return found
