"""Encode prompts as token ids with the target's tokenizer and chat template."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from paceline.actors.engine import compatibility
from paceline.deploy.api.request_schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationOptions,
)
from paceline.deploy.errors import ApiError, invalid_value

_TEMPLATE_ROLES = {"developer": "system"}  # chat templates know the older name only


def context_length(model_path: str | Path, max_model_len: int | None) -> int:
    """Most tokens that prompt and answer may have together, from the model's config.json.

    Raises:
        ModelError: see compatibility.context_length.
    """
    return compatibility.context_length(_read_config(model_path), max_model_len)


def vocabulary_size(model_path: str | Path, tokenizer: Any) -> int:
    """Token ids below it are known to both the tokenizer and the model."""
    model_size = _read_config(model_path).get("vocab_size")
    size: int = max(tokenizer.get_vocab().values()) + 1  # a vocabulary may have holes
    return min(size, model_size) if isinstance(model_size, int) else size


def _read_config(model_path: str | Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(
        (Path(model_path) / "config.json").read_text(encoding="utf-8")
    )
    return content


def check_token_ids(token_ids: Collection[int], vocab_size: int, param: str = "prompt") -> None:
    """Refuse token ids beyond the vocabulary.

    Raises:
        ApiError: 400 naming ``param``.
    """
    largest = max(token_ids, default=0)
    if largest >= vocab_size:
        reason = f"token id {largest} is not below the vocabulary's {vocab_size}"
        raise invalid_value(param, reason)


class PromptEncoder:
    """Encodes the prompts of both endpoints.

    Args:
        tokenizer: a transformers fast tokenizer with the target's chat template.
        vocab_size: token ids must be below it, those of encoded text too: a tokenizer may have
            tokens without embeddings in the model.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size

    def check_options(self, options: GenerationOptions) -> None:
        """Refuse token ids beyond the vocabulary in the sampling options.

        Raises:
            ApiError: 400 naming ``logit_bias`` or ``stop_token_ids``.
        """
        check_token_ids(options.logit_bias or (), self._vocab_size, "logit_bias")
        check_token_ids(options.stop_token_ids or (), self._vocab_size, "stop_token_ids")

    def encode_prompts(self, request: CompletionRequest) -> list[list[int]]:
        """Token ids of every prompt.

        Raises:
            ApiError: 400 naming ``prompt`` for an empty one or an id beyond the vocabulary.
        """
        encoded = []
        for prompt in request.prompts:
            if isinstance(prompt, str):
                token_ids = list(self._tokenizer(prompt)["input_ids"])
            else:
                token_ids = prompt
            check_token_ids(token_ids, self._vocab_size)
            if not token_ids:
                raise invalid_value("prompt", "it is empty")
            encoded.append(token_ids)
        return encoded

    def encode_chat(self, request: ChatCompletionRequest) -> list[int]:
        """Token ids of a conversation, up to the start of the assistant's turn.

        Raises:
            ApiError: 400 naming ``messages`` if the template refuses them or is missing, or
                gives an id beyond the vocabulary.
        """
        messages = [
            {"role": _TEMPLATE_ROLES.get(message.role, message.role), "content": message.text}
            for message in request.messages
        ]
        try:
            token_ids = self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except Exception as error:  # a template is a program by the model's authors
            reason = " ".join(str(error).split())
            text = f"The target's chat template refuses these messages: {reason}"
            raise ApiError(400, text, param="messages", code="invalid_value") from error
        check_token_ids(token_ids, self._vocab_size, "messages")
        return list(token_ids)

    def decode(self, token_ids: list[int]) -> str:
        """The text of a prompt without special tokens, for the router."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))


def last_user_message(request: ChatCompletionRequest) -> str:
    """The last user message, which the router classifies; without one, the last message."""
    users = [message.text for message in request.messages if message.role == "user"]
    return users[-1] if users else request.messages[-1].text
