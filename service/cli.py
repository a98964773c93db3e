"""`patchgrid serve | plan | embed | bench`: the command line.

Invariant: nothing but the standard library is imported until it is sure that `encoder`, `distributed` and `service` are
this project's: Dask, for one, has a package named `distributed`.
"""

import argparse
import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from encoder.config import VisionConfig
    from encoder.geometry import Plan
    from encoder.image import Canvas

_USAGE = """\
usage: patchgrid [-h] [--version] COMMAND ...

commands:
  serve   serve a vision tower over HTTP
  plan    print what images or sizes come to: grids, tokens, rows
  embed   send images to a server and save their rows
  bench   send a server a load and print how it bears it

`patchgrid COMMAND --help` says more."""

_SIZE = re.compile(r"([0-9]{1,10})x([0-9]{1,10})")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code: 0 done, 1 failed, 2 asked for in a way that cannot be understood."""
    command, *arguments = (sys.argv[1:] if argv is None else list(argv)) or ["--help"]
    if command in ("-h", "--help"):
        print(_USAGE)
        return 0
    if command == "--version":
        print(f"patchgrid {importlib.metadata.version('patchgrid')}")
        return 0
    if command not in _COMMANDS:
        print(f"{_USAGE}\npatchgrid: error: there is no command {command!r}", file=sys.stderr)
        return 2
    if strangers := _strangers():
        for name, found in strangers.items():
            own = Path(__file__).resolve().parents[1] / name
            print(f"patchgrid: error: `import {name}` finds {found}, not {own}", file=sys.stderr)
        print("patchgrid: another project has a package of that name; give patchgrid its own venv", file=sys.stderr)
        return 1
    return _COMMANDS[command](arguments)


def _strangers() -> dict[str, str]:
    """Those of our packages that Python would import from elsewhere, and from where."""
    home = Path(__file__).resolve().parents[1]
    found = {}
    for name in ("encoder", "distributed", "service"):
        spec = importlib.util.find_spec(name)
        folder = Path(spec.origin).resolve().parent if spec and spec.origin else None
        if folder != home / name:
            found[name] = str(folder or "nothing")
    return found


def _serve(argv: Sequence[str]) -> int:
    from service.settings import load_settings

    settings = load_settings(argv)

    from service.server import serve

    return serve(settings)


def _plan(argv: Sequence[str]) -> int:
    from encoder.checkpoint import CheckpointError, open_config
    from encoder.config import ConfigError
    from encoder.geometry import PlanError, plan
    from encoder.image import ImageError, read_canvas
    from service.settings import load_settings

    parser = argparse.ArgumentParser("patchgrid plan", description="Print what images or sizes come to.")
    parser.add_argument("images", nargs="+", metavar="FILE|WxH", help="an image file, or a size in pixels: 1920x1080")
    parser.add_argument("--model", default="demo", help="as for serve (default: demo)")
    parser.add_argument(
        "--image-profile", choices=("vllm", "plain"), default="vllm", help="as for serve (default: vllm)"
    )
    parser.add_argument(
        "--dump", type=Path, metavar="F.safetensors", help="save each file's patches, bfloat16, (patches, 588)"
    )
    options = parser.parse_args(argv)
    if options.dump and all(_SIZE.fullmatch(name) for name in options.images):
        parser.error("--dump saves the patches of files, and there are sizes only")
    try:
        config = open_config(options.model)
    except (CheckpointError, ConfigError) as error:
        parser.exit(1, f"patchgrid plan: error: {error}\n")

    limit_pixels = load_settings(()).limit_image_pixels
    plans: dict[str, Plan] = {}
    canvases: dict[str, Canvas] = {}
    for name in options.images:
        try:
            if size := _SIZE.fullmatch(name):
                plans[name] = plan(config, int(size[1]), int(size[2]))
            else:
                data = Path(name).read_bytes()
                canvas = read_canvas(data, config, options.image_profile, limit_pixels=limit_pixels)
                plans[name] = canvas.plan
                if options.dump:
                    canvases[name] = canvas
        except (OSError, PlanError, ImageError) as error:
            print(f"patchgrid plan: error: {name}: {_reason(error)}", file=sys.stderr)
    if plans:
        _print_table(plans)
    if canvases:
        _dump_patches(canvases, config, options.dump)
    return 0 if plans.keys() == set(options.images) else 1


def _print_table(plans: Mapping[str, "Plan"]) -> None:
    rows: list[tuple[str, ...]] = [("image", "size", "canvas", "ViT grid", "LLM grid", "tokens", "rows", "patches")]
    for name, plan in plans.items():
        pairs = (plan.image_size, plan.resized, plan.vit_grid, plan.llm_grid)
        counts = (plan.num_tokens, plan.num_rows, plan.num_patches)
        rows.append((name, *(f"{first} x {second}" for first, second in pairs), *map(str, counts)))
    name_width, *widths = (max(map(len, column)) for column in zip(*rows, strict=True))
    for name, *cells in rows:
        print("  ".join((name.ljust(name_width), *map(str.rjust, cells, widths))))


def _dump_patches(canvases: Mapping[str, "Canvas"], config: "VisionConfig", file: Path) -> None:
    import torch
    from safetensors.torch import save_file

    from encoder.packing import normalise, patchify

    save_file(
        {
            name: normalise(patchify(torch.from_numpy(canvas.pixels), config.patch_size), torch.bfloat16)
            for name, canvas in canvases.items()
        },
        file,
    )


def _embed(argv: Sequence[str]) -> int:
    from service.client import ClientError, embed_files

    parser = argparse.ArgumentParser("patchgrid embed", description="Send images to a server and save their rows.")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="an image file")
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="OUT.safetensors", help="where to save the rows"
    )
    parser.add_argument("--url", default="http://127.0.0.1:8100", help="the server (default: %(default)s)")
    parser.add_argument("--layout", default="rows", choices=("rows", "v4", "v41"), help="(default: %(default)s)")
    parser.add_argument(
        "--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"), help="(default: %(default)s)"
    )
    parser.add_argument("--timeout-s", type=float, default=300.0, help="(default: %(default)s)")
    parser.add_argument(
        "--api-key", default=os.environ.get("PATCHGRID_API_KEY"), help="(default: environment PATCHGRID_API_KEY)"
    )
    options = parser.parse_args(argv)
    try:
        tensors = embed_files(
            options.files,
            options.output,
            url=options.url,
            layout=options.layout,
            dtype=options.dtype,
            timeout_s=options.timeout_s,
            api_key=options.api_key,
        )
    except OSError as error:
        where = error.filename or options.output
        print(f"patchgrid embed: error: {where}: {_reason(error)}", file=sys.stderr)
        return 1
    except ClientError as error:
        print(f"patchgrid embed: error: {error}", file=sys.stderr)
        return 1
    for name, tensor in zip(options.files, tensors, strict=True):
        print(f"{name}: {tensor}")
    print(f"saved to {options.output}")
    return 0


def _bench(argv: Sequence[str]) -> int:
    import json
    import secrets
    from dataclasses import asdict

    from service.bench import Load, render_report, run_load, show_progress
    from service.bench_images import MIXED_SIZES, Photos
    from service.client import ClientError

    parser = argparse.ArgumentParser("patchgrid bench", description="Send a server a load and print how it bears it.")
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8100", help="the server (default: %(default)s)")
    parser.add_argument(
        "--clients", type=_count, help="requests in flight at most (default: 8; with --rate, 64 and the load is open)"
    )
    parser.add_argument("--rate", type=_amount, metavar="IMAGES/S", help="images that fall due, answered or not")
    parser.add_argument("--images", type=_count, help="end after so many (default without --seconds: 64)")
    parser.add_argument("--seconds", type=_amount, help="end after so long")
    parser.add_argument("--per-request", type=_count, default=1, metavar="IMAGES", help="(default: %(default)s)")
    parser.add_argument(
        "--sizes", type=_sizes, default=MIXED_SIZES, metavar="WxH,...", help="of the images (default: eight, mixed)"
    )
    parser.add_argument("--same", action="store_true", help="the same images over and over: what the cache is worth")
    parser.add_argument("--seed", type=int, help="of the images and of when they are due (default: another each time)")
    parser.add_argument("--layout", default="rows", choices=("rows", "v4", "v41"), help="(default: %(default)s)")
    parser.add_argument(
        "--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"), help="(default: %(default)s)"
    )
    parser.add_argument("--timeout-s", type=_amount, default=300.0, help="(default: %(default)s)")
    parser.add_argument(
        "--api-key", default=os.environ.get("PATCHGRID_API_KEY"), help="(default: environment PATCHGRID_API_KEY)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="save the load and the figures")
    options = parser.parse_args(argv)
    load = Load(
        url=options.url,
        clients=options.clients or (8 if options.rate is None else 64),
        rate=options.rate,
        images=64 if options.images is None and options.seconds is None else options.images,
        seconds=options.seconds,
        per_request=options.per_request,
        layout=options.layout,
        dtype=options.dtype,
        # A seed that the server has seen is a load that it knows by heart.
        seed=secrets.randbits(32) if options.seed is None else options.seed,
        timeout_s=options.timeout_s,
        api_key=options.api_key,
    )
    try:
        report = run_load(load, Photos(options.sizes, seed=load.seed, same=options.same), on_progress=show_progress)
    except ClientError as error:
        print(f"patchgrid bench: error: {error}", file=sys.stderr)
        return 1
    show_progress(None)
    print(render_report(load, report))
    if options.json:
        told = {name: value for name, value in asdict(load).items() if name != "api_key"}
        try:
            options.json.write_text(json.dumps({"load": told, "report": asdict(report)}, indent=2) + "\n")
        except OSError as error:
            print(f"patchgrid bench: error: {options.json}: {_reason(error)}", file=sys.stderr)
            return 1
    return 1 if report.errors else 0


def _count(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError
    return number


def _amount(text: str) -> float:
    if not 0 < (number := float(text)) < float("inf"):
        raise ValueError
    return number


def _sizes(text: str) -> tuple[tuple[int, int], ...]:
    sizes = [_SIZE.fullmatch(part) for part in text.split(",")]
    found = tuple((int(size[1]), int(size[2])) for size in sizes if size and int(size[1]) and int(size[2]))
    if len(found) < len(sizes):
        raise ValueError
    return found


def _reason(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


_COMMANDS: Mapping[str, Callable[[Sequence[str]], int]] = {
    "serve": _serve,
    "plan": _plan,
    "embed": _embed,
    "bench": _bench,
}


if __name__ == "__main__":
    sys.exit(main())
