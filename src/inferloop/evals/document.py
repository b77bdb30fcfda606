"""YAML read with its positions, so that an error can name file, line and key."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import yaml

from inferloop.core.errors import ContractError, nearest


class Document:
    """One parsed YAML text. Raises ContractError for every fault, with the line it is on."""

    def __init__(self, text: str, *, source: str) -> None:
        self.source = source
        try:
            self._loader = yaml.SafeLoader(text)
            root = self._loader.get_single_node()
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else None
            raise ContractError(f"not YAML: {error.problem}", file=source, line=line) from error
        except yaml.YAMLError as error:
            raise ContractError(f"not YAML: {error}", file=source) from error
        if root is None:
            raise ContractError("the file is empty", file=source, line=1)
        self.root: yaml.Node = root

    def error(self, problem: str, node: yaml.Node, key: str | None = None, hint: str | None = None) -> ContractError:
        return ContractError(problem, file=self.source, line=node.start_mark.line + 1, key=key, hint=hint)

    def mapping(self, node: yaml.Node, *, key: str | None, allowed: Collection[str]) -> dict[str, yaml.Node]:
        """The entries of a mapping, in order. Unknown and repeated keys are errors."""
        if not isinstance(node, yaml.MappingNode):
            raise self.error(f"must be a mapping, is {self.kind_of(node)}", node, key)
        entries: dict[str, yaml.Node] = {}
        for key_node, value in node.value:
            name = str(key_node.value)
            path = f"{key}.{name}" if key else name
            if name in entries:
                raise self.error("is given twice", key_node, path)
            if name not in allowed:
                guess = nearest(name, allowed)
                hint = f"did you mean {guess!r}?" if guess else f"known keys: {', '.join(sorted(allowed))}"
                raise self.error("is not a known key", key_node, path, hint)
            entries[name] = value
        return entries

    def items(self, node: yaml.Node, *, key: str) -> Iterator[tuple[str, yaml.Node]]:
        """(path, node) of each element of a list."""
        if not isinstance(node, yaml.SequenceNode):
            raise self.error(f"must be a list, is {self.kind_of(node)}", node, key)
        for index, item in enumerate(node.value):
            yield f"{key}[{index}]", item

    def value(self, node: yaml.Node, *, key: str) -> Any:
        """The plain Python value. Repeated keys at any depth are errors."""
        self._refuse_repeats(node, key)
        try:
            return self._loader.construct_object(node, deep=True)
        except (yaml.YAMLError, ValueError, TypeError) as error:
            raise self.error(f"cannot be read: {error}", node, key) from error

    def text(self, node: yaml.Node, *, key: str) -> str:
        """A string that is not blank."""
        found = self.value(node, key=key)
        if not isinstance(found, str):
            raise self.error(f"must be text, is {self.kind_of(node)}", node, key, "put it in quotes")
        if not found.strip():
            raise self.error("must not be blank", node, key)
        return found

    def choice(self, node: yaml.Node, *, key: str, allowed: Collection[str]) -> str:
        found = self.text(node, key=key)
        if found not in allowed:
            guess = nearest(found, allowed)
            hint = f"did you mean {guess!r}?" if guess else f"one of: {', '.join(allowed)}"
            raise self.error(f"is {found!r}", node, key, hint)
        return found

    def kind_of(self, node: yaml.Node) -> str:
        if isinstance(node, yaml.MappingNode):
            return "a mapping"
        if isinstance(node, yaml.SequenceNode):
            return "a list"
        names = {"str": "text", "int": "a whole number", "float": "a number", "bool": "true or false", "null": "empty"}
        return names.get(node.tag.rpartition(":")[2], "something else")

    def _refuse_repeats(self, node: yaml.Node, key: str) -> None:
        if isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                self._refuse_repeats(item, f"{key}[{index}]")
        elif isinstance(node, yaml.MappingNode):
            seen: set[str] = set()
            for key_node, value in node.value:
                path = f"{key}.{key_node.value}"
                if str(key_node.value) in seen:
                    raise self.error("is given twice", key_node, path)
                seen.add(str(key_node.value))
                self._refuse_repeats(value, path)
