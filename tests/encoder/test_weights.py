"""Weights from every source: complete, finite, of the right shapes, or an error that names the tensor."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from encoder.checkpoint import Checkpoint, open_checkpoint, tensor_shapes
from encoder.config import DEMO
from encoder.tower import Tower
from encoder.weights import LEARNED_VECTORS, WeightsError, fingerprint, load_weights

Edit = Callable[[dict[str, Tensor]], object]

TIMM_PARTS = [("wqkv", "qkv"), (".wo.", ".proj."), (".w1.", ".fc1."), (".w2.", ".fc2.")]


@pytest.fixture
def released(goldens: Path) -> dict[str, Tensor]:
    """All tensors of the tiny V4 checkpoint, the language model's decoys included."""
    tensors: dict[str, Tensor] = {}
    for shard in sorted((goldens / "tiny-deepseek_v4").glob("*.safetensors")):
        tensors |= load_file(shard)
    return tensors


@pytest.fixture
def load_edited(goldens: Path, released: dict[str, Tensor], tmp_path: Path) -> Callable[[Edit], dict[str, Tensor]]:
    """Load the tiny checkpoint as one file after an edit of its tensors."""

    def load(edit: Edit) -> dict[str, Tensor]:
        edit(released)
        shutil.copy(goldens / "tiny-deepseek_v4" / "config.json", tmp_path)
        save_file(released, tmp_path / "model.safetensors")
        return load_weights(open_checkpoint(str(tmp_path)))

    return load


def write_timm_file(released: dict[str, Tensor], folder: Path) -> Path:
    tensors: dict[str, Tensor] = {}
    for name, tensor in released.items():
        if name.startswith(("vision.", "aligner.")):
            for part, timm_part in TIMM_PARTS:
                name = name.replace(part, timm_part)
            tensors[name.removeprefix("vision.")] = tensor
    tensors["patch_embed.proj.weight"] = tensors["patch_embed.proj.weight"].reshape(-1, 3, 14, 14)
    save_file(tensors, folder / "deepseek_vit.safetensors")
    return folder / "deepseek_vit.safetensors"


@pytest.mark.parametrize("model", ["deepseek_v4", "deepseek_v41"])
def test_folder_gives_the_tower_and_nothing_else(goldens: Path, model: str) -> None:
    checkpoint = open_checkpoint(str(goldens / f"tiny-{model}"))
    weights = load_weights(checkpoint)
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == tensor_shapes(checkpoint.config)
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}


def test_one_file_gives_the_same_as_shards(goldens: Path, load_edited: Callable[[Edit], dict[str, Tensor]]) -> None:
    checkpoint = open_checkpoint(str(goldens / "tiny-deepseek_v4"))
    whole = load_edited(lambda tensors: None)
    assert fingerprint(checkpoint.config, whole) == fingerprint(checkpoint.config, load_weights(checkpoint))


def test_timm_file_gives_the_released_tower_without_learned_vectors(
    goldens: Path, released: dict[str, Tensor], tmp_path: Path
) -> None:
    shutil.copy(goldens / "tiny-deepseek_v4" / "config.json", tmp_path)
    weights = load_weights(open_checkpoint(str(write_timm_file(released, tmp_path))))
    expected = load_weights(open_checkpoint(str(goldens / "tiny-deepseek_v4")))
    assert weights.keys() == expected.keys() - set(LEARNED_VECTORS)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights.items())


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda tensors: tensors.pop("vision.blocks.1.attn.wo.bias"),
            r"has no tensor vision\.blocks\.1\.attn\.wo\.bias",
        ),
        (lambda tensors: tensors.pop("image_newline"), "has no tensor image_newline"),
        (
            lambda tensors: tensors.update({"aligner.w1.bias": torch.ones(97)}),
            r"aligner\.w1\.bias has shape \[97\], and the config makes it \[96\]",
        ),
        (lambda tensors: tensors["vision.norm.weight"][3:4].fill_(float("nan")), "vision.norm.weight"),
        (lambda tensors: tensors["image_end"][:1].fill_(float("-inf")), "image_end holds values that are not finite"),
        (
            lambda tensors: tensors.update({"image_start": torch.ones(96, dtype=torch.int32)}),
            r"image_start is torch\.int32",
        ),
        (
            lambda tensors: tensors.update({"vision.blocks.3.norm1.weight": torch.ones(64)}),
            r"vision\.blocks\.3\.norm1\.weight is not part of a tower of 3 layers",
        ),
    ],
    ids=["missing", "missing vector", "shape", "nan", "infinity", "integers", "a layer too many"],
)
def test_bad_tensor_is_an_error_that_names_it(
    load_edited: Callable[[Edit], dict[str, Tensor]], edit: Edit, message: str
) -> None:
    with pytest.raises(WeightsError, match=message):
        load_edited(edit)


def test_timm_error_names_the_tensor_as_timm_does(goldens: Path, released: dict[str, Tensor], tmp_path: Path) -> None:
    shutil.copy(goldens / "tiny-deepseek_v4" / "config.json", tmp_path)
    released["vision.blocks.2.attn.wqkv.bias"][0] = float("nan")
    with pytest.raises(WeightsError, match=r"blocks\.2\.attn\.qkv\.bias holds values that are not finite"):
        load_weights(open_checkpoint(str(write_timm_file(released, tmp_path))))


def test_tensor_in_two_files_is_an_error(goldens: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(goldens / "tiny-deepseek_v4"))
    copy = shutil.copy(checkpoint.files[0], tmp_path / "again.safetensors")
    doubled = dataclasses.replace(checkpoint, files=(*checkpoint.files, Path(copy)))
    with pytest.raises(WeightsError, match=r"and again in .*again\.safetensors"):
        load_weights(doubled)


def test_truncated_file_is_an_error_that_names_it(goldens: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(goldens / "tiny-deepseek_v4"))
    broken = tmp_path / "model-00001-of-00003.safetensors"
    broken.write_bytes(checkpoint.files[0].read_bytes()[:-10])
    with pytest.raises(WeightsError, match=r"cannot read .*model-00001-of-00003"):
        load_weights(dataclasses.replace(checkpoint, files=(broken, *checkpoint.files[1:])))


def test_random_weights_depend_on_seed_and_name_alone() -> None:
    demo = open_checkpoint("demo")
    weights = load_weights(demo)
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == tensor_shapes(demo.config)
    deeper = dataclasses.replace(demo, config=dataclasses.replace(demo.config, out_width=96))
    assert torch.equal(load_weights(deeper)["vision.norm.weight"], weights["vision.norm.weight"])
    assert not torch.equal(weights["image_start"], weights["image_end"])
    reseeded = dataclasses.replace(demo, seed=demo.seed + 1)
    assert not torch.equal(load_weights(reseeded)["image_start"], weights["image_start"])


def test_random_tower_keeps_its_scale_through_32_layers_and_tells_images_apart() -> None:
    config = dataclasses.replace(DEMO, num_layers=32)
    weights = load_weights(Checkpoint(name="deep", config=config, naming="random", files=()))
    tower = Tower(config, weights, device=torch.device("cpu"), dtype=torch.bfloat16)
    canvases = torch.randint(0, 256, (2, 42, 42, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    rows_MD = tower.encode(list(canvases), ["rows", "rows"]).float()
    assert 0.2 < rows_MD.std() < 5
    assert (rows_MD[0] - rows_MD[1]).std() > 0.2


def test_fingerprint_tells_config_name_and_every_bit_apart() -> None:
    weights = {"image_start": torch.zeros(8, dtype=torch.bfloat16), "image_end": torch.ones(8, dtype=torch.bfloat16)}
    one_bit = {**weights, "image_start": torch.tensor([0.0] * 7 + [-0.0], dtype=torch.bfloat16)}
    swapped = {"image_start": weights["image_end"], "image_end": weights["image_start"]}
    digests = [
        fingerprint(DEMO, weights),
        fingerprint(dataclasses.replace(DEMO, rope_theta=10001.0), weights),
        fingerprint(DEMO, one_bit),
        fingerprint(DEMO, swapped),
        fingerprint(DEMO, {name: tensor.view(torch.float16) for name, tensor in weights.items()}),
    ]
    assert len(set(digests)) == len(digests)
    assert all(len(digest) == 32 and int(digest, 16) >= 0 for digest in digests)


def test_fingerprint_does_not_depend_on_order() -> None:
    weights = load_weights(open_checkpoint("demo"))
    assert fingerprint(DEMO, dict(reversed(weights.items()))) == fingerprint(DEMO, weights)
