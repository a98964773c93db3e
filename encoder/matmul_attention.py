"""Attention of one image by bfloat16 matrix products: for CPUs that multiply bfloat16 well and fuse attention badly.

torch's fused attention computes in float32 on a CPU without AMX, at a fifth of the rate of bfloat16 products. But a
bfloat16 product rounds its scores, which alone would cost attention up to a tenth of its accuracy where scores are
large. So scores are computed twice: once to find each query's largest, then less that largest, by one more feature of
query and key. Those that matter are near zero then, where bfloat16 is fine.

Invariant: as accurate as fused attention in bfloat16, whatever the scores' size. Blocks are chosen by the image's
length alone, so an image has the same bits in any pack.

Shapes: L rows of the image, B of a block of them, H heads, G of a group of them, D features of a head, E = D + 1.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

# The scores that are held at a time. Measured on two cores with 1 MiB of L2 each and 32 MiB of L3: 2 MiB costs 5 to
# 10 % more, 16 MiB up to 30 %.
_SCORES_BYTES = 4 * 2**20


def attend_by_matmul(q_LHD: Tensor, k_LHD: Tensor, v_LHD: Tensor, out_LHD: Tensor) -> None:
    """Write softmax(q k^T / sqrt(D)) v of one image into out_LHD. All bfloat16 on the CPU, of any strides; L > 0."""
    length, num_heads, head_dim = q_LHD.shape
    q_HLE = q_LHD.new_zeros(num_heads, length, head_dim + 1)
    torch.mul(q_LHD.transpose(0, 1), head_dim**-0.5, out=q_HLE[..., :head_dim])
    k_HLE = k_LHD.new_full((num_heads, length, head_dim + 1), -1.0)
    k_HLE[..., :head_dim] = k_LHD.transpose(0, 1)
    k_HEL, v_HLD, out_HLD = k_HLE.transpose(1, 2), v_LHD.transpose(0, 1), out_LHD.transpose(0, 1)
    for heads, rows in _blocks(num_heads, length):
        q_GBE = q_HLE[heads, rows]
        scores_GBL = torch.bmm(q_GBE, k_HEL[heads])
        q_GBE[..., head_dim] = largest(scores_GBL)
        torch.bmm(q_GBE, k_HEL[heads], out=scores_GBL)
        out_HLD[heads, rows] = torch.bmm(scores_GBL.softmax(dim=-1), v_HLD[heads])


def largest(x: Tensor) -> Tensor:
    """The largest of the last dimension of a bfloat16 tensor: amax, six times as fast."""
    # As integers, floats that are not negative are in order, and negative ones in reverse order below them.
    bits = x.view(torch.int16)
    highest, lowest = bits.amax(dim=-1), bits.amin(dim=-1)
    return torch.where(highest < 0, lowest, highest).view(torch.bfloat16)


def _blocks(num_heads: int, length: int) -> Iterator[tuple[slice, slice]]:
    """Cut (heads, rows) of the scores into blocks: several heads whole, or else one head's rows in even parts."""
    score_bytes = length * torch.bfloat16.itemsize
    group = max(1, _SCORES_BYTES // (length * score_bytes))
    parts = -(-length // max(1, _SCORES_BYTES // score_bytes))
    block = -(-length // parts)
    for head in range(0, num_heads, group):
        for row in range(0, length, block):
            yield slice(head, head + group), slice(row, row + block)
