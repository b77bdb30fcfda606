"""/openapi.json, made from the types that decode and encode the bodies, so it cannot drift from them."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import msgspec

from inferloop.serve import replies, wire
from inferloop.serve.responses.replies import Response
from inferloop.serve.responses.wire import ResponsesRequest

_OK = {
    "/v1/models": ("get", None, replies.ModelList, "The served model."),
    "/v1/models/{model}": ("get", None, replies.Model, "One model."),
    "/v1/chat/completions": ("post", wire.ChatRequest, replies.ChatCompletion, "Answer a conversation."),
    "/v1/completions": ("post", wire.CompletionRequest, replies.Completion, "Continue a text."),
    "/v1/responses": ("post", ResponsesRequest, Response, "Answer a conversation, in the newer form."),
    "/identity": ("get", None, None, "The serving identity: everything that decides what text comes out."),
    "/tokenize": ("post", replies.TokenizeRequest, replies.TokenizeResponse, "Text or conversation to token ids."),
    "/detokenize": ("post", replies.DetokenizeRequest, replies.DetokenizeResponse, "Token ids to text."),
    "/health/live": ("get", None, replies.Live, "The process answers."),
    "/health/ready": ("get", None, replies.Ready, "A real token was produced; 503 before that and while draining."),
    "/health/progress": ("get", None, replies.Progress, "Step counter and queue."),
}
_STREAMED = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
_REQUEST_HEADERS = {
    "x-request-id": "Echoed; made up when absent.",
    "traceparent": "W3C Trace Context to continue.",
    "x-inferloop-timings": "1: token counts per chunk and server timings in an `inferloop` object.",
}


def openapi_document() -> dict[str, Any]:
    """An OpenAPI 3.1 document."""
    types = {t for _, request, answer, _ in _OK.values() for t in (request, answer) if t is not None}
    types.add(replies.ErrorResponse)
    ordered = sorted(types, key=lambda t: t.__name__)
    refs, components = msgspec.json.schema_components(ordered, ref_template="#/components/schemas/{name}")
    schema_of: dict[Any, Any] = dict(zip(ordered, refs, strict=True))
    paths: dict[str, Any] = {}
    for path, (method, request, answer, summary) in _OK.items():
        paths[path] = {method: _operation(path, summary, request, answer, schema_of)}
    for path, media in (("/metrics", "text/plain"), ("/openapi.json", "application/json")):
        paths[path] = {"get": {"responses": {"200": {"description": path, "content": {media: {}}}}}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "inferloop", "version": version("inferloop")},
        "paths": paths,
        "components": {"schemas": components},
    }


def _operation(
    path: str, summary: str, request: type | None, answer: type | None, schema_of: dict[Any, Any]
) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": schema_of[answer] if answer else {"type": "object"}}}
    if path in _STREAMED:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    error = {"application/json": {"schema": schema_of[replies.ErrorResponse]}}
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": {
            "200": {"description": "Done.", "content": content},
            "default": {"description": "An OpenAI error object.", "content": error},
        },
    }
    if path == "/health/ready":
        operation["responses"]["503"] = {"description": "Not ready; `reason` says why.", "content": content}
    if "{model}" in path:
        operation["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
    if request is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema_of[request]}}}
    if path in _STREAMED:
        operation["parameters"] = [
            {"name": name, "in": "header", "description": text, "schema": {"type": "string"}}
            for name, text in _REQUEST_HEADERS.items()
        ]
    return operation
