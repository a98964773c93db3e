"""deploy/compose*.yaml: what they promise about the image and the settings holds."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from service.settings import ENV_PREFIX, Settings

ROOT = Path(__file__).parents[2]
FILES = ["compose.yaml", "compose.cpu.yaml"]


class Reset:
    """What Compose's `!reset` tag stands for: the value of the file below is taken away."""


class Loader(yaml.SafeLoader):
    """YAML with Compose's own tag."""


Loader.add_constructor("!reset", lambda loader, node: Reset())


def load_service(file: str) -> dict[str, Any]:
    compose = yaml.load((ROOT / "deploy" / file).read_text(), Loader)
    return dict(compose["services"]["patchgrid"])


def resolve(value: str) -> str:
    """The value where nothing is set outside: `${NAME:-default}` is its default."""
    return re.sub(r"\$\{\w+:-(.*?)\}", r"\1", value)


def seconds(duration: str) -> float:
    match = re.fullmatch(r"(\d+)s", duration)
    assert match is not None, duration
    return float(match[1])


def image_environment(name: str) -> str:
    match = re.search(rf"^(?:ENV|   ) +{name}=(\S+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert match is not None, name
    return match[1]


@pytest.fixture
def settings(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """The settings as the service in compose.yaml reads them, or in compose.yaml under the files of a parameter."""
    for file in ["compose.yaml", *getattr(request, "param", [])]:
        for name, value in load_service(file)["environment"].items():
            monkeypatch.setenv(name, resolve(value))
    return Settings()


@pytest.mark.parametrize("file", FILES)
def test_every_setting_is_a_field(file: str) -> None:
    names = [name for name in load_service(file)["environment"] if name.startswith(ENV_PREFIX)]
    assert names
    assert {name.removeprefix(ENV_PREFIX).lower() for name in names} <= set(Settings.model_fields)


@pytest.mark.parametrize("file", FILES)
def test_a_setting_taken_from_outside_keeps_its_name(file: str) -> None:
    for name, value in load_service(file)["environment"].items():
        assert all(outside == name for outside in re.findall(r"\$\{(\w+)", value)), name


def test_the_defaults_serve_the_demo_model(settings: Settings) -> None:
    assert settings.model == "demo"
    assert settings.nproc_per_node == "auto"


@pytest.mark.parametrize("settings", [["compose.cpu.yaml"]], indirect=True)
def test_the_cpu_file_runs_the_tower_on_the_cpu(settings: Settings) -> None:
    assert settings.device == "cpu"


def test_a_gpu_is_reserved_and_the_cpu_file_takes_it_away() -> None:
    (gpu,) = load_service("compose.yaml")["deploy"]["resources"]["reservations"]["devices"]
    assert gpu["driver"] == "nvidia"
    assert gpu["capabilities"] == ["gpu"]
    assert isinstance(load_service("compose.cpu.yaml")["deploy"]["resources"]["reservations"]["devices"], Reset)


def test_a_model_may_take_as_long_to_load_as_the_service_allows(settings: Settings) -> None:
    assert seconds(load_service("compose.yaml")["healthcheck"]["start_period"]) >= settings.startup_timeout_s


@pytest.mark.parametrize("file", FILES)
def test_the_probe_is_the_image_s_own(file: str) -> None:
    assert not {"test", "disable"} & set(load_service(file).get("healthcheck", {}))


def test_a_stop_waits_for_accepted_requests(settings: Settings) -> None:
    assert seconds(load_service("compose.yaml")["stop_grace_period"]) > settings.request_timeout_s


def test_ranks_have_shared_memory_to_meet_in() -> None:
    match = re.fullmatch(r"(\d+)gb", load_service("compose.yaml")["shm_size"])
    assert match is not None
    assert int(match[1]) >= 1


@pytest.mark.parametrize("file", FILES)
def test_no_privilege_is_given(file: str) -> None:
    assert not {"privileged", "user", "cap_add", "pid", "network_mode"} & set(load_service(file))


def test_privileges_are_dropped() -> None:
    service = load_service("compose.yaml")
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]


def test_the_published_port_is_the_image_s_and_this_host_s_alone() -> None:
    (port,) = load_service("compose.yaml")["ports"]
    host, _, target = port.split(":")
    assert host == "127.0.0.1"
    assert target == image_environment("PATCHGRID_PORT")


def test_the_hub_s_cache_is_kept_in_a_volume() -> None:
    compose = yaml.load((ROOT / "deploy" / "compose.yaml").read_text(), Loader)
    (mount,) = compose["services"]["patchgrid"]["volumes"]
    volume, target = mount.split(":")
    assert volume in compose["volumes"]
    assert target == image_environment("HF_HOME")


def test_the_image_is_built_from_the_repository() -> None:
    context = ROOT / "deploy" / load_service("compose.yaml")["build"]["context"]
    assert (context / "Dockerfile").samefile(ROOT / "Dockerfile")


@pytest.mark.parametrize("file", FILES)
def test_every_build_argument_is_one_of_the_dockerfile(file: str) -> None:
    declared = set(re.findall(r"^ARG (\w+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE))
    assert set(load_service(file)["build"]["args"]) <= declared
