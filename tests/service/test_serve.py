"""The whole way: image files over HTTP to a real server of two ranks, and other people's rows back."""

import base64
import json
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import load, load_file
from server import Server

from encoder.layout import layout_index

MODELS = ["deepseek_v4", "deepseek_v41"]
GOLDEN_FILES = ["420x40_RGB.jpeg", "500x333_RGB.jpeg", "97x61_RGB.png"]


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Server], goldens: Path, model: str) -> Server:
    flags = ["--nproc-per-node=2", "--dtype=float32", "--image-profile=plain"]
    return start_server(f"--model={goldens / f'tiny-{model}'}", *flags).wait_ready()


@pytest.fixture(scope="module")
def golden_rows(goldens: Path, model: str) -> dict[str, torch.Tensor]:
    return dict(load_file(goldens / f"rows-{model}.safetensors"))


def read(goldens: Path, name: str) -> bytes:
    return (goldens / "images" / name).read_bytes()


def as_data_url(data: bytes) -> str:
    return "data:image/any;base64," + base64.b64encode(data).decode()


def relative(rows: torch.Tensor, expected: torch.Tensor) -> float:
    assert rows.shape == expected.shape
    return float((rows.double() - expected.double()).norm() / expected.double().norm())


def decode(entry: dict[str, object], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    data = bytearray(base64.b64decode(str(entry["embedding"])))
    return torch.frombuffer(data, dtype=dtype).view(*entry["shape"])  # type: ignore[misc]


def test_files_of_one_request_become_the_golden_rows_in_order(
    server: Server, goldens: Path, golden_rows: dict[str, torch.Tensor]
) -> None:
    names = [*GOLDEN_FILES, GOLDEN_FILES[0]]
    body = {"images": [as_data_url(read(goldens, name)) for name in names], "dtype": "float32"}
    answer = server.client.post("/embed", json=body).raise_for_status().json()
    assert [entry["index"] for entry in answer["data"]] == [0, 1, 2, 3]
    for name, entry in zip(names, answer["data"], strict=True):
        assert relative(decode(entry, torch.float32), golden_rows[name]) < 1e-5
    assert answer["data"][0]["id"] == answer["data"][3]["id"]
    assert answer["usage"]["rows"] == sum(len(golden_rows[name]) for name in names)


@pytest.mark.parametrize("layout", ["rows", "v4", "v41"])
def test_layouts_place_rows_and_learned_vectors(
    server: Server, goldens: Path, golden_rows: dict[str, torch.Tensor], layout: str
) -> None:
    name = "500x333_RGB.jpeg"
    body = {"images": [as_data_url(read(goldens, name))], "dtype": "float32", "layout": layout}
    entry = server.client.post("/embed", json=body).raise_for_status().json()["data"][0]
    source = torch.cat(
        [golden_rows[name], *(golden_rows[f"image_{which}"][None] for which in ("start", "newline", "end"))]
    )
    index = layout_index(layout, tuple(entry["llm_grid"]))  # type: ignore[arg-type]
    assert relative(decode(entry, torch.float32), source[torch.from_numpy(index)]) < 1e-5


def send_json(client: httpx.Client, data: bytes) -> httpx.Response:
    return client.post("/embed", json={"images": [as_data_url(data)]})


def send_bare_base64(client: httpx.Client, data: bytes) -> httpx.Response:
    return client.post("/embed", json={"images": [base64.b64encode(data).decode()]})


def send_object(client: httpx.Client, data: bytes) -> httpx.Response:
    return client.post("/embed", json={"images": [{"image": as_data_url(data), "id": "mine"}]})


def send_multipart(client: httpx.Client, data: bytes) -> httpx.Response:
    return client.post("/embed", files=[("files", ("a.bin", data))])


def send_raw(client: httpx.Client, data: bytes) -> httpx.Response:
    return client.post("/embed", content=data, headers={"content-type": "image/png"})


@pytest.mark.parametrize("send", [send_json, send_bare_base64, send_object, send_multipart, send_raw])
def test_every_form_of_the_question_has_the_same_answer(
    server: Server, goldens: Path, golden_rows: dict[str, torch.Tensor], send: Callable[..., httpx.Response]
) -> None:
    answer = send(server.client, read(goldens, "97x61_RGB.png")).raise_for_status().json()
    assert relative(decode(answer["data"][0]), golden_rows["97x61_RGB.png"]) < 2**-8
    assert answer["data"][0]["image_size"] == [97, 61]


def test_several_files_in_one_form_keep_their_order(
    server: Server, goldens: Path, golden_rows: dict[str, torch.Tensor]
) -> None:
    files = [("files", (name, read(goldens, name))) for name in GOLDEN_FILES]
    answer = server.client.post("/embed", files=files, data={"dtype": "float32"}).raise_for_status().json()
    for name, entry in zip(GOLDEN_FILES, answer["data"], strict=True):
        assert relative(decode(entry, torch.float32), golden_rows[name]) < 1e-5


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 2**-8), ("float16", 2**-10), ("float32", 1e-5)])
def test_safetensors_answers_hold_the_rows_and_describe_them(
    server: Server,
    goldens: Path,
    golden_rows: dict[str, torch.Tensor],
    tmp_path: Path,
    dtype: str,
    tolerance: float,
) -> None:
    body = {"images": [as_data_url(read(goldens, name)) for name in GOLDEN_FILES], "dtype": dtype}
    response = server.client.post("/embed", json=body, headers={"accept": "application/x-safetensors"})
    file = tmp_path / "answer.safetensors"
    file.write_bytes(response.raise_for_status().content)
    tensors = load(file.read_bytes())
    assert sorted(tensors) == ["0", "1", "2"]
    for index, name in enumerate(GOLDEN_FILES):
        assert tensors[str(index)].dtype == getattr(torch, dtype)
        assert relative(tensors[str(index)], golden_rows[name]) < tolerance
    with safe_open(file, "pt") as opened:
        described = json.loads(opened.metadata()["patchgrid"])
    assert [entry["shape"] for entry in described["data"]] == [list(golden_rows[name].shape) for name in GOLDEN_FILES]


def test_float_answers_are_the_rows_as_lists(
    server: Server, goldens: Path, golden_rows: dict[str, torch.Tensor]
) -> None:
    body = {"images": [as_data_url(read(goldens, "97x61_RGB.png"))], "dtype": "float32", "encoding_format": "float"}
    entry = server.client.post("/embed", json=body).raise_for_status().json()["data"][0]
    rows: NDArray[np.float32] = np.array(entry["embedding"], np.float32)
    assert relative(torch.from_numpy(rows), golden_rows["97x61_RGB.png"]) < 1e-5


def test_plan_answers_every_golden_size(server: Server, goldens: Path, model: str) -> None:
    golden = json.loads((goldens / "geometry.json").read_text())["geometry"]
    answer = server.client.post("/plan", json={"sizes": [each["size"] for each in golden]}).raise_for_status().json()
    keys = ("resized", "vit_grid", "llm_grid", "num_tokens")
    assert [{key: each[key] for key in keys} for each in answer["data"]] == [
        {key: each[model][key] for key in keys} for each in golden
    ]


@pytest.mark.parametrize(
    ("bad", "status", "code"),
    [
        (b"GIF89a but no more", 422, "invalid_image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0", 415, "unsupported_format"),
    ],
)
def test_a_bad_image_is_refused_with_its_index(
    server: Server, goldens: Path, bad: bytes, status: int, code: str
) -> None:
    images = [as_data_url(read(goldens, "97x61_RGB.png")), as_data_url(bad)]
    response = server.client.post("/embed", json={"images": images})
    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    assert response.json()["error"]["index"] == 1


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/embed", b'{"images": [', 400, "invalid_request"),
        ("/embed", b'{"images": []}', 400, "invalid_request"),
        ("/embed", b'{"images": ["AAAA"], "layout": "v5"}', 400, "invalid_request"),
        ("/embed", b'{"images": ["http://127.0.0.1/x.png"]}', 400, "fetch_disabled"),
        ("/plan", b'{"sizes": [[0, 4]]}', 400, "invalid_request"),
        ("/nothing", b"{}", 404, "not_found"),
        ("/metrics", b"{}", 405, "method_not_allowed"),
    ],
)
def test_refusals_follow_the_table(server: Server, path: str, body: bytes, status: int, code: str) -> None:
    response = server.client.post(path, content=body, headers={"content-type": "application/json"})
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)


def test_a_request_id_comes_back_and_a_strange_one_does_not(server: Server) -> None:
    assert server.client.get("/health", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    strange = server.client.get("/health", headers={"x-request-id": "a b<c>"}).headers["x-request-id"]
    assert len(strange) == 32


def test_metrics_count_what_was_served(server: Server, goldens: Path) -> None:
    before = {name: server.metric(f"patchgrid_{name}_total") for name in ("images", "patches", "rows")}
    ok = server.metric("patchgrid_requests_total", outcome="ok")
    send_json(server.client, read(goldens, "97x61_RGB.png")).raise_for_status()
    usage = send_json(server.client, read(goldens, "500x333_RGB.jpeg")).json()["usage"]
    assert server.metric("patchgrid_images_total") == before["images"] + 2
    assert server.metric("patchgrid_patches_total") > before["patches"] + usage["patches"]
    assert server.metric("patchgrid_rows_total") > before["rows"] + usage["rows"]
    assert server.metric("patchgrid_requests_total", outcome="ok") == ok + 2
    assert server.metric("patchgrid_ready") == 1
    assert server.metric("patchgrid_queue_images") == server.metric("patchgrid_queue_patches") == 0
    for stage in ("decode", "queue", "link", "encode", "gather", "reply"):
        assert server.metric("patchgrid_stage_seconds_count", stage=stage) >= 2, stage
    assert server.metric("patchgrid_rank_patches_total", rank="0") > 0


def test_info_describes_the_model_and_the_group(server: Server, model: str) -> None:
    info = server.client.get("/info").raise_for_status().json()
    assert info["model_type"] == model
    assert info["ranks"] == 2
    assert info["layouts"] == ["rows", "v4", "v41"]
    assert info["dtype"] == "float32"
    assert info["limits"]["images_per_request"] == 64


def test_health_says_live_and_ready(server: Server) -> None:
    for path in ("/health", "/health/live", "/health/ready"):
        assert server.client.get(path).json() == {"live": True, "ready": True, "reasons": []}


def test_docs_and_their_openapi_are_served(server: Server) -> None:
    assert server.client.get("/docs").status_code == 200
    operation = server.client.get("/openapi.json").json()["paths"]["/embed"]["post"]
    assert {"application/json", "multipart/form-data"} <= set(operation["requestBody"]["content"])
    assert "application/x-safetensors" in operation["responses"]["200"]["content"]
