"""What the gateway answers by itself; everything else goes to a replica."""

from __future__ import annotations

import msgspec

from inferloop.fleet.act.gateway.answers import Answer, error_answer
from inferloop.fleet.act.gateway.ask import refusal_answer
from inferloop.fleet.act.gateway.config import GatewayConfig
from inferloop.fleet.act.gateway.metrics import CONTENT_TYPE, GatewayMetrics
from inferloop.fleet.decide.router import Router

_METHODS = ("GET", "POST", "DELETE")
_FORWARDED_PATHS = ("/tokenize", "/detokenize", "/openapi.json")


def own_answer(method: str, path: str, router: Router, metrics: GatewayMetrics, config: GatewayConfig) -> Answer | None:
    """None for what goes to a replica."""
    if path == "/health/live":
        return Answer(200, b'{"status":"live"}')
    if path in ("/health", "/health/ready"):
        return _ready(router, config)
    if path == "/health/progress":
        return _progress(router, metrics)
    if path == "/metrics":
        return Answer(200, metrics.render(), ((b"content-type", CONTENT_TYPE),))
    if not path.startswith("/v1/") and path not in _FORWARDED_PATHS:
        return error_answer(404, f"no such path: {path}", "not_found")
    if method not in _METHODS:
        return error_answer(405, f"{method} is not supported here", "method_not_allowed")
    return None


def _ready(router: Router, config: GatewayConfig) -> Answer:
    """With several models the service is ready when its default one is; the others are told, and may be missing: their
    requests are refused, and nothing is escalated to them."""
    if config.routing is None:
        if router.num_ready:
            return Answer(200, b'{"status":"ready","replicas":%d}' % router.num_ready)
        return refusal_answer("no_replica_ready", config.retry_after_s)
    ready = {model.name: router.num_ready_of(model.name) for model in config.routing.models}
    if not ready[config.routing.default]:
        return refusal_answer("no_replica_ready", config.retry_after_s, config.routing.default)
    return Answer(200, msgspec.json.encode({"status": "ready", "replicas": router.num_ready, "models": ready}))


def _progress(router: Router, metrics: GatewayMetrics) -> Answer:
    """The same fields as a replica's: a step is one piece of an answer passed on; nothing waits here."""
    told = {
        "alive": True,
        "draining": False,
        "step_counter": metrics.num_pieces,
        "running": router.num_in_flight,
        "waiting": 0,
        "in_flight": router.num_in_flight,
    }
    return Answer(200, msgspec.json.encode(told))
