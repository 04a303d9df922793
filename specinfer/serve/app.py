"""The application: which path is answered by whom."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException

from specinfer.serve.api.chat import Chat, ChatFields
from specinfer.serve.api.completions import ChoicesAnswer, CompletionFields, Completions
from specinfer.serve.api.growing_answer import GrowingAnswer
from specinfer.serve.api.infill import Infill, InfillFields
from specinfer.serve.api.message_fields import MessageFields
from specinfer.serve.api.messages import Messages, count_tokens
from specinfer.serve.api.response_fields import ResponseFields
from specinfer.serve.api.responses import Responses, ResponseStore
from specinfer.serve.api.service import Service
from specinfer.serve.api.tokens import DetokenizeFields, TokenizeFields, detokenize, tokenize
from specinfer.serve.backend.work import EngineInfo
from specinfer.serve.fields.body import parse
from specinfer.serve.http.access import Access, Keys
from specinfer.serve.http.api_error import ApiError, tell_api_error, tell_http_error
from specinfer.serve.http.event_stream import body_of, stream, unless_gone
from specinfer.serve.http.hosts import Hosts
from specinfer.serve.http.page_server import PAGE_HEADERS, page_files
from specinfer.version import VERSION

_MOST_ITEMS: Final = 100  # of one list, as in OpenAI's API


def build_app(service: Service, keys: Keys, hosts: Hosts | None = None) -> FastAPI:
    """The server's application; `hosts` are whom it may be asked for by, None for any name."""
    config = service.config
    app = FastAPI(
        title="specinfer",
        version=VERSION,
        docs_url=None,  # its page would come from somewhere else
        redoc_url=None,
        redirect_slashes=False,  # the place it would name is not the one by which a proxy is asked
    )
    app.add_exception_handler(ApiError, tell_api_error)
    app.add_exception_handler(HTTPException, tell_http_error)
    _add_answers(app, service)
    _add_models(app, service)
    _add_server_paths(app, service)
    if config.page:
        _add_page(app)
    # The last one added is the first one asked.
    app.add_middleware(
        Access,
        keys=keys,
        max_body=config.max_body,
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
            allow_headers=["*"],  # clients have headers of their own
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    return app


def _add_answers(app: FastAPI, service: Service) -> None:
    """The paths that answer what a body asks for, in one piece or, where it says so, as a stream."""
    bodies = _Bodies(app, service)
    bodies.answer("/v1/completions", CompletionFields, Completions)
    bodies.answer("/v1/chat/completions", ChatFields, Chat)
    store = ResponseStore(service.config.stored_responses)
    # Streams of others end with an event that says so, and with no other sign.
    bodies.answer("/v1/responses", ResponseFields, partial(Responses, store=store), done="")
    _add_kept_responses(app, store)
    bodies.answer("/v1/messages", MessageFields, Messages, done="")
    bodies.answer("/infill", InfillFields, Infill, done="")
    bodies.tell("/tokenize", TokenizeFields, tokenize)
    bodies.tell("/detokenize", DetokenizeFields, detokenize)
    bodies.tell("/v1/messages/count_tokens", MessageFields, count_tokens)
    bodies.describe()


class _Bodies:
    """POST paths whose bodies are described in the OpenAPI document and read by us.

    The framework would read them with Python's JSON, which takes NaN and fails on what is nested deep.
    """

    def __init__(self, app: FastAPI, service: Service) -> None:
        self._app = app
        self._service = service
        self._kinds: list[type[BaseModel]] = []

    def answer(
        self,
        path: str,
        kind: type[BaseModel],
        make: Callable[[Service, Any], GrowingAnswer[Any] | ChoicesAnswer[Any] | Infill],
        *,
        done: str = "data: [DONE]\n\n",
    ) -> None:
        """A path whose answer grows; a stream of it ends with `done`."""
        service = self._service

        async def endpoint(request: Request, fields: BaseModel) -> Response:
            answer = make(service, service.with_defaults(fields))
            if getattr(fields, "stream", None):
                streamed = stream(answer.events(), done=done, ping=service.config.ping_interval)
                return await unless_gone(request, streamed)
            return JSONResponse(await unless_gone(request, answer.whole()))

        self._add(path, kind, endpoint)

    def tell(self, path: str, kind: type[BaseModel], make: Callable[[Service, Any], Awaitable[Any]]) -> None:
        """A path whose answer is there at once."""

        async def endpoint(request: Request, fields: BaseModel) -> Response:
            return JSONResponse(await make(self._service, fields))

        self._add(path, kind, endpoint)

    def describe(self) -> None:
        """Add what all these bodies look like to the OpenAPI document."""
        usual = self._app.openapi

        def document() -> dict[str, Any]:
            found = usual()
            _, schemas = models_json_schema(
                [(kind, "validation") for kind in self._kinds], ref_template="#/components/schemas/{model}"
            )
            found.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
            return found

        self._app.openapi = document  # type: ignore[method-assign]

    def _add(
        self, path: str, kind: type[BaseModel], answer: Callable[[Request, Any], Awaitable[Response]]
    ) -> None:
        service = self._service

        async def endpoint(request: Request) -> Response:
            body = await body_of(request)
            return await answer(request, parse(kind, body, service.config.max_body, service.field_policy))

        self._kinds.append(kind)
        schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
        self._app.add_api_route(
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
            "sampling_defaults": service.sampling,  # of requests that do not say; what is not here is usual
            "speculation": _speculation(service.facts),
        }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card(name) for name in (*service.models, *service.adapters)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        return card(service.check_model(name))

    @app.post("/v1/embeddings")
    async def embeddings() -> None:
        raise ApiError(
            "embeddings are not offered: this server makes text alone; ask a server with an embedding model",
            status=404,
            code="not_offered",
        )


def _add_kept_responses(app: FastAPI, store: ResponseStore) -> None:
    @app.get("/v1/responses/{name}")
    async def response(name: str, request: Request) -> Response:
        """A response that was kept, in one piece."""
        _parameters(request)
        return Response(store.kept(name).body, media_type="application/json")

    @app.delete("/v1/responses/{name}")
    async def forget(name: str) -> dict[str, Any]:
        """Forget a response; those that went on from it stay."""
        store.forget(name)
        return {"id": name, "object": "response", "deleted": True}

    @app.get("/v1/responses/{name}/input_items")
    async def input_items(name: str, request: Request) -> dict[str, Any]:
        """The items of a kept response's input; those of responses before it are listed with these."""
        given = _parameters(request, "after", "limit", "order")
        limit, order = given.get("limit", "20"), given.get("order", "desc")
        if not limit.isdecimal() or not 1 <= int(limit[:4]) <= _MOST_ITEMS:
            raise ApiError(f"limit is {limit[:20]!r}; allowed: 1 to {_MOST_ITEMS}", param="limit")
        if order not in ("asc", "desc"):
            raise ApiError(f"order is {order[:20]!r}; allowed: asc, desc", param="order")
        return store.page(name, after=given.get("after"), limit=int(limit), order=order)

    @app.post("/v1/responses/{name}/cancel")
    async def cancel(name: str) -> None:
        """Nothing to cancel: a response is kept when it has ended."""
        store.kept(name)
        raise ApiError(
            "only responses that are made in the background can be cancelled, and none are here; "
            "close the connection to end one"
        )


def _parameters(request: Request, *allowed: str) -> dict[str, str]:
    """The parameters of a request's query; raises ApiError for one that is not among these."""
    for param in request.query_params:
        if param not in allowed:
            known = f"allowed: {', '.join(allowed)}" if allowed else "drop it"
            raise ApiError(f"{param[:100]} is no parameter here; {known}", param=param[:100])
    return dict(request.query_params)


def _add_server_paths(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    async def health() -> Response:
        """Whether this process answers; what a restart would mend."""
        return JSONResponse({"status": "ok"})

    @app.get("/ready")
    async def ready() -> Response:
        """Whether it takes work: 503 while no engine does, or while the server drains."""
        health = await service.backend.health()
        trouble = "the server is shutting down" if service.draining else health.trouble
        if trouble:
            return ApiError(trouble, status=503, headers={"Retry-After": "5"}).response()
        serving = sum(not one.trouble for one in health.replicas)
        told = {"replicas": len(health.replicas), "serving": serving, "restarts": health.restarts}
        return JSONResponse({"status": "ready", **told})

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": VERSION}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(await service.backend.health()), media_type=CONTENT_TYPE_LATEST)


def _add_page(app: FastAPI) -> None:
    files = page_files()

    async def page(request: Request) -> Response:
        name = request.path_params.get("name")
        file = files.get("/" if name is None else f"/page/{name}")
        if file is None:
            raise HTTPException(404)
        return Response(file.body, media_type=file.media_type, headers=PAGE_HEADERS)

    app.add_route("/", page, include_in_schema=False)
    app.add_route("/page/{name}", page, include_in_schema=False)


def _speculation(facts: EngineInfo) -> dict[str, Any]:
    """What requests may ask of speculation here, and what they get without asking."""
    usual = facts.speculation
    return {
        "speculators": list(facts.speculators),
        "max_nodes": usual.most_nodes,
        "expansion": usual.shape if usual.drafts else None,  # the shape of a draft model's trees
        "verifier": usual.verifier,
    }
