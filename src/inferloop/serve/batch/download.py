"""What is in a file, sent from a handle that was opened before: whoever deletes it meanwhile does not cut it off."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import BinaryIO
from urllib.parse import quote

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

_PIECE_BYTES = 1 << 16


class Download(StreamingResponse):
    """`file` is this response's from here on, `num_bytes` all that is in it."""

    def __init__(self, file: BinaryIO, num_bytes: int, filename: str) -> None:
        self._file, self._wanted = file, True
        headers = {
            "content-length": str(num_bytes),
            "content-disposition": f"attachment; filename*=utf-8''{quote(filename, safe='')}",
        }
        super().__init__(self._pieces(), headers=headers, media_type="application/jsonl")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._wanted = scope["method"] != "HEAD"
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._file.close()

    async def _pieces(self) -> AsyncIterator[bytes]:
        while self._wanted and (piece := await asyncio.to_thread(self._file.read, _PIECE_BYTES)):
            yield piece
