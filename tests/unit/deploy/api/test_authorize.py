"""Who counts as an operator."""

from __future__ import annotations

import pytest
from fastapi import Request

from paceline.deploy.api.auth import authorize, is_rebound
from paceline.deploy.errors import ApiError

JSON = {"host": "127.0.0.1:8000", "content-type": "application/json"}


def call(client: str = "127.0.0.1", server: str = "127.0.0.1", **headers: str) -> Request:
    named = JSON | {name.replace("_", "-"): value for name, value in headers.items()}
    return Request(
        {
            "type": "http",
            "method": "POST",
            "scheme": "http",
            "path": "/v1/paceline/drain",
            "query_string": b"",
            "client": (client, 1234),
            "server": (server, 8000),
            "headers": [(name.encode(), value.encode()) for name, value in named.items()],
        }
    )


def test_the_machine_itself_may_and_so_may_a_key() -> None:
    authorize(call(), "This", keyed=False)
    authorize(call("203.0.113.9", host="example.org"), "This", keyed=True)


@pytest.mark.parametrize(
    "request_of",
    [
        call("203.0.113.9"),
        call(host="example.org"),
        call("10.0.0.5", server="10.0.0.5", host="10.0.0.5:8000"),  # perhaps a proxy
        call(x_forwarded_for="203.0.113.9"),
        call(via="1.1 somebody"),
    ],
)
def test_others_may_not(request_of: Request) -> None:
    with pytest.raises(ApiError) as refused:
        authorize(request_of, "This", keyed=False)
    assert refused.value.status == 403


@pytest.mark.parametrize(
    ("headers", "status"), [({"origin": "http://evil"}, 403), ({"content_type": "text/plain"}, 415)]
)
def test_what_a_web_page_could_send_is_refused_with_a_key_too(
    headers: dict[str, str], status: int
) -> None:
    with pytest.raises(ApiError) as refused:
        authorize(call(**headers), "This", keyed=True)
    assert refused.value.status == status


@pytest.mark.parametrize(
    ("host", "server", "rebound"),
    [
        ("evil.example:8000", ("127.0.0.1", 8000), True),
        ("EVIL.example.:8000", ("::1", 8000), True),
        ("127.0.0.1.evil.example:8000", ("127.0.0.1", 8000), True),
        ("evil.example", ("127.0.0.1", 80), True),
        ("localhost:8000", ("127.0.0.1", 8000), False),
        ("app.localhost:8000", ("127.0.0.1", 8000), False),
        ("127.0.0.1:8000", ("127.0.0.1", 8000), False),
        ("[::1]:8000", ("::1", 8000), False),
        ("host.docker.internal:8000", ("127.0.0.1", 8000), False),
        ("workstation:8000", ("127.0.0.1", 8000), False),
        ("llm.example.org", ("127.0.0.1", 8000), False),  # a proxy's
        ("llm.example.org:8443", ("127.0.0.1", 8000), False),
        ("llm.example.org:8000", ("10.0.0.5", 8000), False),
        ("llm.example.org:8000", None, False),
        ("", ("127.0.0.1", 8000), False),
        ("evil.example:port", ("127.0.0.1", 8000), False),
        ("[", ("127.0.0.1", 8000), False),
    ],
)
def test_another_site_s_name_for_this_machine_is_found_out(
    host: str, server: tuple[str, int] | None, rebound: bool
) -> None:
    assert is_rebound(host, server) == rebound
