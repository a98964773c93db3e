"""The vision transformer: pixels of packed patches to one row of features per patch.

Invariant: packed only. One image is a pack of one, and nothing but attention looks beyond a row. Modules and parameters
carry the released checkpoints' names. Norms and rotations compute in float32 whatever the tower computes in.

Shapes: N rows of the pack, C tower width, P values of a patch, H heads, D features of a head, R = D / 2.
"""

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu

from encoder.attention import AttentionName, attention
from encoder.config import VisionConfig
from encoder.packing import Pack

# The config files' rms_norm_eps is the language model's.
NORM_EPS = 1e-6


class RMSNorm(nn.Module):
    """Root-mean-square norm in float32, weight included; the answer has the type of the question."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, dtype=torch.float32))

    def forward(self, x_NC: Tensor) -> Tensor:
        return rms_norm(x_NC.float(), self.weight.shape, self.weight, NORM_EPS).to(x_NC.dtype)


class Attention(nn.Module):
    """Multi-head attention within each image, with two-dimensional rotary positions."""

    def __init__(self, config: VisionConfig, name: AttentionName) -> None:
        super().__init__()
        self.wqkv = nn.Linear(config.width, 3 * config.width)
        self.wo = nn.Linear(config.width, config.width)
        self.head_shape = (config.num_heads, config.head_dim)
        self.name: AttentionName = name

    def forward(self, x_NC: Tensor, pack: Pack) -> Tensor:
        qkv_N3HD: Tensor = self.wqkv(x_NC).unflatten(1, (3, *self.head_shape))
        rotate_(qkv_N3HD[:, :2], pack.cos_NR[:, None, None], pack.sin_NR[:, None, None])
        q_NHD, k_NHD, v_NHD = qkv_N3HD.unbind(1)
        out_NHD = attention(q_NHD, k_NHD, v_NHD, pack, self.name)
        out_NC: Tensor = self.wo(out_NHD.flatten(1))
        return out_NC


class MLP(nn.Module):
    """SwiGLU without bias; w1 holds the gate's rows, then those of what it gates."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.width, 2 * config.mlp_width, bias=False)
        self.w2 = nn.Linear(config.mlp_width, config.width, bias=False)

    def forward(self, x_NC: Tensor) -> Tensor:
        gate, gated = self.w1(x_NC).chunk(2, dim=-1)
        out_NC: Tensor = self.w2(silu(gate).mul_(gated))
        return out_NC


class Block(nn.Module):
    """One pre-norm layer. Adds to its argument in place."""

    def __init__(self, config: VisionConfig, name: AttentionName) -> None:
        super().__init__()
        self.norm1 = RMSNorm(config.width)
        self.attn = Attention(config, name)
        self.norm2 = RMSNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, x_NC: Tensor, pack: Pack) -> Tensor:
        x_NC.add_(self.attn(self.norm1(x_NC), pack))
        return x_NC.add_(self.mlp(self.norm2(x_NC)))


class VisionTransformer(nn.Module):
    """Patches to features: embedding, blocks, final norm."""

    def __init__(self, config: VisionConfig, attention: AttentionName) -> None:
        super().__init__()
        self.patch_embed = nn.Sequential(OrderedDict(proj=nn.Linear(config.patch_dim, config.width)))
        self.blocks = nn.ModuleList(Block(config, attention) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.width)

    def forward(self, patches_NP: Tensor, pack: Pack) -> Tensor:
        x_NC: Tensor = self.patch_embed(patches_NP)
        for block in self.blocks:
            x_NC = block(x_NC, pack)
        vit_NC: Tensor = self.norm(x_NC)
        return vit_NC


def rotate_(x_NJHD: Tensor, cos_N11R: Tensor, sin_N11R: Tensor) -> None:
    """Turn each pair (i, i + R) of every head's features by its row's angle i, in place, computed in float32."""
    first, second = x_NJHD.float().chunk(2, dim=-1)
    x_first, x_second = x_NJHD.chunk(2, dim=-1)
    # In float32 first and second are x_NJHD itself: both results must exist before either is written.
    turned_first = (first * cos_N11R).addcmul_(second, sin_N11R, value=-1)
    turned_second = (second * cos_N11R).addcmul_(first, sin_N11R)
    x_first.copy_(turned_first)
    x_second.copy_(turned_second)
