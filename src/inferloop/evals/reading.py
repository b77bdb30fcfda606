"""Small checks over located values; each fault is a ContractError with file, line, key and the nearest valid name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from inferloop.contract.located import Located, kind_of
from inferloop.contract.reader import did_you_mean
from inferloop.core.errors import ContractError

Check = Callable[[Any], bool]
Fields = Mapping[str, tuple[Check, str]]
"""Of each key: the check that its value must pass, and what that asks for, in words."""


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads one file's values. Every method raises ContractError."""

    file: str

    def error(self, node: Located, problem: str, *, key: str | None = None, hint: str | None = None) -> ContractError:
        """`key` is a child of the node that is missing or stands for a group."""
        path = (f"{node.path}.{key}" if node.path else key) if key else node.path
        return ContractError(problem, file=self.file, line=node.line, key=path or None, hint=hint)

    def mapping(self, node: Located, allowed: Collection[str], *, required: Collection[str] = ()) -> dict[str, Located]:
        """The entries of a mapping, in order. Unknown and missing keys are errors."""
        if not isinstance(node.value, dict):
            raise self.error(node, f"must be a mapping, not {kind_of(node)}")
        for name, child in node.value.items():
            if name not in allowed:
                raise self.error(child, "is not a known key", hint=did_you_mean(name, allowed))
        for name in required:
            if name not in node.value:
                raise self.error(node, "is missing", key=name)
        return node.value

    def items(self, node: Located) -> list[Located]:
        """The elements of a list that is not empty."""
        if not isinstance(node.value, list):
            raise self.error(node, f"must be a list, not {kind_of(node)}")
        if not node.value:
            raise self.error(node, "must not be empty")
        return node.value

    def text(self, node: Located) -> str:
        """Text that is not blank."""
        if not isinstance(node.value, str):
            raise self.error(node, f"must be text, not {kind_of(node)}", hint="put it in quotes")
        if not node.value.strip():
            raise self.error(node, "must not be blank")
        return node.value

    def choice(self, node: Located, allowed: Collection[str]) -> str:
        found = self.text(node)
        if found not in allowed:
            raise self.error(node, f"is {found!r}", hint=did_you_mean(found, allowed))
        return found

    def checked(self, node: Located, check: Check, want: str) -> Any:
        """The plain value, which must pass."""
        found = bare(node)
        if not check(found):
            raise self.error(node, f"must be {want}, not {kind_of(node)}")
        return found

    def fields(self, node: Located, table: Fields) -> dict[str, Any]:
        """A mapping whose every value passes its check in `table`."""
        return {name: self.checked(child, *table[name]) for name, child in self.mapping(node, table).items()}


def bare(node: Located) -> Any:
    """The value without its places."""
    if isinstance(node.value, dict):
        return {name: bare(child) for name, child in node.value.items()}
    if isinstance(node.value, list):
        return [bare(child) for child in node.value]
    return node.value
