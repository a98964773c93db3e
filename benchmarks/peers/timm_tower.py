"""timm's port of the same tower, with weights of ours: what benchmarks.encoder and benchmarks.peers compare with.

Invariant: it computes what encoder.tower does, from the same canvases; only its way of doing it is its own.
"""

import importlib.metadata
import importlib.util
from functools import cache
from typing import Any

import torch
from torch import Tensor

from encoder.config import VisionConfig

_MODEL = "deepseek_vit_412m_enc"


def is_installed() -> bool:
    """Whether this interpreter has timm, as the one of the venv that requirements.txt describes has."""
    return importlib.util.find_spec("timm") is not None


def build_tower(
    config: VisionConfig, weights: dict[str, Tensor] | None, device: torch.device, dtype: torch.dtype
) -> Any:
    """timm's module for this config, with random weights where None are given. It takes (1, 3, H, W)."""
    if torch.version.cuda is None:
        _name_missing_operators()
    import timm
    from timm.models.deepseek_vit import checkpoint_filter_fn_encoder

    torch.manual_seed(0)
    tower = timm.create_model(
        _MODEL,
        pretrained=False,
        patch_size=config.patch_size,
        out_features=config.out_width,
        embed_dim=config.width,
        depth=config.num_layers,
        num_heads=config.num_heads,
        mlp_ratio=config.mlp_width / config.width,
        downsample_ratio=config.merge_ratio,
        rope_temperature=config.rope_theta,
    )
    if weights is not None:
        tower.load_state_dict(checkpoint_filter_fn_encoder(weights, tower))
    return tower.eval().requires_grad_(False).to(device, dtype)


def normalise(canvas: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A uint8 canvas as timm's tower takes it: a batch of one, in [-1, 1], (1, 3, H, W)."""
    pixels = canvas.to(device).permute(2, 0, 1).float()
    return ((pixels / 255 - 0.5) / 0.5).to(dtype).unsqueeze(0)


@cache
def _name_missing_operators() -> torch.library.Library | None:
    """Give torchvision, which timm imports, two names without which its import fails; the tower calls neither.

    Its wheel on PyPI is built for CUDA, and has no operators beside a CPU build of torch.
    """
    if importlib.metadata.version("torchvision").endswith("+cpu"):
        return None
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library  # in the cache, or its names would go with it
