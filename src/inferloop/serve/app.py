"""The routes of one replica."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from inferloop.backends.protocols import Generator
from inferloop.core.clock import Clock
from inferloop.core.errors import InferloopError
from inferloop.records.sink import Sink
from inferloop.serve.adapters import AdapterEndpoints
from inferloop.serve.answer import CHAT, COMPLETIONS, RESPONSES
from inferloop.serve.asgi import ClientGoneError, Envelope
from inferloop.serve.batch.routes import batch_routes
from inferloop.serve.batch.service import BatchConfig, Batches
from inferloop.serve.cancel import CancelEndpoint
from inferloop.serve.config import ServeConfig
from inferloop.serve.embeddings import EmbeddingsEndpoint
from inferloop.serve.errors import MethodError, NotFoundError, error_headers, error_object, error_status
from inferloop.serve.generate import GenerateEndpoint
from inferloop.serve.health import HealthEndpoints, json_response
from inferloop.serve.keys import Guard
from inferloop.serve.openapi import openapi_document
from inferloop.serve.render import RenderEndpoint
from inferloop.serve.replica import Replica
from inferloop.serve.texts import TextEndpoints


def build_app(
    generator: Generator,
    config: ServeConfig,
    sink: Sink,
    *,
    content_sink: Sink | None = None,
    clock: Clock | None = None,
    batch: BatchConfig | None = None,
) -> Starlette:
    """The ASGI application; `app.state.replica` is its Replica. Its lifespan warms the generator up, works batch jobs
    off and closes the sinks; starting and stopping the generator is the caller's. Raises UsageError for a folder of
    batch jobs that cannot be used."""
    replica = Replica(generator, config, sink, content_sink=content_sink, clock=clock)
    health, texts, adapters = HealthEndpoints(replica), TextEndpoints(replica), AdapterEndpoints(replica)
    batches = None if batch is None else Batches(replica, batch)
    document = functools.cache(openapi_document)  # most servers are never asked for it
    middleware = [Middleware(Envelope, replica=config.replica, identity_digest=replica.identity_digest)]
    if config.keys is not None:
        middleware.append(Middleware(Guard, keys=config.keys, count=replica.metrics.count_refused))

    async def openapi(_: Request) -> Response:
        told = document(batches=batches is not None, adapters=adapters.are_on, guarded=config.keys is not None)
        return json_response(told)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        warm_up = asyncio.create_task(replica.warm_up())
        if batches is not None:
            batches.start()
        try:
            yield
        finally:
            warm_up.cancel()
            if batches is not None:
                await batches.close()
            for open_sink in (sink, content_sink):
                if open_sink is not None:
                    await asyncio.to_thread(open_sink.close)

    app = Starlette(
        routes=[
            Route("/v1/models", texts.models, methods=["GET"]),
            Route("/v1/models/{model:path}", texts.model, methods=["GET"]),
            Route("/v1/chat/completions", GenerateEndpoint(replica, CHAT), methods=["POST"]),
            Route("/v1/completions", GenerateEndpoint(replica, COMPLETIONS), methods=["POST"]),
            Route("/v1/embeddings", EmbeddingsEndpoint(replica), methods=["POST"]),
            Route("/v1/responses", GenerateEndpoint(replica, RESPONSES), methods=["POST"]),
            Route("/v1/chat/completions/render", RenderEndpoint(replica, CHAT).render, methods=["POST"]),
            Route(
                "/v1/completions/render", RenderEndpoint(replica, COMPLETIONS, several=True).render, methods=["POST"]
            ),
            Route("/v1/responses/render", RenderEndpoint(replica, RESPONSES).render, methods=["POST"]),
            Route("/v1/requests/{request_id}/cancel", CancelEndpoint(replica).cancel, methods=["POST"]),
            *batch_routes(batches),
            Route("/v1/load_lora_adapter", adapters.load, methods=["POST"]),
            Route("/v1/unload_lora_adapter", adapters.unload, methods=["POST"]),
            Route("/identity", texts.identity, methods=["GET"]),
            Route("/tokenize", texts.tokenize, methods=["POST"]),
            Route("/detokenize", texts.detokenize, methods=["POST"]),
            Route("/health", health.ready, methods=["GET"]),  # where other servers have it, so probes ask there
            Route("/health/live", health.live, methods=["GET"]),
            Route("/health/ready", health.ready, methods=["GET"]),
            Route("/health/progress", health.progress, methods=["GET"]),
            Route("/metrics", health.metrics, methods=["GET"]),
            Route("/openapi.json", openapi, methods=["GET"]),
        ],
        middleware=middleware,
        exception_handlers={
            HTTPException: _http_error,
            InferloopError: _error,
            ClientGoneError: _error,
        },
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state.replica = replica
    return app


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        message = f"There is no {request.url.path} here; /openapi.json lists what there is"
        return await _error(request, NotFoundError(message, code="not_found"))
    if error.status_code == 405:
        message = f"{request.method} is not allowed on {request.url.path}"
        response = await _error(request, MethodError(message, code="method_not_allowed"))
        response.headers.update(error.headers or {})  # Allow, which RFC 9110 asks for
        return response
    return await _error(request, error)


async def _error(_: Request, error: Exception) -> Response:
    if isinstance(error, ClientGoneError):
        return Response(status_code=499)
    headers = {k.decode(): v.decode() for k, v in error_headers(error)}
    return Response(error_object(error), error_status(error), headers=headers, media_type="application/json")
