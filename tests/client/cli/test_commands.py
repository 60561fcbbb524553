"""The command line of the base install: its commands, the runs of a server, and what it says of the machine."""

from __future__ import annotations

import importlib.metadata
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import gradwire
import pytest
from gradwire.cli import doctor, listing, plugins
from gradwire.cli.app import app
from rich.console import Console
from support.chats import chat_model
from support.server import Server
from typer.testing import CliRunner, Result


def run(*words: str, typed: str | None = None) -> Result:
    return CliRunner().invoke(app, list(words), input=typed, env={"COLUMNS": "200", "GRADWIRE_API_KEY": None})


@pytest.fixture(scope="module")
def server(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of models with several chat formats."""
    folder = tmp_path_factory.mktemp("models")
    models = {form: chat_model(folder / form, form) for form in ("marked", "glm", "phi")}
    # GLM's answers end where another one's turn begins.
    added = json.loads((models["glm"] / "tokenizer.json").read_text())["added_tokens"]
    stops = [each["id"] for each in added if each["content"] in ("<|endoftext|>", "<|user|>")]
    settings = models["glm"] / "generation_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"eos_token_id": stops[::-1]}))
    more = [f"--model={form}={path}" for form, path in models.items()]
    running = Server(tiny_model_path, folder / "state", *more).start()
    yield running
    assert running.end() == 0


def test_the_version_is_the_packages() -> None:
    assert gradwire.__version__ == importlib.metadata.version("gradwire")
    assert run("--version").stdout == f"gradwire {gradwire.__version__}\n"


@pytest.mark.long
def test_runs_are_listed_forked_and_deleted(server: Server) -> None:
    address = ("--address", server.address)
    assert run("runs", "list", *address).stdout == f"no runs on {server.address}\n"
    with gradwire.sync.connect(server.address) as service:
        first = service.create_run("tiny", lora=2, name="\x1b[31mfirst")
        checkpoint = first.save_checkpoint("start").result(60).path
    forked = run("runs", "fork", checkpoint, "--name", "second", *address)
    assert forked.exit_code == 0, forked.output
    second = forked.stdout.strip()
    listed = run("runs", "list", *address).stdout
    assert first.run_id in listed and second in listed and "\x1b[31m" not in listed
    assert listed.index("second") < listed.index("·[31mfirst") and checkpoint in listed
    assert run("runs", "delete", second, *address, typed="n\n").exit_code == 1
    assert second in run("runs", "list", *address).stdout
    assert run("runs", "delete", second, "--yes", *address).stdout == f"deleted {second}\n"
    assert second not in run("runs", "list", *address).stdout
    gone = run("runs", "delete", second, "--yes", *address)
    assert gone.exit_code == 2 and gone.stderr.count("\n") == 1 and second in gone.stderr


def test_listings_keep_names_in_one_piece_where_they_have_room(monkeypatch: pytest.MonkeyPatch) -> None:
    columns, rows = ("run", "name", "owner", "checkpoint"), [("run-1", "a name", "", "run-1/" + "c" * 60)]

    def listed(width: int, terminal: bool) -> str:
        console = Console(file=io.StringIO(), width=width, force_terminal=terminal, color_system=None)
        monkeypatch.setattr(listing, "Console", lambda **options: console)
        listing.print_listing(columns, rows, empty="none")
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue()

    assert listed(100, True).splitlines()[1].split() == ["run-1", "a", "name", "run-1/" + "c" * 60]
    narrow = [line.strip() for line in listed(70, True).splitlines()]
    assert narrow == ["run-1", "name a name, checkpoint", "run-1/" + "c" * 60]


@pytest.mark.long
def test_conversations_are_shown_as_the_model_gets_them(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "talks.jsonl"
    file.write_text('{"prompt": "1 and 1?", "completion": "two"}\n{"prompt": "\\u001b[31m?", "completion": "red"}\n')
    marked = ("render", str(file), "--model", "marked", "--address", server.address)
    shown, ids = run(*marked, "--rows", "2"), run(*marked, "--json")
    file.write_text('{"q": "1 and 1?", "a": "two"}\n')
    mapped, wrong = run(*marked, "--mapping", "prompt=q", "--mapping", "completion=a"), run(*marked)
    assert shown.exit_code == 0, shown.output
    assert re.search(r"talks\.jsonl, line 1: \d+ tokens, \d+ trained on", shown.stdout)
    assert re.search(r">>>two[^1]*<<<", shown.stdout) and "1 and 1?" in shown.stdout
    assert "\x1b[31m" not in shown.stdout and ">>>red" in shown.stdout
    row = json.loads(ids.stdout)
    assert len(row["input_ids"]) == len(row["loss_mask"]) and 0 < sum(row["loss_mask"]) < len(row["loss_mask"])
    assert mapped.exit_code == 0 and ">>>two" in mapped.stdout
    assert wrong.exit_code == 2 and "line 1" in wrong.stderr and wrong.stdout == ""
    assert "--mapping prompt=COLUMN --mapping completion=COLUMN" in wrong.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "ends"),
    [("glm", ["one<|user|>", "four<|endoftext|>"]), ("phi", ["one<|end|>", "four<|end|>"]), ("tiny", ["four</s>"])],
)
def test_the_end_of_every_answer_that_is_learned_is_shown(
    server: Server, model: str, ends: list[str], tmp_path: Path
) -> None:
    talk = [{"role": role, "content": text} for role, text in (("user", "add"), ("assistant", "one"), ("user", "and"),
                                                               ("assistant", "four"))]  # fmt: skip
    file = tmp_path / "talks.jsonl"
    file.write_text(json.dumps({"messages": talk}) + "\n")
    shown = run("render", str(file), "--model", model, "--address", server.address)
    assert shown.exit_code == 0, shown.output
    stretches = re.findall(r">>>(?!>)(.*?)<<<(?!<)", shown.stdout, re.DOTALL)
    assert [each.lstrip("\n").split("\n")[0] for each in stretches] == ends, shown.output


def test_a_server_that_is_away_costs_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradwire.cli.service.CONNECT_S", 0.2)
    for words in (["status"], ["top"], ["runs", "list"], ["uploads", "list"]):
        away = run(*words, "--address", "127.0.0.1:1")
        assert away.exit_code == 1 and away.stdout == ""
        assert re.fullmatch(r"gradwire: no answer from 127\.0\.0\.1:1: .*\n", away.stderr)


@pytest.mark.long
def test_tls_to_a_server_without_it_costs_one_sentence(server: Server) -> None:
    """In a process of its own: gRPC writes to its stderr, not to Python's."""
    words = [sys.executable, "-m", "gradwire.cli", "status", "--address", f"https://{server.address}"]
    away = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (away.returncode, away.stdout) == (2, "")
    assert away.stderr == (
        f"gradwire: https://{server.address}: {server.address} does not speak TLS: leave out https:// and certificates,"
        " or start the server with --tls-cert\n"
    )
    missing = run("status", "--ca-cert", "none.pem")
    assert missing.exit_code == 2 and "'none.pem' does not exist" in missing.stderr


def test_every_command_of_ours_says_what_it_does() -> None:
    ours = {
        each.name for each in importlib.metadata.distribution("gradwire").entry_points if each.group == plugins.GROUP
    }
    assert ours <= set(plugins.HELP)


def test_commands_of_other_packages_are_loaded_when_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def entry_points(group: str) -> Sequence[importlib.metadata.EntryPoint]:
        assert group == plugins.GROUP
        return [
            importlib.metadata.EntryPoint("speak", "tests_of_gradwire_nowhere:main [voice]", group),
            importlib.metadata.EntryPoint("join.words", "os.path:join", group),
        ]

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    assert "speak" in run("--help").stdout and "join" in run("--help").stdout
    missing = run("speak", "--loud")
    assert missing.exit_code == 2
    assert missing.stderr == (
        "gradwire: `gradwire speak` needs tests_of_gradwire_nowhere, which is not installed:"
        " pip install 'gradwire[voice]'\n"
    )
    completed = CliRunner().invoke(
        app, [], prog_name="gradwire",
        env={"_GRADWIRE_COMPLETE": "complete_bash", "COMP_WORDS": "gradwire speak --", "COMP_CWORD": "2"},
    )  # fmt: skip
    assert (completed.exit_code, completed.stdout) == (0, "--help\n"), completed.output


@pytest.mark.long
def test_doctor_finds_what_is_wrong_and_says_what_to_do(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "keys.json").write_text("{}")
    (tmp_path / "keys.json").chmod(0o644)
    found = run("doctor", "--state-dir", str(tmp_path), "--address", "127.0.0.1:0")
    assert found.exit_code == 1
    for words in ("Python: 3.", "torch: ", "Memory: ", "Disk: ", "Port: 127.0.0.1:0 is free"):
        assert words in found.stdout
    assert f"chmod 700 {tmp_path}" in found.stdout and f"chmod 600 {tmp_path}/keys.json" in found.stdout
    tmp_path.chmod(0o700)
    (tmp_path / "keys.json").chmod(0o600)
    assert "problem" not in run("doctor", "--state-dir", str(tmp_path), "--address", "127.0.0.1:0").stdout


def test_doctor_on_a_machine_with_a_driver() -> None:
    (blind,) = doctor._cuda({"devices": [["H", 60 << 30, 80 << 30]], "built_for": "12.8"})
    assert (blind.state, blind.words) == ("ok", "H, 60 GiB of 80 GiB free")
    (busy,) = doctor._cuda({"devices": [["H", 10 << 30, 80 << 30]], "built_for": "12.8"})
    assert busy.state == "note" and "nvidia-smi" in busy.advice


@pytest.mark.parametrize(("built_for", "words"), [("", "was built for the CPU"), ("12.8", "finds no device")])
def test_doctor_on_a_machine_whose_gpu_torch_does_not_find(
    built_for: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    (finding,) = doctor._cuda({"devices": [], "built_for": built_for})
    assert finding.state == "problem" and words in finding.words and finding.advice


@pytest.mark.long
def test_a_port_in_use_is_noted(server: Server) -> None:
    finding = doctor.port(server.address)
    assert finding.state == "note" and f"gradwire status --address {server.address}" in finding.advice
    assert doctor.port("nowhere").state == "problem"
