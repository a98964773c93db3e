"""The shape of one vision tower, read from either model's config.json.

Invariant: every number comes from the file. Nothing falls back on a default, because the other model's value
is never right; a field that is missing or wrong is an error that names it as the file spells it.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

ModelType = Literal["deepseek_v4", "deepseek_v41"]

NUM_CHANNELS = 3

# Two rows of two columns with their markers, after V4 has set its leading pads aside: less is no image.
MIN_IMAGE_TOKENS = 16


class ConfigError(ValueError):
    """A config.json that cannot be read, or a field of it that is missing or wrong."""


class ModelTypeError(ConfigError):
    """A config.json of some other kind of model."""


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """What the tower is and how images are cut for it. Sizes in pixels, widths in features."""

    model_type: ModelType
    num_layers: int
    width: int
    num_heads: int
    mlp_width: int
    patch_size: int
    rope_theta: float
    merge_ratio: int
    max_image_tokens: int
    min_pixels: int
    max_aspect_ratio: int | float | None
    out_width: int

    @property
    def head_dim(self) -> int:
        """Features per attention head."""
        return self.width // self.num_heads

    @property
    def patch_dim(self) -> int:
        """Values in one flattened patch: channels x side x side."""
        return NUM_CHANNELS * self.patch_size**2


@dataclass(frozen=True, slots=True)
class _FieldNames:
    """Where a model's config.json keeps each value; a dot goes one object deeper."""

    num_layers: str
    width: str
    num_heads: str
    mlp_width: str
    patch_size: str
    rope_theta: str
    merge_ratio: str
    max_image_tokens: str
    min_pixels: str
    max_aspect_ratio: str
    out_width: str


_FIELD_NAMES: dict[ModelType, _FieldNames] = {
    "deepseek_v4": _FieldNames(
        num_layers="vision_n_layers",
        width="vision_dim",
        num_heads="vision_n_heads",
        mlp_width="vision_inter_dim",
        patch_size="vision_patch_size",
        rope_theta="vision_rope_theta",
        merge_ratio="vision_downsample_ratio",
        max_image_tokens="vision_max_n_token",
        min_pixels="vision_min_pixels",
        max_aspect_ratio="vision_max_wh_ratio",
        out_width="hidden_size",
    ),
    "deepseek_v41": _FieldNames(
        num_layers="vision_config.num_hidden_layers",
        width="vision_config.hidden_size",
        num_heads="vision_config.num_attention_heads",
        mlp_width="vision_config.intermediate_size",
        patch_size="vision_config.patch_size",
        rope_theta="vision_config.rope_theta",
        merge_ratio="vision_config.downsample_ratio",
        max_image_tokens="vision_config.max_image_tokens",
        min_pixels="vision_config.min_pixels",
        max_aspect_ratio="vision_config.max_wh_ratio",
        out_width="text_config.hidden_size",
    ),
}


def parse_config(fields: Mapping[str, object]) -> VisionConfig:
    """Read a decoded config.json of either released model.

    Raises:
        ConfigError: a field is missing, of the wrong type or out of range; the message names the field.
        ModelTypeError: the model is neither of the two.
    """
    model_type = _model_type(fields)
    names = _FIELD_NAMES[model_type]
    config = VisionConfig(
        model_type=model_type,
        num_layers=_integer(fields, names.num_layers),
        width=_integer(fields, names.width),
        num_heads=_integer(fields, names.num_heads),
        mlp_width=_integer(fields, names.mlp_width),
        patch_size=_integer(fields, names.patch_size),
        rope_theta=float(_number(fields, names.rope_theta)),
        merge_ratio=_integer(fields, names.merge_ratio),
        max_image_tokens=_integer(fields, names.max_image_tokens, least=MIN_IMAGE_TOKENS),
        min_pixels=_integer(fields, names.min_pixels, least=0),
        max_aspect_ratio=_aspect_ratio(fields, names.max_aspect_ratio),
        out_width=_integer(fields, names.out_width),
    )
    if config.width % config.num_heads:
        raise ConfigError(f"{names.width} is {config.width}: not a multiple of {names.num_heads}, {config.num_heads}")
    if config.head_dim % 4:
        raise ConfigError(
            f"{names.width} / {names.num_heads} is {config.head_dim}: two-dimensional RoPE needs a multiple of 4"
        )
    return config


def load_config(path: Path) -> VisionConfig:
    """Read a config.json, given its path or its folder's.

    Raises:
        ConfigError: the file cannot be read, is not a JSON object, or has a wrong field.
        ModelTypeError: the model is neither of the two.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        fields = json.loads(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{file} holds a JSON {type(fields).__name__}, not an object")
    try:
        return parse_config(fields)
    except ConfigError as error:
        raise type(error)(f"{file}: {error}") from error


def _model_type(fields: Mapping[str, object]) -> ModelType:
    found = fields.get("model_type")
    for known in _FIELD_NAMES:
        if found == known:
            return known
    raise ModelTypeError(f"model_type is {found!r}; the models with a known vision tower are {', '.join(_FIELD_NAMES)}")


def _lookup(fields: Mapping[str, object], name: str) -> object:
    value: object = fields
    for key in name.split("."):
        if not isinstance(value, Mapping) or key not in value:
            raise ConfigError(f"{name} is missing")
        value = value[key]
    return value


def _integer(fields: Mapping[str, object], name: str, *, least: int = 1) -> int:
    value = _lookup(fields, name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}; it must be an integer")
    if value < least:
        raise ConfigError(f"{name} is {value}; it must be at least {least}")
    return value


def _number(fields: Mapping[str, object], name: str) -> int | float:
    value = _lookup(fields, name)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}; it must be a number")
    if not 0 < value <= sys.float_info.max:
        raise ConfigError(f"{name} is {value}; it must be finite and greater than 0")
    return value


def _aspect_ratio(fields: Mapping[str, object], name: str) -> int | float | None:
    if _lookup(fields, name) is None:
        return None
    ratio = _number(fields, name)
    if ratio < 1:
        raise ConfigError(f"{name} is {ratio}; it must be at least 1, or null for no limit")
    return ratio


DEEPSEEK_V4 = VisionConfig(
    model_type="deepseek_v4",
    num_layers=32,
    width=1024,
    num_heads=16,
    mlp_width=2816,
    patch_size=14,
    rope_theta=10000.0,
    merge_ratio=3,
    max_image_tokens=384,
    min_pixels=147456,
    max_aspect_ratio=8,
    out_width=4096,
)

DEEPSEEK_V41 = VisionConfig(
    model_type="deepseek_v41",
    num_layers=32,
    width=1024,
    num_heads=16,
    mlp_width=2816,
    patch_size=14,
    rope_theta=10000.0,
    merge_ratio=3,
    max_image_tokens=1024,
    min_pixels=295936,
    max_aspect_ratio=None,
    out_width=5120,
)

DEMO = replace(DEEPSEEK_V4, num_layers=4, width=256, num_heads=4, mlp_width=704, out_width=512)
