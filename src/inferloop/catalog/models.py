"""Models that can be fetched by name. The facts, each with its source and date, are data in models.toml."""

from __future__ import annotations

import datetime
import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

_FILE = Path(__file__).with_name("models.toml")


@dataclass(frozen=True, slots=True)
class Source:
    """Where a fact was read, and when."""

    what: str
    url: str
    date: datetime.date


@dataclass(frozen=True, slots=True)
class Wheel:
    """A pinned wheel of a package index, and what of it is wanted. `requirement` is `name==version`."""

    requirement: str
    sha256: str
    num_bytes: int
    member: str


@dataclass(frozen=True, slots=True)
class Terms:
    """What whoever fetches a model agrees to."""

    name: str
    url: str


@dataclass(frozen=True, slots=True)
class KnownModel:
    """One file, whole or in parts inside pinned wheels; sha256 are lower-case hex."""

    name: str
    display_name: str
    family: str
    num_params: int
    context_length: int
    stored_precision: str
    license: str
    homepage: str
    wheels: tuple[Wheel, ...]
    """Whose members make up the file, in this order."""
    file_name: str
    file_sha256: str
    file_bytes: int
    sources: Mapping[str, Source]
    """Field name -> where its value comes from."""
    terms: Terms | None = None
    """None: the license asks nothing of who only fetches."""

    @property
    def wheel_bytes(self) -> int:
        """Of all wheels."""
        return sum(wheel.num_bytes for wheel in self.wheels)


@functools.cache
def known_models() -> Mapping[str, KnownModel]:
    """Every model of the catalogue by name."""
    return read_models(tomllib.loads(_FILE.read_text("utf-8")))


def read_models(data: Mapping[str, Any]) -> dict[str, KnownModel]:
    """Raises KeyError or TypeError for an entry that lacks a fact or a source: the catalogue ships with us, so that
    is our own bug and a test finds it."""
    sources = {name: Source(**source) for name, source in data["sources"].items()}
    return {name: _model(name, entry, sources) for name, entry in data["models"].items()}


def _model(name: str, entry: Mapping[str, Mapping[str, Any]], sources: Mapping[str, Source]) -> KnownModel:
    values = {key: fact["value"] for key, fact in entry.items()}
    values["wheels"] = tuple(Wheel(**wheel) for wheel in values["wheels"])
    if "terms" in values:
        values["terms"] = Terms(**values["terms"])
    model = KnownModel(name=name, sources={key: sources[fact["source"]] for key, fact in entry.items()}, **values)
    for field in fields(KnownModel):
        value = getattr(model, field.name)
        if field.type in ("str", "int") and type(value).__name__ != field.type:
            raise TypeError(f"models.toml: {name}.{field.name} is {value!r}, not {field.type}")
    return model
