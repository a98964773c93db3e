"""Ranks, torchrun and front end are really killed under load; every answer is the undisturbed one, and none is lost."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from load import Load, Reference, embed
from server import Server

NUM_RANKS = 3


@pytest.fixture(scope="module")
def server(start_faulty: Callable[..., Server]) -> Server:
    return start_faulty(ranks=NUM_RANKS).wait_ready()


def agent_pid(server: Server) -> int:
    (parent,) = {psutil.Process(pid).ppid() for pid in server.rank_pids()}
    return parent


def wait_for_restart(server: Server, restarts: float) -> None:
    deadline = time.monotonic() + 60
    while server.metric("patchgrid_restarts_total") <= restarts:
        assert time.monotonic() < deadline, server.log
        time.sleep(0.05)


def under_load(server: Server, reference: Reference, break_it: Callable[[], None]) -> Load:
    restarts = server.metric("patchgrid_restarts_total")
    with Load(server.url, reference) as load:
        load.wait_for(10)
        break_it()
        wait_for_restart(server, restarts)
        load.wait_for(20)  # what all clients waited for, and what they asked next
    assert load.errors == []
    return load


@pytest.mark.parametrize("rank", range(NUM_RANKS))
def test_kill_of_a_rank(server: Server, reference: Reference, settles: Callable[[Server], None], rank: int) -> None:
    pids = server.rank_pids()
    under_load(server, reference, lambda: os.kill(pids[rank], signal.SIGKILL))
    settles(server)
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.parametrize("rank", [0, 2])
def test_stop_of_a_rank(server: Server, reference: Reference, settles: Callable[[Server], None], rank: int) -> None:
    pids = server.rank_pids()
    under_load(server, reference, lambda: os.kill(pids[rank], signal.SIGSTOP))
    settles(server)
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_kill_of_torchrun(server: Server, reference: Reference, settles: Callable[[Server], None]) -> None:
    pids = server.rank_pids()
    under_load(server, reference, lambda: os.kill(agent_pid(server), signal.SIGKILL))
    settles(server)
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_kill_during_a_restart(server: Server, reference: Reference, settles: Callable[[Server], None]) -> None:
    def kill_twice() -> None:
        restarts = server.metric("patchgrid_restarts_total")
        old = set(server.rank_pids())
        os.kill(min(old), signal.SIGKILL)
        deadline = time.monotonic() + 60
        while not (fresh := set(server.rank_pids()) - old):
            assert time.monotonic() < deadline
        assert server.client.get("/health/ready").status_code == 503
        os.kill(fresh.pop(), signal.SIGKILL)
        wait_for_restart(server, restarts + 1)

    under_load(server, reference, kill_twice)
    settles(server)


def test_kill_during_the_start(start_faulty: Callable[..., Server], reference: Reference) -> None:
    server = start_faulty(ranks=2)
    deadline = time.monotonic() + 60
    while not server.rank_pids():
        assert time.monotonic() < deadline
    os.kill(server.rank_pids()[0], signal.SIGKILL)
    server.wait_ready()
    reference.check(0, embed(server.client, reference.images[0]))
    assert server.metric("patchgrid_restarts_total") == 1
    assert server.end() == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_alone_that_cannot_start_ends_serve_with_its_reason(
    start_faulty: Callable[..., Server], rank: int
) -> None:
    missing = "/a/checkpoint/that/only/this/rank/does/not/find"
    server = start_faulty(ranks=2, FAULTY_RANK=str(rank), FAULTY_ARGUMENT=f"--model={missing}")
    assert server.wait() == 1
    assert f"cannot go on: rank {rank} failed in setup" in server.log
    assert missing in server.log


def test_sigterm_under_load_answers_all_that_were_let_in(
    start_faulty: Callable[..., Server], reference: Reference
) -> None:
    server = start_faulty(ranks=2).wait_ready()
    tree = psutil.Process(server.process.pid).children(recursive=True)
    load = Load(server.url, reference)
    with load:
        load.wait_for(20)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
    # Whoever was let in has an answer, and who came later an honest 503, until the door is closed: then a client cannot
    # connect, or is reset if it is just sending.
    assert server.log.count("POST /embed 200") == load.answers["200"]
    turned_away = ("ConnectError", "ReadError('[Errno 104]", "WriteError('[Errno")
    assert [error for error in load.errors if not error.startswith(turned_away)] == []
    assert not any(child.is_running() for child in tree)
    assert "without an answer" not in server.log


def test_a_second_signal_ends_at_once(start_faulty: Callable[..., Server]) -> None:
    server = start_faulty("--drain-pause-s=60", ranks=1).wait_ready()
    server.process.send_signal(signal.SIGTERM)
    server.wait_for_log("draining")
    assert server.client.get("/health/ready").json()["reasons"] == ["draining"]
    assert server.client.get("/health/live").status_code == 200
    assert server.end(signal.SIGTERM, timeout_s=30) == 0


def test_sigkill_of_the_front_end_leaves_nothing(start_faulty: Callable[..., Server], reference: Reference) -> None:
    server = start_faulty(ranks=2).wait_ready()
    tree = psutil.Process(server.process.pid).children(recursive=True)
    sockets = [conn.laddr for conn in psutil.Process(server.process.pid).net_connections("unix") if conn.laddr]
    load = Load(server.url, reference)
    with load:
        load.wait_for(5)
        server.process.kill()
        server.wait()
        psutil.wait_procs(tree, timeout=30)
    assert not any(child.is_running() for child in tree)
    assert not any(Path(str(path)).exists() for path in sockets)
