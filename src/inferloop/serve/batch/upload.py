"""A multipart/form-data body, written to disk as it comes: text fields are kept, the one file goes into `path`."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path
from typing import BinaryIO

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from inferloop.core.errors import RequestError
from inferloop.serve.asgi import ClientGoneError
from inferloop.serve.errors import BodyTooLargeError

MAX_FILE_BYTES = 200 << 20
"""OpenAI's own bound for the input of a batch."""
_MAX_BODY_BYTES = MAX_FILE_BYTES + (1 << 20)
_MAX_FIELD_BYTES = 8192
_MAX_PARTS = 16


class Form:
    """Fed piece by piece, from one thread at a time. After `close`: `fields` by name, `filename` and `num_bytes` of
    the file, None and 0 when there was none."""

    def __init__(self, boundary: bytes, path: Path) -> None:
        """Raises RequestError for a boundary that cannot be one, OSError."""
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.num_bytes = 0
        self._path = path
        self._file: BinaryIO | None = None
        self._num_parts = 0
        self._complete = False
        self._header_name = self._header_value = b""
        self._disposition: bytes | None = None
        self._name: str | None = None
        self._field = bytearray()
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._on_part_begin,
                    "on_header_field": self._on_header_field,
                    "on_header_value": self._on_header_value,
                    "on_header_end": self._on_header_end,
                    "on_headers_finished": self._on_headers_finished,
                    "on_part_data": self._on_part_data,
                    "on_part_end": self._on_part_end,
                    "on_end": self._on_end,
                },
            )
        except FormParserError as error:
            raise _broken(error) from None

    def feed(self, data: bytes) -> None:
        """Raises RequestError, OSError."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise _broken(error) from None

    def close(self) -> None:
        """The body has ended: check that it is whole, and make the file durable. Raises RequestError, OSError."""
        if not self._complete:
            raise RequestError("the form ends before its closing boundary", code="invalid_multipart")
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()

    def drop(self) -> None:
        """Leave nothing on disk."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # what a full disk did not take does not fit now either
                self._file.close()
        self._path.unlink(missing_ok=True)

    def _on_part_begin(self) -> None:
        self._num_parts += 1
        if self._num_parts > _MAX_PARTS:
            raise RequestError(f"the form has more than {_MAX_PARTS} parts", code="invalid_multipart")
        self._disposition, self._name, self._field = None, None, bytearray()

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _on_header_end(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            self._disposition = self._header_value
        self._header_name = self._header_value = b""

    def _on_headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        name = options.get(b"name")
        if name is None:
            raise RequestError("a part of the form has no name", code="invalid_multipart")
        self._name = name.decode("utf-8", "replace")
        if self._name != "file":
            return
        if self.filename is not None:
            raise RequestError("give one file", param="file")
        self.filename = options.get(b"filename", b"").decode("utf-8", "replace")
        self._file = self._path.open("wb")

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._name == "file":
            assert self._file is not None, "the file was opened with its headers"
            self.num_bytes += end - start
            if self.num_bytes > MAX_FILE_BYTES:
                raise BodyTooLargeError(MAX_FILE_BYTES)
            self._file.write(data[start:end])
        else:
            self._field += data[start:end]
            if len(self._field) > _MAX_FIELD_BYTES:
                raise RequestError(f"{self._name} is too long", param=self._name)

    def _on_part_end(self) -> None:
        if self._name is not None and self._name != "file":
            self.fields[self._name] = self._field.decode("utf-8", "replace")

    def _on_end(self) -> None:
        self._complete = True


async def read_form(request: Request, path: Path) -> Form:
    """The form of a request, its file in `path`; what is held in memory is one piece of the body.

    Raises RequestError, BodyTooLargeError, ClientGoneError, OSError; then there is no file.
    """
    kind, options = parse_options_header(request.headers.get("content-type"))
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        raise RequestError("the body must be multipart/form-data, with a boundary", code="invalid_multipart")
    form = Form(boundary, path)
    try:
        num_bytes, more = 0, True
        while more:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            piece, more = message.get("body", b""), message.get("more_body", False)
            num_bytes += len(piece)
            if num_bytes > _MAX_BODY_BYTES:
                raise BodyTooLargeError(MAX_FILE_BYTES)
            await asyncio.to_thread(form.feed, piece)
        await asyncio.to_thread(form.close)
    except BaseException:
        form.drop()
        raise
    return form


def _broken(error: FormParserError) -> RequestError:
    return RequestError(f"the form cannot be read: {error}", code="invalid_multipart")
