"""API keys: what they open, what is open without, and that they are never shown."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import Response
from local_ingress import ingress_client
from tiny_models import tiny_tokenizer

from paceline.deploy.api.auth import api_keys, check_key
from paceline.deploy.api.ingress import Ingress, IngressSettings
from paceline.deploy.cli.main import _banner
from paceline.deploy.config.config import load_config
from paceline.deploy.config.preflight import warnings
from paceline.deploy.config.sections import AuthConfig
from paceline.deploy.errors import ApiError

KEYS = {"PACELINE_API_KEYS": "first-key, zweiter-schlüssel,voilà,"}
NAMED = {"acme": {"sha256": hashlib.sha256(b"third-key").hexdigest(), "store": False}}
API_KEYS = api_keys(AuthConfig.model_validate({"keys": NAMED}), KEYS)


class IdleTarget:
    """A target that says it lives and is asked for nothing else here."""

    async def status(self, attempt: int = 0) -> dict[str, Any]:
        return {"attempt": attempt}

    def generate(self, *_: object) -> None:
        raise AssertionError("a request came through")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer and a context length: all that the ingress reads."""
    path = tmp_path_factory.mktemp("target")
    tiny_tokenizer().save_pretrained(path)
    (path / "config.json").write_text('{"max_position_embeddings": 64, "model_type": "llama"}')
    return path


def ask(folder: Path, *requests: tuple[str, str], header: str | None, **more: Any) -> list[Any]:
    headers = {} if header is None else {"Authorization": header}

    async def send() -> list[httpx.Response]:
        async with ingress_client(IdleTarget(), folder, **({"ui": True} | more)) as http:
            return [await http.request(*each, headers=headers) for each in requests]

    return asyncio.run(send())


def test_keys_come_by_commas_and_from_the_config_and_only_their_digests_stay() -> None:
    assert [(len(key.digest), key.name, key.store) for key in API_KEYS] == [
        (32, "acme", False),
        *[(32, "", True)] * 3,
    ]
    assert len({key.id for key in API_KEYS}) == 4
    assert api_keys(AuthConfig(), {}) == ()
    assert api_keys(AuthConfig(), {"PACELINE_API_KEYS": " , "}) == ()
    assert api_keys(AuthConfig(api_keys_env=None), {"": "x", "None": "y"}) == ()
    settings = IngressSettings("m", "f", None, (), 1.0, 0.5, 8, api_keys=API_KEYS)
    assert str(API_KEYS[0].digest) not in repr(settings)


def test_a_key_of_the_config_keeps_its_name_if_it_is_in_the_environment_too() -> None:
    config = AuthConfig.model_validate({"keys": NAMED})
    (key,) = api_keys(config, {"PACELINE_API_KEYS": "third-key"})
    assert (key.name, key.store) == ("acme", False)


@pytest.mark.parametrize(
    ("header", "index"),
    [
        ("Bearer third-key", 0),
        ("Bearer first-key", 1),
        ("bearer  first-key ", 1),
        ("Bearer zweiter-schl\u00c3\u00bcssel", 2),
        ("Bearer voil\u00c3\u00a0", 3),
    ],
)
def test_every_key_opens(header: str, index: int) -> None:
    """The last ones as HTTP hands out the bytes of their UTF-8: one character each."""
    assert check_key(header, API_KEYS) is API_KEYS[index]


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer ", "first-key", "Basic first-key", "Bearer first-ke", "Bearer x,"],
)
def test_anything_else_does_not(header: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        check_key(header, API_KEYS)
    assert caught.value.status == 401
    assert "first-ke" not in str(caught.value)


GUARDED = [
    ("GET", "/v1/models"),
    ("GET", "/v1/models/m"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("GET", "/v1/paceline/status"),
    ("GET", "/v1/paceline/live"),
    ("GET", "/openapi.json"),
    ("POST", "/v1/responses"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/tokenizer_info"),
    ("GET", "/metrics"),
    ("GET", "/nothing"),
    ("GET", "/index.html"),
    ("GET", "/uix"),
    ("GET", "/health/"),
]
OPEN = [
    ("GET", "/"),
    ("GET", "/health"),
    ("HEAD", "/health"),
    ("GET", "/ui"),
    ("GET", "/ui/"),
    ("GET", "/ui/main.js"),
]


@pytest.mark.parametrize("header", [None, "Bearer wrong"])
def test_without_a_key_nothing_but_health_and_the_page_is_there(
    folder: Path, header: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for answer in ask(folder, *GUARDED, header=header, api_keys=API_KEYS):
        assert answer.status_code == 401
        assert answer.headers["WWW-Authenticate"] == "Bearer"
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] == "invalid_api_key"
    for answer in ask(folder, *OPEN, header=header, api_keys=API_KEYS):
        assert answer.status_code in (200, 307)
    assert "wrong" not in caplog.text
    assert "-key" not in caplog.text


def test_with_a_key_all_is_as_without_keys(folder: Path) -> None:
    asked = [*GUARDED, *OPEN]
    guarded = ask(folder, *asked, header="Bearer first-key", api_keys=API_KEYS)
    free = ask(folder, *asked, header=None)
    assert [a.status_code for a in guarded] == [a.status_code for a in free]
    assert 401 not in [a.status_code for a in free]
    document = dict(zip(asked, guarded, strict=True))["GET", "/openapi.json"].json()
    assert document["components"]["securitySchemes"]["bearer"]["scheme"] == "bearer"
    assert "401" not in document["paths"]["/health"]["get"]["responses"]


@pytest.mark.parametrize(
    ("metrics", "without", "with_key"), [("key", 401, 503), ("open", 503, 503), ("off", 401, 404)]
)
def test_metrics_are_behind_the_key_open_or_off(
    folder: Path, metrics: str, without: int, with_key: int
) -> None:
    """503: no replica answers here."""
    for header, status in ((None, without), ("Bearer first-key", with_key)):
        asked = ask(folder, ("GET", "/metrics"), header=header, api_keys=API_KEYS, metrics=metrics)
        assert [answer.status_code for answer in asked] == [status]


def test_pages_of_other_sites_call_the_api_only_where_their_origin_is_configured(
    folder: Path,
) -> None:
    preflight = {"Access-Control-Request-Method": "POST",
                 "Access-Control-Request-Headers": "authorization,content-type"}  # fmt: skip

    async def send(origin: str, **more: Any) -> list[httpx.Response]:
        headers = {"Origin": origin}
        async with ingress_client(IdleTarget(), folder, api_keys=API_KEYS, **more) as http:
            return [
                await http.options("/v1/chat/completions", headers=headers | preflight),
                await http.get("/v1/models", headers=headers | {"Authorization": "Bearer x"}),
                await http.get(
                    "/v1/models", headers=headers | {"Authorization": "Bearer first-key"}
                ),
            ]

    site, allow = "https://a.example", "Access-Control-Allow-Origin"
    asked, refused, served = asyncio.run(send(site, cors_origins=(site,)))
    assert (asked.status_code, refused.status_code, served.status_code) == (200, 401, 200)
    assert [answer.headers[allow] for answer in (asked, refused, served)] == [site] * 3
    assert "authorization" in asked.headers["Access-Control-Allow-Headers"]
    assert "Access-Control-Allow-Credentials" not in served.headers
    for answers in (send("https://b.example", cors_origins=(site,)), send(site)):
        assert not any(allow in answer.headers for answer in asyncio.run(answers))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses", "/tokenize"])
def test_pages_of_other_sites_make_the_server_do_nothing(folder: Path, path: str) -> None:
    """Browsers send such a body without asking the server first."""
    page = {"Origin": "https://a.example", "Content-Type": "text/plain"}
    body = '{"model": "m", "prompt": "x", "input": "x"}'

    async def send() -> httpx.Response:
        async with ingress_client(IdleTarget(), folder) as http:
            return await http.post(path, headers=page, content=body)

    answer = asyncio.run(send())
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "invalid_type")


class Faulty(Ingress):
    async def models(self) -> Response:
        raise RuntimeError("a fault of the ingress")


@pytest.mark.parametrize("site", ["https://a.example", "https://b.example"])
def test_pages_of_other_sites_read_an_unexpected_error_too(
    folder: Path, caplog: pytest.LogCaptureFixture, site: str
) -> None:
    async def send() -> httpx.Response:
        more: Any = {"ingress_class": Faulty, "cors_origins": ("https://a.example",)}
        async with ingress_client(IdleTarget(), folder, **more) as http:
            return await http.get("/v1/models", headers={"Origin": site})

    answer = asyncio.run(send())
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    allowed = site if site == "https://a.example" else None
    assert answer.headers.get("Access-Control-Allow-Origin") == allowed
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.exc_info is not None
    assert str(record.exc_info[1]) == "a fault of the ingress"
    assert "in models" in caplog.text  # its traceback


def test_the_page_can_be_left_out(folder: Path) -> None:
    answers = ask(folder, ("GET", "/ui"), ("GET", "/ui/main.js"), header=None, ui=False)
    assert [answer.status_code for answer in answers] == [404, 404]


def test_a_start_that_others_reach_without_keys_is_warned_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def said(**fields: Any) -> str:
        changes = {"router.enabled": False, "drafts.topics": []} | fields
        return " ".join(warnings(load_config(None, changes)))

    monkeypatch.delenv("PACELINE_API_KEYS", raising=False)
    for host in ("127.0.0.1", "127.3.2.1", "::1", "localhost"):
        assert said(host=host) == ""
    for host in ("0.0.0.0", "::", "10.1.2.3", "model.example"):
        assert "no API key" in said(host=host)
        assert "PACELINE_API_KEYS" in said(host=host)
    assert "auth.api_keys_env" in said(host="::", **{"auth.api_keys_env": None})
    monkeypatch.setenv("PACELINE_API_KEYS", "secret-of-ours")
    assert said(host="0.0.0.0") == ""
    assert "no API key" in said(host="0.0.0.0", **{"auth.api_keys_env": "OTHER"})


def test_the_banner_says_that_keys_are_asked_for_and_not_which(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Running:
        base_url = "http://127.0.0.1:8000"
        target = SimpleNamespace(drafts={}, dtype="float32", device="cpu")
        trainer = None

    config = load_config()
    monkeypatch.delenv("PACELINE_API_KEYS", raising=False)
    text = _banner(config, Running())  # type: ignore[arg-type]
    assert "http://127.0.0.1:8000/ui/" in text
    assert "Bearer" not in text
    monkeypatch.setenv("PACELINE_API_KEYS", "secret-of-ours")
    text = _banner(config, Running())  # type: ignore[arg-type]
    assert "Authorization: Bearer KEY" in text
    assert "secret-of-ours" not in text + config.model_dump_json()
    assert "  keys     1, of PACELINE_API_KEYS\n" in text
    named = load_config(None, {"auth.keys": {"acme": {"sha256": "a" * 64}}})
    text = _banner(named, Running())  # type: ignore[arg-type]
    assert "  keys     2, of PACELINE_API_KEYS and auth.keys\n" in text
    without = load_config(None, {"ui.enabled": False})
    assert ":8000/ui/" not in _banner(without, Running())  # type: ignore[arg-type]


@pytest.mark.parametrize(("keys", "statuses"), [((), [403, 403, 200]), (API_KEYS, [200, 200, 200])])
def test_pages_of_other_sites_reach_no_server_without_keys(
    folder: Path, keys: tuple[Any, ...], statuses: list[int]
) -> None:
    async def send() -> list[httpx.Response]:
        async with ingress_client(IdleTarget(), folder, ui=True, api_keys=keys) as http:
            asked = [("evil.example", "/health"), ("evil.example", "/ui/"), ("localhost", "/ui/")]
            return [await http.get(path, headers={"Host": host}) for host, path in asked]

    answers = asyncio.run(send())
    assert [answer.status_code for answer in answers] == statuses
    if not keys:
        assert answers[0].json()["error"]["code"] == "forbidden"
