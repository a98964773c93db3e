"""Running servers for the tests of this folder."""

from collections.abc import Callable, Iterator

import pytest
from server import Server


@pytest.fixture(scope="module")
def start_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    """Starts servers with these flags; all are gone when the module's tests are done."""
    servers: list[Server] = []

    def start(*flags: str, **options: object) -> Server:
        servers.append(Server(tmp_path_factory.mktemp("serve"), *flags, **options))  # type: ignore[arg-type]
        return servers[-1]

    yield start
    for server in servers:
        server.close()
