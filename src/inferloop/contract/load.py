"""Contracts from files: read, check everything, and hand back one frozen value.

The full form and the short form, YAML, TOML and JSON all lead here, and equal meanings give equal contracts.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from inferloop.contract import objectives, routing, short_form, traffic
from inferloop.contract.located import Located, locate
from inferloop.contract.model_ref import read_model
from inferloop.contract.reader import Problems, Section
from inferloop.contract.source import parse_text, read_text
from inferloop.contract.suites import explain_missing, resolve_suite
from inferloop.contract.workload import (
    CAPTURE_LEVELS,
    Archetype,
    Contract,
    CostCap,
    Privacy,
    QualityGate,
)
from inferloop.core.slo import Slo

VERSION = 1
UNNAMED = "contract"
ARCHETYPES = ("chat", "agent", "batch")
KEYS = (
    "version",
    "service",
    "archetype",
    "model",
    "models",
    "routing",
    "traffic",
    "slo",
    "sla",
    "quality",
    "cost",
    "privacy",
)
_ELSEWHERE = {
    **dict.fromkeys(traffic.KEYS, "traffic"),
    **dict.fromkeys(objectives.KEYS, "slo"),
    "quality_gate": "quality, as its suite",
    "suite": "quality",
    "precision": "model",
    **dict.fromkeys(("rules", "escalation"), "routing"),
}


def load(path: Path | str, *, base: Path | None = None) -> Contract:
    """The contract in a .yaml, .yml, .toml or .json file. Files it names are looked up from `base`, by default the
    contract's own folder.

    Raises UsageError when there is no such file, ContractError (for several problems ContractProblemsError) with
    file, line and key for everything that is wrong inside it.
    """
    path = Path(path)
    text, fmt = read_text(path)
    return _read(parse_text(text, fmt, str(path)), file=str(path), folder=base or path.parent)


def parse(content: Mapping[str, Any] | str, *, fmt: str = "yaml", base: Path | None = None) -> Contract:
    """A contract from plain values, or from text in `fmt` (yaml, toml, json). `source` stays None."""
    root = parse_text(content, fmt, UNNAMED) if isinstance(content, str) else locate(content)
    return _read(root, file=None, folder=base or Path())


def _read(root: Located, *, file: str | None, folder: Path) -> Contract:
    problems = Problems(file or UNNAMED)
    valid = (*KEYS, *short_form.KEYS) if short_form.is_short(root) else KEYS
    top = Section(short_form.expand(root, problems), problems, valid, _ELSEWHERE)
    version = top.number("version", low=0)
    if version not in (None, VERSION):
        problems.add(top.get("version") or root, f"version {version:g} is not known", f"this inferloop reads {VERSION}")
    service = top.text("service") or "default"
    if not traffic.valid_name(service):
        problems.add(
            top.get("service") or root, f"{service!r} must be letters, digits, dot, dash or underscore, at most 64"
        )
    archetype = top.text("archetype", choices=ARCHETYPES) or "chat"
    several = top.get("models") is not None or top.get("routing") is not None
    model = read_model(top.get("model", required=not several), problems)
    section = top.section("traffic", traffic.KEYS, required=True)
    flow = traffic.read_traffic(section, problems, folder) if section else None
    names = [c.name for c in flow.classes] if flow else []
    routes = routing.read_routing(top, service, names, problems) if several else None
    slo = objectives.read_slo(top.get("slo"), problems, names)
    sla = objectives.read_slo(top.get("sla"), problems, names)
    quality = _read_quality(top.section("quality", ("suite", "minimum", "allowed_loss")), problems, folder)
    cost = _read_cost(top.section("cost", ("usd_per_hour", "usd_per_mtok")))
    privacy = _read_privacy(top.section("privacy", ("capture", "retain_days")), problems)
    problems.raise_if_any()
    if routes is not None:
        model = routes.model(routes.default).ref
    assert model is not None and flow is not None, "whatever is missing was reported"
    return Contract(
        version=VERSION,
        service=service,
        archetype=cast(Archetype, archetype),
        model=model,
        traffic=flow,
        slo=slo or Slo(),
        sla=sla,
        quality=quality,
        cost=cost,
        privacy=privacy,
        routing=routes,
        source=file,
    )


def _read_quality(section: Section | None, problems: Problems, folder: Path) -> QualityGate | None:
    if section is None:
        return None
    name = section.text("suite", required=True)
    minimum, allowed = section.number("minimum", high=1.0), section.number("allowed_loss", high=1.0)
    if name is None:
        return None
    found = resolve_suite(name, folder)
    if found is None:
        problems.add(section.get("suite") or section.node, *explain_missing(name, folder))
        return None
    canonical, path = found
    return QualityGate(str(path), 1.0 if minimum is None else minimum, allowed, name=canonical)


def _read_cost(section: Section | None) -> CostCap | None:
    if section is None:
        return None
    per_hour, per_mtok = section.number("usd_per_hour", above=True), section.number("usd_per_mtok", above=True)
    return None if per_hour is None and per_mtok is None else CostCap(per_hour, per_mtok)


def _read_privacy(section: Section | None, problems: Problems) -> Privacy:
    if section is None:
        return Privacy()
    capture = section.text("capture", choices=CAPTURE_LEVELS) or Privacy().capture
    days = section.number("retain_days", high=36500.0)
    if days is not None and days != int(days):
        problems.add(section.get("retain_days") or section.node, f"must be whole days, not {days:g}")
    return Privacy(capture, Privacy().retain_days if days is None else int(days))
