"""`inferloop hardware`: what this machine is, and how fast it reads memory and multiplies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from inferloop.cli.common import JsonOption, is_interactive, print_json, stderr, stdout, verb
from inferloop.core.hardware import MeasuredHardware
from inferloop.core.units import human_bytes
from inferloop.records.fingerprint import Fingerprint, fingerprint
from inferloop.records.nvml import nvidia_devices

if TYPE_CHECKING:
    from inferloop.records.nvml import NvidiaDevice

_MUCH = 0.1
"""Share of the processors that other processes may have before it deserves a word."""


@verb
def hardware(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes and samples: a second or two.")] = False,
    json_output: JsonOption = False,
) -> None:
    """Show what is known of this machine and measure, in about ten seconds, what bounds every step of a model: how fast
    memory is read, by how much of it is read again and again, and how fast it multiplies between registers.

    Nothing is judged: it exits 0 once it has measured. docs/hardware.md says how to read it.

    Example: inferloop hardware --quick --json
    """
    from inferloop.engine.compute.native.hardware import QUICK_BUDGET_S, QUICK_SETS, measure

    machine, devices = fingerprint(), nvidia_devices()
    if is_interactive():
        stderr.print("measuring ...")
    found = measure(QUICK_SETS, QUICK_BUDGET_S) if quick else measure()
    notes = list(_notes(found, devices, machine))
    if json_output:
        print_json({"machine": machine, "devices": devices, "measured": found, "notes": notes})
        return
    stdout.print(_machine_table(machine, devices, found))
    stdout.print()
    stdout.print(_bandwidth_table(found))
    if found.peaks:
        stdout.print()
        stdout.print(_peaks_table(found))
    stdout.print(f"\nmedian of {found.num_samples} or more samples (the best one)")
    for note in notes:
        stdout.print(f"\n[yellow]note[/] {escape(note)}", soft_wrap=True)


def _notes(found: MeasuredHardware, devices: tuple[NvidiaDevice, ...] | None, machine: Fingerprint) -> Iterable[str]:
    if found.method != "native":
        yield (
            "the native extension is missing: numpy reads memory slower than this machine can, and multiplying is not "
            "measured. Install inferloop where a C++20 compiler is found."
        )
    if found.others_share > _MUCH:
        yield (
            f"other processes had {found.others_share:.0%} of the processors meanwhile, so the medians are too low: "
            "measure again when the machine is quiet"
        )
    if machine.devices and devices is None:
        yield "more is known of NVIDIA devices where the package nvidia-ml-py is installed"


def _machine_table(machine: Fingerprint, devices: tuple[NvidiaDevice, ...] | None, found: MeasuredHardware) -> Table:
    cores = f"{machine.num_cores} of {machine.num_physical_cores}" if machine.num_physical_cores else machine.num_cores
    known = [f"{d.name}, {human_bytes(d.memory_bytes)}, CUDA {d.compute_capability}" for d in devices or ()]
    rows = {
        "processor": machine.cpu_model,
        "cores": f"{cores} usable",
        "instructions": f"{found.best_isa or 'unknown'} ({' '.join(machine.cpu_flags)})",
        "caches": ", ".join(f"{c.count} x {human_bytes(c.size_bytes)} {c.name}" for c in machine.caches) or "unknown",
        "memory": human_bytes(machine.memory_bytes),
        "huge pages": f"{machine.huge_pages or 'none'}; {_in_huge_pages(found)}",
        "devices": ", ".join(known or machine.devices) or "none",
        "system": f"{machine.system}, {machine.python}",
    }
    table = _table("This machine", "", "")
    for name, value in rows.items():
        table.add_row(name, escape(value))
    return table


def _in_huge_pages(found: MeasuredHardware) -> str:
    if found.huge_page_bytes is None:
        return "whether the memory read lay in them is not known"
    return f"{found.huge_page_bytes / found.memory_bytes:.0%} of the memory read lay in them"


def _bandwidth_table(found: MeasuredHardware) -> Table:
    threads = sorted({b.num_threads for b in found.bandwidth})
    table = _table("Reading memory, GB/s", "working set", *map(_threads, threads))
    cells = {(b.working_set_bytes, b.num_threads): (b.bytes_per_s, b.best_bytes_per_s) for b in found.bandwidth}
    for size in sorted({size for size, _ in cells}):
        table.add_row(human_bytes(size), *(_pair(*cells[size, n], 1e9) for n in threads))
    return table


def _peaks_table(found: MeasuredHardware) -> Table:
    threads = sorted({p.num_threads for p in found.peaks})
    table = _table("Multiplying and adding, Gop/s", "kind", "instructions", *map(_threads, threads))
    cells = {(p.kind, p.isa, p.num_threads): (p.ops_per_s, p.best_ops_per_s) for p in found.peaks}
    for kind, isa in sorted({(kind, isa) for kind, isa, _ in cells}):
        table.add_row(kind, isa, *(_pair(*cells[kind, isa, n], 1e9) for n in threads))
    return table


def _pair(median: float, best: float, unit: float) -> str:
    return f"{_number(median / unit)} ({_number(best / unit)})"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _threads(num: int) -> str:
    return "1 thread" if num == 1 else f"{num} threads"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    table.show_header = any(columns)
    for name in columns:
        table.add_column(name, justify="right" if "thread" in name else "left", overflow="fold")
    return table
