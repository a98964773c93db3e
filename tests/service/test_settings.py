import re
from pathlib import Path

import pytest
from pydantic import ValidationError

import service.settings
from service.settings import Settings, count_gpus, load_settings, settings_table


def test_defaults_need_no_flags() -> None:
    settings = load_settings([])
    assert (settings.model, settings.host, settings.port) == ("demo", "127.0.0.1", 8100)
    assert settings.limit_body_bytes == 64 * 1024 * 1024


def test_every_field_has_a_flag_an_environment_name_and_a_description(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        load_settings(["--help"])
    assert exit_info.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for name, field in Settings.model_fields.items():
        assert field.description
        assert f"--{name.replace('_', '-')} " in text
        assert f"PATCHGRID_{name.upper()}" in text


def test_a_flag_wins_over_the_environment_and_that_over_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATCHGRID_PORT", "9000")
    monkeypatch.setenv("PATCHGRID_NPROC_PER_NODE", "3")
    settings = load_settings(["--port", "9001"])
    assert settings.port == 9001
    assert settings.nproc_per_node == 3


def test_an_empty_environment_value_is_none_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATCHGRID_MODEL_NAME", "")
    monkeypatch.setenv("PATCHGRID_DECODE_PROCESSES", "")
    settings = load_settings([])
    assert settings.model_name is None
    assert settings.decode_processes is None


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--port", "abc"], "--port (PATCHGRID_PORT) cannot be 'abc': "),
        (["--port", "65536"], "--port (PATCHGRID_PORT) cannot be '65536': "),
        (["--nproc-per-node", "0"], "--nproc-per-node (PATCHGRID_NPROC_PER_NODE) cannot be '0': "),
        (["--dtype", "int8"], "--dtype (PATCHGRID_DTYPE) cannot be 'int8': "),
        (["--request-timeout-s", "inf"], "--request-timeout-s (PATCHGRID_REQUEST_TIMEOUT_S) cannot be 'inf': "),
        (["--limit-body-bytes", "-1"], "--limit-body-bytes (PATCHGRID_LIMIT_BODY_BYTES) cannot be '-1': "),
        (["--nnodes", "2"], "--rdzv-endpoint is required when --nnodes is more than 1"),
    ],
)
def test_a_value_that_cannot_be_used_ends_the_start_with_one_line(
    flags: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        load_settings(flags)
    assert exit_info.value.code == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith(f"patchgrid serve: error: {line}")


def test_a_wrong_environment_value_is_told_as_a_flag_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATCHGRID_PORT", "tcp://10.0.0.1:8100")
    with pytest.raises(SystemExit) as exit_info:
        load_settings([])
    assert exit_info.value.code == 2
    assert "PATCHGRID_PORT" in capsys.readouterr().err


def test_an_unknown_flag_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        load_settings(["--prot", "1"])
    assert exit_info.value.code == 2
    assert "unrecognized arguments: --prot" in capsys.readouterr().err


def test_settings_are_frozen() -> None:
    settings = Settings()
    with pytest.raises(ValidationError):
        settings.port = 1  # type: ignore[misc]


def test_a_secret_is_not_shown() -> None:
    assert "hunter2" not in repr(load_settings(["--id-key", "hunter2"]))


def test_auto_is_one_rank_per_gpu_and_one_without(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(service.settings, "_NVIDIA_GPUS", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert Settings().num_local_ranks == 1
    for bus in ("0000:01:00.0", "0000:02:00.0", "0000:03:00.0"):
        (tmp_path / bus).mkdir()
    assert Settings().num_local_ranks == 3
    assert Settings(device="cpu").num_local_ranks == 1
    assert Settings(nproc_per_node=2).num_local_ranks == 2


@pytest.mark.parametrize(("visible", "expected"), [("0,2", 2), ("", 0), ("-1", 0), ("1", 1), ("0,1,2,3", 3)])
def test_hidden_gpus_do_not_count(visible: str, expected: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(service.settings, "_NVIDIA_GPUS", tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    for bus in ("0000:01:00.0", "0000:02:00.0", "0000:03:00.0"):
        (tmp_path / bus).mkdir()
    assert count_gpus() == expected


def test_the_table_has_a_row_for_every_field() -> None:
    rows = settings_table().splitlines()
    assert len(rows) == 2 + len(Settings.model_fields)
    assert rows[2].startswith("| `--model` | `PATCHGRID_MODEL` | `demo` |")


_DERIVED = {
    "nproc_per_node": "num_local_ranks",
    "decode_processes": "num_decode_processes",
}


def test_every_setting_is_obeyed_somewhere() -> None:
    package = Path(service.settings.__file__).parent
    code = "".join(file.read_text() for file in package.glob("*.py") if file.name != "settings.py")
    for name in Settings.model_fields:
        derived = _DERIVED.get(name, name)
        assert re.search(rf"\bsettings\.{derived}\b", code), f"no code reads {name}"
