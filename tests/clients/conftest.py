"""The default server, started once, and the environment of other people's clients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from real_clients import BIN, Clients, Serve, Server, serving


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Each client waits for a model that answers on the CPU: longer than other tests may take."""
    for item in items:
        if "clients" in item.path.parts:
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope="session")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Clients:
    """Programs of the clients' environment."""
    if not (BIN / "python").exists():
        pytest.skip("there is no .venv-clients: `make test-clients` makes it")
    return Clients(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="session")
def serve(clients: Clients, tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """Starts a server, see `serving`."""
    del clients  # without them there is nothing to serve
    return lambda **keys: serving(tmp_path_factory.mktemp("server"), **keys)


@pytest.fixture(scope="session")
def server(serve: Serve) -> Iterator[Server]:
    """The default server; it learns meanwhile."""
    with serve() as running:
        yield running
