"""Texts of callers that become code: every place is in one list with what holds it, and the list is walked."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import socket
import stat
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from gradwire.rl.rewards import math_answer
from gradwire_proto.v1 import jobs_pb2 as jobs
from gradwire_server.access.signing import SIGNING_KEY, URL_SECRET, UrlSecret, sign, signer
from gradwire_server.cli import keys
from support.job_stubs import NO_WORKERS, refused, stub_of, upload
from support.keyed import code_of
from typer.testing import CliRunner

ROOT = Path(__file__).parents[3]
OWN = "the user's own, on the user's machine; jobs refuse it"
SEALED = "sealed: a root of Python and named packages, a user of its own, an allow-list of system calls"
BOUNDED = "a process of bounded memory and time, and a language without input and output"
FIXED = "text of this project's, or of the administrator's"
PLACES = {
    "client/gradwire/rl/rewards/graders/source.py": ("_run_source", SEALED),
    "client/gradwire/rl/rewards/_sandbox/program_main.py": ("Session.do_load", "Session.do_run", SEALED),
    "client/gradwire/rl/rewards/_sandbox/rebuild.py": ("rebuild", "rebuild.value", OWN),
    "client/gradwire/rl/rewards/_sandbox/serve.py": ("serve", OWN),
    "client/gradwire/rl/rewards/_sandbox/worker.py": ("answer_of", OWN),
    "client/gradwire/rl/rewards/_sandbox/grading.py": ("_try_statement", "_scope", OWN),
    "client/gradwire/rl/rewards/verifiable.py": ("regex_match", "regex_match.regex_match", OWN),
    "client/gradwire/recipes/own_code.py": ("environment_of", "loaded", "_from_file", OWN),
    "client/gradwire/data/stored.py": ("Copied.__getitem__", OWN),
    "client/gradwire/router/policy.py": ("LinearPolicy.load", OWN),
    "client/gradwire/router/run_folder.py": ("RunFolder.resume", OWN),
    "client/gradwire/router/settings_file.py": ("parse_settings", "_override", OWN),
    "client/gradwire/extras.py": ("require", FIXED),
    "client/gradwire/recipes/command.py": ("_recipe", FIXED),
    "client/gradwire/router/__init__.py": ("__getattr__", FIXED),
    "client/gradwire/rl/viewer.py": ("page", FIXED),
    "server/gradwire_jobs/worker.py": ("_run_script", "an administrator's, with --job-scripts"),
    "server/gradwire_server/tokenizing/chat_template.py": ("_environment", "ChatTemplate.write", BOUNDED),
    "server/gradwire_server/tokenizing/known_texts.py": ("KnownTexts.__init__", FIXED),  # a tokenizer's added tokens
    "server/gradwire_server/grammar_trial.py": ("tried", BOUNDED),
    "server/gradwire_server/grammar_forms.py": ("written", BOUNDED),
    "server/gradwire_server/doors/http/openai/call_readers.py": ("tagged", "written", "python_between", FIXED),
    "server/gradwire_server/doors/http/door.py": ("", FIXED),
    "server/gradwire_server/doors/http/openai/reading.py": ("_pattern", FIXED),
    "server/gradwire_server/engine/model/attention/varlen.py": ("varlen_kernel", FIXED),
    "server/gradwire_server/engine/model/loading/configuration.py": ("without_path", FIXED),
    "server/gradwire_server/engine/model/loading/fused_kernels.py": ("_Liger.__init__", FIXED),
    "server/gradwire_console/preview.py": ("_without", FIXED),
    "server/gradwire_feedback/api/errors.py": ("", FIXED),
    "server/gradwire_feedback/names.py": ("is_agent_id", "is_version", FIXED),
    "losses/gradwire_losses/registry.py": ("load_builtin_losses", "load_plugin_losses", "load_loss_file", FIXED),
}
"""File -> the functions in which a text becomes code, and last what holds that code."""

BUILTINS = ("exec", "eval", "compile", "__import__")
LOADERS = (
    "import_module", "run_path", "run_module", "exec_module", "spec_from_file_location", "from_string", "FunctionType",
    "LLMatcher", "any_to_lark", "Unpickler",
)  # fmt: skip
MODULES = ("pickle.load", "pickle.loads", "marshal.loads", "torch.load", "yaml.load", "np.load", "numpy.load")
PATTERNS = ("compile", "match", "search", "fullmatch", "sub", "subn", "split", "findall", "finditer")


class Places(ast.NodeVisitor):
    """Functions that make code of a text which is not written there."""

    def __init__(self) -> None:
        self.found: set[str] = set()
        self._within: list[str] = []

    def visit_FunctionDef(self, node: Any) -> None:
        self._within.append(node.name)
        self.generic_visit(node)
        self._within.pop()

    visit_AsyncFunctionDef = visit_ClassDef = visit_FunctionDef

    def visit_Call(self, node: ast.Call) -> None:
        name = ast.unparse(node.func)
        last = name.rpartition(".")[2]
        written = bool(node.args) and isinstance(node.args[0], ast.Constant)
        remote = [each for each in node.keywords if each.arg in ("trust_remote_code", "shell")]
        if (
            name in BUILTINS
            or name in MODULES
            or (last in LOADERS and not written)
            or (name.removeprefix("re.") in PATTERNS and name.startswith("re.") and not written)
            or last in ("Environment", "ImmutableSandboxedEnvironment")
            or re.fullmatch(r".*\b(entry_point|offered\[reference\])\.load", name)
            or any(not isinstance(each.value, ast.Constant) or each.value.value for each in remote)
        ):
            self.found.add(".".join(self._within))
        self.generic_visit(node)


@pytest.mark.long
def test_every_place_where_text_becomes_code_is_in_the_list() -> None:
    found: dict[str, set[str]] = {}
    for folder in ("client", "losses", "server"):
        for file in (ROOT / folder).rglob("*.py"):
            places = Places()
            places.visit(ast.parse(file.read_text()))
            if places.found:
                found[str(file.relative_to(ROOT))] = places.found
    assert found == {file: set(functions) for file, (*functions, _) in PLACES.items()}


LOOK = """
import ctypes, json, os, socket, tempfile, threading

def grade(sample, item):
    libc, found = ctypes.CDLL(None, use_errno=True), []

    def tried(what, does, *arguments):
        try:
            result = does(*arguments)
        except BaseException:
            return
        if result not in (-1, False, None):
            found.append(what)

    def written():
        for number in range(600):
            with open(f"/tmp/{number}", "wb") as file:
                file.write(bytes(1 << 20))
        return True

    def threads():
        for _ in range(200):
            threading.Thread(target=threading.Event().wait, daemon=True).start()
        return True

    for path in item["paths"]:
        tried(path, open, path)
        tried(path, os.stat, path)
        tried(path, os.listdir, path)
    for path in ("/dev/kmsg", "/dev/loop0", "/dev/fuse", "/dev/vsock", "/dev/vda", "/dev/mem", "/dev/null/x"):
        tried(path, os.open, path, os.O_RDWR)
    for family in ("UNIX", "INET", "INET6", "NETLINK", "VSOCK", "PACKET"):
        tried(f"socket {family}", socket.socket, getattr(socket, "AF_" + family))
    tried("datagrams", socket.socketpair, socket.AF_UNIX, socket.SOCK_DGRAM)
    for name, arguments in {
        "unshare": (0x10000000,), "mount": (b"none", b"/tmp", b"tmpfs", 0, None), "chroot": (b"/tmp",), "fork": (),
        "ptrace": (16, 1, None, None), "kill": (1, 0), "setuid": (0,), "prctl": (22, 2, None), "syslog": (3, None, 0),
        "memfd_create": (b"x", 0), "userfaultfd": (0,), "io_setup": (1, None), "personality": (0,),
    }.items():
        tried(name, getattr(libc, name, lambda *_: -1), *arguments)
    # keyctl, add_key, process_vm_readv, bpf, perf_event_open, io_uring_setup, pidfd_open, setns, open_by_handle_at
    for number in item["calls"]:
        tried(f"call {number}", libc.syscall, number, 0, 0, 0, 0, 0, 0)
    tried("600 MiB", written)
    tried("200 threads", threads)
    seen = {name for name in os.environ if "KEY" in name or "TOKEN" in name or name in ("HOME", "USER")}
    raise RuntimeError(json.dumps([found, sorted(seen), sorted(os.listdir("/")), os.getuid()]) + "x" * 100_000)
"""
CALLS = {
    "x86_64": (250, 248, 310, 321, 298, 425, 434, 308, 304),
    "aarch64": (219, 217, 270, 280, 241, 425, 434, 268, 265),
}


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is of Linux")
async def test_a_tenants_grader_sees_nothing_of_the_server(
    keyed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "the judge's")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "host.sock"))
        listening.listen()
        async with keyed(http="127.0.0.1:0", **NO_WORKERS) as door:
            other = await upload(await stub_of(door.door, door.secrets["bob"]))
            state = door.door.server.core.config.state_dir
            files = [*(each for each in state.rglob("*")), tmp_path / "host.sock", Path(__file__), Path(sys.executable)]
            assert state / "files" / other.digest.hex() in files and state / "keys.json" in files
            paths = [
                *map(str, files),
                "/proc",
                "/sys",
                "/etc/passwd",
                "/home",
                "/usr/bin",
                str(ROOT / "server"),
            ]
            async with httpx.AsyncClient(
                base_url=door.door.server.http.url, headers={"X-API-Key": door.secrets["ada"]}, timeout=120
            ) as http:
                answer = await http.post(
                    "/v1/fine_tuning/alpha/graders/run",
                    json={
                        "grader": {"type": "python", "source": LOOK}, "model_sample": "a",
                        "item": {"paths": paths, "calls": CALLS[os.uname().machine]},
                    },
                )  # fmt: skip
    errors = answer.json()["metadata"]["errors"]
    assert errors["python_grader_runtime_error"], answer.text
    told = errors["python_grader_runtime_error_details"]
    assert len(told) <= 2000
    found, seen, root, user = json.JSONDecoder().raw_decode(told.removeprefix("RuntimeError: "))[0]
    assert (found, seen) == ([], [])
    outside = {"etc", "lib", "lib64", "usr", "tmp", "dev"}  # and what leads to Python and its packages
    assert {*root} <= outside | {Path(each).parts[1] for each in (sys.base_prefix, sys.prefix)}
    if os.geteuid() == 0:
        assert user not in (0, 65534)


REFUSED = {
    "a reward's code": {"reward": "os:system"},
    "code among rewards": {"reward": {"last_number": 1.0, "x.py:f": 1.0}},
    "an environment's code": {"environment": "subprocess:run", "environment_args": {"args": "id"}},
    "an agent's program": {"environment": "agent", "command": "id"},
    "an agent's program in its options": {"environment": "agent", "environment_args": {"command": ["id"]}},
    "a program without an agent": {"command": ["id"]},
}


async def test_settings_of_jobs_name_no_code(keyed: Any) -> None:
    async with keyed(**NO_WORKERS) as door:
        ada = await stub_of(door.door, door.secrets["ada"])
        data = (await upload(ada)).file_id
        for what, settings in REFUSED.items():
            spec = jobs.JobSpec(recipe="grpo", settings=json.dumps({"model": "tiny", "data": data} | settings))
            error = await refused(ada.CreateJob(jobs.CreateJobRequest(spec=spec)))
            assert (code_of(error), error.field) == ("invalid_argument", next(iter(settings))), what
        script = (await upload(ada, b"print(1)", purpose="script", filename="a.py")).file_id
        spec = jobs.JobSpec(recipe="script", settings=json.dumps({"script": script}))
        assert code_of(await refused(ada.CreateJob(jobs.CreateJobRequest(spec=spec)))) == "permission_denied"


MATHEMATICS = [
    "$__import__('os').system('touch {})$", "\\boxed{{().__class__.__base__.__subclasses__()}}",
    "answer: 1+__import__('os').system('touch {}')", "answer is 2*exec(\"open('{}', 'w')\")", "$x = eval('1')$",
]  # fmt: skip


def test_mathematics_is_no_code(tmp_path: Path) -> None:
    """sympy's parser evaluates what it is given: digits and operators only."""
    pytest.importorskip("math_verify", reason="comes with gradwire[math]")
    reward, made = math_answer(), tmp_path / "made"
    for text in MATHEMATICS:
        for response, truth in ((text.format(made), "1"), ("1", text.format(made))):
            with contextlib.suppress(ValueError):  # a truth that is none
                reward(response, truth)
    assert not made.exists()


def test_secrets_of_signatures_are_for_the_servers_user_alone_and_can_be_made_anew(tmp_path: Path) -> None:
    url = UrlSecret(tmp_path)
    first, signed = url.value, sign(tmp_path, b"a record")
    for name in (SIGNING_KEY, URL_SECRET):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    result = CliRunner().invoke(keys.app, ["rotate-signing", "--state-dir", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert url.value != first and len(url.value) == 64
    assert sign(tmp_path, b"a record")["public_key"] != signed["public_key"]
    assert signer(b"a record", signed).startswith("ed25519:")
    assert CliRunner().invoke(keys.app, ["rotate-signing", "--state-dir", str(tmp_path / "none")]).exit_code == 2
