"""The models that `up` runs: the contract's one, or each of those that its routing names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from inferloop.cli import wire
from inferloop.cli.gates import Gate
from inferloop.contract.workload import Contract, ModelRef
from inferloop.core.units import MIB
from inferloop.fleet.decide.fit import MachineCapacity
from inferloop.models.resolve import ModelFiles
from inferloop.plan.memory import replica_memory


def served_models(contract: Contract) -> dict[str, ModelRef]:
    """By the names that the API has for them, the one that is measured first."""
    routing = contract.routing
    if routing is None:
        return {contract.model.id: contract.model}
    names = sorted((m.name for m in routing.models), key=lambda name: name != routing.default)
    return {name: routing.model(name).ref for name in names}


def asked_model(contract: Contract) -> str:
    """The name that a client gives: with several models the service's own, which is routed."""
    return contract.model.id if contract.routing is None else contract.service


@dataclass(frozen=True, slots=True)
class MemoryJudged:
    """`others_bytes` is what the models beside the measured one take, with all of their replicas."""

    gate: Gate
    others_bytes: int


def judge_memory(
    contract: Contract, files: Mapping[str, ModelFiles], machine: MachineCapacity, kv_memory_mib: int
) -> MemoryJudged:
    """Does one replica of the measured model fit beside all of the others'? Refuses before anything is started what
    would be killed once it is."""
    tokens = max(int(c.input_tokens.points[-1][1] + c.output_tokens.points[-1][1]) for c in contract.traffic.classes)
    models, numbers = served_models(contract), replicas_beside(contract)
    told, taken, first, fits = [], 0, 0, True
    for name, model in models.items():
        header = files[name].header
        weight_bytes, kv_bytes_per_token = wire.memory_needs(model, header)
        for _ in range(numbers.get(name, 1)):
            needs = replica_memory(
                header.shape,
                memory_bytes=max(1, machine.memory_bytes - taken),
                sequence_tokens=min(tokens, header.shape.context_length),
                weight_bytes=weight_bytes,
                kv_bytes_per_token=kv_bytes_per_token,
                kv_memory_bytes=kv_memory_mib * MIB,
            )
            fits = fits and needs.fits
            taken += needs.weight_bytes + needs.overhead_bytes + kv_memory_mib * MIB
            first = first or taken
        number = f"{numbers[name]} x " if numbers.get(name, 1) > 1 else ""
        told.append(needs.reason if len(models) == 1 else f"{number}{name}: {needs.reason}")
    return MemoryJudged(Gate("memory", "pass" if fits else "fail", "; ".join(told)), taken - first)


def beside(machine: MachineCapacity, others_bytes: int) -> MachineCapacity:
    """What is left for the replicas of the measured model."""
    return replace(machine, memory_bytes=max(0, machine.memory_bytes - others_bytes))


def told_of_chats(files: Mapping[str, ModelFiles]) -> list[str]:
    """Models that cannot be asked chats, in words."""
    return [
        f"{name} has no chat template: it completes texts, and chats that are escalated to it keep their first answer"
        for name, one in files.items()
        if one.header.chat_template is None
    ]


def replicas_beside(contract: Contract) -> dict[str, int]:
    """How many are started of each model that is not measured."""
    routing = contract.routing
    return {m.name: m.replicas for m in routing.models if m.name != routing.default} if routing is not None else {}


def told_of_the_unmeasured(contract: Contract) -> str | None:
    """What is known of the models beside the default one, in words."""
    if contract.routing is None:
        return None
    told = ", ".join(f"{number} x {name}" for name, number in replicas_beside(contract).items())
    return f"only {contract.routing.default} was measured: whether {told} carry what is sent there is not known"
