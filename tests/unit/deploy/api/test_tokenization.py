"""The tokenizer's endpoints, against the tokenizer itself."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from local_ingress import CONTEXT_LENGTH, ingress_client
from tiny_models import CHAT_TEMPLATE, tiny_tokenizer

from paceline.actors.engine.target import TargetReplica
from paceline.deploy.api.prompt_encoder import PromptEncoder

TOKENIZER = tiny_tokenizer()
CHAT = [{"role": "user", "content": "hi"}]


def post(target: TargetReplica, folder: Path, *asked: tuple[str, Any]) -> list[httpx.Response]:
    async def send() -> list[httpx.Response]:
        async with ingress_client(target, folder) as http:
            return [await http.post(path, json=body) for path, body in asked]

    return asyncio.run(send())


@pytest.mark.parametrize(
    "text", ["SELECT name", "", "Zwölf ☕ 漢字", "<s><|user|>hi", "a " * 40_000]
)
def test_a_text_comes_back_from_its_tokens(
    target: TargetReplica, target_folder: Path, text: str
) -> None:
    """The last one is read on another thread, and may be longer than the context."""
    (encoded,) = post(target, target_folder, ("/tokenize", {"prompt": text, "model": "m"}))
    answer = encoded.json()
    assert answer["tokens"] == TOKENIZER.encode(text)
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), CONTEXT_LENGTH)
    assert answer["token_strs"] is None
    (decoded,) = post(target, target_folder, ("/detokenize", {"tokens": answer["tokens"]}))
    assert decoded.json() == {"prompt": text}


def test_a_conversation_has_the_tokens_that_chat_completions_count(
    target: TargetReplica, target_folder: Path
) -> None:
    asked = {"messages": CHAT, "return_token_strs": True}
    chat = {"model": "m", "messages": CHAT, "max_tokens": 1}
    encoded, open_end, counted = post(
        target,
        target_folder,
        ("/tokenize", asked),
        ("/tokenize", asked | {"add_generation_prompt": False}),
        ("/v1/chat/completions", chat),
    )
    answer = encoded.json()
    assert TOKENIZER.decode(answer["tokens"]) == "<s><|user|>hi<|assistant|>"
    assert answer["token_strs"] == TOKENIZER.convert_ids_to_tokens(answer["tokens"])
    assert open_end.json()["tokens"] == answer["tokens"][:-1]
    assert counted.json()["usage"]["prompt_tokens"] == answer["count"]


def test_a_large_body_is_not_tokenized_if_its_text_cannot_fit(
    target: TargetReplica, target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PromptEncoder, "encode_text", lambda *_: pytest.fail("it was tokenized"))
    text = "a" * 2**20
    conversation = [{"role": "user", "content": text}]
    asked = ("/tokenize", {"prompt": text}), ("/tokenize", {"messages": conversation})
    answers = post(target, target_folder, *asked)
    assert [answer.status_code for answer in answers] == [400, 400]
    errors = [answer.json()["error"] for answer in answers]
    assert [error["param"] for error in errors] == ["prompt", "messages"]
    assert {error["code"] for error in errors} == {"context_length_exceeded"}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "messages"),
        ("/tokenize", {"prompt": "a", "messages": CHAT}, 400, "messages"),
        ("/tokenize", {"prompt": 3}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "flavour": 1}, 400, "flavour"),
        ("/tokenize", {"prompt": "a", "model": "gpt-9"}, 404, "model"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens.0"),
        ("/detokenize", {"tokens": [300]}, 400, "tokens"),
        ("/detokenize", {"tokens": [1], "model": "gpt-9"}, 404, "model"),
    ],
)
def test_what_is_wrong_is_named(
    target: TargetReplica, target_folder: Path, path: str, body: Any, status: int, param: str
) -> None:
    (refused,) = post(target, target_folder, (path, body))
    assert (refused.status_code, refused.json()["error"]["param"]) == (status, param)


def test_the_tokenizer_is_described_without_paths(
    target: TargetReplica, target_folder: Path
) -> None:
    async def ask() -> httpx.Response:
        async with ingress_client(target, target_folder) as http:
            return await http.get("/tokenizer_info")

    answer = asyncio.run(ask())
    facts = answer.json()
    assert (facts["bos_token"], facts["eos_token"], facts["pad_token"]) == ("<s>", "</s>", "<pad>")
    assert facts["chat_template"] == CHAT_TEMPLATE
    assert facts["unk_token"] is None
    assert str(target_folder) not in answer.text
