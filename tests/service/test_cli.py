import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import uvicorn
from fastapi import FastAPI, Request, Response
from safetensors.torch import load_file

from encoder.config import DEEPSEEK_V4
from service.cli import main
from service.decode import DecodePool
from service.errors import ServiceError, install_error_handling
from service.intake import read_embed
from service.metrics import Metrics
from service.reply import Answer, EmbeddedImage, embed_response
from service.settings import Settings

DIM = 4


@contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            while not server.started:
                time.sleep(0.01)
            server.should_exit = True
            thread.join()


@pytest.fixture
def url() -> Iterator[str]:
    """A server of the real bodies and answers, whose rows are all the image's length."""
    settings, metrics = Settings(decode_processes=1), Metrics()
    app = FastAPI()
    install_error_handling(app)
    with DecodePool(settings, DEEPSEEK_V4, metrics) as pool:

        @app.post("/embed")
        async def embed(request: Request) -> Response:
            job = await read_embed(request, settings, pool)
            if job.layout == "v41":
                raise ServiceError("queue_full", "too many patches are waiting", retry_after_s=9)
            images = []
            for index, data in enumerate(job.images):
                canvas = (await pool.draw(data, index)).canvas
                shape = (canvas.plan.num_rows, DIM)
                rows = torch.full(shape, len(data), dtype=getattr(torch, job.dtype))
                octets = memoryview(rows.view(torch.uint8).numpy().tobytes())
                images.append(EmbeddedImage(id="ab", plan=canvas.plan, shape=shape, data=octets))
            answer = Answer(model="m", layout=job.layout, dtype=job.dtype, images=images)
            accept = request.headers.get("accept")
            return await embed_response(
                answer, accept=accept, encoding_format=job.encoding_format, pool=pool, metrics=metrics
            )

        with serving(app) as url:
            yield url


# plan


def test_plan_prints_what_sizes_and_files_come_to(goldens: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = str(goldens / "images/640x700_RGB.jpeg")
    assert main(["plan", "2000x2000", image, "--model", "random:deepseek_v4"]) == 0
    head, size, file = capsys.readouterr().out.splitlines()
    assert head.split()[0] == "image"
    assert size.split()[:4] == ["2000x2000", "2000", "x", "2000"]
    assert size.split()[-3] == "346"
    assert file.startswith(image)
    assert "640 x 700" in file


def test_plan_goes_by_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    tokens = []
    for model in ("random:deepseek_v4", "random:deepseek_v41"):
        assert main(["plan", "2000x2000", "--model", model]) == 0
        tokens.append(capsys.readouterr().out.split()[-3])
    assert tokens[0] != tokens[1]


@pytest.mark.parametrize("model_type", ["deepseek_v4", "deepseek_v41"])
def test_plan_dumps_the_patches_of_the_reference(model_type: str, goldens: Path, tmp_path: Path) -> None:
    dump = tmp_path / "patches.safetensors"
    told = json.loads((goldens / "preprocess.json").read_text())["images"]
    expected = {str(goldens / "images" / each["file"]): each[model_type]["patches_bf16_sha256"] for each in told}
    flags = ["--model", f"random:{model_type}", "--image-profile", "plain", "--dump", str(dump)]
    assert main(["plan", *expected, *flags]) == 0
    patches = load_file(dump)
    assert all(tensor.dtype == torch.bfloat16 and tensor.shape[1] == 588 for tensor in patches.values())
    assert expected == {
        name: hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest() for name, tensor in patches.items()
    }


def test_plan_tells_which_image_is_wrong_and_plans_the_rest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    junk = tmp_path / "junk.png"
    junk.write_bytes(b"junk")
    assert main(["plan", str(junk), "0x5", "100x100", str(tmp_path / "none.png")]) == 1
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 2
    assert f"{junk}: the content is not" in err
    assert "0x5: " in err
    assert "none.png: No such file or directory" in err


def test_plan_with_an_unknown_model_fails(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["plan", "1x1", "--model", "nothing"])
    assert exit_info.value.code == 1
    assert "patchgrid plan: error: nothing is not" in capsys.readouterr().err


# embed


def test_embed_saves_the_rows_of_files_in_order(
    url: str, goldens: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [goldens / "images/640x700_RGB.jpeg", goldens / "images/97x61_RGB.png"]
    output = tmp_path / "rows.safetensors"
    assert main(["embed", *map(str, files), "-o", str(output), "--url", url, "--dtype", "float32"]) == 0
    tensors = load_file(output)
    assert [float(tensors[name][0, 0]) for name in ("0", "1")] == [file.stat().st_size for file in files]
    assert tensors["0"].dtype == torch.float32
    out = capsys.readouterr().out
    assert f"{files[0]}: tensor '0', 272 x {DIM}, F32" in out
    assert list(tmp_path.iterdir()) == [output]


def test_embed_tells_the_servers_error_and_the_file_it_is_about(
    url: str, goldens: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    junk = tmp_path / "junk.png"
    junk.write_bytes(b"junk")
    good = goldens / "images/97x61_RGB.png"
    assert main(["embed", str(good), str(junk), "-o", str(tmp_path / "rows"), "--url", url]) == 1
    err = capsys.readouterr().err
    assert err.startswith("patchgrid embed: error: unsupported_format: ")
    assert f"({junk})" in err
    assert list(tmp_path.iterdir()) == [junk]


def test_embed_tells_when_to_try_again(
    url: str, goldens: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = str(goldens / "images/97x61_RGB.png")
    assert main(["embed", good, "-o", str(tmp_path / "rows"), "--url", url, "--layout", "v41"]) == 1
    assert "queue_full: too many patches are waiting; try again in 9 s" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "file:///etc/passwd", "http://[", "http://a:b", "nonsense"])
def test_embed_without_a_server_fails_in_one_line(
    url: str, goldens: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "rows.safetensors"
    assert main(["embed", str(goldens / "images/97x61_RGB.png"), "-o", str(output), "--url", url]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert not output.exists()


def test_embed_at_a_server_of_another_kind_fails(
    goldens: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    app = FastAPI()

    @app.post("/embed")
    async def embed() -> dict[str, str]:
        return {"hello": "world"}

    with serving(app) as url:
        good = str(goldens / "images/97x61_RGB.png")
        assert main(["embed", good, "-o", str(tmp_path / "rows"), "--url", url]) == 1
        assert main(["embed", good, "-o", str(tmp_path / "rows"), "--url", f"{url}/nowhere"]) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert "answered with application/json" in first
    assert "answered 404" in second


# the command line itself


def test_without_a_command_the_commands_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {command} " in out for command in ("serve", "plan", "embed"))


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("patchgrid 0.")


def test_an_unknown_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sevre"]) == 2
    assert "there is no command 'sevre'" in capsys.readouterr().err


def test_a_wrong_flag_of_serve_is_a_usage_error() -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["serve", "--port", "abc"])
    assert exit_info.value.code == 2


def test_a_stranger_named_distributed_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "distributed").mkdir()
    (tmp_path / "distributed/__init__.py").touch()
    paths = os.pathsep.join((str(tmp_path), str(Path(__file__).parents[2])))
    ended = subprocess.run(
        [sys.executable, "-c", "import sys; from service.cli import main; sys.exit(main(['plan', '1x1']))"],
        env={**os.environ, "PYTHONPATH": paths},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert f"`import distributed` finds {tmp_path / 'distributed'}, not " in ended.stderr
    assert "Traceback" not in ended.stderr
