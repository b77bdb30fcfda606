"""/v1/models of a service with several: itself, its classes, and each of its models as its own replica tells of it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any
from urllib.parse import unquote

import msgspec

from inferloop.core.ids import TraceContext
from inferloop.fleet.act.gateway.account import Account, Hop
from inferloop.fleet.act.gateway.answers import Answer, error_answer
from inferloop.fleet.act.gateway.ask import Asker
from inferloop.fleet.act.gateway.config import GatewayConfig
from inferloop.fleet.act.gateway.upstream import UpstreamRequest
from inferloop.fleet.decide.routes import class_names

MODELS_PATH = "/v1/models"
_TIMEOUT_S = 5.0


async def list_models(config: GatewayConfig, asker: Asker, request: UpstreamRequest, account: Account) -> Answer:
    """Models whose replicas do not answer are listed by name alone."""
    assert config.routing is not None
    names = [model.name for model in config.routing.models]
    quick = replace(request, target=MODELS_PATH, timeout_s=_TIMEOUT_S)
    told = dict(zip(names, await asyncio.gather(*(_ask(asker, quick, account, name) for name in names)), strict=True))
    default = told[config.routing.default]
    entries = {config.service: {**default, "id": config.service}} if config.service is not None else {}
    classes = class_names(config.routing, config.service)
    entries |= {name: {**told[rule.model], "id": name} for name, rule in classes.items()} | told
    target = request.target.partition("?")[0].removeprefix(MODELS_PATH)
    if target in ("", "/"):
        return Answer(200, msgspec.json.encode({"object": "list", "data": list(entries.values())}))
    wanted = unquote(target.removeprefix("/"))
    if wanted not in entries:
        return error_answer(404, f"the model {wanted!r} does not exist", "model_not_found", param="model")
    return Answer(200, msgspec.json.encode(entries[wanted]))


async def _ask(asker: Asker, request: UpstreamRequest, account: Account, name: str) -> dict[str, Any]:
    """No hop of the account: nothing is generated."""
    plain = {"id": name, "object": "model", "created": 0, "owned_by": "inferloop"}
    hop = Hop(TraceContext.new(), account.t_in_ns, name)
    async with asker.ask(request, hop) as asked:
        if not isinstance(asked.result, Answer) or asked.result.status != 200:
            return plain
        try:
            (entry,) = msgspec.json.decode(asked.result.body)["data"]
            return {**entry, "id": name}
        except (msgspec.MsgspecError, KeyError, ValueError, TypeError):
            return plain
