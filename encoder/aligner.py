"""The aligner: each block of merge_ratio x merge_ratio neighbouring patches to one row for the language model.

Invariant: packed only, and a block that sticks out of its image sees zeros there, never a neighbour's rows.

Shapes: N rows of the pack, M aligner rows, K patches of a block, C tower width, D language-model width.
"""

from torch import Tensor, nn
from torch.nn.functional import gelu

from encoder.config import VisionConfig
from encoder.packing import Pack


class Aligner(nn.Module):
    """Fold, Linear, exact GELU, Linear. Parameters carry the released checkpoints' names."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.width * config.merge_ratio**2, config.out_width)
        self.w2 = nn.Linear(config.out_width, config.out_width)

    def forward(self, vit_NC: Tensor, pack: Pack) -> Tensor:
        rows_MD: Tensor = self.w2(gelu(self.w1(fold(vit_NC, pack))))
        return rows_MD


def fold(vit_NC: Tensor, pack: Pack) -> Tensor:
    """Gather the patches of each block, channel-major: (M, C * K), index c * K + dy * merge_ratio + dx."""
    blocks_MKC = vit_NC.index_select(0, pack.merge_index_MK.flatten()).view(*pack.merge_index_MK.shape, vit_NC.shape[1])
    blocks_MKC.masked_fill_(~pack.merge_mask_MK.unsqueeze(-1), 0)
    return blocks_MKC.transpose(1, 2).flatten(1)
