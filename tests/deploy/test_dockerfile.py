"""Dockerfile: it names files that exist, drops root, and its probe and its list of dependencies do what they say."""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from service.settings import ENV_PREFIX, Settings

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction, its lines joined."""

    keyword: str
    value: str


def read_instructions() -> list[Instruction]:
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [Instruction(*line.split(maxsplit=1)) for line in joined.splitlines() if line]


def final_stage() -> list[Instruction]:
    instructions = read_instructions()
    start = max(i for i, instruction in enumerate(instructions) if instruction.keyword == "FROM")
    return instructions[start:]


def values(instructions: list[Instruction], keyword: str) -> list[str]:
    return [instruction.value for instruction in instructions if instruction.keyword == keyword]


def sources() -> list[str]:
    """Every file or folder that is copied from the repository."""
    copies = [value.split() for value in values(read_instructions(), "COPY")]
    return [source for copy in copies if not copy[0].startswith("--from") for source in copy[:-1]]


def environment() -> dict[str, str]:
    return dict(pair.split("=", 1) for value in values(final_stage(), "ENV") for pair in shlex.split(value))


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def option(name: str) -> float:
    """An option of HEALTHCHECK, seconds."""
    (value,) = values(final_stage(), "HEALTHCHECK")
    match = re.search(rf"--{name}=(\d+)s", value)
    assert match is not None, name
    return float(match[1])


def probe(port: int) -> int:
    """Run HEALTHCHECK's command against a port of this host; its exit code."""
    (value,) = values(final_stage(), "HEALTHCHECK")
    program, *arguments = json.loads(value.split("CMD", 1)[1])
    assert program == "python"
    environ = {**os.environ, "PATCHGRID_PORT": str(port), "http_proxy": "http://127.0.0.1:9"}
    return subprocess.run([sys.executable, *arguments], env=environ, timeout=60, capture_output=True).returncode


@contextmanager
def serve(ready: HTTPStatus) -> Iterator[int]:
    """A server on a free port that answers `/health/ready` as told, and nothing else."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(ready if self.path == "/health/ready" else HTTPStatus.NOT_FOUND)
            self.end_headers()

        def log_message(self, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def test_every_copied_source_exists() -> None:
    assert sources()
    assert [source for source in sources() if not (ROOT / source).exists()] == []


def test_the_build_context_holds_what_is_copied_and_no_more() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in lines
    assert {line[1:] for line in lines if line.startswith("!")} == set(sources())


def test_every_package_is_copied() -> None:
    assert set(pyproject()["tool"]["setuptools"]["packages"]) <= set(sources())


def test_dependencies_are_installed_before_any_source_is_copied() -> None:
    instructions = read_instructions()
    installed = next(i for i, each in enumerate(instructions) if "pip install" in each.value and "-r " in each.value)
    copied = next(i for i, each in enumerate(instructions) if each.keyword == "COPY" and "encoder" in each.value)
    assert installed < copied


def test_the_list_of_dependencies_is_that_of_pyproject(tmp_path: Path) -> None:
    (command,) = [value for value in values(read_instructions(), "RUN") if "tomllib" in value]
    listed = tmp_path / "requirements.txt"
    command = command.replace("python", shlex.quote(sys.executable), 1).replace("/requirements.txt", str(listed))
    subprocess.run(["sh", "-c", command], cwd=ROOT, check=True)
    assert listed.read_text().splitlines() == pyproject()["project"]["dependencies"]


def test_flash_attn_is_off_unless_asked_for() -> None:
    assert "FLASH_ATTN=0" in values(read_instructions(), "ARG")
    stages = [value.split()[-1] for value in values(read_instructions(), "FROM")]
    assert {"flash-attn-0", "flash-attn-1"} <= set(stages)


def test_the_service_does_not_run_as_root() -> None:
    keywords = [instruction.keyword for instruction in final_stage()]
    (user,) = values(final_stage(), "USER")
    assert user not in ("root", "0")
    assert any(f" {user} " in f"{value} " for value in values(final_stage(), "RUN") if value.startswith("useradd"))
    assert keywords.index("USER") < keywords.index("ENTRYPOINT")
    assert "RUN" not in keywords[keywords.index("USER") :]


def test_the_entry_point_is_the_console_script() -> None:
    (entry,) = values(final_stage(), "ENTRYPOINT")
    assert json.loads(entry) == list(pyproject()["project"]["scripts"])
    assert values(final_stage(), "CMD") == ['["serve"]']
    assert values(final_stage(), "STOPSIGNAL") == ["SIGTERM"]


def test_every_setting_is_a_field_and_listens_where_docker_publishes(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {name: value for name, value in environment().items() if name.startswith(ENV_PREFIX)}
    assert {name.removeprefix(ENV_PREFIX).lower() for name in names} <= set(Settings.model_fields)
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    assert Settings().host == "0.0.0.0"
    assert [str(Settings().port)] == values(final_stage(), "EXPOSE")


def test_the_hub_s_cache_is_a_volume() -> None:
    assert values(final_stage(), "VOLUME") == [environment()["HF_HOME"]]


def test_the_version_is_that_of_pyproject() -> None:
    (labels,) = values(final_stage(), "LABEL")
    assert f"org.opencontainers.image.version={pyproject()['project']['version']}" in shlex.split(labels)


def test_a_ready_service_is_healthy() -> None:
    with serve(HTTPStatus.OK) as port:
        assert probe(port) == 0


def test_a_service_that_is_not_ready_is_unhealthy() -> None:
    with serve(HTTPStatus.SERVICE_UNAVAILABLE) as port:
        assert probe(port) == 1


def test_a_service_that_does_not_listen_is_unhealthy() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        assert probe(held.getsockname()[1]) == 1


def test_a_model_may_take_as_long_to_load_as_the_service_allows() -> None:
    assert option("start-period") >= Settings.model_fields["startup_timeout_s"].default
