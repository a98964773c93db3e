"""Both models' config.json, and every way a field can be wrong."""

import copy
import dataclasses
import json
from pathlib import Path

import pytest

from encoder.config import DEEPSEEK_V4, DEEPSEEK_V41, DEMO, ConfigError, VisionConfig, load_config, parse_config

V4_FIELDS: dict[str, object] = {
    "model_type": "deepseek_v4",
    "hidden_size": 4096,
    "rms_norm_eps": 1e-20,
    "vision_n_layers": 32,
    "vision_dim": 1024,
    "vision_n_heads": 16,
    "vision_inter_dim": 2816,
    "vision_patch_size": 14,
    "vision_rope_theta": 10000,
    "vision_downsample_ratio": 3,
    "vision_max_n_token": 384,
    "vision_min_pixels": 147456,
    "vision_max_wh_ratio": 8,
}

V41_FIELDS: dict[str, object] = {
    "model_type": "deepseek_v41",
    "text_config": {"hidden_size": 5120},
    "vision_config": {
        "num_hidden_layers": 32,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "intermediate_size": 2816,
        "patch_size": 14,
        "rope_theta": 10000.0,
        "downsample_ratio": 3,
        "max_image_tokens": 1024,
        "min_pixels": 295936,
        "max_wh_ratio": None,
    },
}

V4_NAMES = [name for name in V4_FIELDS if name not in ("model_type", "rms_norm_eps")]
V41_NAMES = [
    "text_config.hidden_size",
    "vision_config.num_hidden_layers",
    "vision_config.hidden_size",
    "vision_config.num_attention_heads",
    "vision_config.intermediate_size",
    "vision_config.patch_size",
    "vision_config.rope_theta",
    "vision_config.downsample_ratio",
    "vision_config.max_image_tokens",
    "vision_config.min_pixels",
    "vision_config.max_wh_ratio",
]
NAMES = [(V4_FIELDS, name) for name in V4_NAMES] + [(V41_FIELDS, name) for name in V41_NAMES]


def changed(fields: dict[str, object], name: str, value: object = None, *, drop: bool = False) -> dict[str, object]:
    """A deep copy of the fields with one dotted name set or dropped."""
    fields = copy.deepcopy(fields)
    inner = fields
    *parents, last = name.split(".")
    for parent in parents:
        inner = inner[parent]  # type: ignore[assignment]
    if drop:
        del inner[last]
    else:
        inner[last] = value
    return fields


def test_released_values_of_v4() -> None:
    assert parse_config(V4_FIELDS) == DEEPSEEK_V4


def test_released_values_of_v41() -> None:
    assert parse_config(V41_FIELDS) == DEEPSEEK_V41


def test_derived_sizes() -> None:
    assert (DEEPSEEK_V4.head_dim, DEEPSEEK_V4.patch_dim) == (64, 588)
    assert (DEMO.head_dim, DEMO.patch_dim) == (64, 588)


def test_demo_cuts_images_as_v4_does() -> None:
    geometry = ("model_type", "patch_size", "merge_ratio", "max_image_tokens", "min_pixels", "max_aspect_ratio")
    assert [getattr(DEMO, name) for name in geometry] == [getattr(DEEPSEEK_V4, name) for name in geometry]


def test_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        DEEPSEEK_V4.width = 1  # type: ignore[misc]


@pytest.mark.parametrize(("model", "out_width"), [("deepseek_v4", 96), ("deepseek_v41", 80)])
def test_tiny_checkpoints_load_from_folder_and_from_file(goldens: Path, model: str, out_width: int) -> None:
    folder = goldens / f"tiny-{model}"
    config = load_config(folder)
    assert config == load_config(folder / "config.json")
    assert (config.model_type, config.num_layers, config.width, config.out_width) == (model, 3, 64, out_width)


@pytest.mark.parametrize(("fields", "name"), NAMES)
def test_missing_field_is_named(fields: dict[str, object], name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name} is missing$"):
        parse_config(changed(fields, name, drop=True))


@pytest.mark.parametrize("value", ["32", True, [32], float("nan"), float("inf"), -1, -0.5])
@pytest.mark.parametrize(("fields", "name"), NAMES)
def test_wrong_value_is_named(fields: dict[str, object], name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{name} is "):
        parse_config(changed(fields, name, value))


@pytest.mark.parametrize(
    ("fields", "name"), [pair for pair in NAMES if not pair[1].endswith(("min_pixels", "max_wh_ratio"))]
)
@pytest.mark.parametrize("value", [0, None])
def test_zero_and_null_are_refused(fields: dict[str, object], name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{name} is "):
        parse_config(changed(fields, name, value))


def test_integer_fields_refuse_fractions() -> None:
    with pytest.raises(ConfigError, match=r"^vision_patch_size is 14.0; it must be an integer$"):
        parse_config(changed(V4_FIELDS, "vision_patch_size", 14.0))


def test_aspect_ratio_may_be_null_for_v4_and_set_for_v41() -> None:
    assert parse_config(changed(V4_FIELDS, "vision_max_wh_ratio", None)).max_aspect_ratio is None
    assert parse_config(changed(V41_FIELDS, "vision_config.max_wh_ratio", 2.5)).max_aspect_ratio == 2.5


def test_aspect_ratio_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^vision_max_wh_ratio is 0.5; it must be at least 1"):
        parse_config(changed(V4_FIELDS, "vision_max_wh_ratio", 0.5))


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(ConfigError, match=r"^vision_dim is 1024: not a multiple of vision_n_heads, 15$"):
        parse_config(changed(V4_FIELDS, "vision_n_heads", 15))


def test_head_must_hold_two_axes_of_rotated_pairs() -> None:
    with pytest.raises(ConfigError, match=r"^vision_config.hidden_size / vision_config.num_attention_heads is 2:"):
        parse_config(changed(V41_FIELDS, "vision_config.num_attention_heads", 512))


def test_budget_too_small_for_any_image_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^vision_max_n_token is 15; it must be at least 16$"):
        parse_config(changed(V4_FIELDS, "vision_max_n_token", 15))


@pytest.mark.parametrize("model_type", ["llama", None, 4, ["deepseek_v4"]])
def test_unknown_model_type_is_refused(model_type: object) -> None:
    with pytest.raises(ConfigError, match=r"^model_type is "):
        parse_config(changed(V4_FIELDS, "model_type", model_type))


def test_parent_that_is_not_an_object_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^vision_config.num_hidden_layers is missing$"):
        parse_config(changed(V41_FIELDS, "vision_config", 7))


def test_number_too_large_for_a_float_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^vision_rope_theta is "):
        parse_config(changed(V4_FIELDS, "vision_rope_theta", 10**400))


def test_loading_names_the_file_and_the_field(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(changed(V4_FIELDS, "vision_dim", drop=True)))
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path)
    assert str(caught.value) == f"{file}: vision_dim is missing"


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*config\.json: No such file"):
        load_config(tmp_path)


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b'{"a": 1} trailing', b"[" * 100_000])
def test_file_that_is_not_json_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.json is not JSON"):
        load_config(tmp_path)


def test_file_that_is_not_an_object_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="holds a JSON list, not an object"):
        load_config(tmp_path)


def test_every_field_is_read_from_its_own_place() -> None:
    """Each field moved off its released value shows up in exactly one attribute."""
    for fields, released in ((V4_FIELDS, DEEPSEEK_V4), (V41_FIELDS, DEEPSEEK_V41)):
        for known, name in NAMES:
            if known is not fields:
                continue
            value = 2048 if name.endswith(("vision_dim", "vision_config.hidden_size")) else 32
            value = 33 if name.endswith("layers") else value
            config = parse_config(changed(fields, name, value))
            moved = [
                f.name for f in dataclasses.fields(VisionConfig) if getattr(config, f.name) != getattr(released, f.name)
            ]
            assert len(moved) == 1, name
