"""What a running service is made of, and how its parts hang together. The only place that knows them all.

Nothing is started here: the server runs what has a `run`, and the routes stand on the rest.
"""

from dataclasses import dataclass
from pathlib import Path

from distributed.launcher import LaunchOptions
from encoder.checkpoint import Checkpoint
from encoder.config import VisionConfig
from service.admission import Admission
from service.batcher import Batcher
from service.cache import RowCache
from service.decode import DecodePool
from service.errors import ServiceError
from service.fetch import Fetcher
from service.ledger import Ledger
from service.metrics import Metrics
from service.pipeline import Pipeline
from service.quarantine import Quarantine
from service.schemas import Health
from service.settings import Settings
from service.supervisor import GroupState, Supervisor, SupervisorOptions

_RETRY_STARTING_S = 5
_RETRY_ENDING_S = 1
_IMAGES_TO_SHARE = 2


@dataclass(frozen=True, slots=True)
class Foundation:
    """What is read before anything is built. Wrong settings have been refused by then."""

    settings: Settings
    checkpoint: Checkpoint
    keys: tuple[bytes, ...]
    fetcher: Fetcher | None


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of one service. The pool is to be closed by whoever assembled them."""

    foundation: Foundation
    metrics: Metrics
    supervisor: Supervisor
    batcher: Batcher
    admission: Admission
    pool: DecodePool
    pipeline: Pipeline

    @property
    def settings(self) -> Settings:
        """The settings, as read at the start."""
        return self.foundation.settings

    @property
    def model_name(self) -> str:
        """The name in answers."""
        return self.settings.model_name or self.foundation.checkpoint.name

    def health(self) -> Health:
        """Whether the service takes work, and if not, why."""
        reasons = ("draining",) * self.admission.draining + self.supervisor.reasons_not_ready()
        return Health(live=True, ready=not reasons, reasons=reasons)

    def check_ready(self) -> None:
        """Refuse work that the group cannot begin now.

        Raises:
            ServiceError: starting, restarting or draining, with a time to come back after.
        """
        match self.supervisor.state:
            case GroupState.STARTING:
                raise ServiceError("starting", "the model is loading", retry_after_s=_RETRY_STARTING_S)
            case GroupState.RESTARTING:
                raise ServiceError("restarting", "the worker group is starting again", retry_after_s=_RETRY_STARTING_S)
            case GroupState.STOPPED:
                raise ServiceError("draining", "the service is ending", retry_after_s=_RETRY_ENDING_S)


def assemble(foundation: Foundation, run_dir: Path) -> Parts:
    """Build every part. Of these the pool's processes start at once; the group starts when the supervisor runs."""
    settings, config = foundation.settings, foundation.checkpoint.config
    metrics = Metrics()
    quarantine = Quarantine(settings.quarantine_s)
    ledger = Ledger(config.out_width, quarantine, metrics)
    supervisor = Supervisor(launch_options(foundation), _supervisor_options(settings), config, ledger, run_dir, metrics)
    batcher = Batcher(
        supervisor.encode,
        metrics,
        budget_patches=lambda: settings.max_patches_per_batch or _batch_patches(settings, supervisor, config),
        slots=settings.batches_in_flight,
        limit_queue_patches=settings.limit_queue_patches,
    )
    admission = Admission(
        limit_decoding_requests=settings.limit_decoding_requests,
        limit_held_bytes=settings.limit_held_bytes,
        waiting_s=batcher.waiting_s,
        metrics=metrics,
    )
    pool = DecodePool(settings, config, metrics)
    cache = RowCache(settings.cache_bytes, metrics)
    pipeline = Pipeline(settings, pool, cache, batcher, supervisor, quarantine, metrics)
    return Parts(foundation, metrics, supervisor, batcher, admission, pool, pipeline)


def launch_options(foundation: Foundation) -> LaunchOptions:
    """What the ranks are started with: on one host the files that were found, so that a restart cannot find others."""
    settings = foundation.settings
    return LaunchOptions(
        model=foundation.checkpoint.location if settings.nnodes == 1 else settings.model,
        nproc_per_node=settings.num_local_ranks,
        nnodes=settings.nnodes,
        rdzv_endpoint=settings.rdzv_endpoint,
        device=settings.device,
        dtype=settings.dtype,
        attention=settings.attention,
        max_patches_per_forward=1 if settings.batch_invariant else settings.max_patches_per_forward,
        graph_patches=settings.graph_patches,
        collective_timeout_s=settings.collective_timeout_s,
        stall_timeout_s=settings.stall_timeout_s,
        worker_module=settings.worker_module,
    )


def _batch_patches(settings: Settings, supervisor: Supervisor, config: VisionConfig) -> int:
    """Patches of a batch: a forward of every rank, but for several ranks at least so much that it can be shared evenly.

    Whole images go to ranks. Simulated (benchmarks/scaling.py), ranks are busy for 94 to 99 % of the time with one
    forward of a CPU's size for each, and for 99 % with this; with more, images only wait longer for one another.
    """
    hello = supervisor.hello
    assert hello is not None, "asked once there was work"
    num_ranks = len(hello.ranks)
    per_rank = hello.max_patches_per_forward
    if num_ranks > 1 or settings.batch_invariant:
        per_rank = max(per_rank, _IMAGES_TO_SHARE * config.max_image_tokens * config.merge_ratio**2)
    return per_rank * num_ranks


def _supervisor_options(settings: Settings) -> SupervisorOptions:
    return SupervisorOptions(
        startup_timeout_s=settings.startup_timeout_s,
        rank_timeout_s=settings.rank_timeout_s,
        restart_limit=settings.restart_limit,
        restart_window_s=settings.restart_window_s,
    )
