"""The files of `inferloop batch`: what is still to do, and the answers put together in the order of the input."""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import Raw, Struct

from inferloop.core.errors import RecordWriteError, RequestError, UsageError
from inferloop.serve.batch.input import InputRow, Row, check_rows
from inferloop.serve.decode import decode_body

MAX_BODY_BYTES = 8 << 20


class _Model(Struct):
    model: str | None = None


class _Answered(Struct):
    custom_id: str
    response: Raw
    """null where a row never ran. It is what no line of an input has."""


@dataclass(frozen=True, slots=True)
class Input:
    """A checked input file: all rows are for `endpoint`. `models` are those that rows name, `num_unnamed` the rows that
    name none."""

    path: Path
    endpoint: str
    rows: tuple[Row, ...]
    models: frozenset[str]
    num_unnamed: int


@contextlib.contextmanager
def held(folder: Path, output: Path) -> Iterator[None]:
    """The folder of a run, made if need be, for this process alone; removed when nothing was put into it.

    Raises UsageError when it cannot be made, or another run has it.
    """
    path = folder / "lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UsageError(f"--output {output}: {error.strerror}") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ours = os.path.samestat(os.fstat(lock), path.stat())  # a run that ended meanwhile has removed it
        except OSError:
            ours = False
        if not ours:
            raise UsageError(f"--output {output}: another run is writing it; wait for its end")
        try:
            yield
        finally:
            with contextlib.suppress(FileNotFoundError):
                if [entry.name for entry in folder.iterdir()] == [path.name]:
                    shutil.rmtree(folder)
    finally:
        os.close(lock)


def read_input(path: Path, *, with_default_model: bool) -> Input:
    """Everything that can be said of the file without the server. Raises UsageError with every wrong line."""
    models: set[str] = set()
    num_unnamed = 0

    def check_body(body: bytes) -> int:
        nonlocal num_unnamed
        model = decode_body(body, _Model).model
        if model is not None:
            models.add(model)
        elif with_default_model:
            num_unnamed += 1
        else:
            raise RequestError("the body has no model; give it there, or to all such rows with --model", param="model")
        return 1

    try:
        endpoint = _first_url(path)
        checked = check_rows(path, endpoint, check_body, max_body_bytes=MAX_BODY_BYTES)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    if errors := checked.all_errors():
        raise wrong_lines(path, [(error.line, error.message) for error in errors])
    return Input(path, endpoint, tuple(checked.rows), frozenset(models), num_unnamed)


def _first_url(path: Path) -> str:
    """The endpoint of the first row that has one: the others must agree with it."""
    with path.open("rb") as file:
        while line := file.readline(MAX_BODY_BYTES):
            try:
                return msgspec.json.decode(line.removeprefix(codecs.BOM_UTF8), type=InputRow).url
            except (msgspec.MsgspecError, RecursionError):
                continue
    return ""


def wrong_lines(path: Path, problems: list[tuple[int | None, str]]) -> UsageError:
    return UsageError("\n".join(f"{path}{'' if line is None else f':{line}'}: {text}" for line, text in problems))


def answered_in(path: Path) -> dict[str, tuple[int, int]]:
    """(offset, length) of each answer of an output file, by custom_id; empty when there is no file. Raises UsageError
    for a file that is something else."""
    found: dict[str, tuple[int, int]] = {}
    offset = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    found[msgspec.json.decode(line, type=_Answered).custom_id] = (offset, len(line))
                except (msgspec.MsgspecError, RecursionError):
                    raise UsageError(f"{path}:{number}: not the output of a batch; choose another --output") from None
                offset += len(line)
    except FileNotFoundError:
        return found
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    return found


def write_rest(source: Input, known: dict[str, tuple[int, int]], model: str | None, path: Path) -> tuple[int, str]:
    """The rows that are not `known`, with `model` where they name none, into `path`, each on the line where it stands
    in the source, so that the server's line numbers are those of the user's file. Gives their number, and the digest of
    all rows.

    Raises RecordWriteError.
    """
    digest, num_rows = hashlib.sha256(), 0
    try:
        with source.path.open("rb") as file, path.open("wb") as out:
            num_lines = 0
            for row in source.rows:
                file.seek(row.offset)
                line = _with_model(file.read(row.length), model)
                digest.update(line + b"\n")
                if row.custom_id in known:
                    continue
                out.write(b"\n" * (row.number - 1 - num_lines) + line + b"\n")
                num_lines, num_rows = row.number, num_rows + 1
    except OSError as error:
        raise RecordWriteError(f"cannot write {path}: {error.strerror}") from None
    return num_rows, digest.hexdigest()


def _with_model(line: bytes, model: str | None) -> bytes:
    row = msgspec.json.decode(line, type=InputRow)
    if model is None or msgspec.json.decode(row.body, type=_Model).model is not None:
        return line.strip()
    body = msgspec.json.decode(row.body, type=dict[str, Raw])
    row.body = Raw(msgspec.json.encode({**body, "model": model}))
    return msgspec.json.encode(row)


def merge(source: Input, parts: list[Path], target: Path) -> int:
    """The answers of several files, whole, in the order of the input; the later file counts. Gives their number."""
    places: dict[str, tuple[Path, int, int]] = {}
    for part in parts:
        places |= {name: (part, *place) for name, place in answered_in(part).items()}
    if not places:
        return 0
    partial = target.with_name(f".{target.name}.partial")
    try:
        with partial.open("wb") as out:
            out.writelines(_lines(source, places))
            out.flush()
            os.fsync(out.fileno())  # where the answers come from is deleted next
        partial.replace(target)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise RecordWriteError(f"cannot write {target}: {error.strerror}") from None
    return len(places)


def _lines(source: Input, places: dict[str, tuple[Path, int, int]]) -> Iterator[bytes]:
    files = {path: path.open("rb") for path in {path for path, _, _ in places.values()}}
    try:
        for row in source.rows:
            if row.custom_id in places:
                path, offset, length = places[row.custom_id]
                files[path].seek(offset)
                yield files[path].read(length).rstrip(b"\n") + b"\n"
    finally:
        for file in files.values():
            file.close()
