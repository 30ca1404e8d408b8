"""The HTTP face: OpenAI's endpoints over the router and the target.

No ``from __future__ import annotations`` here: FastAPI and Ray read the annotations.
"""

import asyncio
import logging
import time
import uuid
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from paceline.actors.decoding.request import GenerationRequest
from paceline.deploy import answers, translate
from paceline.deploy.admission import Slots
from paceline.deploy.errors import ApiError, internal, overloaded
from paceline.deploy.generation import complete_all, stream_all, streaming
from paceline.deploy.openai_types import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationOptions,
)
from paceline.deploy.prompts import PromptEncoder, context_length, question
from paceline.deploy.status import LearningActors, gather_status
from paceline.deploy.streams import EventStream, events, started
from paceline.deploy.topics import TopicFinder

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 8 * 2**20
_LONG_PROMPT_BYTES = 64 * 2**10
_HEALTH_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class IngressSettings:
    """What the front door has to know; plain data that crosses process borders.

    ``max_in_flight`` sequences are let through at once, more get a 503 with Retry-After.
    """

    model_name: str
    model_path: str
    max_model_len: int | None
    experts: tuple[str, ...]
    router_timeout_s: float
    min_confidence: float
    max_in_flight: int


class Ingress:
    """Checks requests, finds their topic, passes them to the target and words the answers."""

    def __init__(
        self, settings: IngressSettings, target: Any, router: Any, actors: LearningActors
    ) -> None:
        """Load the tokenizer.

        Args:
            settings: see IngressSettings.
            target: Serve handle of the target deployment.
            router: Serve handle of the router deployment, or None.
            actors: what the status shows.
        """
        self._settings = settings
        self._target = target
        self._streams = streaming(target)
        self._actors = actors
        self._topics = TopicFinder(
            router,
            settings.experts,
            settings.router_timeout_s,
            settings.min_confidence,
            time.monotonic,
        )
        from transformers import AutoTokenizer  # seconds, and the driver never needs it

        tokenizer = AutoTokenizer.from_pretrained(settings.model_path, local_files_only=True)
        self._encoder = PromptEncoder(tokenizer)
        self._context = context_length(settings.model_path, settings.max_model_len)
        self._created = int(time.time())
        self._slots = Slots(settings.max_in_flight)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """The routes over this instance; Serve calls it after the constructor."""
        api = FastAPI(title="Paceline", docs_url=None, redoc_url=None, openapi_url=None)
        api.add_api_route("/health", self.health, methods=["GET"])
        api.add_api_route("/v1/models", self.models, methods=["GET"])
        api.add_api_route("/v1/models/{model:path}", self.model, methods=["GET"])
        api.add_api_route("/v1/completions", self.completions, methods=["POST"])
        api.add_api_route("/v1/chat/completions", self.chat_completions, methods=["POST"])
        api.add_api_route("/v1/paceline/status", self.status, methods=["GET"])
        api.add_exception_handler(ApiError, _answer_error)
        api.add_exception_handler(HTTPException, _answer_error)
        api.add_exception_handler(Exception, _answer_error)
        return api

    async def health(self) -> Response:
        """200 where the target answers, else 503."""
        try:
            async with asyncio.timeout(_HEALTH_TIMEOUT_S):
                await self._target.describe.remote()
        except Exception as error:
            raise overloaded("The target does not answer.") from error
        return JSONResponse({"status": "ok"})

    async def models(self) -> Response:
        """The one model that is served, in a list."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, model: str) -> Response:
        """The model by its name, else 404."""
        translate.check_model(model, self._settings.model_name)
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
        return JSONResponse(await gather_status(self._target, self._actors))

    async def completions(self, request: Request) -> Response:
        """OpenAI's legacy completions: one choice per prompt."""
        body = await _read(request)
        asked = translate.parse(body, CompletionRequest, self._settings.model_name)
        if len(body) > _LONG_PROMPT_BYTES:
            prompts = await asyncio.to_thread(self._encoder.completion, asked)
        else:
            prompts = self._encoder.completion(asked)
        limit, field = translate.max_tokens_of(asked)
        limits = [
            translate.fit_limit(
                limit,
                field,
                len(prompt),
                self._context,
                "prompt",
                translate.DEFAULT_COMPLETION_TOKENS,
            )
            for prompt in prompts
        ]
        texts = [self._encoder.plain_text(prompt) for prompt in prompts]
        return await self._answer(asked, prompts, texts, limits, chat=False)

    async def chat_completions(self, request: Request) -> Response:
        """OpenAI's chat completions."""
        body = await _read(request)
        asked = translate.parse(body, ChatCompletionRequest, self._settings.model_name)
        if len(body) > _LONG_PROMPT_BYTES:
            prompt = await asyncio.to_thread(self._encoder.chat, asked)
        else:
            prompt = self._encoder.chat(asked)
        limit, field = translate.max_tokens_of(asked)
        limit = translate.fit_limit(limit, field, len(prompt), self._context, "messages")
        return await self._answer(asked, [prompt], [question(asked)], [limit], chat=True)

    async def _answer(
        self,
        asked: GenerationOptions,
        prompts: list[list[int]],
        texts: list[str],
        limits: list[int],
        *,
        chat: bool,
    ) -> Response:
        """Route the prompts, run them and word the answer."""
        translate.check_draft(asked.speculative.draft, self._settings.experts)
        release = self._slots.take(len(prompts))
        try:
            answer = self._head(asked, chat)
            topics = await self._topics_of(asked, texts)
            requests = [
                _request(asked, f"{answer.id}-{index}", *facts)
                for index, facts in enumerate(zip(prompts, limits, topics, strict=True))
            ]
            prompt_tokens = sum(map(len, prompts))
            if asked.stream:
                pieces = await started(stream_all(self._streams, requests))
                usage = asked.stream_options is not None and asked.stream_options.include_usage
                content = events(answer, pieces, topics, prompt_tokens, usage)
                response = EventStream(content, pieces, release)
                release = _nothing  # the stream releases when it ends
                return response
            chunks = await complete_all(self._target, requests)
            body = answers.whole(answer, chunks, topics, prompt_tokens)
            return Response(body, media_type="application/json")
        finally:
            release()

    async def _topics_of(self, asked: GenerationOptions, texts: list[str]) -> list[str]:
        """A topic per prompt: the expert that the client names learns from it, else the router."""
        named = translate.named_expert(asked.speculative.draft)
        if named is not None:
            return [named] * len(texts)
        return await asyncio.gather(*map(self._topics.find, texts))

    def _head(self, asked: GenerationOptions, chat: bool) -> answers.Answer:
        return answers.Answer(
            id=f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=self._settings.model_name,
            chat=chat,
            token_ids=asked.return_token_ids,
        )


def _request(
    asked: GenerationOptions, request_id: str, prompt: list[int], limit: int, topic: str
) -> GenerationRequest:
    sampling = translate.sampling_of(asked, limit)
    store = asked.store is not False
    return translate.generation_request(
        request_id, prompt, sampling, topic, asked.speculative, store
    )


def _nothing() -> None:
    """Release nothing."""


async def _read(request: Request) -> bytes:
    """The body, refused before it fills the memory."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise ApiError(413, f"The body is larger than {MAX_BODY_BYTES} bytes.")
    return bytes(body)


async def _answer_error(request: Request, error: Exception) -> Response:
    """Every failure in OpenAI's shape."""
    if isinstance(error, HTTPException):
        text = f"{error.detail}: {request.method} {request.url.path}"
        error = ApiError(error.status_code, text)
    elif not isinstance(error, ApiError):
        logger.error("a request failed", exc_info=error)
        error = internal("The server failed on this request.")
    return JSONResponse(error.body(), error.status, error.headers())
