"""YAML, TOML and JSON text to located values.

One meaning for three formats. YAML scalars follow the YAML 1.2 core schema
(https://yaml.org/spec/1.2.2/#103-core-schema), as JSON and TOML have it: `1e3` is a number, `on` and `no` are words,
`0o17` is octal, `012` is twelve. A key given twice is an error everywhere.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping

import yaml

from inferloop.contract.located import MAX_DEPTH, Located, Scalar, is_sound_text, join, locate
from inferloop.core.errors import ContractError

MAX_NODES = 100_000
"""More than any contract has; stops a small file whose aliases expand without end."""


# --- YAML ---------------------------------------------------------------------------------------------------------

_INT = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_WORDS: dict[str, Scalar] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), float("nan")),
    **dict.fromkeys((".inf", ".Inf", ".INF", "+.inf"), float("inf")),
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), float("-inf")),
}


def _yaml_scalar(node: yaml.ScalarNode) -> Scalar:
    text = str(node.value)
    if node.style is not None:  # quoted or block text is text
        return text
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text) and len(text) < 400:
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    if re.fullmatch(r"0o[0-7]+|0x[0-9a-fA-F]+", text):
        return int(text, 0)
    return text


_YAML_TAGS = tuple(
    f"tag:yaml.org,2002:{kind}"
    for kind in ("null", "bool", "int", "float", "str", "timestamp", "merge", "value", "map", "seq")
)


def parse_yaml(text: str, file: str | None) -> Located | None:
    """None for a text without a document."""
    try:
        documents = list(yaml.compose_all(text, Loader=yaml.SafeLoader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        problem = f"is not valid YAML: {error.problem}"
        raise ContractError(problem, file=file, line=mark.line + 1 if mark else None) from error
    except yaml.YAMLError as error:
        raise ContractError(f"is not valid YAML: {error}", file=file) from error
    if len(documents) > 1:
        line = documents[1].start_mark.line + 1
        raise ContractError("holds several YAML documents; one file is one contract", file=file, line=line)
    return _YamlTree(file).read(documents[0]) if documents else None


class _YamlTree:
    """Turns composed nodes into located values. Aliases are expanded, up to MAX_NODES nodes in all."""

    def __init__(self, file: str | None) -> None:
        self._file = file
        self._num_nodes = 0

    def read(self, node: yaml.Node, path: str = "", line: int | None = None, depth: int = 0) -> Located:
        line = line or node.start_mark.line + 1
        self._num_nodes += 1
        if depth > MAX_DEPTH or self._num_nodes > MAX_NODES:
            raise self._error("is nested too deeply or refers to itself", line, path)
        if isinstance(node, yaml.MappingNode):
            return Located(self._children(node, path, depth), line, path)
        if node.tag not in _YAML_TAGS:
            raise self._error(f"the YAML tag {node.tag} has no meaning here", line, path)
        if isinstance(node, yaml.SequenceNode):
            items = [self.read(n, f"{path}[{i}]", None, depth + 1) for i, n in enumerate(node.value)]
            return Located(items, line, path)
        assert isinstance(node, yaml.ScalarNode), "a node is a mapping, a sequence or a scalar"
        if not is_sound_text(node.value):
            raise self._error("holds half of a surrogate pair, which is no text", line, path)
        return Located(_yaml_scalar(node), line, path)

    def _children(self, node: yaml.MappingNode, path: str, depth: int) -> dict[str, Located]:
        children: dict[str, Located] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise self._error("keys must be words", line, path)
            key = str(key_node.value)
            if not is_sound_text(key):
                raise self._error("keys must be words", line, path)
            if key in children:
                raise _duplicate(key, path, self._file, line)
            children[key] = self.read(value_node, join(path, key), line, depth + 1)
        return children

    def _error(self, problem: str, line: int, path: str) -> ContractError:
        return ContractError(problem, file=self._file, line=line, key=path or None)


def _duplicate(key: str, path: str, file: str | None, line: int | None) -> ContractError:
    return ContractError("is given twice", file=file, line=line, key=join(path, key))


# --- TOML ---------------------------------------------------------------------------------------------------------

_TOML_HEADER = re.compile(r"\s*\[(\[)?\s*([^\[\]]+?)\s*\]")
_TOML_KEY = re.compile(r"\s*([A-Za-z0-9_.\"'-]+(?:\s*\.\s*[A-Za-z0-9_\"'-]+)*)\s*=")


def parse_toml(text: str, file: str | None) -> Located:
    try:
        value = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, ValueError) as error:
        found = re.search(r"\(at line (\d+)", str(error))
        line = int(found[1]) if found else None
        raise ContractError(f"is not valid TOML: {_reason(error)}", file=file, line=line) from error
    return _located_in(file, value, _toml_lines(text))


def _toml_lines(text: str) -> dict[str, int]:
    """Key path -> line, read off the text, since tomllib tells no positions. Keys inside inline tables are found
    through their parent's line."""
    lines: dict[str, int] = {"": 1}
    prefix, counts = "", dict[str, int]()
    for number, line in enumerate(text.splitlines(), 1):
        if header := _TOML_HEADER.match(line):
            prefix = _toml_name(header[2])
            if header[1]:
                index = counts.get(prefix, 0)
                counts[prefix] = index + 1
                lines.setdefault(prefix, number)
                prefix = f"{prefix}[{index}]"
            lines.setdefault(prefix, number)
        elif key := _TOML_KEY.match(line):
            lines.setdefault(join(prefix, _toml_name(key[1])), number)
    return lines


def _toml_name(text: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in text.split("."))


# --- JSON ---------------------------------------------------------------------------------------------------------

_JSON_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+|\n')


def parse_json(text: str, file: str | None) -> Located:
    try:
        value = json.loads(text, object_pairs_hook=_Pairs)
    except json.JSONDecodeError as error:
        raise ContractError(f"is not valid JSON: {error.msg}", file=file, line=error.lineno) from error
    except ValueError as error:
        raise ContractError(f"is not valid JSON: {_reason(error)}", file=file) from error
    keys = iter(_json_key_lines(text))
    lines: dict[str, int] = {"": 1}

    def unpack(value: object, path: str) -> object:
        if isinstance(value, _Pairs):
            result: dict[str, object] = {}
            for key, child in value:
                line = next(keys, None)
                if key in result:
                    raise _duplicate(key, path, file, line)
                if line:
                    lines[join(path, key)] = line
                result[key] = unpack(child, join(path, key))
            return result
        if isinstance(value, list):
            return [unpack(v, f"{path}[{i}]") for i, v in enumerate(value)]
        return value

    return _located_in(file, unpack(value, ""), lines)


class _Pairs(list[tuple[str, object]]):
    """A JSON object whose keys are still in order and may repeat."""


def _json_key_lines(text: str) -> list[int]:
    """The line of every object key, in reading order. The text is already known to be valid."""
    found, line, last_string_line = list[int](), 1, 1
    for token in _JSON_TOKEN.findall(text):
        if token == "\n":
            line += 1
        elif token == ":":
            found.append(last_string_line)
        elif token.startswith('"'):
            last_string_line = line
    return found


def _reason(error: ValueError) -> str:
    """The parser's words, but for the interpreter's own limit on the digits of a number."""
    return "a number has too many digits" if str(error).startswith("Exceeds the limit") else str(error)


def _located_in(file: str | None, value: object, lines: Mapping[str, int]) -> Located:
    try:
        return locate(value, "", lines)
    except ContractError as error:
        raise ContractError(error.problem, file=file, line=error.line, key=error.key) from error
