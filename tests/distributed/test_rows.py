"""Rows on their way out: the bytes of the dtype that was asked for, and no rows that cannot be used."""

from typing import Any

import pytest
import torch

from distributed.messages import ImageSpec, RowDtype
from distributed.rows import OutgoingRows

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")],
    ),
]


def spec(dtype: RowDtype) -> ImageSpec:
    return ImageSpec(height=14, width=14, layout="rows", dtype=dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tower_dtype", [torch.bfloat16, torch.float32])
def test_every_image_has_its_own_dtype(device: str, tower_dtype: torch.dtype) -> None:
    dtypes: list[RowDtype] = ["bfloat16", "float32", "float16", "bfloat16"]
    computed = [torch.randn(rows, 5).to(device, tower_dtype) for rows in (1, 3, 7, 2)]
    outgoing = OutgoingRows.bring_down([spec(dtype) for dtype in dtypes], computed)
    if device == "cuda":
        torch.cuda.synchronize()
    specs, buffers = outgoing.collect()
    assert [(image.num_rows, image.width, image.state) for image in specs] == [
        (rows, 5, "good") for rows in (1, 3, 7, 2)
    ]
    for dtype, rows_ND, buffer in zip(dtypes, computed, buffers, strict=True):
        expected = rows_ND.cpu().to(getattr(torch, dtype))
        assert bytes(buffer) == expected.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("device", DEVICES)
def test_unusable_rows_stay_behind_and_their_mates_go(device: str) -> None:
    computed = [torch.ones(2, 4, device=device) for _ in range(4)]
    computed[1][0, 3] = float("nan")
    computed[2][1, 1] = 70000.0  # more than float16 can hold
    computed[3][1, 2] = float("-inf")
    outgoing = OutgoingRows.bring_down([spec("float16")] * 4, computed)
    if device == "cuda":
        torch.cuda.synchronize()
    specs, buffers = outgoing.collect()
    assert [image.state for image in specs] == ["good", "not_finite", "overflow", "not_finite"]
    assert [len(buffer) for buffer in buffers] == [16, 0, 0, 0]


def test_rows_that_have_no_room_on_the_device_are_converted_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    convert, conversions = torch.Tensor.to, 0

    def run_out_once(self: torch.Tensor, *arguments: Any) -> torch.Tensor:
        nonlocal conversions
        conversions += 1
        if conversions == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return convert(self, *arguments)

    computed = [torch.randn(3, 4), torch.randn(2, 4)]
    monkeypatch.setattr(torch.Tensor, "to", run_out_once)
    outgoing = OutgoingRows.bring_down([spec("bfloat16"), spec("float32")], computed)
    monkeypatch.undo()
    assert conversions == 4
    specs, buffers = outgoing.collect()
    assert [image.state for image in specs] == ["good", "good"]
    assert bytes(buffers[0]) == computed[0].bfloat16().view(torch.uint8).numpy().tobytes()
    assert bytes(buffers[1]) == computed[1].numpy().tobytes()
