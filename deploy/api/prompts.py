"""Text to token ids with the target's own tokenizer and chat template."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from paceline.actors.engine import compatibility
from paceline.deploy.api.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationOptions,
)
from paceline.deploy.errors import ApiError


def check_token_ids(token_ids: Collection[int], vocab_size: int, param: str = "prompt") -> None:
    """Refuse ids that the target does not have.

    Raises:
        ApiError: 400 naming ``param``.
    """
    largest = max(token_ids, default=0)
    if largest >= vocab_size:
        raise ApiError(
            400,
            f"Invalid value for {param}: token id {largest} is not below the vocabulary's "
            f"{vocab_size}.",
            param=param,
            code="invalid_value",
        )


_ROLES = {"developer": "system"}  # chat templates know the older name


def context_length(model_path: str | Path, max_model_len: int | None) -> int:
    """Tokens that prompt and answer may have together, by the model's folder.

    Raises:
        ModelError: see compatibility.context_length.
    """
    return compatibility.context_length(_config(model_path), max_model_len)


def vocabulary_size(model_path: str | Path, tokenizer: Any) -> int:
    """Token ids below it are known to the tokenizer and the model: another fails in the model."""
    own = _config(model_path).get("vocab_size")
    known: int = max(tokenizer.get_vocab().values()) + 1  # a vocabulary may have holes
    return min(known, own) if isinstance(own, int) else known


def _config(model_path: str | Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(
        (Path(model_path) / "config.json").read_text(encoding="utf-8")
    )
    return content


class PromptEncoder:
    """Encodes the prompts of both endpoints."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        """Take a transformers fast tokenizer with the target's chat template.

        Token ids must be below ``vocab_size``, those of texts too: a tokenizer may have got
        tokens that the model has no embeddings for.
        """
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size

    def check_tokens(self, request: GenerationOptions) -> None:
        """Refuse token ids beyond the vocabulary.

        Raises:
            ApiError: 400 naming ``logit_bias`` or ``stop_token_ids``.
        """
        check_token_ids(request.logit_bias or (), self._vocab_size, "logit_bias")
        check_token_ids(request.stop_token_ids or (), self._vocab_size, "stop_token_ids")

    def completion(self, request: CompletionRequest) -> list[list[int]]:
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
                raise ApiError(
                    400,
                    "Invalid value for prompt: it is empty.",
                    param="prompt",
                    code="invalid_value",
                )
            encoded.append(token_ids)
        return encoded

    def chat(self, request: ChatCompletionRequest) -> list[int]:
        """Token ids of a conversation, ready for the assistant's turn.

        Raises:
            ApiError: 400 naming ``messages`` where the template refuses them, has no form, or
                gives an id beyond the vocabulary.
        """
        messages = [
            {"role": _ROLES.get(message.role, message.role), "content": message.text}
            for message in request.messages
        ]
        try:
            token_ids = self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except Exception as error:  # a template is a program of the model's authors
            reason = " ".join(str(error).split())
            raise ApiError(
                400,
                f"The target's chat template refuses these messages: {reason}",
                param="messages",
                code="invalid_value",
            ) from error
        check_token_ids(token_ids, self._vocab_size, "messages")
        return list(token_ids)

    def plain_text(self, token_ids: list[int]) -> str:
        """The text of a prompt without the tokens that frame turns, for the router."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))


def question(request: ChatCompletionRequest) -> str:
    """What the router judges a conversation by: the last thing that the user said."""
    users = [message.text for message in request.messages if message.role == "user"]
    return users[-1] if users else request.messages[-1].text
