"""Finding the tower: seeded models, folders, single files, timm's files and a real hub over loopback HTTP."""

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from encoder.checkpoint import CheckpointError, open_checkpoint, tensor_shapes
from encoder.config import DEEPSEEK_V4, DEEPSEEK_V41, DEMO, ConfigError, VisionConfig, load_config

INDEX = "model.safetensors.index.json"
SHARDS = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
TOWER_SHARDS, DECOY_SHARD = SHARDS[:2], SHARDS[2]

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(params=["deepseek_v4", "deepseek_v41"])
def tiny(goldens: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A copy of a tiny checkpoint in the released layout, to be taken apart."""
    return Path(shutil.copytree(goldens / f"tiny-{request.param}", tmp_path / f"tiny-{request.param}"))


def save_shapes(file: Path, shapes: dict[str, tuple[int, ...]]) -> Path:
    save_file({name: np.zeros(shape, np.uint8) for name, shape in shapes.items()}, file)
    return file


def timm_shapes(out_width: int) -> dict[str, tuple[int, ...]]:
    """The two tensors of a timm file that tell what it is."""
    return {"patch_embed.proj.weight": (64, 3, 14, 14), "aligner.fc2.weight": (out_width, 1)}


def edit_index(folder: Path, name: str, shard: object) -> None:
    fields = json.loads((folder / INDEX).read_text())
    fields["weight_map"][name] = shard
    if shard is None:
        del fields["weight_map"][name]
    (folder / INDEX).write_text(json.dumps(fields))


@pytest.mark.parametrize(
    ("model", "config"),
    [("demo", DEMO), ("random:deepseek_v4", DEEPSEEK_V4), ("random:deepseek_v41", DEEPSEEK_V41)],
)
def test_seeded_models_have_no_files(model: str, config: VisionConfig) -> None:
    checkpoint = open_checkpoint(model)
    assert (checkpoint.name, checkpoint.config, checkpoint.naming, checkpoint.files) == (model, config, "random", ())


def test_shapes_are_those_of_the_released_tensors(tiny: Path) -> None:
    """But for image_pad and the language model's, the names in the files and the names asked for are the same."""
    stored = {}
    for shard in SHARDS:
        header_bytes = int.from_bytes((tiny / shard).read_bytes()[:8], "little")
        header = json.loads((tiny / shard).read_bytes()[8 : 8 + header_bytes])
        stored |= {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    for foreign in ("norm.weight", "head.weight", "embed.weight", "image_pad"):
        stored.pop(foreign, None)
    assert tensor_shapes(load_config(tiny)) == stored


def test_full_size_towers_have_the_released_shapes() -> None:
    shapes = tensor_shapes(DEEPSEEK_V41)
    assert shapes["vision.patch_embed.proj.weight"] == (1024, 588)
    assert shapes["vision.blocks.31.attn.wqkv.weight"] == (3072, 1024)
    assert shapes["vision.blocks.31.mlp.w1.weight"] == (5632, 1024)
    assert shapes["aligner.w1.weight"] == (5120, 9216)
    assert shapes["image_newline"] == (5120,)


def test_folder_opens_the_shards_of_the_tower(tiny: Path) -> None:
    checkpoint = open_checkpoint(str(tiny))
    assert checkpoint.name == tiny.name
    assert checkpoint.naming == "released"
    assert checkpoint.config == load_config(tiny)
    assert checkpoint.files == tuple(tiny / shard for shard in TOWER_SHARDS)


def test_shards_of_the_language_model_may_be_absent(tiny: Path) -> None:
    (tiny / DECOY_SHARD).unlink()
    assert open_checkpoint(str(tiny)).files == tuple(tiny / shard for shard in TOWER_SHARDS)


def test_missing_shard_is_named(tiny: Path) -> None:
    (tiny / TOWER_SHARDS[1]).unlink()
    with pytest.raises(CheckpointError, match=rf"names {TOWER_SHARDS[1]} for the vision tower"):
        open_checkpoint(str(tiny))


@pytest.mark.parametrize("name", ["vision.blocks.2.attn.wqkv.bias", "image_newline", "aligner.w2.weight"])
def test_tensor_missing_from_the_index_is_named(tiny: Path, name: str) -> None:
    edit_index(tiny, name, None)
    with pytest.raises(CheckpointError, match=rf"does not say which file holds {name}$"):
        open_checkpoint(str(tiny))


@pytest.mark.parametrize("shard", ["../secret.safetensors", "/etc/passwd", "model.bin", "", 7])
def test_index_names_only_files_beside_it(tiny: Path, shard: object) -> None:
    edit_index(tiny, "image_start", shard)
    with pytest.raises(CheckpointError, match=r"for image_start, which is not a safetensors file beside it$"):
        open_checkpoint(str(tiny))


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": []}'])
def test_broken_index_is_named(tiny: Path, content: str) -> None:
    (tiny / INDEX).write_text(content)
    with pytest.raises(CheckpointError, match=rf"{INDEX} (is not JSON|has no weight_map)"):
        open_checkpoint(str(tiny))


def test_wrong_config_is_named(tiny: Path) -> None:
    (tiny / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"cannot read .*config\.json"):
        open_checkpoint(str(tiny))


def test_single_file_needs_no_index(tiny: Path) -> None:
    config = load_config(tiny)
    for file in [INDEX, *SHARDS]:
        (tiny / file).unlink()
    whole = save_shapes(tiny / "model.safetensors", tensor_shapes(config))
    from_folder, from_file = open_checkpoint(str(tiny)), open_checkpoint(str(whole))
    assert (from_folder.name, from_folder.config, from_folder.naming) == (tiny.name, config, "released")
    assert (from_file.name, from_file.config, from_file.naming) == ("model", config, "released")
    assert from_folder.files == from_file.files == (whole,)


@pytest.mark.parametrize("released", [DEEPSEEK_V4, DEEPSEEK_V41])
def test_timm_file_is_known_by_the_width_of_its_aligner(tmp_path: Path, released: VisionConfig) -> None:
    file = save_shapes(tmp_path / "encoder.safetensors", timm_shapes(released.out_width))
    checkpoint = open_checkpoint(str(file))
    assert (checkpoint.name, checkpoint.naming, checkpoint.files) == ("encoder", "timm", (file,))
    assert checkpoint.config == released


def test_timm_file_takes_a_released_config_beside_it(goldens: Path, tmp_path: Path) -> None:
    shutil.copy(goldens / "tiny-deepseek_v4" / "config.json", tmp_path)
    file = save_shapes(tmp_path / "encoder.safetensors", timm_shapes(96))
    assert open_checkpoint(str(file)).config == load_config(tmp_path)


def test_timm_folder_with_its_own_config_is_opened(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architecture": "deepseek_vit_412m_enc", "num_classes": 0}')
    file = save_shapes(tmp_path / "model.safetensors", timm_shapes(4096))
    checkpoint = open_checkpoint(str(tmp_path))
    assert (checkpoint.config, checkpoint.naming, checkpoint.files) == (DEEPSEEK_V4, "timm", (file,))


def test_timm_file_beside_a_wrong_released_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v4"}')
    file = save_shapes(tmp_path / "encoder.safetensors", timm_shapes(4096))
    with pytest.raises(ConfigError, match="vision_n_layers is missing"):
        open_checkpoint(str(file))


def test_timm_file_of_unknown_width_asks_for_a_config(tmp_path: Path) -> None:
    file = save_shapes(tmp_path / "encoder.safetensors", timm_shapes(4097))
    with pytest.raises(CheckpointError, match=r"aligner\.fc2\.weight of .* has 4097 rows"):
        open_checkpoint(str(file))


def test_timm_classifier_is_refused(tmp_path: Path) -> None:
    file = save_shapes(tmp_path / "classifier.safetensors", {"patch_embed.proj.weight": (64, 3, 14, 14)})
    with pytest.raises(CheckpointError, match=r"has no aligner\.fc2\.weight"):
        open_checkpoint(str(file))


def test_file_without_a_tower_is_refused(goldens: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no vision tower"):
        open_checkpoint(str(goldens / "tiny-deepseek_v4" / DECOY_SHARD))


def test_truncated_file_is_refused(tiny: Path) -> None:
    whole = save_shapes(tiny / "whole.safetensors", tensor_shapes(load_config(tiny)))
    whole.write_bytes(whole.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="is not a whole safetensors file"):
        open_checkpoint(str(whole))


def test_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot read .*model\.safetensors"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize("model", ["random:deepseek_v3", "demo2", "/no/such/folder", "no/such.safetensors"])
def test_unknown_model_says_what_there_is(model: str) -> None:
    with pytest.raises(CheckpointError, match="is not demo, random:deepseek_v4, random:deepseek_v41, a folder or file"):
        open_checkpoint(model)


class Hub(ThreadingHTTPServer):
    """The part of the Hugging Face hub that serves one repository's files, and a list of what was asked of it."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.folder = folder
        self.fetched: list[str] = []
        self.revisions: set[str] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class HubHandler(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        repo, _, rest = self.path.removeprefix("/").partition("/resolve/")
        revision, _, name = rest.partition("/")
        file = self.server.folder / name
        if repo != "org/tiny" or not name or not file.is_file():
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound" if repo == "org/tiny" else "RepoNotFound")
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        body = file.read_bytes()
        self.send_response(200)
        self.send_header("ETag", f'"{name}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.server.revisions.add(revision)
        if self.command == "GET":
            self.server.fetched.append(name)
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Keep the test's output quiet."""


@pytest.fixture
def hub(goldens: Path, tmp_path: Path) -> Iterator[Hub]:
    """A running hub whose repository org/tiny is the tiny V4 checkpoint."""
    with Hub(Path(shutil.copytree(goldens / "tiny-deepseek_v4", tmp_path / "served"))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def open_in_new_process(model: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Open a checkpoint in a process of its own, because the hub's library reads its environment when imported."""
    code = (
        "import sys; from encoder.checkpoint import open_checkpoint; checkpoint = open_checkpoint(sys.argv[1]); "
        "print(checkpoint.name, checkpoint.naming, checkpoint.config.out_width, *checkpoint.files, sep='\\n')"
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return subprocess.run(
        [sys.executable, "-c", code, model],
        env=kept | {"HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1"} | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_hub_id_downloads_only_what_holds_the_tower(hub: Hub, tmp_path: Path) -> None:
    done = open_in_new_process("org/tiny", HF_ENDPOINT=hub.url, HF_HOME=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr
    name, naming, out_width, *files = done.stdout.splitlines()
    assert (name, naming, out_width) == ("org/tiny", "released", "96")
    assert [Path(file).name for file in files] == TOWER_SHARDS
    assert sorted(hub.fetched) == sorted(["config.json", INDEX, *TOWER_SHARDS])
    for file in files:
        assert Path(file).read_bytes() == (hub.folder / Path(file).name).read_bytes()


def test_hub_files_are_all_of_one_commit(hub: Hub, tmp_path: Path) -> None:
    done = open_in_new_process("org/tiny", HF_ENDPOINT=hub.url, HF_HOME=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr
    assert hub.revisions == {"main", COMMIT}


def test_hub_id_works_from_the_cache_without_a_network(hub: Hub, tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    online = open_in_new_process("org/tiny", HF_ENDPOINT=hub.url, HF_HOME=cache)
    fetched = list(hub.fetched)
    offline = open_in_new_process("org/tiny", HF_ENDPOINT=hub.url, HF_HOME=cache, HF_HUB_OFFLINE="1")
    assert offline.returncode == 0, offline.stderr
    assert offline.stdout == online.stdout
    assert hub.fetched == fetched


def test_hub_repository_with_a_single_file_is_opened(hub: Hub, tmp_path: Path) -> None:
    for file in [INDEX, *SHARDS]:
        (hub.folder / file).unlink()
    save_shapes(hub.folder / "model.safetensors", tensor_shapes(load_config(hub.folder)))
    cache = str(tmp_path / "cache")
    online = open_in_new_process("org/tiny", HF_ENDPOINT=hub.url, HF_HOME=cache)
    assert online.returncode == 0, online.stderr
    assert Path(online.stdout.splitlines()[3]).name == "model.safetensors"
    offline = open_in_new_process("org/tiny", HF_ENDPOINT=hub.url, HF_HOME=cache, HF_HUB_OFFLINE="1")
    assert offline.stdout == online.stdout


@pytest.mark.parametrize("environment", [{}, {"HF_HUB_OFFLINE": "1"}])
def test_unknown_hub_id_says_so(hub: Hub, tmp_path: Path, environment: dict[str, str]) -> None:
    done = open_in_new_process("org/other", HF_ENDPOINT=hub.url, HF_HOME=str(tmp_path / "cache"), **environment)
    assert done.returncode == 1
    assert "there is no folder org/other here, and as a hub id it cannot be fetched" in done.stderr
