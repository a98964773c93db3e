"""Which files hold a model's vision tower, and the shape it has; the tensors themselves are read elsewhere.

Invariant: of a checkpoint's shards only those that its index names for the tower are looked at or downloaded.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HFValidationError
from safetensors import SafetensorError, safe_open

from encoder.config import DEEPSEEK_V4, DEEPSEEK_V41, DEMO, ModelTypeError, VisionConfig, load_config

Naming = Literal["released", "timm", "random"]

_CONFIG = "config.json"
_INDEX = "model.safetensors.index.json"
_WHOLE = "model.safetensors"

_SEEDED = {"demo": DEMO, "random:deepseek_v4": DEEPSEEK_V4, "random:deepseek_v41": DEEPSEEK_V41}
_SEED = 0

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


class CheckpointError(ValueError):
    """A model that cannot be found, or files that do not hold a whole tower."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Where a tower's tensors come from. `random` has no files: its tensors are drawn from the seed."""

    name: str
    config: VisionConfig
    naming: Naming
    files: tuple[Path, ...]
    seed: int = _SEED

    @property
    def location(self) -> str:
        """What opens this very checkpoint again on this host, also when its hub id means a newer commit by then."""
        if not self.files:
            return self.name
        return str(self.files[0] if len(self.files) == 1 else self.files[0].parent)


def open_checkpoint(model: str) -> Checkpoint:
    """Find the tower of a model: `demo`, `random:deepseek_v4`, `random:deepseek_v41`, a folder, a file or a hub id.

    A folder holds config.json and either an index with its shards or a single model.safetensors. A file is a tower in
    the released or in timm's naming; timm's needs no config.json if its aligner is as wide as a released one. Of a hub
    id, config.json, the index and the tower's shards are downloaded, or found in the local cache.

    Raises:
        CheckpointError: there is no such model, or a file or an entry of its index is missing.
        ConfigError: its config.json is wrong.
    """
    if model in _SEEDED:
        return Checkpoint(name=model, config=_SEEDED[model], naming="random", files=())
    path = Path(model).expanduser()
    if path.is_dir():
        return _open_folder(path, path.resolve().name)
    if path.is_file():
        return _open_file(path, path.stem)
    if _HUB_ID.fullmatch(model) and path.suffix != ".safetensors":
        return _open_folder(_download_tower(model), model)
    raise CheckpointError(f"{model} is not {', '.join(_SEEDED)}, a folder or file that exists, or a hub id (org/name)")


def open_config(model: str) -> VisionConfig:
    """The config of a model, named as for `open_checkpoint`; of a hub id, config.json is all that is downloaded.

    Raises:
        CheckpointError, ConfigError: as `open_checkpoint`.
    """
    if Path(model).expanduser().exists() or not _HUB_ID.fullmatch(model):
        return open_checkpoint(model).config
    return load_config(_download(model, _CONFIG))


def tensor_shapes(config: VisionConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the tower by its released name, with its shape.

    Linear weights are (out, in). `wqkv` stacks q, k, v and the MLP's `w1` gate over up. V4's `image_pad` is not among
    them: the pads are the language model's.
    """
    width, mlp_width, out_width = config.width, config.mlp_width, config.out_width
    shapes: dict[str, tuple[int, ...]] = {
        "vision.patch_embed.proj.weight": (width, config.patch_dim),
        "vision.patch_embed.proj.bias": (width,),
    }
    for layer in range(config.num_layers):
        block = f"vision.blocks.{layer}"
        shapes |= {
            f"{block}.norm1.weight": (width,),
            f"{block}.attn.wqkv.weight": (3 * width, width),
            f"{block}.attn.wqkv.bias": (3 * width,),
            f"{block}.attn.wo.weight": (width, width),
            f"{block}.attn.wo.bias": (width,),
            f"{block}.norm2.weight": (width,),
            f"{block}.mlp.w1.weight": (2 * mlp_width, width),
            f"{block}.mlp.w2.weight": (width, mlp_width),
        }
    return shapes | {
        "vision.norm.weight": (width,),
        "aligner.w1.weight": (out_width, width * config.merge_ratio**2),
        "aligner.w1.bias": (out_width,),
        "aligner.w2.weight": (out_width, out_width),
        "aligner.w2.bias": (out_width,),
        "image_start": (out_width,),
        "image_newline": (out_width,),
        "image_end": (out_width,),
    }


def _open_folder(folder: Path, name: str) -> Checkpoint:
    index = folder / _INDEX
    if not index.is_file():
        return _open_file(folder / _WHOLE, name)
    config = load_config(folder)
    files = tuple(folder / shard for shard in _tower_shards(index, config))
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{index} names {file.name} for the vision tower, and there is no such file")
    return Checkpoint(name=name, config=config, naming="released", files=files)


def _open_file(file: Path, name: str) -> Checkpoint:
    shapes = _read_shapes(file)
    if "vision.patch_embed.proj.weight" in shapes:
        return Checkpoint(name=name, config=load_config(file.parent), naming="released", files=(file,))
    if "patch_embed.proj.weight" in shapes:
        return Checkpoint(name=name, config=_timm_config(file, shapes), naming="timm", files=(file,))
    raise CheckpointError(
        f"{file} holds no vision tower: neither vision.patch_embed.proj.weight nor, as timm has it, "
        "patch_embed.proj.weight is in it"
    )


def _read_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    try:
        with safe_open(file, framework="np") as opened:
            names = opened.keys()
            return {name: tuple(opened.get_slice(name).get_shape()) for name in names}
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error}") from error
    except SafetensorError as error:
        raise CheckpointError(f"{file} is not a whole safetensors file: {error}") from error


def _timm_config(file: Path, shapes: dict[str, tuple[int, ...]]) -> VisionConfig:
    if (file.parent / _CONFIG).is_file():
        try:
            return load_config(file.parent)
        except ModelTypeError:
            pass  # timm writes a config.json of its own, which knows nothing of image sizes
    if "aligner.fc2.weight" not in shapes:
        raise CheckpointError(f"{file} has no aligner.fc2.weight: it is timm's classifier, not its encoder")
    out_width = shapes["aligner.fc2.weight"][0]
    for released in (DEEPSEEK_V4, DEEPSEEK_V41):
        if released.out_width == out_width:
            return released
    raise CheckpointError(
        f"aligner.fc2.weight of {file} has {out_width} rows, as no released model has: it needs its {_CONFIG} beside it"
    )


def _download_tower(repo: str) -> Path:
    """Fetch what of a hub repository holds the tower, all of one commit, and return its folder in the local cache."""
    folder = _download(repo, _CONFIG).parent
    commit = folder.name
    try:
        index = _download(repo, _INDEX, commit)
    except EntryNotFoundError:
        _download(repo, _WHOLE, commit)
        return folder
    for shard in _tower_shards(index, load_config(folder)):
        _download(repo, shard, commit)
    return folder


def _download(repo: str, file: str, commit: str | None = None) -> Path:
    try:
        return Path(hf_hub_download(repo, file, revision=commit))
    except (OSError, EntryNotFoundError, HFValidationError) as error:
        if file == _INDEX and isinstance(error, EntryNotFoundError):
            raise
        raise CheckpointError(
            f"there is no folder {repo} here, and as a hub id it cannot be fetched: {error}"
        ) from error


def _tower_shards(index: Path, config: VisionConfig) -> tuple[str, ...]:
    """The names of the files that the index gives for the tower's tensors, sorted."""
    try:
        fields = json.loads(index.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{index} is not JSON: {error}") from error
    weight_map = fields.get("weight_map") if isinstance(fields, dict) else None
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index} has no weight_map")
    shards = set()
    for name in tensor_shapes(config):
        shard = weight_map.get(name)
        if shard is None:
            raise CheckpointError(f"{index} does not say which file holds {name}")
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise CheckpointError(f"{index} gives {shard!r} for {name}, which is not a safetensors file beside it")
        shards.add(shard)
    return tuple(sorted(shards))
