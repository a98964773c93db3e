"""Forwards through buffers that stay in place, so that CUDA can replay them as graphs.

A forward is hundreds of kernels, and a single image's are done sooner than the host can launch them one by one. A graph
launches all at once, but always the same ones on the same memory. So a pack is padded to the next rung of a ladder of
sizes, each of which has a graph; a pack without a rung is computed as it is.

Invariant: padding changes nothing but rounding. It is one more image, of zeros, behind those of the pack: rows that
attention leaves out would keep what the memory held before, and kernels that multiply such a row by zero, rather than
skip it, spread its NaN to the image before it.

Shapes: N patches of the rung, P values of a patch, M aligner rows, D language-model width.
"""

import logging
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from encoder.attention import AttentionName
from encoder.config import VisionConfig
from encoder.ladder import Rung, find_rung
from encoder.packing import Pack

log = logging.getLogger("patchgrid.graphs")

CAPTURABLE: tuple[AttentionName, ...] = ("flash_attn", "varlen")
"""Attention that finds the images' bounds on the device; the others cut images apart on the host."""


class Graphs:
    """The networks on one device, with a graph for each rung on CUDA. A CPU computes over the same buffers.

    Buffers are made once, for the last rung, and the others are views of them: about 3 KB a patch for the released
    models. The graphs share one pool of memory for what happens in between, another 25 KB a patch.
    """

    def __init__(
        self,
        compute: Callable[[Tensor, Pack], Tensor],
        rungs: Sequence[Rung],
        config: VisionConfig,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Capture on CUDA how compute makes rows_MD of patches_NP and a pack, on every rung; they grow in all numbers.

        Raises:
            ValueError: the device's memory does not suffice. There is no going on with fewer graphs: a rank that lacks
                one would give an image other bits than its peers.
        """
        top = rungs[-1] if rungs else Rung(patches=0, images=0, rows=0, longest=0)
        block = config.merge_ratio**2
        self._compute = compute
        self._rungs = tuple(rungs)
        self._patches_NP = torch.zeros(top.patches, config.patch_dim, dtype=dtype, device=device)
        self._pack = Pack(
            cu_seqlens=torch.zeros(top.images + 2, dtype=torch.int32, device=device),
            lengths=(),
            max_seqlen=top.longest,
            cos_NR=torch.zeros(top.patches, config.head_dim // 2, device=device),
            sin_NR=torch.zeros(top.patches, config.head_dim // 2, device=device),
            merge_index_MK=torch.zeros(top.rows, block, dtype=torch.int64, device=device),
            merge_mask_MK=torch.zeros(top.rows, block, dtype=torch.bool, device=device),
        )
        self._rows_MD = torch.zeros(top.rows, config.out_width, dtype=dtype, device=device)
        self._graphs = self._capture(device) if device.type == "cuda" and rungs else {}

    @torch.inference_mode()
    def run(self, patches_NP: Tensor, pack: Pack) -> Tensor:
        """rows_MD of the pack. They may be a view of a buffer, which the next run overwrites on the same stream."""
        rung = find_rung(self._rungs, pack)
        if rung is None:
            return self._compute(patches_NP, pack)
        self._fill(rung, patches_NP, pack)
        if self._graphs:
            self._graphs[rung].replay()
        else:
            padding = rung.patches - sum(pack.lengths)
            self._forward(rung, (*pack.lengths, padding) if padding else pack.lengths)
        return self._rows_MD[: len(pack.merge_index_MK)]

    def _fill(self, rung: Rung, patches_NP: Tensor, pack: Pack) -> None:
        buffers = self._view(rung)
        _overwrite(self._patches_NP[: rung.patches], patches_NP, 0)
        # The first slot that is left is the padding's, and the others hold images of no patches.
        _overwrite(buffers.cu_seqlens, pack.cu_seqlens, rung.patches)
        _overwrite(buffers.cos_NR, pack.cos_NR, 0)
        _overwrite(buffers.sin_NR, pack.sin_NR, 0)
        _overwrite(buffers.merge_index_MK, pack.merge_index_MK, 0)
        _overwrite(buffers.merge_mask_MK, pack.merge_mask_MK, False)

    def _forward(self, rung: Rung, lengths: tuple[int, ...]) -> None:
        """From buffers to buffer. The lengths are for attention on a CPU: nothing that is captured looks at them."""
        rows_MD = self._compute(self._patches_NP[: rung.patches], self._view(rung, lengths))
        self._rows_MD[: rung.rows].copy_(rows_MD)

    def _view(self, rung: Rung, lengths: tuple[int, ...] = ()) -> Pack:
        return Pack(
            cu_seqlens=self._pack.cu_seqlens[: rung.images + 2],
            lengths=lengths,
            max_seqlen=rung.longest,
            cos_NR=self._pack.cos_NR[: rung.patches],
            sin_NR=self._pack.sin_NR[: rung.patches],
            merge_index_MK=self._pack.merge_index_MK[: rung.rows],
            merge_mask_MK=self._pack.merge_mask_MK[: rung.rows],
        )

    @torch.inference_mode()
    def _capture(self, device: torch.device) -> dict[Rung, torch.cuda.CUDAGraph]:
        started, free_bytes = time.perf_counter(), torch.cuda.mem_get_info(device)[0]
        graphs: dict[Rung, torch.cuda.CUDAGraph] = {}
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        try:
            # Largest first: the others find the memory that they need in the pool.
            for rung in reversed(self._rungs):
                one_image = (rung.longest,)
                with torch.cuda.stream(stream):
                    self._pack.cu_seqlens[1:].fill_(rung.longest)
                    # Loads the kernels, which cuBLAS chooses by size, and gives it its workspace for this stream.
                    self._forward(rung, one_image)
                graph = torch.cuda.CUDAGraph()
                # A capture fails if CUDA is asked for memory outside it meanwhile, which other threads may do.
                with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                    self._forward(rung, one_image)
                with torch.cuda.stream(stream):
                    graph.replay()  # The first time puts the graph on the device.
                graphs[rung] = graph
        except RuntimeError as error:
            # Memory that runs out within a capture breaks that, too, and only this may be told.
            if not any("out of memory" in str(each) for each in (error, error.__context__)):
                raise
            raise ValueError(
                f"not enough memory for CUDA graphs of {self._rungs[-1].patches} patches: free some of {device}'s, "
                "or give every rank a lower graph_patches (0 for no graphs)"
            ) from error
        torch.cuda.current_stream(device).wait_stream(stream)
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        seconds = time.perf_counter() - started
        held_gib = (free_bytes - torch.cuda.mem_get_info(device)[0]) / 2**30
        log.info("%d CUDA graphs captured in %.1f s; they hold %.2f GiB", len(graphs), seconds, held_gib)
        return graphs


def _overwrite(buffer: Tensor, values: Tensor, rest: int) -> None:
    buffer[: len(values)].copy_(values)
    buffer[len(values) :].fill_(rest)
