"""The HTTP face: OpenAI's endpoints over the router and the target.

No ``from __future__ import annotations`` here: FastAPI and Ray read the annotations.
"""

import asyncio
import logging
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from paceline.actors.router.policy import LeastConfidence, Route
from paceline.deploy.api.admission import Drain, Slots
from paceline.deploy.api.auth import KeyGuard
from paceline.deploy.api.failover import Failover, FailoverPolicy
from paceline.deploy.api.generation import complete_all, stream_all, streaming
from paceline.deploy.api.openapi import document
from paceline.deploy.api.operations import Operations
from paceline.deploy.api.page import OPEN_PATHS, add_page
from paceline.deploy.api.prompt_encoder import PromptEncoder, context_length, vocabulary_size
from paceline.deploy.api.request_parser import (
    ParsedRequest,
    RequestParser,
    check_draft,
    check_model,
    engine_requests,
    explicit_expert,
    query_number,
    read_body,
)
from paceline.deploy.api.request_schemas import (
    GenerationOptions,
)
from paceline.deploy.api.response_builder import ResponseContext, response_body
from paceline.deploy.api.routing import RouteTable, TopicFinder, load_router
from paceline.deploy.api.status import LearningActors, gather_status
from paceline.deploy.api.streaming import EventStream, events, started, timed, until
from paceline.deploy.api.token_names import TokenNames
from paceline.deploy.api.topic_admin import TopicAdmin, TopicRules
from paceline.deploy.api.traffic import Arrivals, RecentTraffic
from paceline.deploy.config.added_topics import TopicList
from paceline.deploy.config.live import Live, LiveIngress
from paceline.deploy.errors import CLIENT_GONE, ApiError, internal, overloaded
from paceline.deploy.monitoring.outcomes import is_disconnect

logger = logging.getLogger(__name__)

_HEALTH_TRIES = 3
_HEALTH_TIMEOUT_S = 3.0  # of each


@dataclass(frozen=True, slots=True)
class IngressSettings:
    """What the front door has to know; plain data that crosses process borders.

    ``max_in_flight`` sequences are let through at once, more get a 503 with Retry-After; of one
    client ``max_per_client`` (None: all of them), more get a 429. A request that is not answered
    after ``request_timeout_s`` seconds is cancelled. A candidate on trial drafts for
    ``trial_share`` of the requests. Where there are ``key_digests``, requests show one of those
    keys. ``own_router`` are folder and threads of the classifier that this process runs itself,
    None where there is none or it is a deployment. ``page`` serves the page at ``/ui``,
    ``operations`` what operators may do.
    """

    model_name: str
    model_path: str
    max_model_len: int | None
    experts: tuple[str, ...]
    router_timeout_s: float
    min_confidence: LeastConfidence
    max_in_flight: int
    max_per_client: int | None = None
    request_timeout_s: float = 600.0
    trial_share: float = 0.0
    failover: FailoverPolicy = field(default_factory=FailoverPolicy)
    topics: TopicRules = field(default_factory=TopicRules)
    own_router: tuple[str, int] | None = None
    key_digests: tuple[bytes, ...] = field(default=(), repr=False)
    page: bool = False
    operations: bool = True


class Ingress:
    """Parses requests, routes them, runs them on the target and builds the responses."""

    def __init__(
        self, settings: IngressSettings, target: Any, router: Any, actors: LearningActors
    ) -> None:
        """Load the tokenizer.

        Args:
            settings: see IngressSettings.
            target: Serve handle of the target deployment.
            router: Serve handle of the router deployment; None where it runs here, or none does.
            actors: what the status shows.
        """
        self._settings = self._configured = settings
        self._live = Live(LiveIngress, self._retune)
        self._target = target
        self._streams = streaming(target)
        self._failover = Failover(settings.failover)
        self._actors = actors
        self._routes = RouteTable(actors.scorer, time.monotonic, settings.trial_share)
        self._experts = TopicList(settings.experts, actors.registry)
        if settings.own_router is not None:
            router = load_router(*settings.own_router, actors.registry)
        self._topics = TopicFinder(
            router,
            self._experts,
            settings.router_timeout_s,
            settings.min_confidence,
            time.monotonic,
            self._routes.weights,
        )
        from transformers import AutoTokenizer  # seconds, and the driver never needs it

        tokenizer = AutoTokenizer.from_pretrained(settings.model_path, local_files_only=True)
        vocab_size = vocabulary_size(settings.model_path, tokenizer)
        self._encoder = PromptEncoder(tokenizer, vocab_size)
        self._context = context_length(settings.model_path, settings.max_model_len)
        self._parser = RequestParser(settings.model_name, self._encoder, self._context)
        self._created = int(time.time())
        self._names = TokenNames(tokenizer)
        self._slots = Slots(settings.max_in_flight, settings.max_per_client)
        self._document = document(settings.model_name)
        parts = (self._experts, router, target, actors, self._encoder)
        keyed = bool(settings.key_digests)
        self._admin = TopicAdmin(settings.topics, *parts, keyed=keyed)
        self._drain = Drain(actors.scheduler)
        self._arrivals = Arrivals(actors.scheduler, time.monotonic)
        self._operations = Operations(
            actors.registry,
            actors.scheduler,
            self._shards_now,
            self._drain,
            scorer=actors.scorer,
            enabled=settings.operations,
            keyed=keyed,
        )
        self._recent = RecentTraffic(uuid.uuid4().hex, time.time)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """The routes over this instance; Serve calls it after the constructor."""
        api = FastAPI(title="Paceline", docs_url=None, redoc_url=None, openapi_url=None)
        api.add_api_route("/health", self.health, methods=["GET"])
        api.add_api_route("/v1/models", self.models, methods=["GET"])
        api.add_api_route("/v1/models/{model:path}", self.model, methods=["GET"])
        api.add_api_route("/v1/completions", self.completions, methods=["POST"])
        api.add_api_route("/v1/chat/completions", self.chat_completions, methods=["POST"])
        api.add_api_route("/v1/paceline/status", self.status, methods=["GET"])
        api.add_api_route("/v1/paceline/topics", self.topics, methods=["GET"])
        api.add_api_route("/v1/paceline/topics", self.add_topic, methods=["POST"])
        api.add_api_route("/v1/paceline/live", self.live, methods=["GET"])
        api.add_api_route("/openapi.json", self.openapi, methods=["GET"])
        self._operations.add_to(api)
        with suppress(RuntimeError):  # no loop runs: the first request begins it
            asyncio.get_running_loop()
            self._drain.follow()
        if self._settings.page:
            add_page(api)
        if keys := self._settings.key_digests:
            api.add_middleware(KeyGuard, digests=keys, open_paths=("/health", *OPEN_PATHS))
        api.add_exception_handler(ApiError, _answer_error)
        api.add_exception_handler(HTTPException, _answer_error)
        api.add_exception_handler(Exception, _answer_error)
        return api

    async def reconfigure(self, user_config: Any) -> None:
        """Take other limits while requests run; Serve calls it. See LiveIngress."""
        self._live.take(user_config)

    def _retune(self, asked: LiveIngress) -> None:
        changed = asked.model_dump(exclude_none=True)
        give_up_after_s = changed.pop("give_up_after_s", None)
        settings = replace(self._configured, **changed)
        if give_up_after_s is not None:
            if give_up_after_s <= settings.failover.stall_timeout_s:
                raise ValueError("give_up_after_s: must be more than target.stall_timeout_s")
            policy = replace(settings.failover, give_up_after_s=give_up_after_s)
            settings = replace(settings, failover=policy)
        self._settings = settings
        self._failover.policy = settings.failover
        self._slots.resize(settings.max_in_flight, settings.max_per_client)
        self._topics.retune(settings.router_timeout_s, settings.min_confidence)

    async def health(self) -> Response:
        """200 where any replica of the target answers and requests are let in, else 503."""
        self._drain.follow()
        self._drain.check()
        for attempt in range(_HEALTH_TRIES):  # the choice of the next replica goes by it
            try:
                async with asyncio.timeout(_HEALTH_TIMEOUT_S):
                    await self._target.describe.remote(attempt=attempt)
            except Exception as error:
                logger.warning("a replica of the target does not answer: %r", error)
            else:
                return JSONResponse({"status": "ok"})
        raise overloaded("The target does not answer.")

    async def models(self) -> Response:
        """The one model that is served, in a list."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, model: str) -> Response:
        """The model by its name, else 404."""
        check_model(model, self._settings.model_name)
        return JSONResponse(self._model())

    def _model(self) -> dict[str, Any]:
        return {
            "id": self._settings.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "paceline",
            "max_model_len": self._context,
        }

    async def status(self) -> Response:
        """What target, drafts, replay and trainer are doing."""
        status = await gather_status(self._target, replace(self._actors, shards=self._shards()))
        own = {
            "failover": self._failover.counts(),
            "routed": self._topics.counts(),
            "live": self._live.describe(),
        }
        return JSONResponse(status | own)

    def _shards(self) -> dict[str, Any]:
        return {**self._actors.shards, **self._experts.shards}

    async def _shards_now(self) -> dict[str, Any]:
        """Those of all topics, also of one that was added a moment ago."""
        if self._actors.registry is not None:
            self._experts.take(await self._actors.registry.topics.remote())
        return self._shards()

    async def topics(self) -> Response:
        """Every topic, and how far each part knows it."""
        return JSONResponse(await self._admin.describe())

    async def add_topic(self, request: Request) -> Response:
        """Add a topic while requests run; see TopicAdmin."""
        return JSONResponse(await self._admin.add(request, await read_body(request)))

    async def live(self, request: Request) -> Response:
        """What went through this replica of the front door in the last minutes."""
        since = query_number(request.query_params.get("since"), "since")
        return JSONResponse(self._recent.view(since))

    async def openapi(self) -> Response:
        """This API in OpenAPI's words."""
        return JSONResponse(self._document)

    async def completions(self, request: Request) -> Response:
        """OpenAI's legacy completions: n choices per prompt."""
        return await self._answer(await self._parser.parse_completion(request))

    async def chat_completions(self, request: Request) -> Response:
        """OpenAI's chat completions."""
        return await self._answer(await self._parser.parse_chat(request))

    async def _answer(self, parsed: ParsedRequest) -> Response:
        """Route the prompts, run them and word the answer."""
        asked = parsed.options
        deadline = asyncio.get_running_loop().time() + self._settings.request_timeout_s
        self._drain.follow()
        self._drain.check()
        check_draft(asked.speculative.draft, self._experts)
        self._encoder.check_options(asked)
        count = len(parsed.prompts) * asked.num_choices
        param = "n" if asked.num_choices > 1 else "prompt"
        release = self._slots.take(count, parsed.client, param)
        self._arrivals.tell()
        try:
            async with until(deadline):
                routes = await self._routes_of(asked, parsed.router_texts)
            answer = self._head(parsed, [route.topic for route in routes])
            requests = engine_requests(parsed, answer.id, routes, self._routes.for_trial)
            if asked.stream:
                pieces = stream_all(self._streams, requests, self._failover)
                pieces = timed(self._recent.watched(pieces, requests), deadline)
                begun = await started(pieces)
                usage = asked.stream_options is not None and asked.stream_options.include_usage
                response = EventStream(events(answer, begun, usage), begun, release)
                release = _nothing  # the stream releases when it ends
                return response
            async with until(deadline):
                chunks = await complete_all(self._streams, requests, self._failover)
            self._recent.add_all(requests, chunks)
            return Response(response_body(answer, chunks), media_type="application/json")
        finally:
            release()

    async def _routes_of(self, asked: GenerationOptions, texts: list[str]) -> list[Route]:
        """A route per prompt: the expert that the client names learns from it, else the router."""
        named = explicit_expert(asked.speculative.draft)
        if named is not None:
            return [Route(named, named)] * len(texts)
        return await asyncio.gather(*map(self._topics.find, texts))

    def _head(self, parsed: ParsedRequest, topics: list[str]) -> ResponseContext:
        return ResponseContext(
            id=f"{'chatcmpl' if parsed.chat else 'cmpl'}-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=self._settings.model_name,
            chat=parsed.chat,
            token_ids=parsed.options.return_token_ids,
            topics=topics,
            prompt_tokens=sum(map(len, parsed.prompts)),
            names=self._names,
            num_choices=parsed.options.num_choices,
        )


def _nothing() -> None:
    """Release nothing."""


async def _answer_error(request: Request, error: Exception) -> Response:
    """Every failure in OpenAI's shape."""
    if isinstance(error, HTTPException):
        text = f"{error.detail}: {request.method} {request.url.path}"
        error = ApiError(error.status_code, text)
    elif is_disconnect(error):
        error = ApiError(CLIENT_GONE, "The client went away.")
    elif not isinstance(error, ApiError):
        logger.error("a request failed", exc_info=error)
        error = internal("The server failed on this request.")
    return JSONResponse(error.body(), error.status, error.headers())
