"""Where `gradwire serve` takes its settings from, and what it says about those that it cannot use."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_proto.v1.training_pb2_grpc import TrainingServiceStub
from gradwire_server.cli.settings import load
from gradwire_server.cli.settings_file import SettingsError
from gradwire_server.config import EngineSettings, ServerConfig

from tests.server.process.test_serve import engine_of

pytestmark = pytest.mark.long

SERVE = [sys.executable, "-m", "gradwire_server.cli", "serve"]


def serve(folder: Path, *flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`gradwire serve` that does not get as far as an engine."""
    env = os.environ | {"COLUMNS": "200"} | environment
    return subprocess.run([*SERVE, *flags], capture_output=True, text=True, timeout=120, cwd=folder, env=env)


@pytest.mark.parametrize(
    "text, flags, environment, sentences",
    [
        (
            "models: x\n\nthread: 2\n",
            [],
            {},
            ["f.yaml, line 3: thread: there is no such setting; did you mean threads?"],
        ),
        (
            "models: x\nlimits:\n  max_rows: 9\n  max_row: 3\n",
            [],
            {},
            ["f.yaml, line 4: limits.max_row: there is no such limit; did you mean max_rows?"],
        ),
        ("models: x\nthreads: two\n", [], {}, ["f.yaml, line 2: threads: input should be a valid integer"]),
        ("models: [x\nthreads: 2\n", [], {}, ["f.yaml, line 2: this is no YAML"]),
        ("- models\n", [], {}, ["f.yaml, line 1: a file of settings has lines NAME: VALUE"]),
        ("threads: 1\nthreads: 2\n", [], {}, ["f.yaml, line 2: threads is already on line 1"]),
        ("models: [a/x, n=b, n=c]\n", [], {}, ["f.yaml, line 1: models: two models are named 'n'"]),
        ("threads: 2\n", [], {}, ["name at least one model"]),
        (
            "threads: 2\n",
            [],
            {"GRADWIRE_MODEL": "x", "GRADWIRE_STATEDIR": "/x"},
            [
                "GRADWIRE_MODEL is no setting and is ignored; did you mean GRADWIRE_MODELS?",
                "GRADWIRE_STATEDIR is no setting and is ignored; did you mean GRADWIRE_STATE_DIR?",
                "name at least one model",
            ],
        ),
        (
            "models: x\n",
            ["--limit", "max-tesnors=3"],
            {"GRADWIRE_THREADS": "many"},
            [
                "GRADWIRE_THREADS: input should be a valid integer",
                "--limit max_tesnors: there is no such limit; did you mean max_tensors?",
            ],
        ),
        ("models: x\n", ["--limit", "max_rows"], {}, ["--limit max_rows: give NAME=VALUE"]),
        ("models: x\n", [], {"GRADWIRE_LIMITS__MAX_ROWS": "0"}, ["GRADWIRE_LIMITS__MAX_ROWS: input should be greater"]),
        ("models: x\n", ["--grace", "-1"], {}, ["--grace: input should be greater than or equal to 0"]),
    ],
)
def test_settings_that_cannot_be_used_are_told_in_a_sentence_each(
    tmp_path: Path, text: str, flags: list[str], environment: dict[str, str], sentences: list[str]
) -> None:
    (tmp_path / "f.yaml").write_text(text)
    ended = serve(tmp_path, "--config", "f.yaml", *flags, **environment)
    assert ended.returncode == 2
    lines = ended.stderr.splitlines()
    assert len(lines) == len(sentences), ended.stderr
    for line, sentence in zip(lines, sentences, strict=True):
        assert line.startswith(f"gradwire: {sentence}")
    assert list(tmp_path.iterdir()) == [tmp_path / "f.yaml"]


def test_a_file_that_cannot_be_read_and_a_flag_of_the_wrong_type(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"models: \xff\n")
    for flags, sentence in (
        (["--config", "none.yaml"], "gradwire: none.yaml: the file of settings cannot be read: No such file"),
        (["--config", "."], "gradwire: .: the file of settings cannot be read: Is a directory"),
        (["--config", "latin.yaml"], "gradwire: latin.yaml: the file of settings is no UTF-8 text"),
        (["--model", "x", "--threads", "two"], "Invalid value for '--threads'"),
        (["--model", "x", "--sampler", "tea"], "Invalid value for '--sampler'"),
    ):
        ended = serve(tmp_path, *flags)
        assert ended.returncode == 2 and sentence in ended.stderr and "Traceback" not in ended.stderr


def test_flags_go_before_the_environment_and_that_before_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loaded(text: str, flags: Mapping[str, Any], **environment: str) -> ServerConfig:
        (tmp_path / "f.yaml").write_text(text)
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            return load(flags, tmp_path / "f.yaml")

    text = (
        "models: {tiny: /tiny}\nthreads: 1\ndtype: float32\ngrace: 3\nlimits: {max_rows: 1, max_tags: 1, max_runs: 1}\n"
    )
    found = loaded(
        text, {"threads": 3, "limits": ["max-rows=3"]},
        GRADWIRE_THREADS="2", GRADWIRE_DTYPE="mixed", GRADWIRE_GRACE="", GRADWIRE_API_KEY="secret",
        GRADWIRE_LIMITS__MAX_ROWS="2", GRADWIRE_LIMITS__MAX_TAGS="2",
    )  # fmt: skip
    assert (found.threads, found.dtype, found.grace, found.sampler) == (3, "mixed", 3.0, "local")
    assert (found.limits.max_rows, found.limits.max_tags, found.limits.max_runs) == (3, 2, 1)
    assert found.models == {"tiny": "/tiny"}
    assert loaded(text, {"models": ["mine=/a"]}, GRADWIRE_MODELS="b/c").models == {"mine": "/a"}
    assert loaded(text, {}, GRADWIRE_MODELS="b/c, mine=/a").models == {"b/c": "b/c", "mine": "/a"}
    # What YAML reads as something else than text.
    found = loaded("models: x\ngroup_runs: on\nmetrics_address: 9464\nstate_dir: ~/state\n", {})
    assert (found.group_runs, found.metrics_address) == ("on", "127.0.0.1:9464")
    assert found.state_dir == Path.home() / "state"
    with pytest.raises(SettingsError, match="no YAML"):
        loaded("models: \0\n", {})


def test_the_engine_gets_its_part_and_nothing_is_lost_on_the_way(tmp_path: Path) -> None:
    config = ServerConfig(
        models={"tiny": "/a=b"}, allow_models={"late": "/l"}, losses=(tmp_path / "l.py",), state_dir=tmp_path,
        device="cuda:1", dtype="mixed", compile=True, group_runs="on", activation_budget_gib=0.1, threads=3,
        traces="http://localhost:1",
    )  # fmt: skip
    engine = EngineSettings.model_validate_json(config.engine.model_dump_json())
    assert engine == config.engine
    assert engine.model_dump() == {name: getattr(config, name) for name in EngineSettings.model_fields}


def test_engines_that_are_not_alike_serve_their_models_and_agree_on_those_that_several_serve() -> None:
    config = ServerConfig.model_validate(
        {"models": ["a=/a"], "each_engine": ["model=a,ranks=2", "model=b=/b,device=cpu"]}
    )
    assert config.models == {"a": "/a", "b": "/b"}
    engines = config.engine_settings
    assert [(each.models, each.num_ranks, each.device) for each in engines] == [
        ({"a": "/a"}, 2, ""),
        ({"b": "/b"}, 1, "cpu"),
    ]
    for wrong, said in (
        (["model=a", "dtype=float64"], "engines that serve a need one dtype"),
        (["model=a,rank=2"], "--engine model=a,rank=2: 'rank=2' is none of model=NAME, ranks=N"),
        (["model=a,ranks=0"], "greater than or equal to 1"),
    ):
        with pytest.raises(ValueError, match=said):
            ServerConfig.model_validate({"models": ["a=/a"], "each_engine": wrong})
    with pytest.raises(ValueError, match="leave out --engines"):
        ServerConfig.model_validate({"engines": 2, "each_engine": ["model=a=/a"]})


def test_help_lists_each_flag_under_a_subject_and_says_what_goes_before_what(tmp_path: Path) -> None:
    text = serve(tmp_path, "--help").stdout
    assert "Flags take precedence over the environment, the environment over the file" in " ".join(text.split())
    panels = re.split(r"╭─ ", text)
    found = {panel.partition(" ─")[0]: set(re.findall(r"(?m)^│ +(--[a-z-]+)", panel)) for panel in panels[1:]}
    assert found["Models and losses"] == {"--model", "--allow-model", "--losses"}
    assert found["Options"] == {"--help", "--config"}
    process = {"--console", "--feedback", "--ready-file", "--die-with-parent", "--key-on-stdin", "--parent-pid"}
    assert found["Process"] == process
    flags = set().union(*found.values())
    singular = {"models": "model", "allow_models": "allow-model", "limits": "limit", "host_names": "host-name"}
    singular["each_engine"] = "engine"
    assert flags - found["Process"] - found["Options"] == {
        f"--{singular.get(name, name.replace('_', '-'))}" for name in ServerConfig.model_fields
    }


def test_a_server_starts_from_a_file_and_the_environment(tiny_model_path: Path, tmp_path: Path) -> None:
    settings = tmp_path / "gradwire.yaml"
    settings.write_text(
        f"models:\n  tiny: {tiny_model_path}\nstate_dir: {tmp_path / 'state'}\naddress: 127.0.0.1:1\ndtype: float64\n"
        "durability: checkpoint\nthreads: 7\nlimits:\n  max_rows: 11\n"
    )
    environment = {"GRADWIRE_THREADS": "1", "GRADWIRE_LIMITS__MAX_TAGS": "5", "GRADWIRE_DURABILTY": "journal"}
    words = [*SERVE, "--config", str(settings), "--address", "127.0.0.1:0"]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | environment
    ) as server:
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            assert line.startswith("gradwire: listening on ")
            with grpc.insecure_channel(line.split()[-1]) as channel:
                info = TrainingServiceStub(channel).GetServerInfo(pb.GetServerInfoRequest())
            assert (info.limits["max_rows"], info.limits["max_tags"], info.durability) == (11, 5, "checkpoint")
            engine = engine_of(str(tmp_path / "state"))
            words = Path(f"/proc/{engine}/cmdline").read_bytes().decode().split("\0")
            document = EngineSettings.model_validate_json(words[words.index("--settings") + 1])
            assert (document.threads, document.dtype, document.state_dir) == (1, "float64", tmp_path / "state")
        finally:
            server.terminate()
            _, told = server.communicate(timeout=120)
    assert server.returncode == 0
    assert "GRADWIRE_DURABILTY is no setting and is ignored; did you mean GRADWIRE_DURABILITY?" in told
    assert re.search(r"tiny +│.*float64", told)  # what the engine holds
