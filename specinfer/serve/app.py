"""The HTTP application: paths and their handlers."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse
from fastapi.staticfiles import StaticFiles
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.types import Scope

from specinfer.serve.api.answer import EndpointAnswer
from specinfer.serve.api.chat import Chat, ChatFields
from specinfer.serve.api.completions import CompletionFields, Completions
from specinfer.serve.api.infill import Infill, InfillFields
from specinfer.serve.api.message_fields import MessageFields
from specinfer.serve.api.messages import Messages, count_tokens
from specinfer.serve.api.response_fields import ResponseFields
from specinfer.serve.api.responses import Responses, ResponseStore
from specinfer.serve.api.service import Service
from specinfer.serve.api.tokens import DetokenizeFields, TokenizeFields, detokenize, tokenize
from specinfer.serve.backend.work import EngineInfo
from specinfer.serve.fields.body import parse
from specinfer.serve.http.access import Access, Hosts, Keys
from specinfer.serve.http.api_error import ApiError, answer_http_error
from specinfer.serve.http.event_stream import body_of, stream, unless_disconnected
from specinfer.version import VERSION

_DONE: Final = "data: [DONE]\n\n"  # the end of OpenAI's older streams
# No resources of other hosts, no inline code and no frames: a model's answer must not run as code.
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_PAGE_HEADERS: Final = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # so that a newer server shows its newer page
}


def build_app(service: Service, keys: Keys, hosts: Hosts | None = None) -> FastAPI:
    """Build the server's application; `hosts` are the accepted Host headers, None for any."""
    config = service.config
    app = FastAPI(
        title="specinfer",
        version=VERSION,
        docs_url=None,  # its page would load scripts from another host
        redoc_url=None,
        redirect_slashes=False,  # behind a proxy the redirect would name the wrong host
    )
    app.add_exception_handler(HTTPException, answer_http_error)
    _add_answers(app, service)
    _add_models(app, service)
    _add_server_paths(app, service)
    if config.page:
        _add_page(app)
    # The middleware added last runs first.
    app.add_middleware(
        Access,
        keys=keys,
        max_body=config.max_body,
        max_bodies=2 * config.max_body,
        idle_timeout=config.idle_timeout,
        origins=config.cors_origin,
        hosts=hosts,
        session_header=config.session_header,
    )
    if config.cors_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.cors_origin),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],  # client libraries add their own headers
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    return app


def _add_answers(app: FastAPI, service: Service) -> None:
    """Add the POST paths, with our own body parser, and their bodies to the OpenAPI document.

    An answer is one JSON object, or a stream if the body sets `stream`. The framework would parse bodies with
    Python's `json`, which accepts NaN and fails on deep nesting.
    """
    config, kinds = service.config, list[type[BaseModel]]()

    def add(path: str, kind: type[BaseModel], answer: Callable[[Request, Any], Awaitable[Response]]) -> None:
        async def endpoint(request: Request) -> Response:
            body = await body_of(request)
            return await answer(request, parse(kind, body, config.max_body, service.field_policy))

        kinds.append(kind)
        schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
        app.add_api_route(
            path,
            endpoint,
            methods=["POST"],
            openapi_extra={
                "requestBody": {"content": {"application/json": {"schema": schema}}, "required": True}
            },
            responses={
                400: {"description": "The request cannot be served; `error.param` is the field at fault."}
            },
        )

    def generated(
        path: str, kind: type[BaseModel], make: Callable[[Service, Any], EndpointAnswer[Any]], done: str = ""
    ) -> None:
        async def answer(request: Request, fields: BaseModel) -> Response:
            made = make(service, service.with_defaults(fields))
            if getattr(fields, "stream", None):
                streamed = stream(made.events(), done=done, ping=config.ping_interval)
                return await unless_disconnected(request, streamed)
            return JSONResponse(await unless_disconnected(request, made.whole()))

        add(path, kind, answer)

    def computed(path: str, kind: type[BaseModel], make: Callable[[Service, Any], Awaitable[Any]]) -> None:
        async def answer(request: Request, fields: BaseModel) -> Response:
            return JSONResponse(await make(service, fields))

        add(path, kind, answer)

    store = ResponseStore(config.stored_responses)
    generated("/v1/completions", CompletionFields, Completions, _DONE)
    generated("/v1/chat/completions", ChatFields, Chat, _DONE)
    # Streams of the other APIs end with an event of their last type.
    generated("/v1/responses", ResponseFields, partial(Responses, store=store))
    _add_stored_responses(app, store)
    generated("/v1/messages", MessageFields, Messages)
    generated("/infill", InfillFields, Infill)
    computed("/tokenize", TokenizeFields, tokenize)
    computed("/detokenize", DetokenizeFields, detokenize)
    computed("/v1/messages/count_tokens", MessageFields, count_tokens)
    usual = app.openapi

    def document() -> dict[str, Any]:
        found = usual()
        _, schemas = models_json_schema(
            [(kind, "validation") for kind in kinds], ref_template="#/components/schemas/{model}"
        )
        found.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
        return found

    app.openapi = document  # type: ignore[method-assign]


def _add_models(app: FastAPI, service: Service) -> None:
    created = int(time.time())

    def card(name: str) -> dict[str, Any]:
        parent = {"parent": service.models[0]} if name in service.adapters else {}
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "specinfer",
            "root": service.models[0],
            **parent,
            "max_model_len": service.facts.max_context,
            "quantization": service.facts.quantization,
            "sampling_defaults": service.sampling,  # defaults of sampling fields
            "speculation": _speculation(service.facts),
        }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card(name) for name in (*service.models, *service.adapters)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        return card(service.check_model(name, listed=True))

    @app.post("/v1/embeddings")
    async def embeddings() -> None:
        raise ApiError(
            "embeddings are not supported; use a server with an embedding model",
            status=404,
            code="not_offered",
        )


def _add_stored_responses(app: FastAPI, store: ResponseStore) -> None:
    @app.get("/v1/responses/{name}")
    async def response(name: str, request: Request) -> Response:
        """Return a stored response as one object."""
        for param in request.query_params:
            raise ApiError(
                f"{param[:100]} is not a query parameter of this path; remove it", param=param[:100]
            )
        return Response(store.get(name).body, media_type="application/json")

    @app.delete("/v1/responses/{name}")
    async def forget(name: str) -> dict[str, Any]:
        """Delete a response; later responses that continue it stay."""
        store.forget(name)
        return {"id": name, "object": "response", "deleted": True}

    @app.post("/v1/responses/{name}/cancel")
    async def cancel(name: str) -> None:
        """Refuse to cancel: only finished responses are stored."""
        store.get(name)
        raise ApiError(
            "only background responses can be cancelled, and this server has none; "
            "close the connection to end a response"
        )


def _add_server_paths(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    async def health() -> Response:
        """Liveness: 200 while this process answers; restart it if it does not."""
        return JSONResponse({"status": "ok"})

    @app.get("/ready")
    async def ready() -> Response:
        """Readiness: 503 while no engine accepts requests, or while the server drains."""
        health = await service.backend.health()
        trouble = "the server is shutting down" if service.draining else health.trouble
        if trouble:
            return ApiError(trouble, status=503, headers={"Retry-After": "5"}).response()
        serving = sum(one.takes_work for one in health.replicas)
        counts = {"replicas": len(health.replicas), "serving": serving, "restarts": health.restarts}
        return JSONResponse({"status": "ready", **counts})

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": VERSION}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(await service.backend.health()), media_type=CONTENT_TYPE_LATEST)


class _PageFiles(StaticFiles):
    """The files of the page at /, with its headers."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        found = await super().get_response(path, scope)
        found.headers.update(_PAGE_HEADERS)
        return found


def _add_page(app: FastAPI) -> None:
    files = _PageFiles(directory=Path(__file__).with_name("page"))

    async def page(request: Request) -> Response:
        return await files.get_response("index.html", request.scope)

    app.add_route("/", page, include_in_schema=False)
    app.mount("/page", files)


def _speculation(facts: EngineInfo) -> dict[str, Any]:
    """Speculation settings that a request may change, and their defaults."""
    usual = facts.speculation
    return {
        "speculators": list(facts.speculators),
        "max_nodes": usual.node_limit,
        "expansion": usual.shape if usual.drafts else None,  # shape of a draft model's trees
        "verifier": usual.verifier,
    }
