"""The HTTP ingress: OpenAI's endpoints, status and administration.

No ``from __future__ import annotations`` here: FastAPI and Ray read the annotations.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal
from urllib.parse import quote

from fastapi import FastAPI, Request
from fastapi.encoders import jsonable_encoder
from fastapi.responses import JSONResponse, Response
from ray import serve
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.actors.engine.grammar import tokenizer_json
from paceline.actors.engine.request import DRAFT_OFF, GenerationRequest
from paceline.actors.engine.target_handle import TargetHandle
from paceline.actors.general import GENERAL
from paceline.actors.replay.shard import ShardHandle
from paceline.actors.router.key_scope import experts_for, key_of
from paceline.actors.router.policy import MinConfidence, Route
from paceline.cluster.learning_actors import LearningActors
from paceline.deploy.api.actor_calls import call_or_none, call_with_timeout
from paceline.deploy.api.admission import ConcurrencyLimiter, DrainState
from paceline.deploy.api.auth import ApiKey, ApiKeyMiddleware, ReboundMiddleware
from paceline.deploy.api.failover import Failover, FailoverPolicy
from paceline.deploy.api.generation import complete_all, stream_all, streaming_handle
from paceline.deploy.api.grammars import Grammars
from paceline.deploy.api.openapi import openapi_document
from paceline.deploy.api.operations import (
    TOPICS_TIMEOUT_S,
    FoundShards,
    Operations,
    shards_of,
)
from paceline.deploy.api.page import OPEN_PATHS, add_page
from paceline.deploy.api.prompt_encoder import PromptEncoder, context_length, vocabulary_size
from paceline.deploy.api.request_parser import (
    BodyWorkers,
    ParsedRequest,
    RequestParser,
    check_draft,
    check_model,
    engine_requests,
    explicit_expert,
    query_number,
    read_body,
)
from paceline.deploy.api.request_schemas import StreamOptions
from paceline.deploy.api.response_builder import ResponseContext, response_body
from paceline.deploy.api.response_schemas import ModelCard, ModelList
from paceline.deploy.api.responses_builder import ResponsesBuilder
from paceline.deploy.api.routing import (
    ExpertList,
    RouterHandle,
    RouteSelector,
    RoutingRateLimiter,
    RoutingTable,
    load_router,
)
from paceline.deploy.api.sampling_defaults import default_sampling_params
from paceline.deploy.api.status import gather_status
from paceline.deploy.api.streaming import (
    EventStreamResponse,
    deadline_scope,
    prefetch,
    sse_events,
    with_deadline,
)
from paceline.deploy.api.token_names import TokenNames
from paceline.deploy.api.tokenization import Tokenization
from paceline.deploy.api.topic_admin import TopicAdmin, TopicAdminSettings
from paceline.deploy.api.traffic import ArrivalNotifier, RecentTraffic
from paceline.deploy.config.user_config import IngressUserConfig, UserConfigState
from paceline.deploy.errors import CLIENT_GONE, ApiError, internal, overloaded
from paceline.deploy.monitoring.vllm import CONTENT_TYPE, exposition

logger = logging.getLogger(__name__)

_ASCII = "".join(map(chr, range(128)))
_LISTENS = "/-/healthz"  # as Serve's own proxy has it
_HEALTH_ATTEMPTS = 3
_HEALTH_TIMEOUT_S = 3.0  # per attempt
_METRICS_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class IngressSettings:
    """Settings of an ingress replica; plain data that crosses process borders.

    Attributes:
        model_name: the served model's name.
        model_path: the target's folder.
        max_model_len: prompt and answer together, tokens; None for the model's own limit.
        experts: of the configuration, ``general`` first.
        router_timeout_s: of the router, seconds.
        min_confidence: see `policy.choose_topic`.
        max_in_flight: most concurrent sequences; beyond it 503 with Retry-After.
        max_seqs_per_client: most concurrent sequences of a client, None for all; beyond it 429.
        request_timeout_s: a request that takes longer is cancelled with 504.
        canary_share: share of the requests that an expert's candidate drafts for.
        failover: limits of failover.
        topics: settings of topic administration.
        in_process_router: arguments of load_router, without the registry, if this process
            classifies.
        api_keys: the valid ones; without any, no key is needed.
        key_cache: whether requests reuse KV blocks of their own API key's alone.
        key_scope: whether every named key has experts of its own, and nobody else is recorded.
        records: whether any request is recorded.
        ui: whether to serve the page at ``/ui``.
        operations: whether to serve the operators' endpoints.
        generation_config: whether the model's sampling parameters are the defaults of requests.
        cors_origins: origins whose pages may call the API from a browser.
        metrics: who may read ``/metrics``: holders of a key, everybody, or nobody.
    """

    model_name: str
    model_path: str
    max_model_len: int | None
    experts: tuple[str, ...]
    router_timeout_s: float
    min_confidence: MinConfidence
    max_in_flight: int
    max_seqs_per_client: int | None = None
    request_timeout_s: float = 600.0
    canary_share: float = 0.0
    failover: FailoverPolicy = field(default_factory=FailoverPolicy)
    topics: TopicAdminSettings = field(default_factory=TopicAdminSettings)
    in_process_router: tuple[str, str | None, int] | None = None
    api_keys: tuple[ApiKey, ...] = ()
    key_cache: bool = False
    key_scope: bool = False
    records: bool = True
    ui: bool = False
    operations: bool = True
    generation_config: bool = True
    cors_origins: tuple[str, ...] = ()
    metrics: Literal["key", "open", "off"] = "key"


class Ingress:
    """Parses requests, routes them, runs them on the target and builds the responses.

    Args:
        settings: see IngressSettings.
        target: Serve handle of the target deployment.
        router: Serve handle of the router deployment, None if there is none.
        actors: the learning actors.
    """

    def __init__(
        self,
        settings: IngressSettings,
        target: TargetHandle,
        router: RouterHandle | None,
        actors: LearningActors,
    ) -> None:
        self._settings = self._configured = settings
        self._user_config = UserConfigState(IngressUserConfig, self._apply_user_config)
        self._target = target
        self._generation = streaming_handle(target)
        self._failover = Failover(settings.failover)
        self._actors = actors
        self._routing_table = RoutingTable(actors.scorer, time.monotonic, settings.canary_share)
        self._experts = ExpertList(settings.experts, actors.registry)
        if settings.in_process_router is not None:
            router = load_router(*settings.in_process_router, actors.registry)
        self._route_selector = RouteSelector(
            router,
            self._experts,
            settings.router_timeout_s,
            settings.min_confidence,
            time.monotonic,
            self._routing_table.weights,
        )
        from transformers import AutoTokenizer  # seconds, and the driver never needs it

        tokenizer = AutoTokenizer.from_pretrained(settings.model_path, local_files_only=True)
        vocab_size = vocabulary_size(settings.model_path, tokenizer)
        self._encoder = PromptEncoder(tokenizer, vocab_size)
        self._grammars = Grammars(
            lambda: tokenizer_json(tokenizer), vocab_size, {tokenizer.eos_token_id} - {None}
        )
        self._context_length = context_length(settings.model_path, settings.max_model_len)
        self._default_sampling_params = (
            default_sampling_params(settings.model_path) if settings.generation_config else {}
        )
        self._limiter = ConcurrencyLimiter(settings.max_in_flight, settings.max_seqs_per_client)
        self._routing_limiter = RoutingRateLimiter(lambda: self._limiter.running, time.monotonic)
        workers = BodyWorkers(self._limiter)
        self._parser = RequestParser(
            settings.model_name,
            self._encoder,
            self._context_length,
            self._default_sampling_params,
            workers,
        )
        self._tokenization = Tokenization(
            self._encoder, settings.model_name, self._context_length, workers
        )
        self._created = int(time.time())
        self._token_names = TokenNames(tokenizer)
        self._openapi = openapi_document(settings.model_name)
        keyed = bool(settings.api_keys)
        parts = (self._experts, router, target, actors, self._encoder)
        self._topic_admin = TopicAdmin(settings.topics, *parts, keyed=keyed)
        self._drain_state = DrainState(actors.scheduler)
        self._arrivals = ArrivalNotifier(actors.scheduler, time.monotonic)
        self._operations = Operations(
            actors.registry,
            actors.scheduler,
            self._current_shards,
            self._drain_state,
            self._purge_replicas,
            self._all_admitted,
            scorer=actors.scorer,
            enabled=settings.operations,
            keyed=keyed,
        )
        self._recent_traffic = RecentTraffic(
            uuid.uuid4().hex, time.time, observe=self._routing_limiter.observe
        )

    def api(self) -> FastAPI:
        """The application: the routes of this instance."""
        api = FastAPI(title="Paceline", docs_url=None, redoc_url=None, openapi_url=None)
        api.add_api_route("/health", self.health, methods=["GET", "HEAD"])
        api.add_api_route(_LISTENS, self.listens, methods=["GET"])
        api.add_api_route("/v1/models", self.models, methods=["GET"])
        api.add_api_route("/v1/models/{model:path}", self.model, methods=["GET"])
        api.add_api_route("/v1/completions", self.completions, methods=["POST"])
        api.add_api_route("/v1/chat/completions", self.chat_completions, methods=["POST"])
        api.add_api_route("/v1/responses", self.responses, methods=["POST"])
        api.add_api_route("/v1/paceline/status", self.status, methods=["GET"])
        api.add_api_route("/v1/paceline/topics", self.topics, methods=["GET"])
        api.add_api_route("/v1/paceline/topics", self.add_topic, methods=["POST"])
        api.add_api_route("/v1/paceline/live", self.live, methods=["GET"])
        api.add_api_route("/openapi.json", self.openapi, methods=["GET"])
        if self._settings.metrics != "off":
            api.add_api_route("/metrics", self.metrics, methods=["GET", "HEAD"])
        self._operations.add_routes(api)
        self._tokenization.add_routes(api)
        with suppress(RuntimeError):  # without a running loop the first request starts polling
            asyncio.get_running_loop()
            self._drain_state.ensure_polling()
        if self._settings.ui:
            add_page(api)
        api.add_middleware(ErrorMiddleware)
        if keys := self._settings.api_keys:
            open_paths = ["/health", _LISTENS, *OPEN_PATHS]
            if self._settings.metrics == "open":
                open_paths.append("/metrics")
            api.add_middleware(ApiKeyMiddleware, keys=keys, open_paths=open_paths)
        else:
            api.add_middleware(ReboundMiddleware)
        if origins := self._settings.cors_origins:  # outside of the keys: preflights have none
            api.add_middleware(
                CORSMiddleware,
                allow_origins=origins,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=["Retry-After"],
            )
        for kind in (ApiError, HTTPException, Exception):  # the last one outside of all middleware
            api.add_exception_handler(kind, handle_error)
        return api

    async def reconfigure(self, user_config: Any) -> None:
        """Apply Serve's ``user_config``, see IngressUserConfig; Serve calls it."""
        self._user_config.update(user_config)

    def _apply_user_config(self, user_config: IngressUserConfig) -> None:
        changes = user_config.model_dump(exclude_none=True)
        failover_timeout_s = changes.pop("failover_timeout_s", None)
        settings = replace(self._configured, **changes)
        if failover_timeout_s is not None:
            if failover_timeout_s <= settings.failover.stall_timeout_s:
                raise ValueError("failover_timeout_s: must be more than target.stall_timeout_s")
            policy = replace(settings.failover, failover_timeout_s=failover_timeout_s)
            settings = replace(settings, failover=policy)
        self._settings = settings
        self._failover.policy = settings.failover
        self._limiter.resize(settings.max_in_flight, settings.max_seqs_per_client)
        self._route_selector.configure(settings.router_timeout_s, settings.min_confidence)

    async def health(self) -> Response:
        """200 if a replica of the target answers and the server is not draining, else 503."""
        self._drain_state.ensure_polling()
        self._drain_state.check()
        for attempt in range(_HEALTH_ATTEMPTS):  # replica choice spreads attempts by number
            try:
                call = partial(self._target.status.remote, attempt=attempt)
                await call_with_timeout(call, _HEALTH_TIMEOUT_S)
            except Exception as error:
                logger.warning("a replica of the target does not answer: %r", error)
            else:
                return JSONResponse({"status": "ok"})
        raise overloaded("The target does not answer.")

    async def listens(self) -> Response:
        """200 if this replica listens; KubeRay asks for it."""
        return Response("success", media_type="text/plain")

    async def models(self) -> Response:
        """A list of the one served model."""
        models = ModelList(data=[self._model_card()])
        return JSONResponse(models.model_dump())

    async def model(self, model: str) -> Response:
        """The model of that name, else 404."""
        check_model(model, self._settings.model_name)
        return JSONResponse(self._model_card().model_dump())

    def _model_card(self) -> ModelCard:
        return ModelCard(
            id=self._settings.model_name,
            created=self._created,
            max_model_len=self._context_length,
            default_sampling_params=self._default_sampling_params,
        )

    async def status(self) -> Response:
        """Status of target, drafts, replay, trainers and this replica."""
        status = await gather_status(self._target, replace(self._actors, shards=self._shards()))
        own = {
            "records": self._settings.records and len(self._experts) > 0,
            "failover": self._failover.counts(),
            "routed": self._route_selector.counts(),
            "user_config": self._user_config.status(),
        }
        return JSONResponse(jsonable_encoder(status) | jsonable_encoder(own))

    def _shards(self) -> dict[str, ShardHandle]:
        return {**self._actors.shards, **self._experts.shards}

    async def _current_shards(self) -> FoundShards:
        """The shards of all topics, also of those added a moment ago, or configured no more."""
        view = await call_or_none(self._actors.registry.topics.remote, TOPICS_TIMEOUT_S)
        if view is not None:
            self._experts.update(view)
        found = await shards_of(self._actors.shard_hosts)
        return found._replace(by_topic=found.by_topic | self._shards())

    async def topics(self) -> Response:
        """Every topic and its state in each part."""
        return JSONResponse(await self._topic_admin.list_topics())

    async def add_topic(self, request: Request) -> Response:
        """Add a topic, see TopicAdmin."""
        return JSONResponse(await self._topic_admin.add(request, await read_body(request)))

    async def live(self, request: Request) -> Response:
        """Recent traffic of this replica."""
        since = query_number(request.query_params.get("since"), "since")
        return JSONResponse(self._recent_traffic.rows(since))

    async def metrics(self) -> Response:
        """Metrics of all target replicas with vLLM's names; those that do not answer are left out.

        Raises:
            ApiError: 503 if no replica answers.
        """
        replies = await call_or_none(
            # One by one: `results_async` gives nothing if a single replica hangs.
            self._target.broadcast("metrics")._fetch_replica_results_async,
            _METRICS_TIMEOUT_S,
        )
        answers = await asyncio.gather(
            *(call_or_none(reply.get_async, _METRICS_TIMEOUT_S) for reply in replies or ())
        )
        replicas = [answer for answer in answers if answer is not None]
        if not replicas:
            raise overloaded("The target does not answer.")
        text = exposition(self._settings.model_name, replicas)
        return Response(text, media_type=CONTENT_TYPE)

    async def _purge_replicas(self, request_id: str | None, topic: str | None) -> int:
        """Remove answers from all target replicas, see TargetReplica.purge."""
        return await _total(self._target.broadcast("purge", request_id, topic))

    async def admitted(self) -> int:
        """Sequences that this replica has admitted and that have not ended."""
        return self._limiter.running

    async def _all_admitted(self) -> int:
        """Those of all ingress replicas."""
        here = serve.get_replica_context()
        replicas = serve.get_deployment_handle(
            here.deployment,
            here.app_name,
            # Either would block the event loop on a call to another process.
            _check_exists=False,
            _record_telemetry=False,
        )
        return await _total(replicas.broadcast("admitted"))

    async def openapi(self) -> Response:
        """The OpenAPI document."""
        return JSONResponse(self._openapi)

    async def completions(self, request: Request) -> Response:
        """OpenAI's legacy completions: n choices per prompt."""
        return await self._generate(request, self._parser.parse_completion)

    async def chat_completions(self, request: Request) -> Response:
        """OpenAI's chat completions."""
        return await self._generate(request, self._parser.parse_chat)

    async def responses(self, request: Request) -> Response:
        """OpenAI's Responses API, as chat."""
        return await self._generate(request, self._parser.parse_responses)

    async def _generate(
        self, request: Request, parse: Callable[[Request], Awaitable[ParsedRequest]]
    ) -> Response:
        """Parse and admit a request, route its prompts, run them and build the response."""
        self._drain_state.ensure_polling()
        self._drain_state.check()
        parsed = await parse(request)
        self._drain_state.check()  # it may have begun meanwhile
        options = parsed.options
        deadline = asyncio.get_running_loop().time() + self._settings.request_timeout_s
        check_draft(options.speculative.draft, self._experts_for(parsed.key))
        self._encoder.check_options(options)
        count = len(parsed.prompts) * options.num_choices
        param = "n" if options.num_choices > 1 else "prompt"
        with ExitStack() as releases:
            releases.callback(self._limiter.acquire(count, parsed.client, param))
            self._arrivals.notify()
            async with deadline_scope(deadline):
                source = parsed.grammar
                grammar = (
                    "" if source is None else await self._grammars.compile(source, parsed.client)
                )
                routes = await self._select_routes(parsed)
            context = self._response_context(parsed, [route.topic for route in routes])
            asked = parsed.responses
            builder = None if asked is None else ResponsesBuilder(context, asked)
            requests = engine_requests(
                parsed, context.id, routes, self._routing_table.canary_route, grammar
            )
            requests = [self._for_key(request, parsed.key) for request in requests]
            if options.stream:
                chunks = stream_all(self._generation, requests, self._failover)
                chunks = with_deadline(
                    self._recent_traffic.record_stream(chunks, requests), deadline
                )
                stream = await prefetch(chunks)
                events = sse_events(context, stream) if builder is None else builder.events(stream)
                return EventStreamResponse(events, stream, releases.pop_all().close, deadline)
            async with deadline_scope(deadline):
                answers = await complete_all(self._generation, requests, self._failover)
            self._recent_traffic.record_all(requests, answers)

            def body() -> bytes:
                if builder is None:
                    return response_body(context, answers)
                builder.add(answers[0])
                return builder.body()

            # What there is per token takes a while: other streams go on meanwhile.
            has_logprobs = {options.num_logprobs, options.num_prompt_logprobs} != {None}
            is_large = has_logprobs or options.return_token_sources
            whole = await asyncio.to_thread(body) if is_large else body()
            return Response(whole, media_type="application/json")

    def _for_key(self, request: GenerationRequest, key: ApiKey | None) -> GenerationRequest:
        """The request within what its API key shares with others."""
        salt = key.id if self._settings.key_cache and key is not None else ""
        has_expert = not self._settings.key_scope or bool(key_of(request.topic))
        recorded = self._settings.records and has_expert
        return replace(request, cache_salt=salt, recorded=recorded)

    def _experts_for(self, key: ApiKey | None) -> Collection[str]:
        """The experts that may draft for a key's requests."""
        if not self._settings.key_scope:
            return self._experts
        return experts_for("" if key is None else key.name, self._experts)

    async def _select_routes(self, parsed: ParsedRequest) -> list[Route]:
        """A route per prompt: of the requested expert, which learns from it, or the router's.

        With a scope by key, ``general`` drafts for those whose key has no experts. The router does
        not read what nothing drafts for and nobody learns from.
        """
        texts, key, options = parsed.router_texts, "", parsed.options
        expert = explicit_expert(options.speculative.draft)
        own = options.speculative
        is_plain = own.draft == DRAFT_OFF or own.num_speculative_tokens == 0
        teaches = self._settings.records and options.store is not False
        if is_plain and not teaches:
            expert = GENERAL
        if self._settings.key_scope:
            key = "" if parsed.key is None else parsed.key.name
            expert = expert or (None if key else GENERAL)
        if expert is not None:
            return [Route(expert, expert)] * len(texts)
        # The router takes one text at a time: together, some would wait beyond their limit.
        select, limiter = self._route_selector.select, self._routing_limiter
        return [
            await select(text if limiter.allow(key, recorded=teaches) else None, key)
            for text in texts
        ]

    def _response_context(self, parsed: ParsedRequest, topics: list[str]) -> ResponseContext:
        usage = parsed.options.stream_options or StreamOptions()
        return ResponseContext(
            id=f"{_id_prefix(parsed)}{uuid.uuid4().hex}",
            created=int(time.time()),
            model=self._settings.model_name,
            chat=parsed.chat,
            token_ids=parsed.options.return_token_ids,
            topics=topics,
            prompts=parsed.prompts,
            names=self._token_names,
            num_choices=parsed.options.num_choices,
            echoes=parsed.echoes,
            prompt_logprobs=parsed.options.prompt_logprobs is not None,
            include_usage=usage.include_usage,
            continuous_usage=usage.include_usage and usage.continuous_usage_stats,
            tools=parsed.tools,
        )


async def _total(broadcast: Any) -> int:
    """The sum of all replicas' results; Serve's response to a broadcast has no types."""
    replies = await broadcast._fetch_replica_results_async()
    return sum(await asyncio.gather(*(reply.get_async() for reply in replies)))


def _id_prefix(parsed: ParsedRequest) -> str:
    if parsed.responses is not None:
        return "resp_"
    return "chatcmpl-" if parsed.chat else "cmpl-"


class ErrorMiddleware:
    """ASGI middleware that answers a request which failed unexpectedly.

    It is inside of CORS's, so that pages of other sites can read the error.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        query = scope.get("query_string", b"")
        if not query.isascii():  # as clients should; Starlette raises where it redirects with it
            scope = {**scope, "query_string": quote(query, safe=_ASCII).encode()}
        try:
            await self._app(scope, receive, watched_send)
        except Exception as error:
            if started or scope["type"] != "http":
                raise
            response = await handle_error(Request(scope), error)
            await response(scope, receive, send)


async def handle_error(request: Request, error: Exception) -> Response:
    """The response to any exception, in OpenAI's error shape."""
    headers: Mapping[str, str] = {}
    if isinstance(error, HTTPException):
        headers = error.headers or {}  # Allow, of a 405
        # Not of `request.url`, which is read with its query: that may be any bytes.
        text = f"{error.detail}: {request.method} {request.scope['path']}"
        error = ApiError(error.status_code, text)
    elif isinstance(error, ClientDisconnect):
        error = ApiError(CLIENT_GONE, "The client went away.")
    elif not isinstance(error, ApiError):
        logger.error("a request failed", exc_info=error)
        error = internal("The server failed on this request.")
    return JSONResponse(error.body(), error.status, {**headers, **error.headers()})
