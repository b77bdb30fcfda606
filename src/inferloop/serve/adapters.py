"""/v1/load_lora_adapter and /v1/unload_lora_adapter: adapters that come and go while requests run, as with vLLM."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from inferloop.backends.protocols import AdapterHost
from inferloop.core.errors import ModelFileError, RequestError
from inferloop.models.adapters.read import FILES
from inferloop.serve.asgi import read_body
from inferloop.serve.decode import decode_body
from inferloop.serve.health import json_response
from inferloop.serve.replica import Replica
from inferloop.serve.replies import AdapterUnloaded
from inferloop.serve.texts import model_object

_MAX_BODY_BYTES = 65536
_MAX_PATH_CHARS = 4096


class LoadAdapterRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """`lora_path`: a PEFT directory within the server's --lora-dir, absolute or relative to it. `load_inplace`: an
    adapter of this name is replaced; what it answers already, it answers to the end."""

    lora_name: Annotated[str, Meta(min_length=1)]
    lora_path: Annotated[str, Meta(min_length=1, max_length=_MAX_PATH_CHARS)]
    load_inplace: bool = False


class UnloadAdapterRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """`lora_int_id` is vLLM's own; the name is what counts."""

    lora_name: Annotated[str, Meta(min_length=1)]
    lora_int_id: int | None = None


class AdaptersOffError(RequestError):
    status = 501

    def __init__(self) -> None:
        how = "`inferloop serve MODEL --enable-lora --lora-dir DIR`"
        message = f"This server loads no adapters while it runs; start it with {how}"
        super().__init__(message, code="adapters_not_enabled")


class AdapterPathError(RequestError):
    status = 404

    def __init__(self, asked: str) -> None:
        message = f"there is no directory {asked!r} within the folder of adapters"
        super().__init__(message, param="lora_path", code="adapter_not_found")


class AdapterEndpoints:
    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    @property
    def are_on(self) -> bool:
        return self._replica.config.adapter_folder is not None and self._replica.info.takes_adapters

    async def load(self, request: Request) -> Response:
        """Answers with the adapter as /v1/models tells it."""
        host, folder = self._host()
        self._replica.admit()
        asked = decode_body(await read_body(request.receive, _MAX_BODY_BYTES), LoadAdapterRequest)
        path = await asyncio.to_thread(within, folder, asked.lora_path)
        try:
            served = await host.load_adapter(asked.lora_name, path, replaces=asked.load_inplace)
        except ModelFileError as error:
            raise RequestError(str(error), param="lora_path", code="bad_adapter") from None
        self._replica.refresh()
        return json_response(model_object(self._replica, served))

    async def unload(self, request: Request) -> Response:
        """Requests under way end with it, new ones get a 404."""
        host, _ = self._host()
        asked = decode_body(await read_body(request.receive, _MAX_BODY_BYTES), UnloadAdapterRequest)
        await host.unload_adapter(asked.lora_name)
        self._replica.refresh()
        return json_response(AdapterUnloaded(id=asked.lora_name))

    def _host(self) -> tuple[AdapterHost, Path]:
        generator, folder = self._replica.generator, self._replica.config.adapter_folder
        if folder is None or not self.are_on or not isinstance(generator, AdapterHost):
            raise AdaptersOffError
        return generator, folder


def within(folder: Path, asked: str) -> Path:
    """The directory that `asked` means, links followed. Raises AdapterPathError for one that is not there, or lies
    outside of `folder`, or has its files there: which of them is not told."""
    try:
        path, root = (folder / asked).resolve(strict=True), folder.resolve(strict=True)
        inside = (path, *((path / name).resolve() for name in FILES))
        if path.is_dir() and all(place.is_relative_to(root) for place in inside):
            return path
    except (OSError, ValueError, RuntimeError):
        pass
    raise AdapterPathError(asked)
