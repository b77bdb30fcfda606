"""How each target of a comparison was set up: its own flags, what they come to, and how they were chosen."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from markupsafe import Markup

from inferloop.pages.html import Child, Column, grouped_table, table, tag
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
                f"{t.get('label')} (void)" if t.get("void") else str(t.get("label")),
                str(t.get("name")),
                engine_of(t),
                str(t.get("model") or ABSENT),
                str(setup.get("precision") or identity.get("precision") or ABSENT),
                tag("code", str(digest)[:12], title=str(digest)) if digest else "not told",
                _burst(t),
                f"{idle}, suspended" if t.get("suspended") else idle,
            ]
        )
    columns = [
        *(Column(title) for title in ("", "Target", "Engine", "Model", "Weights", "Identity")),
        Column("Completes of a burst, /s", True),
        Column("Idle, of a core", True),
    ]
    caption = "Each target as it was measured; the others are compared with the first, idle while another is measured"
    return table(caption, columns, rows)


def setup_tables(targets: Sequence[Json]) -> list[Markup]:
    """What flags come to, a column for each target that was started for this; below it, all flags of each."""
    known = [(t, mapping(t.get("setup"))) for t in targets if t.get("setup")]
    if not known:
        return []
    settings = [mapping(setup.get("settings")) for _, setup in known]
    come_to: list[list[Child]] = [["Version", *(str(setup.get("version") or ABSENT) for _, setup in known)]]
    come_to += [
        [name[:1].upper() + name[1:], *(str(s.get(name) or ABSENT) for s in settings)]
        for name in dict.fromkeys(name for s in settings for name in s)
    ]
    groups: list[tuple[str | None, list[list[Child]]]] = [
        (
            f"{t.get('label')}: {t.get('name')}",
            [
                ["Model file", _code(setup.get("model_file"))],
                ["Command", _code(shlex.join(words(setup.get("argv"))))],
                ["Environment", _code(" ".join(f"{k}={shlex.quote(str(v))}" for k, v in env.items()))],
                ["Flags chosen by", str(setup.get("tuned") or ABSENT)],
            ],
        )
        for t, setup in known
        for env in (mapping(setup.get("env")),)
    ]
    columns = [Column("Setting"), *(Column(str(t.get("label"))) for t, _ in known)]
    return [
        table("What each engine's flags come to", columns, come_to),
        grouped_table("Each engine's own flags", [Column(""), Column("", wide=True)], groups),
    ]


def engine_of(target: Json) -> str:
    identity, setup = mapping(target.get("identity")), mapping(target.get("setup"))
    told = " ".join(str(identity[k]) for k in ("engine", "engine_revision") if identity.get(k))
    return told or str(setup.get("version") or ABSENT)


def _burst(target: Json) -> str:
    found = target.get("bursts_qps")
    each = [number(qps) for qps in found] if isinstance(found, list) else []
    return f"{number(target.get('burst_qps'))} ({', '.join(each)})" if each else ABSENT


def _code(text: object) -> Child:
    return tag("code", str(text)) if text else ABSENT
