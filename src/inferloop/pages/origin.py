"""Where, when and how the numbers came about."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from inferloop.core.units import NS_PER_S, human_bytes
from inferloop.measure.timing import DEFINITIONS
from inferloop.pages.html import Child, Column, facts, join, table, tag
from inferloop.pages.text import ABSENT, METRICS, duration, instant, number, words
from inferloop.pages.verdicts import Json, mapping

_FEW_STAGES = 20
"""A comparison has one for each window, and what follows them would be far away."""


def origin(header: Json) -> Markup:
    """Machine, versions, identity, and the conditions of the run."""
    made = mapping(header.get("fingerprint"))
    identity = mapping(header.get("identity"))
    machine: list[tuple[str, Child]] = [
        ("Processor", made.get("cpu_model")),
        ("Cores", _cores(made)),
        ("Instructions", ", ".join(words(made.get("cpu_flags")))),
        ("Memory", human_bytes(made["memory_bytes"]) if number(made.get("memory_bytes")) != ABSENT else None),
        ("Devices", ", ".join(words(made.get("devices"))) or ("none" if made else None)),
        ("System", made.get("system")),
        ("Python", made.get("python")),
        ("inferloop", made.get("inferloop_version")),
        ("Revision", _revision(made)),
    ]
    conditions: list[tuple[str, Child]] = [
        ("Run", header.get("run")),
        ("Started", instant(header.get("t_start_wall_ns"))),
        ("Took", _took(header)),
        ("Target", header.get("target")),
        ("Certificate", "not checked (--insecure)" if mapping(header.get("options")).get("insecure") else None),
        ("Arrivals", header.get("arrivals")),
        ("Seed", None if header.get("seed") is None else str(header["seed"])),
        ("Warm-up", None if header.get("warmup_s") is None else duration(header["warmup_s"])),
        ("Window", None if header.get("window_s") is None else duration(header["window_s"])),
        ("Contract", _code(header.get("contract_digest"))),
    ]
    answers: list[tuple[str, Child]] = [
        ("Model", identity.get("model_id")),
        ("Precision", identity.get("precision")),
        ("Engine", " ".join(str(identity[k]) for k in ("engine", "engine_revision") if identity.get(k)) or None),
        ("Identity", _code(identity.get("digest"))),
        ("Weights", _code(identity.get("weights_digest"))),
        ("Tokenizer", _code(identity.get("tokenizer_digest"))),
        ("Template", _code(identity.get("template_digest"))),
    ]
    packages = ", ".join(f"{name} {version}" for name, version in mapping(made.get("packages")).items())
    return join(
        [
            tag("h3", "The run"),
            facts(conditions),
            tag("h3", "What answered"),
            facts(answers) if identity else tag("p", "The target told no serving identity."),
            tag("h3", "The machine"),
            facts(machine),
            tag("p", packages, class_="soft") if packages else None,
        ]
    )


def definitions() -> Markup:
    """What each latency means; the only definitions there are."""
    rows: list[list[Child]] = [[METRICS[name], text] for name, text in DEFINITIONS.items()]
    note = "A percentile is the smallest observed value with at least that share of the samples at or below it. It is "
    note += "shown only when enough samples stand behind it (130 for p95, 662 for p99)."
    return join(
        [table("How each number is defined", [Column("Number"), Column("Definition", wide=True)], rows), tag("p", note)]
    )


def stages(events: Sequence[Json], header: Json) -> Markup | None:
    """What the run did when: one row per stage that started."""
    rows: list[list[Child]] = []
    start = header.get("t_start_ns")
    open_at: dict[str, int] = {}
    order: list[str] = []
    ended: dict[str, tuple[str, int | None]] = {}
    for e in events:
        name, kind, t = str(e.get("stage")), e.get("event"), e.get("t_ns")
        if not isinstance(t, int):
            continue
        if kind == "started":
            open_at[name] = t
            if name not in order:
                order.append(name)
        elif kind in ("finished", "failed"):
            ended[name] = (str(kind), t)
    for name in order:
        kind, t = ended.get(name, ("not finished", None))
        began = duration((open_at[name] - start) / NS_PER_S) if isinstance(start, int) else ABSENT
        rows.append([name, began, ABSENT if t is None else duration((t - open_at[name]) / NS_PER_S), kind])
    if not rows:
        return None
    columns = [Column("Stage"), Column("After", True), Column("Took", True), Column("Ended")]
    told = table("What the run did, in order", columns, rows, hide_caption=True)
    return told if len(rows) <= _FEW_STAGES else tag("details", tag("summary", f"{len(rows)} stages"), told)


def _cores(made: Json) -> str | None:
    if made.get("num_cores") is None:
        return None
    physical = made.get("num_physical_cores")
    return f"{made['num_cores']} logical" + (f", {physical} physical" if physical else "")


def _revision(made: Json) -> Child:
    if not made.get("git_revision"):
        return None
    return join([_code(made["git_revision"]), " with local changes" if made.get("git_dirty") else None])


def _code(digest: object) -> Markup | None:
    return tag("code", str(digest)[:12], title=str(digest)) if digest else None


def _took(header: Json) -> str | None:
    start, end = header.get("t_start_ns"), header.get("t_end_ns")
    return duration((end - start) / NS_PER_S) if isinstance(start, int) and isinstance(end, int) else None
