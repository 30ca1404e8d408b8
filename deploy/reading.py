"""From HTTP requests for answers to checked jobs.

No ``from __future__ import annotations`` here: FastAPI reads the annotations.
"""

import asyncio
from collections.abc import Callable

from fastapi import Request

from paceline.deploy import translate
from paceline.deploy.jobs import Job, client_of, read_body
from paceline.deploy.limits import DEFAULT_COMPLETION_TOKENS, fit_limit, max_tokens_of
from paceline.deploy.openai_chat import ChatCompletionRequest
from paceline.deploy.openai_types import CompletionRequest
from paceline.deploy.prompts import PromptEncoder, question

_LONG_BODY_BYTES = 64 * 2**10


class JobReader:
    """Reads and checks requests; a long one on a thread of its own."""

    def __init__(self, model_name: str, encoder: PromptEncoder, context: int) -> None:
        """Take what requests are checked by.

        Args:
            model_name: the one model that is served.
            encoder: of prompts.
            context: tokens that prompt and answer may have together.
        """
        self._model_name = model_name
        self._encoder = encoder
        self._context = context

    async def completion(self, request: Request) -> Job:
        """OpenAI's legacy completions.

        Raises:
            ApiError: see `translate.parse`, `fit_limit` and `read_body`.
        """
        return await self._read(request, self._completion)

    async def chat(self, request: Request) -> Job:
        """OpenAI's chat completions; raises as :meth:`completion`."""
        return await self._read(request, self._chat)

    async def _read(self, request: Request, make: Callable[[bytes, str], Job]) -> Job:
        body = await read_body(request)
        if len(body) > _LONG_BODY_BYTES:
            return await asyncio.to_thread(make, body, client_of(request))
        return make(body, client_of(request))

    def _completion(self, body: bytes, client: str) -> Job:
        asked = translate.parse(body, CompletionRequest, self._model_name, self._context)
        prompts = self._encoder.completion(asked)
        limit, field = max_tokens_of(asked)
        default = DEFAULT_COMPLETION_TOKENS
        limits = [
            fit_limit(limit, field, len(prompt), self._context, "prompt", default)
            for prompt in prompts
        ]
        texts = [self._encoder.plain_text(prompt) for prompt in prompts]
        return Job(asked, prompts, texts, limits, chat=False, client=client)

    def _chat(self, body: bytes, client: str) -> Job:
        asked = translate.parse(body, ChatCompletionRequest, self._model_name)
        prompt = self._encoder.chat(asked)
        limit, field = max_tokens_of(asked)
        limit = fit_limit(limit, field, len(prompt), self._context, "messages")
        return Job(asked, [prompt], [question(asked)], [limit], chat=True, client=client)
