"""The adapters that our engine has loaded: by name for those who ask, in slots of the runner for its steps.

An answer keeps the adapter that it began with. What is unloaded or replaced has no name any more and stays in its slot
until the last answer through it has ended. Adapters are told apart by their content, in cache keys and identities.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

from inferloop.backends.protocols import ServedAdapter
from inferloop.core.errors import OverloadedError, RequestError, UsageError
from inferloop.core.request import AdapterUse
from inferloop.engine.compute.adapter import load_adapter
from inferloop.engine.compute.runner import AdapterRunner
from inferloop.models.adapters.read import read_adapter
from inferloop.models.headers import ModelHeader
from inferloop.models.identity import ServingIdentity

MAX_NAME_CHARS = 256
Between = Callable[[Callable[[], None]], "Future[None]"]
"""Runs something between two steps of the engine."""


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """At most `num` have a name at a time; as many again may be on their way out."""

    num: int
    max_rank: int


class AdapterGoneError(RequestError):
    status = 404

    def __init__(self, name: str) -> None:
        super().__init__(f"The adapter {name!r} is not loaded any more", param="model", code="model_not_found")


class AdapterUnknownError(RequestError):
    status = 404

    def __init__(self, name: str) -> None:
        super().__init__(f"No adapter {name!r} is loaded", param="lora_name", code="adapter_not_found")


@dataclass(slots=True)
class _Held:
    served: ServedAdapter
    slot: int
    num_users: int = 0
    named: bool = True


class AdapterShelf:
    """Owned by the event loop, but for `put`, which is for before the engine starts."""

    def __init__(
        self, model: ModelHeader, runner: AdapterRunner, identity: ServingIdentity, limits: AdapterLimits
    ) -> None:
        self._model, self._runner, self._identity, self._limits = model, runner, identity, limits
        self._held: dict[int, _Held] = {}
        """By slot."""
        self._free = list(range(2 * limits.num))[::-1]
        self._loading = asyncio.Lock()
        self.served: Mapping[str, ServedAdapter] = {}
        """By name; another mapping after every change."""

    def put(self, name: str, path: Path) -> None:
        """Load while no step runs. Raises UsageError for a name that cannot be, ModelFileError for other files."""
        try:
            self._check_name(name, replaces=False)
        except RequestError as error:
            raise UsageError(error.message) from None
        served, prepared = self._read(name, path)
        self._runner.set_adapter(slot := self._free.pop(), prepared)
        self._name(served, slot)

    async def load(self, name: str, path: Path, between: Between, *, replaces: bool) -> ServedAdapter:
        """Raises RequestError for a name that is taken or limits that are reached, ModelFileError for files that are no
        adapter of this model, OverloadedError while too many that were unloaded still answer."""
        async with self._loading:
            self._check_name(name, replaces=replaces)
            if not self._free:
                raise OverloadedError("too many unloaded adapters still answer requests", reason="adapters")
            served, prepared = await asyncio.to_thread(self._read, name, path)
            slot = self._free.pop()
            try:
                # once asked for it is done: whoever cancels this has the slot emptied
                await asyncio.wrap_future(between(lambda: self._runner.set_adapter(slot, prepared)))
            except BaseException:
                self._empty(slot, between)
                raise
            before = self._by_name(name)
            self._name(served, slot)
            if before is not None:
                self._retire(before, between)
            return served

    def unload(self, name: str, between: Between) -> None:
        """Requests under way end with it. Raises AdapterUnknownError."""
        held = self._by_name(name)
        if held is None:
            raise AdapterUnknownError(name)
        self.served = {known: served for known, served in self.served.items() if known != name}
        self._retire(held, between)

    @contextlib.contextmanager
    def using(self, served: ServedAdapter | None, between: Between) -> Iterator[AdapterUse | None]:
        """Keep it where it is until requests that go through it have been ended, or their ending been asked for. Raises
        AdapterGoneError when it is not the one of its name any more."""
        if served is None:
            yield None
            return
        held = self._by_name(served.name)
        if held is None or held.served is not served:
            raise AdapterGoneError(served.name)
        held.num_users += 1
        try:
            yield AdapterUse(held.slot, served.digest)
        finally:
            held.num_users -= 1
            if not held.named and not held.num_users:
                self._drop(held, between)

    def _check_name(self, name: str, *, replaces: bool) -> None:
        if not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable():
            message = f"an adapter needs a printable name of up to {MAX_NAME_CHARS} characters"
            raise RequestError(message, param="lora_name")
        if name == self._identity.model_id:
            raise RequestError(f"{name!r} is the name of the model itself", param="lora_name")
        if name in self.served:
            if replaces:
                return
            message = f"an adapter {name!r} is loaded already; load_inplace replaces it"
            raise RequestError(message, param="lora_name", code="adapter_exists")
        if len(self.served) >= self._limits.num:
            message = f"{self._limits.num} adapters are loaded, which is the most (--max-loras); unload one"
            raise RequestError(message, param="lora_name", code="too_many_adapters")

    def _read(self, name: str, path: Path) -> tuple[ServedAdapter, object]:
        adapter = load_adapter(read_adapter(path, self._model, max_rank=self._limits.max_rank))
        identity = replace(self._identity, model_id=name, adapter_digest=adapter.digest)
        return ServedAdapter(name, path, identity, adapter.digest, adapter.rank), self._runner.prepare_adapter(adapter)

    def _by_name(self, name: str) -> _Held | None:
        return next((held for held in self._held.values() if held.named and held.served.name == name), None)

    def _name(self, served: ServedAdapter, slot: int) -> None:
        self._held[slot] = _Held(served, slot)
        self.served = {**self.served, served.name: served}

    def _retire(self, held: _Held, between: Between) -> None:
        held.named = False
        if not held.num_users:
            self._drop(held, between)

    def _drop(self, held: _Held, between: Between) -> None:
        del self._held[held.slot]
        self._empty(held.slot, between)

    def _empty(self, slot: int, between: Between) -> None:
        """The slot is free at once: what is asked for between steps is done in the order in which it was asked for."""
        self._free.append(slot)
        with contextlib.suppress(Exception):  # an engine that has ended needs no room
            between(lambda: self._runner.set_adapter(slot, None))
