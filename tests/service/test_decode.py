import asyncio
import io
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image

from encoder.config import DEEPSEEK_V4, DEEPSEEK_V41
from encoder.image import Canvas, read_canvas
from service.decode import DecodePool
from service.decode_process import MEMORY_BYTES_PER_PIXEL
from service.decoder import Drawing
from service.errors import ServiceError
from service.identity import canvas_digest
from service.metrics import Metrics
from service.settings import Settings


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def pool(metrics: Metrics) -> Iterator[DecodePool]:
    with DecodePool(Settings(decode_processes=2, limit_image_pixels=1_000_000), DEEPSEEK_V4, metrics) as pool:
        yield pool


def png(width: int, height: int, mode: str = "L") -> bytes:
    file = io.BytesIO()
    Image.new(mode, (width, height)).save(file, "PNG")
    return file.getvalue()


SMALL = png(64, 48)
BULKY = SMALL + bytes(4_000_000)  # more than fits into the socket: who stops reading it stops whoever sends it


def start_pool(num_processes: int = 1, **settings: float | str) -> DecodePool:
    """A pool whose processes have all decoded."""
    pool = DecodePool(Settings(decode_processes=num_processes, **settings), DEEPSEEK_V4, Metrics())  # type: ignore[arg-type]
    for _ in range(num_processes):  # the one that has been idle for longest takes the next
        decode(pool)
    return pool


def decode(pool: DecodePool, data: bytes = SMALL, index: int = 0) -> Canvas:
    return asyncio.run(pool.draw(data, index)).canvas


def decode_error(pool: DecodePool, data: bytes = SMALL) -> str:
    with pytest.raises(ServiceError) as error_info:
        decode(pool, data, 7)
    assert error_info.value.index == 7
    return error_info.value.code


def decoders(parent_pid: int | None = None) -> list[psutil.Process]:
    """Every child that is there, dead ones that nobody has waited for included."""
    return psutil.Process(parent_pid).children()


def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def stop(process: psutil.Process) -> None:
    process.suspend()
    until(lambda: process.status() == psutil.STATUS_STOPPED)


def test_an_image_becomes_a_canvas_with_its_plan(pool: DecodePool, goldens: Path, metrics: Metrics) -> None:
    data = (goldens / "images/640x700_RGB.jpeg").read_bytes()
    canvas = asyncio.run(pool.draw(data, 0)).canvas
    assert canvas.plan.image_size == (640, 700)
    assert canvas.pixels.shape == (*canvas.plan.resized[::-1], 3)
    assert b'stage_seconds_count{stage="decode"} 1.0' in metrics.render()[0]


def test_a_view_of_a_body_will_do(pool: DecodePool) -> None:
    body = b"--" + png(30, 40) + b"--"
    assert asyncio.run(pool.draw(memoryview(body)[2:-2], 0)).canvas.plan.image_size == (30, 40)


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "unsupported_format"),
        (b"%PDF-1.7", "unsupported_format"),
        (png(300, 300)[:60], "invalid_image"),
        (png(1001, 1000), "image_too_large"),
        (png(1, 20_000), "degenerate_image"),
    ],
)
def test_an_image_that_cannot_be_used_is_told_with_its_index(pool: DecodePool, data: bytes, code: str) -> None:
    with pytest.raises(ServiceError) as error_info:
        asyncio.run(pool.draw(data, 3))
    assert error_info.value.code == code
    assert error_info.value.index == 3


@pytest.mark.parametrize("name", ["640x700_RGB.jpeg", "77x91_P.png", "97x61_RGB.png"])
def test_a_canvas_is_the_one_that_the_encoder_draws(goldens: Path, name: str) -> None:
    data = (goldens / "images" / name).read_bytes()
    ours = read_canvas(data, DEEPSEEK_V41, "plain", limit_pixels=1_000_000)
    with DecodePool(Settings(decode_processes=1, image_profile="plain"), DEEPSEEK_V41, Metrics()) as pool:
        canvas = decode(pool, data)
    assert canvas.plan == ours.plan
    np.testing.assert_array_equal(canvas.pixels, ours.pixels)


def test_the_digest_is_the_canvas_s() -> None:
    with DecodePool(Settings(decode_processes=1), DEEPSEEK_V4, Metrics()) as pool:
        drawing = asyncio.run(pool.draw(SMALL, 0))
    assert drawing.digest == canvas_digest(drawing.canvas)


def test_a_decoder_sees_none_of_our_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATCHGRID_API_KEYS", "hidden")
    with start_pool():
        [decoder] = decoders()
        assert not [name for name in decoder.environ() if name.startswith("PATCHGRID_")]


def test_many_at_once_each_get_their_own_and_no_process_more_starts(pool: DecodePool) -> None:
    async def decode_many() -> list[Drawing]:
        return await asyncio.gather(*(pool.draw(png(64 + index, 64), index) for index in range(60)))

    drawings = asyncio.run(decode_many())
    assert [drawing.canvas.plan.image_size[0] for drawing in drawings] == list(range(64, 124))
    assert len(decoders()) == 2
    assert sum(thread.name.startswith("decode") for thread in threading.enumerate()) <= 2


def test_what_a_function_raises_is_raised_by_run(pool: DecodePool) -> None:
    def fail() -> None:
        raise ServiceError("invalid_request", "no")

    with pytest.raises(ServiceError):
        asyncio.run(pool.run(fail))


def test_answers_do_not_wait_behind_images(pool: DecodePool) -> None:
    data = (png(1000, 1000),) * 40

    async def race() -> bool:
        decoding = asyncio.gather(*(pool.draw(each, index) for index, each in enumerate(data)))
        assert await pool.run(lambda: "rendered") == "rendered"
        was_first = not decoding.done()
        await decoding
        return was_first

    assert asyncio.run(race())


def test_work_whose_caller_has_gone_never_starts(pool: DecodePool) -> None:
    started: list[int] = []
    gate = threading.Event()

    async def leave() -> None:
        blockers = [asyncio.create_task(pool.run(gate.wait, 10)) for _ in range(2)]
        left = asyncio.create_task(pool.run(started.append, 1))
        await asyncio.sleep(0.05)
        left.cancel()
        await asyncio.wait([left])
        gate.set()
        await asyncio.gather(*blockers)
        await pool.run(time.sleep, 0.05)

    asyncio.run(leave())
    assert started == []


@pytest.mark.parametrize("data", [SMALL, BULKY], ids=["small", "bulky"])
def test_a_decode_that_outlives_the_limit_is_ended_and_the_next_works(
    data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with start_pool(decode_timeout_s=0.5) as pool:
        [stuck] = decoders()
        stop(stuck)
        start = time.monotonic()
        assert decode_error(pool, data) == "decode_timeout"
        assert 0.5 <= time.monotonic() - start < 5
        decode(pool)
        [replacement] = decoders()
        assert replacement.pid != stuck.pid
    assert [record.levelno for record in caplog.records if record.name == "service.decoder"] == [logging.WARNING]


def test_one_stuck_decode_keeps_nobody_else_waiting() -> None:
    async def decode_all(pool: DecodePool) -> None:
        waiting = {asyncio.create_task(pool.draw(SMALL, index)) for index in range(20)}
        while len(waiting) > 1:
            _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(0.05)
        [stuck] = waiting
        assert not stuck.done()
        stopped.resume()
        await stuck

    with start_pool(2) as pool:
        stopped, _ = decoders()
        stop(stopped)
        asyncio.run(decode_all(pool))


def test_a_process_killed_while_idle_is_replaced() -> None:
    with start_pool() as pool:
        [killed] = decoders()
        killed.kill()
        decode(pool)
        [replacement] = decoders()
        assert replacement.pid != killed.pid


@pytest.mark.parametrize("data", [SMALL, BULKY], ids=["small", "bulky"])
def test_an_image_whose_process_is_killed_gets_its_canvas_from_the_next(data: bytes) -> None:
    async def decode_and_kill(pool: DecodePool) -> Drawing:
        decoding = asyncio.create_task(pool.draw(data, 0))
        await asyncio.sleep(0.1)
        killed.kill()
        return await decoding

    with start_pool() as pool:
        [killed] = decoders()
        stop(killed)
        assert asyncio.run(decode_and_kill(pool)).canvas.plan.image_size == (64, 48)


def test_an_image_that_kills_every_process_is_invalid_and_the_next_works(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "sitecustomize.py").write_text(FRAGILE_PILLOW)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    with start_pool() as pool:
        assert decode_error(pool, SMALL + b"poison") == "invalid_image"
        assert caplog.text.count("died with code -11") == 2
        decode(pool)


# No file is known to crash this Pillow.
FRAGILE_PILLOW = """
import os, signal
from PIL import Image

def open(file, *args, open=Image.open, **options):
    if file.getvalue().endswith(b"poison"):
        os.kill(os.getpid(), signal.SIGSEGV)
    return open(file, *args, **options)

Image.open = open
"""


def test_a_decode_whose_caller_has_gone_gives_its_process_back() -> None:
    async def leave(pool: DecodePool) -> None:
        left = asyncio.create_task(pool.draw(SMALL, 0))
        await asyncio.sleep(0.05)
        left.cancel()
        await asyncio.wait([left])
        process.resume()
        await pool.draw(SMALL, 1)

    with start_pool() as pool:
        [process] = decoders()
        stop(process)
        asyncio.run(leave(pool))
        assert [each.pid for each in decoders()] == [process.pid]


def test_an_image_that_wants_more_memory_than_there_is_is_invalid() -> None:
    with start_pool() as pool:
        [process] = decoders()
        process.rlimit(psutil.RLIMIT_DATA, (data_bytes(process) + 8_000_000, -1))
        assert decode_error(pool, png(3000, 3000)) == "invalid_image"
        decode(pool)
        assert [each.pid for each in decoders()] == [process.pid]


def test_the_hungriest_image_fits_into_the_memory_that_a_decoder_may_take() -> None:
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    side = 2000
    Image.effect_noise((side, side), 64).convert("RGBA").save(file, "WEBP", exif=exif, method=0)
    with start_pool(limit_image_pixels=side**2) as pool:
        [process] = decoders()
        assert process.rlimit(psutil.RLIMIT_DATA)[0] > data_bytes(process) + MEMORY_BYTES_PER_PIXEL * side**2
        process.rlimit(psutil.RLIMIT_DATA, (data_bytes(process) + MEMORY_BYTES_PER_PIXEL * side**2, -1))
        decode(pool, file.getvalue())


def data_bytes(process: psutil.Process) -> int:
    """What RLIMIT_DATA limits."""
    [line] = [
        line for line in Path(f"/proc/{process.pid}/status").read_text().splitlines() if line.startswith("VmData")
    ]
    return int(line.split()[1]) * 1024


def test_a_decoder_is_the_first_to_go_leaves_no_core_and_leads_no_session() -> None:
    with start_pool():
        [process] = decoders()
        assert Path(f"/proc/{process.pid}/oom_score_adj").read_text() == "500\n"
        assert process.rlimit(psutil.RLIMIT_CORE) == (0, 0)
        assert os.getsid(process.pid) == os.getsid(0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_meant_for_the_front_end_interrupt_no_decode(number: signal.Signals) -> None:
    with start_pool() as pool:
        [process] = decoders()
        process.send_signal(number)
        decode(pool)
        assert [each.pid for each in decoders()] == [process.pid]


def test_what_libraries_say_of_an_image_reaches_no_log(capfd: pytest.CaptureFixture[str]) -> None:
    file = io.BytesIO()
    Image.effect_noise((64, 64), 64).save(file, "TIFF", compression="tiff_deflate")
    broken = bytearray(file.getvalue())
    broken[40:80] = bytes(40)
    with start_pool() as pool:
        assert decode_error(pool, bytes(broken)) == "invalid_image"
    assert capfd.readouterr() == ("", "")


def test_processes_that_do_not_start_are_no_image_s_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(sys, "executable", "/bin/false")
        pool = DecodePool(Settings(decode_processes=1), DEEPSEEK_V4, Metrics())
        with pytest.raises(RuntimeError, match="before they are ready"):
            decode(pool)
    with pool:
        decode(pool)


def test_a_decoder_loads_nothing_that_decoding_does_not_need() -> None:
    program = (
        "import sys, service.decode_process;"
        "sys.exit(not {'torch', 'fastapi', 'pydantic', 'asyncio', 'zmq', 'uvicorn'}.isdisjoint(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_closing_leaves_no_process_and_no_file_descriptor() -> None:
    num_fds = psutil.Process().num_fds()
    with start_pool(2):
        killed, stopped = decoders()
        killed.kill()
        stop(stopped)
    assert decoders() == []
    assert psutil.Process().num_fds() == num_fds


def test_closing_waits_for_no_decode() -> None:
    async def close_while_decoding(pool: DecodePool) -> list[object]:
        decoding = [asyncio.create_task(pool.draw(SMALL, index)) for index in range(3)]
        await asyncio.sleep(0.05)
        pool.close()
        return await asyncio.gather(*decoding, return_exceptions=True)

    pool = start_pool()
    stop(decoders()[0])
    start = time.monotonic()
    ends = asyncio.run(close_while_decoding(pool))
    assert time.monotonic() - start < Settings().decode_timeout_s / 2
    assert [end.code for end in ends if isinstance(end, ServiceError)] == ["draining"] * 3
    assert decoders() == []


def test_sigkill_of_the_front_end_takes_every_decoder_with_it() -> None:
    program = (
        "import time; from encoder.config import DEMO; from service.decode import DecodePool;"
        "from service.metrics import Metrics; from service.settings import Settings;"
        "pool = DecodePool(Settings(decode_processes=2), DEMO, Metrics()); print(flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        idle, stopped = decoders(parent.pid)
        until(lambda: is_bound(idle) and is_bound(stopped))
        stop(stopped)
        parent.kill()
    until(lambda: not is_alive(idle) and not is_alive(stopped))


def is_bound(process: psutil.Process) -> bool:
    return Path(f"/proc/{process.pid}/oom_score_adj").read_text() == "500\n"


def is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
