"""The whole encoder on one device: canvases in, language-model rows out.

Invariant: rows leave in the order in which images came, as many for each as its grid and layout say. But for rounding,
they do not depend on what else was in the batch.

Shapes: N patches of one forward, P values of a patch, C tower width, M aligner rows, D language-model width, L learned
vectors, R rows of the answer, HWC a canvas.
"""

import logging
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from encoder.aligner import Aligner
from encoder.attention import AttentionName, choose_attention
from encoder.config import NUM_CHANNELS, VisionConfig
from encoder.cpu import bfloat16_units
from encoder.geometry import Grid, merge_grid
from encoder.graphs import CAPTURABLE, Graphs
from encoder.ladder import ladder
from encoder.layout import Layout, layout_index, num_layout_rows
from encoder.packing import Pack, normalise, pack, patchify, split_packs
from encoder.upload import upload, upload_beside
from encoder.vit import RMSNorm, VisionTransformer
from encoder.weights import LEARNED_VECTORS

log = logging.getLogger("patchgrid.tower")

# Measured on two cores in bfloat16: three images of 784 patches run no faster together than alone, ten 3 to 5 % faster.
# That is not worth their waiting for each other.
_MAX_PATCHES_CPU = 2560
# Not measured: ten of V4's largest images or three of V4.1's, with about 1 GB of activations in bfloat16.
_MAX_PATCHES_CUDA = 32768
# Not measured: the largest image of V4.1, or two to twelve of V4's. Beyond, arithmetic should outlast the launches.
_GRAPH_PATCHES_CUDA = 9216


class Tower:
    """Vision transformer and aligner in one computing type on one device, and the vectors that layouts place."""

    def __init__(
        self,
        config: VisionConfig,
        weights: dict[str, Tensor],
        *,
        device: torch.device,
        dtype: torch.dtype,
        attention: Literal["auto"] | AttentionName = "auto",
        max_patches_per_forward: int | None = None,
        graph_patches: int | None = None,
    ) -> None:
        """Place checked weights (see load_weights) on the device, and capture graphs.

        max_patches_per_forward bounds memory and, on a CPU, keeps activations near the cache; None takes the device's.
        An image with more patches runs alone.

        graph_patches is the largest forward that is replayed as a CUDA graph, 0 for none; None takes the device's. sdpa
        has no graphs. A CPU only pads by it, which is for tests. Graphs keep their memory from here on, so a lower
        max_patches_per_forward can be set at any time.

        Raises:
            AttentionUnavailable: the named attention cannot run in dtype on the device.
            ValueError: max_patches_per_forward is less than 1 or graph_patches than 0, or memory does not suffice for
                the graphs.
        """
        if max_patches_per_forward is None:
            max_patches_per_forward = _MAX_PATCHES_CPU if device.type == "cpu" else _MAX_PATCHES_CUDA
        if max_patches_per_forward < 1:
            raise ValueError(f"max_patches_per_forward is {max_patches_per_forward}; it must be at least 1")
        if graph_patches is not None and graph_patches < 0:
            raise ValueError(f"graph_patches is {graph_patches}; it must be at least 0")
        self.config = config
        self.device = device
        self.dtype = dtype
        self.max_patches_per_forward = max_patches_per_forward
        self.attention = choose_attention(attention, device, dtype)
        with torch.device("meta"):
            self._vit = VisionTransformer(config, self.attention)
            self._aligner = Aligner(config)
        _place(self._vit, "vision.", weights, device, dtype)
        _place(self._aligner, "aligner.", weights, device, dtype)
        has_vectors = all(name in weights for name in LEARNED_VECTORS)
        self.layouts: tuple[Layout, ...] = ("rows", "v4", "v41") if has_vectors else ("rows", "v4")
        self._learned_LD = torch.empty((0, config.out_width), dtype=dtype, device=device)
        if has_vectors:
            self._learned_LD = torch.stack([weights[name] for name in LEARNED_VECTORS]).to(device, dtype)
        self._copy_stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._graphs = self._make_graphs(graph_patches)

    @torch.inference_mode()
    def encode(self, canvases: Sequence[Tensor], layouts: Sequence[Layout]) -> Tensor:
        """Rows of every canvas, each in its layout, one behind the other: (R, D) in dtype on the device.

        Canvases are uint8 (H, W, 3) with sides that are multiples of the patch size, all on the CPU or all on the
        device. On CUDA the answer is queued, not awaited, on the current stream, which must be the same at every call.
        """
        assert len(canvases) == len(layouts)
        grids = [self._grid(canvas_HWC) for canvas_HWC in canvases]
        num_rows = [num_layout_rows(layout, self._llm_grid(grid)) for layout, grid in zip(layouts, grids, strict=True)]
        out_RD = torch.empty((sum(num_rows), self.config.out_width), dtype=self.dtype, device=self.device)
        filled = 0
        for images in split_packs([rows * cols for rows, cols in grids], self.max_patches_per_forward):
            span = slice(images.start, images.stop)
            patches_NP = self._patches(canvases[span])
            rows_MD = self._graphs.run(patches_NP, pack(grids[span], self.config, self.device))
            index_R = self._layout_index(layouts[span], [self._llm_grid(grid) for grid in grids[span]])
            assert len(index_R) == sum(num_rows[span])
            source_SD = torch.cat([rows_MD, self._learned_LD])
            part_RD = out_RD[filled : filled + len(index_R)]
            torch.index_select(source_SD, 0, upload(torch.from_numpy(index_R), self.device), out=part_RD)
            filled += len(index_R)
        return out_RD

    @torch.inference_mode()
    def forward(self, patches_NP: Tensor, pack: Pack) -> tuple[Tensor, Tensor]:
        """Normalised patches of one pack, in dtype, to vit_NC after the final norm and rows_MD in reading order."""
        vit_NC: Tensor = self._vit(patches_NP, pack)
        rows_MD: Tensor = self._aligner(vit_NC, pack)
        return vit_NC, rows_MD

    def _make_graphs(self, graph_patches: int | None) -> Graphs:
        cuda = self.device.type == "cuda"
        if graph_patches is None:
            graph_patches = _GRAPH_PATCHES_CUDA if cuda else 0
        if cuda and graph_patches and self.attention not in CAPTURABLE:
            log.info("no CUDA graphs: attention %r cannot be captured", self.attention)
            graph_patches = 0
        # No forward has more patches than either of these.
        largest_image = self.config.max_image_tokens * self.config.merge_ratio**2
        top_patches = min(graph_patches, max(self.max_patches_per_forward, largest_image))
        rungs = ladder(self.config, top_patches)
        return Graphs(self._rows, rungs, self.config, device=self.device, dtype=self.dtype)

    def _rows(self, patches_NP: Tensor, pack: Pack) -> Tensor:
        return self.forward(patches_NP, pack)[1]

    def _grid(self, canvas_HWC: Tensor) -> Grid:
        height, width, channels = canvas_HWC.shape
        side = self.config.patch_size
        assert canvas_HWC.dtype == torch.uint8
        assert channels == NUM_CHANNELS
        assert height % side == width % side == 0
        return height // side, width // side

    def _llm_grid(self, grid: Grid) -> Grid:
        rows, cols = grid
        side = self.config.patch_size
        return merge_grid(self.config, (cols * side, rows * side))

    def _patches(self, canvases: Sequence[Tensor]) -> Tensor:
        """Patches of all canvases, normalised where the tower runs: uint8 crosses to the device, in one copy."""
        if self._copy_stream is not None and canvases[0].device.type == "cpu":
            canvases = upload_beside(canvases, self._copy_stream)
        patches_NP = torch.cat([patchify(canvas_HWC, self.config.patch_size) for canvas_HWC in canvases])
        return normalise(patches_NP, self.dtype)

    def _layout_index(self, layouts: Sequence[Layout], llm_grids: Sequence[Grid]) -> NDArray[np.int64]:
        """Where each row of one forward's answer comes from: all its aligner rows, then the learned vectors."""
        counts = [rows * cols for rows, cols in llm_grids]
        first_learned = sum(counts)
        parts: list[NDArray[np.int64]] = []
        first_row = 0
        for layout, llm_grid, count in zip(layouts, llm_grids, counts, strict=True):
            assert layout in self.layouts
            index = layout_index(layout, llm_grid)
            parts.append(np.where(index < count, index + first_row, index - count + first_learned))
            first_row += count
        return np.concatenate(parts)


def choose_dtype(name: Literal["auto", "bfloat16", "float32"], device: torch.device) -> torch.dtype:
    """What to compute in: as named, or for "auto" bfloat16 on CUDA and on CPUs that multiply it natively."""
    if name == "bfloat16":
        return torch.bfloat16
    if name == "float32":
        return torch.float32
    return torch.bfloat16 if device.type == "cuda" or bfloat16_units() != "none" else torch.float32


def _place(
    module: nn.Module, prefix: str, weights: dict[str, Tensor], device: torch.device, dtype: torch.dtype
) -> None:
    """Give a module built on "meta" its weights: in dtype, but norms in float32. No copy where nothing changes."""
    norms = {f"{name}.weight" for name, part in module.named_modules() if isinstance(part, RMSNorm)}
    placed = {
        name: weights[prefix + name].to(device, torch.float32 if name in norms else dtype)
        for name in module.state_dict()
    }
    module.load_state_dict(placed, assign=True)
    module.requires_grad_(False).eval()
