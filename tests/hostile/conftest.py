"""A demo server for each module of attacks, and what has to be true of it after them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from attack import Target
from server import Server


@pytest.fixture(scope="module")
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """Started with the module's FLAGS."""
    flags = getattr(request.module, "FLAGS", [])
    server = Server(
        tmp_path_factory.mktemp("serve"),
        "--model=demo",
        "--nproc-per-node=1",
        "--drain-pause-s=0",
        "--cache-bytes=0",
        *flags,
    )
    try:
        yield Target(server.wait_ready())
        assert server.end() == 0
    finally:
        server.close()


@pytest.fixture(scope="module")
def unharmed(target: Target, goldens: Path) -> Iterator[None]:
    """For modules to use: when they are done, the server is as it was."""
    golden = (goldens / "images" / "97x61_RGB.png").read_bytes()
    before = target.known(golden)
    yield
    target.check_unharmed(golden, before)
