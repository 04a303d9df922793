"""The HTTP application: paths and their handlers."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, Final, TypeVar

from prometheus_client.exposition import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
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
from specinfer.serve.fields.body import Fields
from specinfer.serve.fields.sampling import SamplingFields
from specinfer.serve.http.access import Access, Hosts, Keys
from specinfer.serve.http.api_error import ApiError, answer_http_error
from specinfer.serve.http.event_stream import EventStream, unless_disconnected
from specinfer.serve.model_pool import ModelPool
from specinfer.serve.pooled_model import PooledModel
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

Handler = Callable[[Request], Awaitable[Response]]
_Body = TypeVar("_Body", bound=BaseModel)


class _ModelFields(Fields):
    """The body of /models/load and /models/unload."""

    model: str


class _Paths:
    """The server's paths, and the OpenAPI document that describes them."""

    def __init__(self) -> None:
        self.routes: list[BaseRoute] = []
        self._operations: dict[str, dict[str, Any]] = {}  # by path, then by method
        self._bodies: list[type[BaseModel]] = []

    def add(
        self, path: str, handler: Handler, method: str = "GET", body: type[BaseModel] | None = None
    ) -> None:
        """Add a path, whose handler may read a JSON body of that kind."""
        self.routes.append(Route(path, handler, methods=[method]))
        shown = path.replace(":path}", "}")
        operation: dict[str, Any] = {"responses": {"200": {"description": "OK"}}}
        if "{name" in path:
            operation["parameters"] = [
                {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
            ]
        if body is not None:
            self._bodies.append(body)
            schema = {"$ref": f"#/components/schemas/{body.__name__}"}
            operation["requestBody"] = {"content": {"application/json": {"schema": schema}}, "required": True}
            fault = "The request cannot be served; `error.param` is the field at fault."
            operation["responses"]["400"] = {"description": fault}
        self._operations.setdefault(shown, {})[method.lower()] = operation

    def document(self) -> dict[str, Any]:
        """Return the OpenAPI document."""
        _, schemas = models_json_schema(
            [(kind, "validation") for kind in self._bodies], ref_template="#/components/schemas/{model}"
        )
        return {
            "openapi": "3.1.0",
            "info": {"title": "specinfer", "version": VERSION},
            "paths": self._operations,
            "components": {"schemas": schemas["$defs"]},
        }


def build_app(pool: ModelPool, keys: Keys, hosts: Hosts | None = None) -> Starlette:
    """Build the server's application; `hosts` are the accepted Host headers, None for any."""
    config, paths = pool.config, _Paths()
    _add_answers(paths, pool)
    _add_models(paths, pool)
    _add_server_paths(paths, pool)

    async def document(_: Request) -> Response:
        return JSONResponse(paths.document())

    access = Middleware(
        Access,
        keys=keys,
        max_body=config.max_body,
        max_bodies=2 * config.max_body,
        idle_timeout=config.idle_timeout,
        origins=config.cors_origin,
        hosts=hosts,
        session_header=config.session_header,
    )
    cors = Middleware(
        CORSMiddleware,
        allow_origins=list(config.cors_origin),
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],  # client libraries add their own headers
        expose_headers=["X-Request-Id", "Retry-After"],
    )
    app = Starlette(
        routes=[*paths.routes, Route("/openapi.json", document), *(_page() if config.page else ())],
        middleware=[*([cors] if config.cors_origin else []), access],
        exception_handlers={HTTPException: answer_http_error},
    )
    app.router.redirect_slashes = False  # behind a proxy the redirect would name the wrong host
    return app


def _add_answers(paths: _Paths, pool: ModelPool) -> None:
    """Add the POST paths; an answer is one JSON object, or a stream if the body sets `stream`."""
    config = pool.config

    async def read(request: Request, kind: type[_Body]) -> _Body:
        """Read a request's body, which is in memory once and only until it is parsed."""
        body = BytesIO()
        async for piece in request.stream():
            body.write(piece)
        return pool.field_policy.parse(kind, body.getvalue())

    def generated(
        path: str,
        kind: type[SamplingFields],
        make: Callable[[Service, Any], EndpointAnswer[Any]],
        done: str = "",
    ) -> None:
        async def streamed(fields: SamplingFields) -> AsyncGenerator[str]:
            if not pool.is_ready(fields.model):
                yield ""  # opens the stream, which sends pings while it waits
            async with pool.use(fields.model) as service, aclosing(make(service, fields).events()) as events:
                async for one in events:
                    yield one

        async def whole(fields: SamplingFields) -> dict[str, Any]:
            async with pool.use(fields.model) as service:
                return await make(service, fields).whole()

        async def answer(request: Request) -> Response:
            fields = await read(request, kind)
            fields.check()
            if not fields.stream:
                return JSONResponse(await unless_disconnected(request, whole(fields)))
            events = streamed(fields)
            # An error before the first event sets the status.
            first = await unless_disconnected(request, anext(events, ""))
            return EventStream(events, first, done, config.ping_interval)

        paths.add(path, answer, "POST", kind)

    def computed(path: str, kind: type[BaseModel], make: Callable[[Service, Any], Awaitable[Any]]) -> None:
        async def result(fields: BaseModel) -> JSONResponse:
            async with pool.use(getattr(fields, "model", None)) as service:
                return JSONResponse(await make(service, fields))

        async def answer(request: Request) -> Response:
            return await unless_disconnected(request, result(await read(request, kind)))

        paths.add(path, answer, "POST", kind)

    store = ResponseStore(config.stored_responses)
    generated("/v1/completions", CompletionFields, Completions, _DONE)
    generated("/v1/chat/completions", ChatFields, Chat, _DONE)
    # Streams of the other APIs end with an event of their last type.
    generated("/v1/responses", ResponseFields, partial(Responses, store=store))
    _add_stored_responses(paths, store)
    generated("/v1/messages", MessageFields, Messages)
    generated("/infill", InfillFields, Infill)
    computed("/tokenize", TokenizeFields, tokenize)
    computed("/detokenize", DetokenizeFields, detokenize)
    computed("/v1/messages/count_tokens", MessageFields, count_tokens)


def _add_models(paths: _Paths, pool: ModelPool) -> None:
    created = int(time.time())

    def card(name: str, model: PooledModel) -> dict[str, Any]:
        service = model.service
        failure = {"failure": model.failure} if model.failure else {}
        parent = {"parent": model.names[0]} if name in model.served.engine.adapters else {}
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "specinfer",
            "root": model.names[0],
            **parent,
            "status": {"value": model.status, **failure},
            **(_facts(service) if service is not None else {}),
        }

    async def models(_: Request) -> Response:
        cards = [card(name, one) for one in pool.models for name in one.names]
        return JSONResponse({"object": "list", "data": cards})

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        return JSONResponse(card(name, pool.find(name, listed=True)))

    async def load(request: Request) -> Response:
        await unless_disconnected(request, pool.load((await _named(request)).model))
        return JSONResponse({"success": True})

    async def unload(request: Request) -> Response:
        await pool.unload((await _named(request)).model)
        return JSONResponse({"success": True})

    async def _named(request: Request) -> _ModelFields:
        return pool.field_policy.parse(_ModelFields, await request.body())

    async def embeddings(_: Request) -> Response:
        raise ApiError(
            "embeddings are not supported; use a server with an embedding model",
            status=404,
            code="not_offered",
        )

    paths.add("/v1/models", models)
    paths.add("/v1/models/{name:path}", model)
    paths.add("/models/load", load, "POST", _ModelFields)
    paths.add("/models/unload", unload, "POST", _ModelFields)
    paths.add("/v1/embeddings", embeddings, "POST")


def _facts(service: Service) -> dict[str, Any]:
    """Return the limits of a loaded model, and the settings that a request may change."""
    facts, usual = service.facts, service.facts.speculation
    return {
        "max_model_len": facts.max_context,
        "quantization": facts.quantization,
        "sampling_defaults": service.sampling,  # defaults of sampling fields
        "speculation": {
            "speculators": list(facts.speculators),
            "max_nodes": usual.node_limit,
            "expansion": usual.shape if usual.drafts else None,  # shape of a draft model's trees
            "verifier": usual.verifier,
        },
    }


def _add_stored_responses(paths: _Paths, store: ResponseStore) -> None:
    async def response(request: Request) -> Response:
        """Return a stored response as one object."""
        for param in request.query_params:
            raise ApiError(
                f"{param[:100]} is not a query parameter of this path; remove it", param=param[:100]
            )
        return Response(store.get(request.path_params["name"]).body, media_type="application/json")

    async def forget(request: Request) -> Response:
        """Delete a response; later responses that continue it stay."""
        name = request.path_params["name"]
        store.forget(name)
        return JSONResponse({"id": name, "object": "response", "deleted": True})

    async def cancel(request: Request) -> Response:
        """Refuse to cancel: only finished responses are stored."""
        store.get(request.path_params["name"])
        raise ApiError(
            "only background responses can be cancelled, and this server has none; "
            "close the connection to end a response"
        )

    paths.add("/v1/responses/{name}", response)
    paths.add("/v1/responses/{name}", forget, "DELETE")
    paths.add("/v1/responses/{name}/cancel", cancel, "POST")


def _add_server_paths(paths: _Paths, pool: ModelPool) -> None:
    async def health(_: Request) -> Response:
        """Liveness: 200 while this process answers; restart it if it does not."""
        return JSONResponse({"status": "ok"})

    async def ready(_: Request) -> Response:
        """Readiness: 503 while the server drains, or while the engines of its only model take no requests."""
        found = await pool.health()
        trouble = found[0].trouble if pool.is_fixed else ""
        trouble = "the server is shutting down" if pool.draining else trouble
        if trouble:
            return ApiError(trouble, status=503, headers={"Retry-After": "5"}).response()
        replicas = [one for health in found for one in health.replicas]
        serving = sum(one.takes_work for one in replicas)
        counts = {
            "replicas": len(replicas),
            "serving": serving,
            "restarts": sum(one.restarts for one in found),
        }
        return JSONResponse({"status": "ready", **counts})

    async def version(_: Request) -> Response:
        return JSONResponse({"version": VERSION})

    async def metrics(_: Request) -> Response:
        return Response(await pool.metrics(), media_type=CONTENT_TYPE_LATEST)

    paths.add("/health", health)
    paths.add("/ready", ready)
    paths.add("/version", version)
    paths.add("/metrics", metrics)


class _PageFiles(StaticFiles):
    """The files of the page at /, with its headers."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        found = await super().get_response(path, scope)
        found.headers.update(_PAGE_HEADERS)
        return found


def _page() -> list[BaseRoute]:
    files = _PageFiles(directory=Path(__file__).with_name("page"), follow_symlink=True)

    async def page(request: Request) -> Response:
        return await files.get_response("index.html", request.scope)

    return [Route("/", page), Mount("/page", files)]
