"""The life of `patchgrid serve`: it starts or says why not, outlives its ranks, and leaves nothing behind."""

import http.client
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import httpx
import psutil
import pytest
from server import Server


@pytest.fixture(scope="module")
def image(goldens: Path) -> bytes:
    return (goldens / "images" / "97x61_RGB.png").read_bytes()


def embed(server: Server, image: bytes) -> int:
    return server.client.post("/embed", content=image, headers={"content-type": "image/png"}).status_code


def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Server]) -> Server:
    flags = ["--nproc-per-node=2", "--rank-timeout-s=3", "--decode-processes=1"]
    flags += ["--restart-limit=100", "--cache-bytes=0"]
    return start_server(*flags).wait_ready()


@pytest.mark.parametrize("wait_s", [0.1, 0.5])
def test_a_request_that_meets_a_dying_group_is_answered(server: Server, image: bytes, wait_s: float) -> None:
    pids = server.wait_ready().rank_pids()
    assert len(pids) == 2, server.log[-3000:]
    os.kill(pids[0], signal.SIGKILL)
    time.sleep(wait_s)
    assert embed(server, image) in (200, 503), "let in it is answered, else it is told to come back"
    until(lambda: embed(server, image) == 200)


def test_sigterm_ends_everything_with_code_zero(server: Server, image: bytes) -> None:
    assert embed(server, image) == 200
    tree = psutil.Process(server.process.pid).children(recursive=True)
    assert len(tree) == 4  # a decoder, torchrun and two ranks, and nothing of the groups before
    assert server.end(signal.SIGTERM) == 0
    assert all(gone(child.pid) for child in tree)


def test_sigterm_before_the_group_is_ready_ends_with_code_zero(start_server: Callable[..., Server]) -> None:
    server = start_server()
    until(lambda: server.client.get("/health/live").status_code == 200)
    assert server.client.get("/health/ready").json()["reasons"] == ["starting"]
    refused = server.client.post("/embed", content=b"x", headers={"content-type": "image/png"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "starting")
    assert int(refused.headers["retry-after"]) > 0
    assert server.end(signal.SIGTERM) == 0


def test_sigterm_after_rank_zero_died_ends_all_the_same(start_server: Callable[..., Server]) -> None:
    server = start_server("--nproc-per-node=2", "--drain-pause-s=0").wait_ready()
    os.kill(server.rank_pids()[0], signal.SIGKILL)
    assert server.end(signal.SIGTERM) == 0


def test_api_keys_close_the_work_and_leave_the_probes_open(
    start_server: Callable[..., Server], image: bytes, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# two\nfirst-key\nsecond-key\n")
    server = start_server(f"--api-keys-file={keys}").wait_ready()
    headers = {"content-type": "image/png"}
    assert server.client.post("/embed", content=image, headers=headers).status_code == 401
    assert server.client.post("/plan", json={"sizes": [[1, 1]]}).status_code == 401
    assert server.client.post("/embed", content=image, headers=headers | {"x-api-key": "first"}).status_code == 401
    for shown in ({"authorization": "Bearer first-key"}, {"x-api-key": "second-key"}):
        assert server.client.post("/embed", content=image, headers=headers | shown).status_code == 200
    assert server.client.get("/metrics").status_code == 200
    assert "first-key" not in server.log
    assert "second-key" not in server.log


def test_probes_may_have_a_port_of_their_own(start_server: Callable[..., Server], image: bytes) -> None:
    server = start_server("--probe-port=0")
    probes = server.wait_for_log(r"probes on (http://\S+)").group(1)
    until(lambda: httpx.get(f"{probes}/health/ready").status_code == 200)
    assert httpx.get(f"{probes}/metrics").status_code == httpx.get(f"{probes}/info").status_code == 200
    assert httpx.post(f"{probes}/embed").status_code == 404
    assert server.client.get("/metrics").status_code == server.client.get("/health").status_code == 404
    assert embed(server, image) == 200
    assert server.end(signal.SIGTERM) == 0


def test_a_connection_may_rest_longer_than_clients_let_it(start_server: Callable[..., Server]) -> None:
    host, port = start_server().url.removeprefix("http://").split(":")
    with closing(http.client.HTTPConnection(host, int(port), timeout=10)) as connection:
        for rest_s in (0.0, 6.0):  # uvicorn by itself hangs up after five
            time.sleep(rest_s)
            connection.request("GET", "/health/live")
            assert connection.getresponse().read()


def test_sigkill_of_the_front_end_takes_every_child_with_it(start_server: Callable[..., Server]) -> None:
    server = start_server("--nproc-per-node=2").wait_ready()
    tree = psutil.Process(server.process.pid).children(recursive=True)
    server.end(signal.SIGKILL)
    until(lambda: all(gone(child.pid) for child in tree))


def test_a_checkpoint_that_is_not_there_ends_the_start(start_server: Callable[..., Server], tmp_path: Path) -> None:
    server = start_server(f"--model={tmp_path / 'nowhere'}")
    assert server.wait() == 1
    assert "nowhere" in server.log


def test_a_rank_that_cannot_start_ends_serve_with_its_reason(start_server: Callable[..., Server]) -> None:
    server = start_server("--attention=flash_attn")
    assert server.wait() == 1
    assert "cannot go on: rank 0 failed in setup" in server.log
    assert "flash_attn" in server.log


def test_a_port_in_use_ends_the_start_at_once(start_server: Callable[..., Server]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = start_server(f"--port={taken.getsockname()[1]}")
        assert server.wait() == 1
    assert "in use" in server.log


def test_too_many_deaths_end_serve_with_the_last_reason(start_server: Callable[..., Server]) -> None:
    server = start_server("--restart-limit=0").wait_ready()
    os.kill(server.rank_pids()[0], signal.SIGKILL)
    assert server.wait() == 1
    assert "the worker group died 1 times" in server.log


def test_a_run_folder_that_a_killed_service_left_is_removed_by_the_next(
    start_server: Callable[..., Server], tmp_path: Path
) -> None:
    environment = dict(os.environ, TMPDIR=str(tmp_path))
    first = start_server(env=environment).wait_ready()
    first.end(signal.SIGKILL)
    (left,) = tmp_path.glob("patchgrid-*")
    assert left.stat().st_mode & 0o777 == 0o700
    second = start_server(env=environment).wait_ready()
    assert not left.exists()
    assert second.end(signal.SIGTERM) == 0
    assert list(tmp_path.iterdir()) == []
