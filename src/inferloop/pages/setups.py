"""How each target of a comparison was set up: its own flags, what they come to, and how they were chosen."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from inferloop.pages.html import Child, Column, table, tag
from inferloop.pages.text import ABSENT, number, percent, words
from inferloop.pages.verdicts import Json, mapping


def targets_table(targets: Sequence[Json]) -> Markup:
    """What each is, what it completes at most, and what it costs the others while it is idle."""
    rows: list[list[Child]] = []
    for t in targets:
        identity, setup = mapping(t.get("identity")), mapping(t.get("setup"))
        digest = identity.get("digest")
        idle = percent(t.get("idle_cpu"))
        rows.append(
            [
                str(t.get("label")),
                str(t.get("name")),
                engine_of(t),
                str(t.get("model") or ABSENT),
                str(setup.get("precision") or identity.get("precision") or ABSENT),
                tag("code", str(digest)[:12], title=str(digest)) if digest else "not told",
                _burst(t),
                f"{idle}, suspended" if t.get("suspended") else idle,
                str(t.get("void") or "no"),
            ]
        )
    columns = [
        *(Column(title) for title in ("", "Target", "Engine", "Model", "Weights", "Identity")),
        Column("Completes of a burst, /s", True),
        Column("Idle, of a core", True),
        Column("Void", wide=True),
    ]
    caption = (
        "Each target as it was measured; the others are compared with the first. A burst is all requests at once; idle "
        "is what it takes of a core while another is measured"
    )
    return table(caption, columns, rows)


def setup_table(targets: Sequence[Json]) -> Markup | None:
    """A column for each target that was started for this."""
    known = [(str(t.get("label")), mapping(t.get("setup"))) for t in targets if t.get("setup")]
    if not known:
        return None
    setups = [setup for _, setup in known]
    settings = [mapping(s.get("settings")) for s in setups]
    rows: list[list[Child]] = [
        ["Version", *(str(s.get("version") or ABSENT) for s in setups)],
        ["Model file", *(tag("code", s["model_file"]) if s.get("model_file") else ABSENT for s in setups)],
    ]
    rows += [
        [name[:1].upper() + name[1:], *(str(s.get(name) or ABSENT) for s in settings)]
        for name in dict.fromkeys(name for s in settings for name in s)
    ]
    rows += [
        ["Command", *(tag("code", " ".join(words(s.get("argv"))) or ABSENT) for s in setups)],
        ["Environment", *(_env(mapping(s.get("env"))) for s in setups)],
        ["Flags chosen by", *(str(s.get("tuned") or ABSENT) for s in setups)],
    ]
    columns = [Column("Setting"), *(Column(label, wide=True) for label, _ in known)]
    return table("Each engine's own flags, and what they come to", columns, rows)


def engine_of(target: Json) -> str:
    identity, setup = mapping(target.get("identity")), mapping(target.get("setup"))
    told = " ".join(str(identity[k]) for k in ("engine", "engine_revision") if identity.get(k))
    return told or str(setup.get("version") or ABSENT)


def _burst(target: Json) -> str:
    found = target.get("bursts_qps")
    each = [number(qps) for qps in found] if isinstance(found, list) else []
    return f"{number(target.get('burst_qps'))} ({', '.join(each)})" if each else ABSENT


def _env(env: Json) -> Child:
    return tag("code", " ".join(f"{name}={value}" for name, value in env.items())) if env else ABSENT
