"""/openapi.json, made from the types that decode and encode the bodies, so it cannot drift from them."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import msgspec

from inferloop.serve import replies, wire
from inferloop.serve.adapters import LoadAdapterRequest, UnloadAdapterRequest
from inferloop.serve.batch import wire as batch
from inferloop.serve.embeddings import Embeddings, EmbeddingsRequest
from inferloop.serve.endpoint import MAX_TIMEOUT_MS, TIMEOUT_HEADER
from inferloop.serve.keys import OPEN_PATHS
from inferloop.serve.render import Rendered
from inferloop.serve.responses.replies import Response
from inferloop.serve.responses.wire import ResponsesRequest

_OK: dict[str, tuple[str, Any, Any, str]] = {
    "/v1/models": ("get", None, replies.ModelList, "The served model."),
    "/v1/models/{model}": ("get", None, replies.Model, "One model."),
    "/v1/chat/completions": ("post", wire.ChatRequest, replies.ChatCompletion, "Answer a conversation."),
    "/v1/completions": ("post", wire.CompletionRequest, replies.Completion, "Continue a text."),
    "/v1/embeddings": ("post", EmbeddingsRequest, Embeddings, "Turn texts into vectors."),
    "/v1/responses": ("post", ResponsesRequest, Response, "Answer a conversation, in the newer form."),
    "/v1/chat/completions/render": ("post", wire.ChatRequest, Rendered, "Show what a chat request comes to."),
    "/v1/completions/render": ("post", wire.CompletionRequest, list[Rendered], "Show what each prompt comes to."),
    "/v1/responses/render": ("post", ResponsesRequest, Rendered, "Show what a responses request comes to."),
    "/v1/requests/{request_id}/cancel": ("post", None, replies.Cancelled, "End what runs under an x-request-id."),
    "/identity": ("get", None, None, "The serving identity: everything that decides what text comes out."),
    "/tokenize": ("post", replies.TokenizeRequest, replies.TokenizeResponse, "Text or conversation to token ids."),
    "/detokenize": ("post", replies.DetokenizeRequest, replies.DetokenizeResponse, "Token ids to text."),
    "/health": ("get", None, replies.Ready, "The same as /health/ready."),
    "/health/live": ("get", None, replies.Live, "The process answers."),
    "/health/ready": ("get", None, replies.Ready, "A real token was produced; 503 before that and while draining."),
    "/health/progress": ("get", None, replies.Progress, "Step counter and queue."),
}
_ADAPTERS: dict[str, tuple[str, Any, Any, str]] = {
    "/v1/load_lora_adapter": ("post", LoadAdapterRequest, replies.Model, "Load an adapter, or replace one."),
    "/v1/unload_lora_adapter": ("post", UnloadAdapterRequest, replies.AdapterUnloaded, "Unload an adapter."),
}
_STREAMED = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
_ATTEMPTED = (*_STREAMED, "/v1/embeddings")
"""What goes through serve.endpoint, which reads the headers."""
_BATCH: list[tuple[str, str, Any, Any, str]] = [
    ("/v1/files", "get", None, batch.FileList, "The files, the newest first."),
    ("/v1/files", "post", None, batch.FileObject, "Upload the input of a batch."),
    ("/v1/files/{file_id}", "get", None, batch.FileObject, "One file."),
    ("/v1/files/{file_id}", "delete", None, batch.FileDeleted, "Delete a file that no unfinished batch needs."),
    ("/v1/files/{file_id}/content", "get", None, None, "What is in a file."),
    ("/v1/batches", "get", None, batch.BatchList, "The batches, the newest first."),
    ("/v1/batches", "post", batch.BatchRequest, batch.Batch, "Answer every request of a file."),
    ("/v1/batches/{batch_id}", "get", None, batch.Batch, "One batch, how far it is and how long it will take."),
    ("/v1/batches/{batch_id}/cancel", "post", None, batch.Batch, "Stop a batch; what was answered is kept."),
]
_QUERY: dict[str, dict[str, dict[str, Any]]] = {
    "/v1/files": {
        "purpose": {"type": "string"},
        "after": {"type": "string"},
        "limit": {"type": "integer", "minimum": 1, "maximum": 10_000},
        "order": {"type": "string", "enum": ["asc", "desc"]},
    },
    "/v1/batches": {"after": {"type": "string"}, "limit": {"type": "integer", "minimum": 1, "maximum": 100}},
}
_UPLOAD = {
    "type": "object",
    "properties": {"purpose": {"const": "batch"}, "file": {"type": "string", "format": "binary"}},
    "required": ["purpose", "file"],
    "additionalProperties": False,
}
_TIMINGS_HEADER = "x-inferloop-timings"
_REQUEST_HEADERS: dict[str, tuple[str, dict[str, Any]]] = {
    "x-request-id": ("Echoed; made up when absent.", {"type": "string"}),
    "traceparent": ("W3C Trace Context to continue.", {"type": "string"}),
    _TIMINGS_HEADER: (
        "1: token counts per chunk and server timings in an `inferloop` object.",
        {"type": "string"},
    ),
    TIMEOUT_HEADER: (
        "End the request with a 408 when it takes longer.",
        {"type": "integer", "minimum": 1, "maximum": MAX_TIMEOUT_MS},
    ),
}


def openapi_document(*, batches: bool = False, adapters: bool = False, guarded: bool = False) -> dict[str, Any]:
    """An OpenAPI 3.1 document; with the paths of batch jobs when the server keeps them, those of adapters when it loads
    any while it runs, and the key that it asks for when it is `guarded`."""
    jobs, plain = _BATCH if batches else [], _OK | (_ADAPTERS if adapters else {})
    types: set[Any] = {t for _, request, answer, _ in plain.values() for t in (request, answer) if t is not None}
    types |= {t for _, _, request, answer, _ in jobs for t in (request, answer) if t is not None}
    types.add(replies.ErrorResponse)
    ordered = sorted(types, key=lambda t: t.__name__)
    refs, components = msgspec.json.schema_components(ordered, ref_template="#/components/schemas/{name}")
    schema_of: dict[Any, Any] = dict(zip(ordered, refs, strict=True))
    paths: dict[str, Any] = {}
    for path, (method, request, answer, summary) in plain.items():
        paths[path] = {method: _operation(path, summary, request, answer, schema_of)}
    for path, method, body, reply, summary in jobs:
        operation = _operation(path, summary, body, reply, schema_of)
        paths.setdefault(path, {})[method] = _batch_operation(path, method, operation)
    for path, media in (("/metrics", "text/plain"), ("/openapi.json", "application/json")):
        paths[path] = {"get": {"responses": {"200": {"description": path, "content": {media: {}}}}}}
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "inferloop", "version": version("inferloop")},
        "paths": paths,
        "components": {"schemas": components},
    }
    if guarded:
        document["components"]["securitySchemes"] = {"api_key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"api_key": []}]
        for path in OPEN_PATHS & paths.keys():
            paths[path]["get"]["security"] = []
    return document


def _operation(path: str, summary: str, request: Any, answer: Any, schema_of: dict[Any, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": schema_of[answer] if answer else {"type": "object"}}}
    if path in _STREAMED:
        content["text/event-stream"] = {}  # OpenAPI 3.1 has no words for what an event is
    error = {"application/json": {"schema": schema_of[replies.ErrorResponse]}}
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": {
            "200": {"description": "Done.", "content": content},
            "default": {"description": "An OpenAI error object.", "content": error},
        },
    }
    if path in ("/health", "/health/ready"):
        operation["responses"]["503"] = {"description": "Not ready; `reason` says why.", "content": content}
    for name in ("model", "request_id"):
        if f"{{{name}}}" in path:
            operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}}]
    if request is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema_of[request]}}}
    if path in _ATTEMPTED:
        operation["parameters"] = [
            {"name": name, "in": "header", "description": text, "schema": schema}
            for name, (text, schema) in _REQUEST_HEADERS.items()
            if path in _STREAMED or name != _TIMINGS_HEADER
        ]
    return operation


def _batch_operation(path: str, method: str, operation: dict[str, Any]) -> dict[str, Any]:
    """`operation`, changed, with what only files and batches have."""
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
    ]
    if method == "get":
        query = _QUERY.get(path, {})
        parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in query.items()]
    operation["parameters"] = parameters
    if path == "/v1/files" and method == "post":
        operation["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": _UPLOAD}}}
    if path.endswith("/content"):
        operation["responses"]["200"]["content"] = {"application/jsonl": {}}
    return operation
