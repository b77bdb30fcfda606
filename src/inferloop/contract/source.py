"""A contract's file, read to located values: bytes checked, format chosen by the suffix."""

from __future__ import annotations

from pathlib import Path

from inferloop.contract.formats import parse_json, parse_toml, parse_yaml
from inferloop.contract.located import Located, kind_of
from inferloop.core.errors import ContractError, UsageError, nearest

FORMATS = {".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".json": "json"}
MAX_BYTES = 1 << 20


def read_text(path: Path) -> tuple[str, str]:
    """(text, format) of a contract or suite file.

    Raises UsageError for what is no such file (missing, a directory, another suffix), ContractError for bytes that
    are not text.
    """
    if path.is_dir():
        raise UsageError(f"{path} is a directory; name a file ending in .yaml, .toml or .json")
    if path.exists() and not path.is_file():
        raise UsageError(f"{path} is not a regular file")
    if not path.is_file():
        siblings = [p.name for p in path.parent.iterdir() if p.suffix in FORMATS] if path.parent.is_dir() else []
        close = nearest(path.name, siblings)
        raise UsageError(f"{path} does not exist" + (f" (did you mean {path.parent / close}?)" if close else ""))
    if path.suffix.lower() not in FORMATS:
        raise UsageError(f"{path}: the suffix must say the format: .yaml, .yml, .toml or .json")
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > MAX_BYTES:
        raise ContractError(f"is larger than {MAX_BYTES >> 20} MiB; is it the right file?", file=str(path))
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ContractError("is not UTF-8 text", file=str(path), line=line) from error
    if "\0" in text:
        raise ContractError("is a binary file, not text", file=str(path))
    return text, FORMATS[path.suffix.lower()]


def parse_text(text: str, fmt: str, file: str | None) -> Located:
    """The text's top-level mapping. Raises ContractError with the line of a syntax error or a duplicate key."""
    parsers = {"yaml": parse_yaml, "toml": parse_toml, "json": parse_json}
    try:
        root = parsers[fmt](text, file) if text.strip() else None
    except RecursionError as error:
        raise ContractError("is nested too deeply", file=file) from error
    if root is None or root.value is None:
        raise ContractError("is empty", file=file)
    if not isinstance(root.value, dict):
        raise ContractError(f"must be a mapping of keys to values, not {kind_of(root)}", file=file, line=root.line)
    return root
