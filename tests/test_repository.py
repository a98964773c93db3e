"""The repository itself: scripts that run, pins that are exact and complete, and no path that leads out of it."""

import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from service.settings import settings_table

ROOT = Path(__file__).parents[1]
SCRIPTS = ["scripts/serve", "scripts/test", "scripts/check", "scripts/soak", "scripts/corpus_check", ".ci/run"]


def git(*arguments: str) -> list[str]:
    command = ["git", "-c", "safe.directory=*", *arguments]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def declared() -> list[Requirement]:
    """What pyproject.toml asks for: to build, to run, and with any extra."""
    project = pyproject()["project"]
    extras = [line for extra in project["optional-dependencies"].values() for line in extra]
    return [Requirement(line) for line in [*pyproject()["build-system"]["requires"], *project["dependencies"], *extras]]


def pins() -> dict[str, Version]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {canonicalize_name(name): Version(version) for name, version in (line.split("==") for line in lines)}


@pytest.mark.parametrize("script", SCRIPTS)
def test_script_is_bash_and_executable_in_every_clone(script: str) -> None:
    assert (ROOT / script).read_text().startswith("#!/usr/bin/env bash\n")
    assert os.access(ROOT / script, os.X_OK)
    assert git("ls-files", "--stage", script)[0].startswith("100755 ")
    subprocess.run(["bash", "-n", script], cwd=ROOT, check=True)


def test_no_tracked_file_names_a_path_outside_the_repository() -> None:
    outside = [str(Path("..", "shared")).encode(), str(Path("/", "work", "main")).encode()]
    found = {
        name
        for name in git("ls-files")
        if (ROOT / name).is_file() and any(path in (ROOT / name).read_bytes() for path in outside)
    }
    assert found == set()


def test_every_constraint_is_an_exact_pin_named_once() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", line)] == []
    assert len(pins()) == len(lines)


def test_constraints_satisfy_everything_that_is_declared() -> None:
    unpinned = [
        str(requirement)
        for requirement in declared()
        if (pin := pins().get(canonicalize_name(requirement.name))) is None or pin not in requirement.specifier
    ]
    assert unpinned == []


def test_pillow_is_held_to_the_release_that_the_goldens_were_made_with() -> None:
    (pillow,) = [requirement for requirement in declared() if requirement.name == "pillow"]
    release = pins()["pillow"].release
    assert str(pillow.specifier) == f"=={release[0]}.{release[1]}.*"


def test_everything_installed_for_the_project_is_pinned() -> None:
    """Followed from distribution to distribution; what one of them requires exactly is pinned by that."""
    waiting = [requirement for requirement in declared() if requirement.name != "flash-attn"]
    seen: set[str] = set()
    unpinned: set[str] = set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        exact = any(specifier.operator == "==" and "*" not in specifier.version for specifier in requirement.specifier)
        if name not in pins() and not exact:
            unpinned.add(name)
        for extra in ["", *requirement.extras]:
            if (key := f"{name}[{extra}]") in seen:
                continue
            seen.add(key)
            children = [Requirement(line) for line in distribution(name).requires or []]
            waiting += [each for each in children if each.marker is None or each.marker.evaluate({"extra": extra})]
    assert unpinned == set()


def test_what_is_installed_is_what_is_pinned() -> None:
    different = {}
    for name, pin in pins().items():
        try:
            installed = Version(distribution(name).version)
        except PackageNotFoundError:
            continue
        if installed.public != pin.public:
            different[name] = str(installed)
    assert different == {}


def test_an_installation_that_failed_is_begun_again_from_nothing(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    for name in ("scripts/_venv.sh", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    environ = {**os.environ, "PYTHON": sys.executable, "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    environ.pop("PIP_FIND_LINKS", None)
    command = ["bash", "-euo", "pipefail", "-c", "source scripts/_venv.sh; ensure_venv .; echo believed"]

    for _ in range(2):
        ended = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120)
        assert ended.returncode != 0
        assert ended.stdout == ""
        assert "making .venv" in ended.stderr
        half_written = tmp_path / ".venv/lib/half-written"
        assert not half_written.exists()
        half_written.touch()


def test_the_readme_has_the_settings_as_they_are() -> None:
    assert settings_table() in (ROOT / "README.md").read_text()
