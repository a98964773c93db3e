"""What the cache is worth: an image again, the same pixels in another file, and one image by many clients at once."""

from dataclasses import dataclass, replace

from benchmarks._subject import Subject
from service.bench import Load
from service.bench_images import Picture, Pictures, Size

_SIZES: tuple[Size, ...] = ((300, 300), (1920, 1080))
_NEW_IMAGES = 3
_HITS = 20
_COMMENT = b"\xff\xfe"  # a JPEG's marker for one


@dataclass(frozen=True, slots=True)
class CacheHits:
    """Medians of requests of one image each.

    hit: the same file again, which is not even decoded. same_pixels: another file of the same pixels, decoded but not
    encoded. computations: for so many simultaneous requests of one new image; slowest, the slowest of those.
    """

    size: str
    computed_ms: float
    hit_ms: float
    times_faster: float
    same_pixels_ms: float
    simultaneous: int
    computations: int
    slowest_ms: float


def measure_cache(subject: Subject, clients: int) -> list[CacheHits]:
    """Each size by itself, while nothing else runs."""
    rows = []
    for size in _SIZES:
        name = f"{size[0]} x {size[1]}"
        new = subject.fresh([size], _NEW_IMAGES)
        known, shared = subject.fresh([size], 1)(0), subject.fresh([size], 1)(0)
        subject.run(Load("", clients=1, images=1), _always(known), f"{name}, new")
        computed, again, same_pixels = (
            subject.run(Load("", clients=1, images=count), pictures, f"{name}, {what}")
            for what, count, pictures in (
                ("new", _NEW_IMAGES, new),
                ("again", _HITS, _always(known)),
                ("the same pixels", _HITS, _other_files(known)),
            )
        )
        before = subject.num_computed()
        at_once = subject.run(Load("", clients=clients, images=clients), _always(shared), f"{name}, {clients} at once")
        rows.append(
            CacheHits(
                size=name,
                computed_ms=computed.p50_ms,
                hit_ms=again.p50_ms,
                times_faster=computed.p50_ms / again.p50_ms,
                same_pixels_ms=same_pixels.p50_ms,
                simultaneous=clients,
                computations=subject.num_computed() - before,
                slowest_ms=at_once.worst_ms,
            )
        )
        subject.steps.done(f"{name}: a hit is {rows[-1].times_faster:.0f}x faster")
    return rows


def _always(picture: Picture) -> Pictures:
    return lambda _: picture


def _other_files(picture: Picture) -> Pictures:
    """The same JPEG with a number for a comment."""

    def other(index: int) -> Picture:
        comment = index.to_bytes(4, "big")
        marker = _COMMENT + (2 + len(comment)).to_bytes(2, "big") + comment
        return replace(picture, data=picture.data[:2] + marker + picture.data[2:])

    return other
