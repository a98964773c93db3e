"""Forwards through padded buffers, and as CUDA graphs, against forwards of the packs as they are."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from encoder.attention import AttentionName, AttentionUnavailable
from encoder.checkpoint import open_checkpoint
from encoder.geometry import Grid
from encoder.graphs import CAPTURABLE, Graphs
from encoder.ladder import Rung
from encoder.layout import LAYOUTS, Layout
from encoder.packing import Pack, pack
from encoder.tower import Tower
from encoder.weights import load_weights

CPU, CUDA = torch.device("cpu"), torch.device("cuda")

RUNGS = (
    Rung(patches=24, images=2, rows=6, longest=24),
    Rung(patches=60, images=3, rows=12, longest=60),
    Rung(patches=130, images=5, rows=24, longest=104),
)
SMALL: list[Grid] = [(4, 5)]
LARGE: list[Grid] = [(8, 13), (1, 1), (5, 5)]

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def make_tower(
    goldens: Path,
    *,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
    attention: AttentionName | None = None,
    max_patches: int | None = None,
    graph_patches: int = 0,
) -> Tower:
    checkpoint = open_checkpoint(str(goldens / "tiny-deepseek_v4"))
    return Tower(
        checkpoint.config,
        load_weights(checkpoint),
        device=device,
        dtype=dtype,
        attention=attention or "auto",
        max_patches_per_forward=max_patches,
        graph_patches=graph_patches,
    )


def make_graphs(tower: Tower) -> Graphs:
    return Graphs(
        lambda patches_NP, pack: tower.forward(patches_NP, pack)[1],
        RUNGS,
        tower.config,
        device=tower.device,
        dtype=tower.dtype,
    )


def make_pack(tower: Tower, grids: list[Grid], seed: int = 0) -> tuple[Tensor, Pack]:
    packed = pack(grids, tower.config, tower.device)
    generator = torch.Generator().manual_seed(seed)
    patches_NP = torch.rand(sum(packed.lengths), tower.config.patch_dim, generator=generator) * 2 - 1
    return patches_NP.to(tower.device, tower.dtype), packed


def make_canvases(grids: list[Grid]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(0, 256, (14 * rows, 14 * cols, 3), dtype=torch.uint8, generator=generator) for rows, cols in grids
    ]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    assert actual.shape == expected.shape
    return float((actual.double().cpu() - expected.double().cpu()).norm() / expected.double().cpu().norm())


@pytest.fixture(scope="module")
def padding(goldens: Path) -> tuple[Tower, Graphs]:
    """A tower, and buffers around it that every test finds as the one before left them."""
    tower = make_tower(goldens)
    return tower, make_graphs(tower)


@given(packs=st.lists(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=6), max_size=4))
@example(packs=[[(4, 6)], [(6, 10)], [(8, 13), (2, 13)], [(4, 6)]])
def test_padded_packs_one_after_another_give_the_rows_of_unpadded_ones(
    padding: tuple[Tower, Graphs], packs: list[list[Grid]]
) -> None:
    tower, graphs = padding
    for grids in packs:
        patches_NP, packed = make_pack(tower, grids)
        assert relative_error(graphs.run(patches_NP, packed), tower.forward(patches_NP, packed)[1]) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_larger_pack_left_behind_changes_no_bit(goldens: Path, dtype: torch.dtype) -> None:
    tower = make_tower(goldens, dtype=dtype)
    graphs = make_graphs(tower)
    small, large = make_pack(tower, SMALL), make_pack(tower, LARGE)
    first = graphs.run(*small).clone()
    graphs.run(torch.full_like(large[0], math.nan), large[1])
    assert torch.equal(graphs.run(*small), first)
    assert first.isfinite().all()


def test_networks_see_an_image_of_zeros_and_empty_ones_behind_the_pack(goldens: Path) -> None:
    tower = make_tower(goldens)
    seen: list[tuple[Tensor, Pack]] = []

    def compute(patches_NP: Tensor, pack: Pack) -> Tensor:
        seen.append((patches_NP, pack))
        return tower.forward(patches_NP, pack)[1]

    graphs = Graphs(compute, RUNGS, tower.config, device=CPU, dtype=torch.float32)
    for grids in (LARGE, SMALL):
        graphs.run(*make_pack(tower, grids))
    patches_NP, padded = seen[-1]
    assert (patches_NP.shape, padded.cos_NR.shape) == ((24, 588), (24, 8))
    assert torch.equal(patches_NP[:20], make_pack(tower, SMALL)[0])
    assert padded.cu_seqlens.tolist() == [0, 20, 24, 24]
    assert (padded.lengths, padded.max_seqlen) == ((20, 4), 24)
    assert padded.merge_mask_MK.any(dim=1).tolist() == [True] * 4 + [False] * 2
    for rest in (patches_NP[20:], padded.cos_NR[20:], padded.sin_NR[20:], padded.merge_index_MK[4:]):
        assert not rest.any()


def test_pack_of_nothing_has_no_rows(padding: tuple[Tower, Graphs]) -> None:
    tower, graphs = padding
    assert graphs.run(*make_pack(tower, [])).shape == (0, 96)


def test_tower_that_pads_gives_the_rows_of_one_that_does_not(goldens: Path) -> None:
    grids: list[Grid] = [(28, 28), (1, 1), (28, 27), (29, 29), (8, 13)]
    canvases, layouts = make_canvases(grids), [LAYOUTS[index % 3] for index in range(len(grids))]
    expected = make_tower(goldens).encode(canvases, layouts)
    tower = make_tower(goldens, graph_patches=1000)
    # Lowered as a rank does when its memory ran out: each forward meets another rung than before, or none.
    for max_patches in (3000, 1500, 750, 1):
        tower.max_patches_per_forward = max_patches
        assert relative_error(tower.encode(canvases, layouts), expected) < 1e-5


def test_image_alone_has_the_same_bits_whatever_came_before(goldens: Path) -> None:
    tower = make_tower(goldens, dtype=torch.bfloat16, max_patches=1, graph_patches=1000)
    canvases = make_canvases([(28, 28), (20, 31), (31, 30)])
    layouts: list[Layout] = ["rows"] * len(canvases)
    alone = [tower.encode([canvas], ["rows"]) for canvas in canvases]
    assert torch.equal(tower.encode(canvases[::-1], layouts), torch.cat(alone[::-1]))


def test_negative_graph_patches_are_an_error(goldens: Path) -> None:
    with pytest.raises(ValueError, match="graph_patches is -1; it must be at least 0"):
        make_tower(goldens, graph_patches=-1)


def on_cuda(goldens: Path, attention: AttentionName, **options: int) -> Tower:
    try:
        return make_tower(goldens, device=CUDA, dtype=torch.bfloat16, attention=attention, **options)
    except AttentionUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("attention", CAPTURABLE)
def test_replayed_packs_give_the_rows_of_eager_ones(goldens: Path, attention: AttentionName) -> None:
    tower = on_cuda(goldens, attention)
    graphs = make_graphs(tower)
    packs: list[list[Grid]] = [SMALL, LARGE, [(6, 10)], [(5, 13), (6, 11)], [(1, 1)] * 3, LARGE, SMALL]
    for seed, grids in enumerate(packs):
        patches_NP, packed = make_pack(tower, grids, seed)
        assert relative_error(graphs.run(patches_NP, packed), tower.forward(patches_NP, packed)[1]) < 1e-2, grids


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("attention", CAPTURABLE)
def test_what_a_larger_replay_left_behind_changes_no_bit(goldens: Path, attention: AttentionName) -> None:
    tower = on_cuda(goldens, attention)
    graphs = make_graphs(tower)
    small, large = make_pack(tower, SMALL), make_pack(tower, LARGE)
    first = graphs.run(*small).clone()
    graphs.run(torch.full_like(large[0], math.nan), large[1])
    assert torch.equal(graphs.run(*small), first)
    assert first.isfinite().all()


@pytest.mark.gpu
@needs_cuda
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("attention", CAPTURABLE)
@pytest.mark.parametrize("max_patches", [1, 10_000])
def test_tower_with_graphs_encodes_as_without_and_never_waits(
    goldens: Path, attention: AttentionName, max_patches: int
) -> None:
    grids: list[Grid] = [(28, 28), (1, 1), (28, 27), (29, 29), (8, 13)]
    canvases, layouts = make_canvases(grids), [LAYOUTS[index % 3] for index in range(len(grids))]
    expected = make_tower(goldens).encode(canvases, layouts)
    tower = on_cuda(goldens, attention, max_patches=max_patches, graph_patches=1000)
    torch.cuda.set_sync_debug_mode("error")
    try:
        batches = [tower.encode(canvases, layouts) for _ in range(3)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for rows_RD in batches:
        assert relative_error(rows_RD, expected) < 2e-2


@pytest.mark.gpu
@needs_cuda
def test_sdpa_on_cuda_has_no_graphs_and_says_so(goldens: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        tower = make_tower(goldens, device=CUDA, attention="sdpa", graph_patches=1000)
    assert "no CUDA graphs: attention 'sdpa' cannot be captured" in caplog.text
    canvases = make_canvases([(28, 28)])
    assert relative_error(tower.encode(canvases, ["rows"]), make_tower(goldens).encode(canvases, ["rows"])) < 1e-4
