"""What an API key sets for its requests, over a real target in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from local_ingress import ingress_client
from tiny_models import save_tiny, tiny_tokenizer

from paceline.actors.engine.settings import TargetSettings
from paceline.actors.engine.target import TargetReplica
from paceline.actors.replay.record import ReplayRecord, decode
from paceline.deploy.api.auth import ApiKey, check_key

KEYS = (
    ApiKey(sha256(b"acme's").digest(), "acme", store=False),
    ApiKey(sha256(b"beta's").digest(), "beta"),
    ApiKey(sha256(b"guest's").digest()),
)
PROMPT = {"model": "m", "prompt": "SELECT name FROM people WHERE age > 30 ORDER BY name; " * 3}
BODY = PROMPT | {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("target")
    return save_tiny(root, 1, vocab=len(tiny_tokenizer()), max_position_embeddings=512)


@pytest.fixture
def records() -> list[ReplayRecord]:
    return []


@pytest.fixture
def target(folder: Path, records: list[ReplayRecord]) -> Iterator[TargetReplica]:
    def insert(data: bytes, _left_out: int) -> None:
        records.append(decode(data))

    shard: Any = SimpleNamespace(insert=SimpleNamespace(remote=insert))
    settings = TargetSettings(str(folder), dtype="float32", num_threads=1, max_num_seqs=4)
    replica = TargetReplica(settings, {"general": shard})
    yield replica
    replica._loop.close()


def asked(
    target: TargetReplica, folder: Path, *bodies: tuple[str, str, dict[str, Any]], **settings: Any
) -> list[Any]:
    """Answers to (key, path below /v1, body), one after the other."""

    async def ask() -> list[Any]:
        async with ingress_client(target, folder, api_keys=KEYS, **settings) as http:
            found = []
            for key, path, body in bodies:
                header = {"Authorization": f"Bearer {key}"}
                answer = await http.post(f"/v1/{path}", json=body, headers=header)
                assert answer.status_code == 200, answer.text
                found.append(answer.json())
            return found

    return asyncio.run(ask())


def test_a_key_s_default_of_store_holds_unless_the_request_says_otherwise(
    target: TargetReplica, folder: Path, records: list[ReplayRecord]
) -> None:
    """Acme's is false."""
    asked_for = [
        (key, store) for key in ("acme's", "beta's", "guest's") for store in (None, True, False)
    ]
    answers = asked(
        target,
        folder,
        *((key, "completions", BODY | {"store": store}) for key, store in asked_for),
        ("acme's", "completions", BODY),
        ("acme's", "chat/completions", CHAT),
        ("acme's", "chat/completions", CHAT | {"store": True}),
    )
    ids = [answer["id"] for answer in answers]
    stored = [ids[1], ids[3], ids[4], ids[6], ids[7], ids[-1]]

    async def arrive() -> None:  # a record goes out behind its answer
        async with asyncio.timeout(10):
            while len(records) < len(stored):
                await asyncio.sleep(0.01)

    asyncio.run(arrive())
    assert [record.request_id.rpartition("-")[0] for record in records] == stored


def test_an_answer_of_the_responses_api_says_whether_it_is_stored(
    target: TargetReplica, folder: Path
) -> None:
    body = {"model": "m", "input": "hi", "max_output_tokens": 2}
    answers = asked(
        target,
        folder,
        ("acme's", "responses", body),
        ("acme's", "responses", body | {"store": True}),
        ("beta's", "responses", body),
    )
    assert [answer["store"] for answer in answers] == [False, True, True]


def test_with_a_cache_by_key_no_prompt_s_blocks_serve_another_key(
    target: TargetReplica, folder: Path
) -> None:
    order = ["beta's", "guest's", "beta's", "guest's"]
    bodies = [(key, "completions", BODY) for key in order]
    apart = asked(target, folder, *bodies, key_cache=True)
    shared = asked(target, folder, *bodies)
    cached, seen_by_all = (
        [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
        for answers in (apart, shared)
    )
    assert cached[:2] == [0, 0]
    assert min(cached[2:]) > 0
    assert seen_by_all == [0, *cached[2:3] * 3]
    assert len({answer["choices"][0]["text"] for answer in apart + shared}) == 1


def test_an_id_tells_keys_apart_and_does_not_give_one_away() -> None:
    ids = [key.id for key in KEYS]
    assert ids[:2] == ["acme", "beta"]
    assert "guest" not in ids[2]
    assert check_key("Bearer guest's", KEYS).id == ids[2]


def test_a_key_has_one_share_however_its_header_is_spelled(
    target: TargetReplica, folder: Path
) -> None:
    async def ask() -> list[int]:
        door = ingress_client(target, folder, api_keys=KEYS, max_seqs_per_client=1)
        async with door as http:

            def post(header: str, tokens: int) -> Coroutine[Any, Any, httpx.Response]:
                headers = {"Authorization": header}
                body = BODY | {"max_tokens": tokens}
                return http.post("/v1/completions", json=body, headers=headers)

            long = asyncio.create_task(post("Bearer acme's", 200))
            while not (await target.status()).running:
                await asyncio.sleep(0.005)
            spelled = ("Bearer acme's", "bearer acme's", "BEARER   acme's ", "Bearer beta's")
            found = [await post(header, 1) for header in spelled]
            assert (await long).status_code == 200
            return [answer.status_code for answer in found]

    assert asyncio.run(ask()) == [429, 429, 429, 200]
