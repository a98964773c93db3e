"""Lives of a group: a start that fails says why, an idle group stays usable, an ended one leaves nothing."""

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file, save_file
from worker_group import Group, random_canvases


def wait_until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def test_a_bad_weight_ends_the_start_with_the_tensors_name(
    start_group: Callable[..., Group], goldens: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(goldens / "tiny-deepseek_v4", model)
    shard = model / "model-00001-of-00003.safetensors"
    tensors = load_file(shard)
    tensors["aligner.w1.bias"][3] = float("nan")
    save_file(tensors, shard)
    group = start_group(2, model=str(model))
    assert group.wait() == 1
    failure = group.failure()
    assert failure is not None
    assert failure.phase == "setup"
    assert "aligner.w1.bias" in failure.reason


def test_an_unavailable_attention_ends_the_start_and_says_what_to_do(start_group: Callable[..., Group]) -> None:
    group = start_group(1, attention="flash_attn")
    assert group.wait() == 1
    failure = group.failure()
    assert failure is not None
    assert failure.phase == "setup"
    assert "flash" in failure.reason


@pytest.mark.parametrize("argument", ["--dtype=float32", "--attention=matmul"])
def test_ranks_that_would_not_give_the_same_rows_do_not_start(
    start_group: Callable[..., Group], monkeypatch: pytest.MonkeyPatch, argument: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "support"))
    monkeypatch.setenv("FAULTY_RANK", "1")
    monkeypatch.setenv("FAULTY_ARGUMENT", argument)
    group = start_group(2, dtype="bfloat16", attention="sdpa", worker_module="faulty_worker")
    assert group.wait() == 1
    failure = group.failure()
    assert failure is not None
    assert failure.phase == "join"
    assert "compare --model, --dtype and --attention" in failure.reason


def test_a_group_that_idles_past_its_time_out_still_answers(start_group: Callable[..., Group]) -> None:
    group = start_group(2, collective_timeout_s=4.0)
    group.hello()
    before, _ = group.encode(random_canvases([(2, 2), (3, 3)]))
    time.sleep(9.0)  # more than two time-outs: without the idle commands rank 1 would have given up
    after, _ = group.encode(random_canvases([(2, 2), (3, 3)]))
    assert after.images == before.images


def test_stop_ends_every_rank_with_code_zero(start_group: Callable[..., Group]) -> None:
    group = start_group(2)
    pids = [info.pid for info in group.hello().ranks]
    assert group.stop() == 0
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids))


def test_kill_leaves_no_rank_behind_even_a_stopped_one(start_group: Callable[..., Group]) -> None:
    group = start_group(2)
    pids = [info.pid for info in group.hello().ranks]
    os.kill(pids[1], signal.SIGSTOP)
    group.close()
    for pid in pids:
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_the_whole_group(start_group: Callable[..., Group], victim: int) -> None:
    group = start_group(2)
    pids = [info.pid for info in group.hello().ranks]
    os.kill(pids[victim], signal.SIGKILL)
    assert group.wait() != 0
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids))


def test_a_stopped_rank_falls_silent(start_group: Callable[..., Group]) -> None:
    group = start_group(2)
    stopped = group.hello().ranks[1].pid
    os.kill(stopped, signal.SIGSTOP)
    time.sleep(4.0)
    silent_s = group.ping().silent_s
    assert silent_s[1] > 2.0
    assert silent_s[0] < silent_s[1]
