"""vLLM's endpoints for the target's tokenizer.

POST /tokenize         {"prompt"} or {"messages"}
POST /detokenize       {"tokens"}
GET  /tokenizer_info
"""

from __future__ import annotations

from collections.abc import Callable

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel

from paceline.deploy.api.auth import request_key
from paceline.deploy.api.prompt_encoder import PromptEncoder
from paceline.deploy.api.request_parser import (
    BodyWorkers,
    check_model,
    client_key,
    parse_json,
    read_body,
)
from paceline.deploy.api.request_schemas import DetokenizeRequest, TokenizeRequest
from paceline.deploy.api.response_schemas import DetokenizeResponse, TokenizeResponse
from paceline.deploy.api.tools import check_known

_COUNTED_BYTES = 2**20  # of a body; tokenizing takes some 300 bytes of memory for each


class Tokenization:
    """The tokenizer's endpoints.

    Args:
        encoder: has the target's tokenizer.
        model_name: the served model's name.
        context_length: most tokens that prompt and answer may have together.
        workers: tokenize the bodies.
    """

    def __init__(
        self,
        encoder: PromptEncoder,
        model_name: str,
        context_length: int,
        workers: BodyWorkers,
    ) -> None:
        self._encoder = encoder
        self._model_name = model_name
        self._context_length = context_length
        self._workers = workers

    def add_routes(self, api: FastAPI) -> None:
        """Serve the endpoints."""
        api.add_api_route("/tokenize", self.tokenize, methods=["POST"])
        api.add_api_route("/detokenize", self.detokenize, methods=["POST"])
        api.add_api_route("/tokenizer_info", self.info, methods=["GET"])

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text, or of a conversation as chat completions read it."""
        return await self._answer(request, self._tokenize)

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids, special tokens included."""
        return await self._answer(request, self._detokenize)

    async def info(self) -> Response:
        """The tokenizer's special tokens and chat template."""
        return JSONResponse(self._encoder.describe())

    async def _answer(self, request: Request, work: Callable[[bytes], BaseModel]) -> Response:
        body = await read_body(request)
        client = client_key(request, request_key(request))
        answer = await self._workers.run(client, len(body), lambda: work(body).model_dump_json())
        return Response(answer, media_type="application/json")

    def _check_model(self, requested: str | None) -> None:
        check_model(self._model_name if requested is None else requested, self._model_name)

    def _tokenize(self, body: bytes) -> TokenizeResponse:
        asked = parse_json(body, TokenizeRequest)
        self._check_model(asked.model)
        # Clients count texts that are longer than the context too, to cut them.
        limit = self._context_length if len(body) > _COUNTED_BYTES else None
        if asked.messages is not None:
            if asked.tools:
                check_known(self._encoder.template_tools)
            tokens = self._encoder.encode_chat(
                asked.messages, asked, tools=asked.tools or (), context_length=limit
            )
        else:
            text = asked.prompt or ""
            self._encoder.check_chars(text, limit, "prompt")
            tokens = self._encoder.encode_text(text, asked.add_special_tokens)
        return TokenizeResponse(
            count=len(tokens),
            max_model_len=self._context_length,
            tokens=tokens,
            token_strs=self._encoder.token_strs(tokens) if asked.return_token_strs else None,
        )

    def _detokenize(self, body: bytes) -> DetokenizeResponse:
        asked = parse_json(body, DetokenizeRequest)
        self._check_model(asked.model)
        return DetokenizeResponse(
            prompt=self._encoder.decode(asked.tokens, skip_special_tokens=False)
        )
