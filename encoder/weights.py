"""A checkpoint's tensors, by their released names, whatever file or seed they come from.

Invariant: what this returns is complete, finite and of the right shapes; anything else is an error that names the
tensor as its file does. Tensors are on the CPU, in the type in which they are stored.
"""

import hashlib
import math
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from encoder.checkpoint import Checkpoint, tensor_shapes
from encoder.config import NUM_CHANNELS, VisionConfig

# What the released language models place between rows. Layout v41 needs them; timm's files have none.
LEARNED_VECTORS = ("image_start", "image_newline", "image_end")

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_TIMM_NAMES = {
    "vision.": "",
    "attn.wqkv.": "attn.qkv.",
    "attn.wo.": "attn.proj.",
    "mlp.w1.": "mlp.fc1.",
    "mlp.w2.": "mlp.fc2.",
    "aligner.w1.": "aligner.fc1.",
    "aligner.w2.": "aligner.fc2.",
}


class WeightsError(ValueError):
    """Weights that are missing, unreadable, misshapen or not finite; the message names the tensor and its file."""


def load_weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """All tensors of the tower by released name; LEARNED_VECTORS only if the file is not in timm's layout.

    Raises:
        WeightsError: a file cannot be read; a tensor is missing, of another shape or type, or holds NaN or infinity.
    """
    config = checkpoint.config
    if checkpoint.naming == "random":
        return {
            name: _draw(name, shape, config.num_layers, checkpoint.seed)
            for name, shape in tensor_shapes(config).items()
        }
    timm = checkpoint.naming == "timm"
    found = _read_files(checkpoint)
    weights: dict[str, Tensor] = {}
    for name, shape in tensor_shapes(config).items():
        file_name = _timm_name(name) if timm else name
        if file_name in found:
            file, tensor = found[file_name]
            weights[name] = _checked(file_name, tensor, _file_shape(name, shape, config, timm), file).reshape(shape)
        elif not (timm and name in LEARNED_VECTORS):
            raise WeightsError(f"{checkpoint.name} has no tensor {file_name}")
    return weights


def fingerprint(config: VisionConfig, weights: dict[str, Tensor]) -> str:
    """32 hex digits that differ whenever the config, a tensor's name, type or shape, or one bit of its data differs."""
    digest = hashlib.blake2b(repr(config).encode(), digest_size=16)
    for name, tensor in sorted(weights.items()):
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _read_files(checkpoint: Checkpoint) -> dict[str, tuple[Path, Tensor]]:
    """Every tensor of the tower in the checkpoint's files, by the file's own name. Data is mapped, not copied."""
    timm = checkpoint.naming == "timm"
    wanted = {_timm_name(name) if timm else name for name in tensor_shapes(checkpoint.config)}
    blocks = "blocks." if timm else "vision.blocks."
    found: dict[str, tuple[Path, Tensor]] = {}
    for file in checkpoint.files:
        try:
            with safe_open(file, framework="pt", device="cpu") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (safe_open is no mapping)
                    if name in found:
                        raise WeightsError(f"{name} is in {found[name][0]} and again in {file}")
                    if name in wanted:
                        found[name] = (file, tensors.get_tensor(name))
                    elif name.startswith(blocks):
                        raise WeightsError(
                            f"{file}: {name} is not part of a tower of {checkpoint.config.num_layers} layers"
                        )
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"cannot read {file}: {error}") from error
    return found


def _checked(name: str, tensor: Tensor, shape: tuple[int, ...], file: Path) -> Tensor:
    if tensor.shape != shape:
        raise WeightsError(f"{file}: {name} has shape {list(tensor.shape)}, and the config makes it {list(shape)}")
    if tensor.dtype not in _DTYPES:
        raise WeightsError(f"{file}: {name} is {tensor.dtype}; it must be bfloat16, float16 or float32")
    # NaN and either infinity show in the extremes, which one pass finds without a second tensor.
    if not all(extreme.isfinite() for extreme in torch.aminmax(tensor)):
        raise WeightsError(f"{file}: {name} holds values that are not finite")
    return tensor


def _timm_name(name: str) -> str:
    for released, timm in _TIMM_NAMES.items():
        name = name.replace(released, timm)
    return name


def _file_shape(name: str, shape: tuple[int, ...], config: VisionConfig, timm: bool) -> tuple[int, ...]:
    """timm embeds patches by a convolution; its weight flattens to the released one."""
    if timm and name == "vision.patch_embed.proj.weight":
        return (config.width, NUM_CHANNELS, config.patch_size, config.patch_size)
    return shape


def _draw(name: str, shape: tuple[int, ...], num_layers: int, seed: int) -> Tensor:
    """Random bfloat16 weights that depend on seed and name alone, and keep activations near 1 at any depth.

    Uniform rather than normal: the CPU's generator gives the same bits on every machine, and 460 million in a second.
    """
    centre, deviation = 0.0, 0.1
    if len(shape) == 2:
        deviation = 1 / math.sqrt(shape[1])
        if name.endswith(("attn.wo.weight", "mlp.w2.weight")):
            deviation /= math.sqrt(2 * num_layers)
    elif name in LEARNED_VECTORS:
        deviation = 1.0
    elif not name.endswith("bias"):
        centre = 1.0
    name_seed = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=4).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(name_seed, "little"))
    reach = math.sqrt(3) * deviation
    return torch.empty(shape).uniform_(centre - reach, centre + reach, generator=generator).to(torch.bfloat16)
