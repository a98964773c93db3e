import io
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from server import Server

from encoder.config import DEMO
from encoder.geometry import plan
from encoder.layout import Layout, num_layout_rows
from service.bench import Load, run_load
from service.bench_images import MIXED_SIZES, Photos, Picture
from service.cli import main
from service.client import ClientError

SIZES = ((300, 300), (500, 333))


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Server]) -> Server:
    return start_server("--decode-processes=1").wait_ready()


@pytest.fixture
def broken_url() -> Iterator[str]:
    """A server that plans 100 rows for every image and answers with a safetensors file that has one."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            is_plan = self.path == "/plan"
            tensor = b'"0":{"dtype":"BF16","shape":[1,2],"data_offsets":[0,4]}'
            header = rb'{"__metadata__":{"patchgrid":"{\"usage\":{\"cached\":0}}"},' + tensor + b"}"
            body = (
                b'{"data":[{"llm_grid":[10,10],"patches":784}]}'
                if is_plan
                else len(header).to_bytes(8, "little") + header + bytes(4)
            )
            self.send_response(200)
            self.send_header("content-type", "application/json" if is_plan else "application/x-safetensors")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as broken:
        thread = threading.Thread(target=broken.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{broken.server_port}"
        broken.shutdown()
        thread.join()


def pixels(picture: Picture) -> np.ndarray:  # type: ignore[type-arg]
    return np.asarray(Image.open(io.BytesIO(picture.data)))


# images


def test_photos_are_the_same_for_the_same_seed_and_number() -> None:
    assert Photos(SIZES, seed=1)(5).data == Photos(SIZES, seed=1)(5).data
    assert Photos(SIZES, seed=1)(5).data != Photos(SIZES, seed=2)(5).data


def test_photos_take_turns_in_size() -> None:
    photos = Photos(SIZES, seed=0)
    for index in range(5):
        assert photos(index).size == SIZES[index % 2]
        assert pixels(photos(index)).shape == (*reversed(SIZES[index % 2]), 3)


def test_photos_differ_in_their_pixels_and_not_by_much() -> None:
    photos = Photos([(300, 300)], seed=0)
    first, others = pixels(photos(0)).astype(int), [pixels(photos(number)).astype(int) for number in (1, 31, 32, 1024)]
    assert len({other.tobytes() for other in others} | {first.tobytes()}) == 5
    # In every corner, so that no scaling hides it.
    assert all((abs(first - other)[::299, ::299] > 0).any() or (first != other).mean() > 0.2 for other in others)


def test_same_photos_repeat() -> None:
    photos = Photos(SIZES, seed=0, same=True)
    assert photos(0).data == photos(2).data != photos(1).data


# loads


def test_a_closed_loop_sends_as_many_images_as_it_is_told(server: Server) -> None:
    before = server.metric("patchgrid_cache_lookups_total", result="computed")
    report = run_load(Load(server.url, clients=3, images=10, seed=10), Photos(SIZES, seed=10))
    assert (report.requests, report.images, report.errors) == (10, 10, ())
    assert 0 < report.p50_ms <= report.p90_ms <= report.p99_ms <= report.worst_ms
    assert report.images_per_s == pytest.approx(10 / report.seconds)
    plans = [plan(DEMO, *size) for size in SIZES]
    assert report.patches_per_s == pytest.approx(5 * sum(each.num_patches for each in plans) / report.seconds)
    assert report.rows_per_s == pytest.approx(5 * sum(each.num_rows for each in plans) / report.seconds)
    assert report.cached == 0
    assert server.metric("patchgrid_cache_lookups_total", result="computed") == before + 10


def test_a_load_ends_after_its_seconds(server: Server) -> None:
    report = run_load(Load(server.url, clients=2, seconds=0.3, seed=11), Photos(SIZES, seed=11))
    assert report.images > 0
    assert 0.2 < report.seconds < 10


def test_an_open_loop_keeps_its_rate_and_not_the_servers(server: Server) -> None:
    load = Load(server.url, clients=8, rate=40.0, images=20, seed=12)
    report = run_load(load, Photos([(300, 300)], seed=12, same=True))
    assert report.images == 20
    assert report.seconds > 0.2, "it was not sent at once"


def test_in_an_open_loop_waiting_for_a_client_is_part_of_the_time(server: Server) -> None:
    load = Load(server.url, clients=1, rate=10_000.0, images=8, seed=13)
    report = run_load(load, Photos([(300, 300)], seed=13))
    assert report.late_ms > report.p50_ms / 4
    assert report.worst_ms > report.late_ms


def test_requests_of_several_images_are_checked_as_one(server: Server) -> None:
    report = run_load(Load(server.url, clients=1, images=7, per_request=3, seed=14), Photos(SIZES, seed=14))
    assert (report.requests, report.images, report.errors) == (3, 7, ())


@pytest.mark.parametrize("layout", ["rows", "v4", "v41"])
def test_every_layout_is_checked_by_its_own_rows(server: Server, layout: Layout) -> None:
    load = Load(server.url, clients=1, images=2, layout=layout, dtype="float16")
    report = run_load(load, Photos(SIZES, seed=21, same=True))
    assert (report.images, report.errors) == (2, ())
    grids = [plan(DEMO, *size).llm_grid for size in SIZES]
    assert report.rows_per_s == pytest.approx(sum(num_layout_rows(layout, grid) for grid in grids) / report.seconds)


def test_same_images_are_answered_from_the_cache(server: Server) -> None:
    before = server.metric("patchgrid_cache_lookups_total", result="computed")
    report = run_load(Load(server.url, clients=1, images=12, seed=15), Photos(SIZES, seed=15, same=True))
    assert (report.images, report.cached) == (12, 10)
    assert server.metric("patchgrid_cache_lookups_total", result="computed") == before + 2


def test_errors_are_counted_by_the_servers_code(server: Server) -> None:
    def spoiled(index: int) -> Picture:
        return Picture(b"not an image" if index % 2 else Photos(SIZES, seed=16)(0).data, "image/jpeg", (300, 300))

    report = run_load(Load(server.url, clients=1, images=4, seed=16), spoiled)
    assert report.errors == (("unsupported_format", 2),)
    assert (report.requests, report.images) == (4, 2)


def test_an_answer_with_too_few_rows_is_an_error(broken_url: str) -> None:
    report = run_load(Load(broken_url, clients=1, images=2), Photos(SIZES, seed=17))
    assert report.errors == (("wrong_answer", 2),)
    assert report.images == 0


def test_a_server_that_goes_away_is_an_error_of_each_request(start_server: Callable[..., Server]) -> None:
    server = start_server("--decode-processes=1").wait_ready()
    timer = threading.Timer(0.3, server.process.kill)
    timer.start()
    report = run_load(Load(server.url, clients=2, seconds=1.0, timeout_s=5.0), Photos([(300, 300)], seed=18))
    timer.join()
    assert report.images > 0
    assert dict(report.errors).keys() == {"connection"}


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "ftp://127.0.0.1", "http://[", "http://127.0.0.1:x"])
def test_a_wrong_address_is_told_at_once(url: str) -> None:
    start = time.monotonic()
    with pytest.raises(ClientError):
        run_load(Load(url, clients=2, images=4), Photos(SIZES, seed=19))
    assert time.monotonic() - start < 5


# command


def test_bench_prints_a_table_and_saves_it(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bench.json"
    flags = ["--images=6", "--clients=2", "--sizes=300x300,500x333", "--seed=20", f"--json={file}", "--api-key=secret"]
    assert main(["bench", server.url, *flags]) == 0
    printed = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert printed.keys() == {"load", "images", "throughput", "cached", "p50", "p90", "p95", "p99", "worst", "late"}
    assert printed["images"].startswith("6 in ")
    saved = json.loads(file.read_text())
    assert saved["load"]["seed"] == 20
    assert saved["report"]["images"] == 6
    assert "secret" not in file.read_text()


def test_bench_takes_other_images_every_time(server: Server) -> None:
    for _ in range(2):
        before = server.metric("patchgrid_cache_lookups_total", result="computed")
        assert main(["bench", server.url, "--images=2", "--sizes=300x300"]) == 0
        assert server.metric("patchgrid_cache_lookups_total", result="computed") == before + 2


def test_bench_fails_when_requests_do(broken_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", broken_url, "--images=1", "--sizes=300x300"]) == 1
    assert "wrong_answer" in capsys.readouterr().out


def test_bench_tells_why_it_cannot_begin(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "http://127.0.0.1:1", "--sizes=300x300"]) == 1
    assert capsys.readouterr().err.startswith("patchgrid bench: error: http://127.0.0.1:1: ")


@pytest.mark.parametrize(
    "flag", ["--clients=0", "--rate=0", "--rate=inf", "--seconds=nan", "--sizes=1920", "--sizes=0x5"]
)
def test_bench_refuses_what_cannot_be(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", flag])
    assert flag.split("=")[0] in capsys.readouterr().err


def test_the_default_mix_has_wide_and_tall_images() -> None:
    assert {width > height for width, height in MIXED_SIZES} == {True, False}
