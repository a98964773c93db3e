"""Every setting of `patchgrid serve`, in one place: flag = environment name = field, prefix PATCHGRID_.

Invariant: settings are read and validated once, at start, and passed down frozen. A flag wins over the environment, the
environment over the default, and a value that cannot be used ends the start with one line that names its flag.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, SecretStr, ValidationError, model_validator
from pydantic_settings import BaseSettings, CliApp, SettingsConfigDict

ENV_PREFIX = "PATCHGRID_"

_MIB = 1024 * 1024
_NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")
_MAX_DECODERS = 8

_Finite = Annotated[PositiveFloat, Field(allow_inf_nan=False)]


class Settings(BaseSettings):
    """Serve a DeepSeek vision tower over HTTP: images in, language-model rows out."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        env_ignore_empty=True,
        frozen=True,
        cli_prog_name="patchgrid serve",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        cli_show_env_vars=True,
    )

    model: str = Field(
        default="demo",
        min_length=1,
        description="what to serve: demo, random:deepseek_v4, random:deepseek_v41, a checkpoint folder, "
        "a timm .safetensors file or a hub id",
    )
    model_name: str | None = Field(default=None, description="the name in answers; without it, the checkpoint's own")
    host: str = Field(
        default="127.0.0.1", min_length=1, description="address to listen on; 0.0.0.0 for every interface"
    )
    port: int = Field(default=8100, ge=0, le=65535, description="TCP port to listen on; 0 picks a free one")

    nproc_per_node: Literal["auto"] | PositiveInt = Field(
        default="auto", description="ranks on this host; auto is one for each NVIDIA GPU, or one on the CPU"
    )
    nnodes: PositiveInt = Field(default=1, description="hosts in the group; the log says what to run on the others")
    rdzv_endpoint: str = Field(
        default="", description="this host's name and a free port, host:port, where several hosts meet"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="where the tower runs")
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        default="auto", description="what the tower computes in; auto is bfloat16 where the device is fast at it"
    )
    attention: Literal["auto", "flash_attn", "varlen", "matmul", "sdpa"] = Field(
        default="auto", description="attention implementation"
    )

    image_profile: Literal["vllm", "plain"] = Field(
        default="vllm",
        description="what an image means: vllm applies EXIF orientation and puts transparency on white; "
        "plain does neither, as the reference and SGLang",
    )
    id_key: SecretStr | None = Field(
        default=None, description="secret that image ids are keyed with; without it anyone can compute them"
    )
    batch_invariant: bool = Field(
        default=False,
        description="an image's rows are the same bytes whatever shares its batch and whichever rank runs it: "
        "one image in a forward, max-patches-per-forward notwithstanding",
    )
    max_patches_per_forward: PositiveInt | None = Field(
        default=None, description="most patches in one forward pass of a rank; without it, what suits the device"
    )
    graph_patches: NonNegativeInt | None = Field(
        default=None,
        description="patches of the largest forward that is replayed as a CUDA graph, 0 for none; without it, what "
        "suits the device",
    )
    max_patches_per_batch: PositiveInt | None = Field(
        default=None,
        description="most patches in one batch over all ranks; without it, a forward pass for every rank, or what "
        "several ranks can share evenly",
    )
    batches_in_flight: PositiveInt = Field(
        default=2, description="batches the group holds at once: one or two work, the rest wait"
    )
    decode_processes: PositiveInt | None = Field(
        default=None, description=f"processes that decode images; without it, one per core, at most {_MAX_DECODERS}"
    )

    cache_bytes: NonNegativeInt = Field(
        default=512 * _MIB, description="bytes of rows that are kept for images that come again; 0 keeps none"
    )

    api_keys: SecretStr | None = Field(
        default=None, description="keys that may use /embed and /plan, separated by commas; without any, everyone may"
    )
    api_keys_file: Path | None = Field(default=None, description="a file of such keys, one on each line")
    probe_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="a second port for /health, /metrics and /info, which then leave the first; 0 picks a free one",
    )
    fetch_hosts: str = Field(
        default="",
        description="hosts whose http(s) URLs may stand for images, separated by commas, *.name for all below name; "
        "without any, no URL is fetched",
    )
    fetch_timeout_s: _Finite = Field(default=10.0, description="longest one image may take to fetch, seconds")

    limit_body_bytes: PositiveInt = Field(default=64 * _MIB, description="largest request body, bytes")
    limit_images_per_request: PositiveInt = Field(default=64, description="most images in one request")
    limit_image_bytes: PositiveInt = Field(default=32 * _MIB, description="largest encoded image, bytes")
    limit_image_pixels: PositiveInt = Field(
        default=100_000_000, description="largest image, width x height, checked before it is decoded"
    )
    limit_decoding_requests: PositiveInt = Field(
        default=256, description="most requests between the door and the queue; one beyond it gets 429"
    )
    limit_queue_patches: PositiveInt = Field(
        default=1_000_000, description="most patches waiting for the group; a request beyond it gets 429"
    )
    limit_held_bytes: PositiveInt = Field(
        default=2048 * _MIB,
        description="bytes of bodies, canvases and rows held for requests; one that finds it reached gets 429",
    )

    request_timeout_s: _Finite = Field(
        default=120.0,
        description="longest a request may take, upload included, seconds; x-timeout-ms may ask for less",
    )
    receive_timeout_s: _Finite = Field(
        default=30.0,
        description="longest a head, a body, or a pause in reading the answer may take, seconds",
    )
    decode_timeout_s: _Finite = Field(default=20.0, description="longest one image may take to decode, seconds")
    startup_timeout_s: _Finite = Field(default=900.0, description="longest the group may take to become ready, seconds")
    rank_timeout_s: _Finite = Field(
        default=10.0, description="longest silence of the group before it is restarted, seconds"
    )
    stall_timeout_s: _Finite = Field(
        default=300.0,
        description="longest a rank may work on one batch before it counts as hung, seconds",
    )
    collective_timeout_s: _Finite = Field(
        default=600.0, description="time-out of torch.distributed's collectives, seconds"
    )
    restart_limit: int = Field(default=5, ge=0, description="restarts allowed in restart-window-s before giving up")
    restart_window_s: _Finite = Field(default=300.0, description="how far back restarts are counted, seconds")
    quarantine_s: _Finite = Field(
        default=3600.0, description="how long an image that crashed the ranks is refused, seconds"
    )
    drain_pause_s: float = Field(
        default=1.0, ge=0, allow_inf_nan=False, description="time for balancers to see that ready is gone, seconds"
    )
    drain_timeout_s: _Finite = Field(
        default=120.0, description="longest that accepted requests may take to finish after SIGTERM, seconds"
    )
    worker_module: str = Field(
        default="distributed.worker", min_length=1, description="what torchrun starts as a rank; for tests"
    )
    log_level: Literal["debug", "info", "warning", "error", "critical"] = Field(
        default="info", description="least to log"
    )

    @model_validator(mode="after")
    def _hosts_can_meet(self) -> Self:
        if self.nnodes > 1 and not self.rdzv_endpoint:
            raise ValueError("--rdzv-endpoint is required when --nnodes is more than 1")
        return self

    @property
    def num_local_ranks(self) -> int:
        """Ranks on this host, `auto` resolved."""
        if self.nproc_per_node != "auto":
            return self.nproc_per_node
        return 1 if self.device == "cpu" else max(count_gpus(), 1)

    @property
    def num_decode_processes(self) -> int:
        """Processes that decode images, the default resolved."""
        return self.decode_processes or min(os.cpu_count() or 1, _MAX_DECODERS)


def load_settings(argv: Sequence[str]) -> Settings:
    """Read the settings from flags, environment and defaults.

    Raises:
        SystemExit: code 0 after --help; code 2, with one line on stderr for each, if a setting cannot be used.
    """
    try:
        return CliApp.run(Settings, cli_args=list(argv))
    except ValidationError as error:
        for line in _explain(error):
            print(f"patchgrid serve: error: {line}", file=sys.stderr)
        raise SystemExit(2) from None


def settings_table() -> str:
    """The settings as a Markdown table: flag, environment name, default, meaning."""
    lines = ["| flag | environment | default | meaning |", "|---|---|---|---|"]
    for name, field in Settings.model_fields.items():
        default = "" if field.default in (None, "") else f"`{field.default}`"
        lines.append(f"| `{_flag(name)}` | `{_env_name(name)}` | {default} | {field.description} |")
    return "\n".join(lines)


def count_gpus() -> int:
    """NVIDIA GPUs this process may use, without loading CUDA: the driver's list, cut by CUDA_VISIBLE_DEVICES."""
    try:
        num_gpus = sum(1 for _ in _NVIDIA_GPUS.iterdir())
    except OSError:
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return num_gpus
    return min(num_gpus, sum(1 for device in visible.split(",") if device.strip() not in ("", "-1")))


def _explain(error: ValidationError) -> list[str]:
    """One line for each setting that is wrong; the alternatives of a union are joined."""
    reasons: dict[str, list[str]] = {}
    for detail in error.errors(include_url=False):
        if not detail["loc"]:
            reasons[detail["msg"].removeprefix("Value error, ")] = []
            continue
        name = str(detail["loc"][0])
        head = f"{_flag(name)} ({_env_name(name)}) cannot be {detail['input']!r}"
        reasons.setdefault(head, []).append(detail["msg"][0].lower() + detail["msg"][1:])
    return [f"{head}: {', or '.join(tail)}" if tail else head for head, tail in reasons.items()]


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _env_name(name: str) -> str:
    return ENV_PREFIX + name.upper()
