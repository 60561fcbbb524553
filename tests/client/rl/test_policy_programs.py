"""Code that a policy wrote: what it may do to be rewarded without having earned it, and what it must be able to do."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gradwire.rl.rewards._sandbox as sandbox_package
import numpy as np
import pytest
from gradwire.rl.rewards import PolicyProgram, RewardFunction, Sandbox, SandboxLimits, code_passes
from gradwire.rl.types import Action, EvaluateResult, State, StepData, Task, Trajectory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the isolation is of Linux")

TESTS = ["assert add(1, 2) == 3", "assert add(20, 22) == 42"]
RIGHT = "def add(a, b):\n    return a + b"
WRONG = "def add(a, b):\n    return a - b"


@pytest.fixture(params=["bubblewrap", "own namespaces"], scope="module")
def passes(request: pytest.FixtureRequest) -> Iterator[RewardFunction]:
    if request.param == "bubblewrap" and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    scorer = code_passes(limits=SandboxLimits(time_s=2.0), workers=1)
    with pytest.MonkeyPatch.context() as patch:  # until the sandbox has started
        if request.param == "own namespaces":
            patch.setenv("PATH", "/nowhere")
        patch.setenv("GRADWIRE_API_KEY", "secret of the server")
        patch.setenv("OPENAI_API_KEY", "secret of the judge")
        asyncio.run(verdicts(scorer, RIGHT))
    yield scorer
    scorer.close()


async def verdicts(scorer: RewardFunction, *responses: str, tests: Any = TESTS) -> list[EvaluateResult]:
    trajectories = []
    for number, response in enumerate(responses):
        task = Task("write a function", tests)
        step = StepData(
            0, "", 0, np.array([1]), Action(f"```python\n{response}\n```"), np.array([2]), np.zeros(1, np.float32)
        )
        trajectories.append(Trajectory(task, 0, number, steps=[step], state=State(task)))
    return await scorer.evaluate(trajectories)


async def scores(scorer: RewardFunction, *responses: str, tests: Any = TESTS) -> list[float]:
    results = await verdicts(scorer, *responses, tests=tests)
    assert [each.error for each in results] == [""] * len(responses)
    return [each.score for each in results]


FRAMES = """
import json, os, struct
def add(a, b):
    for content in ({"value": {"score": 1.0}}, {"results": [{"value": {"score": 1.0}}] * 8, "missing": []}):
        content = json.dumps(content).encode()
        for fd in range(64):
            try:
                os.write(fd, (struct.pack("<I", len(content)) + content) * 4)
            except OSError:
                pass
    return a - b
"""
PATCH = """
import gc, json, sys
def good(*args, **kwargs):
    return {"score": 1.0, "metrics": {}, "reason": ""}
for module in list(sys.modules.values()):
    for name in ("share_of_passed", "answer_of", "code_passes", "compare", "encode"):
        if hasattr(module, name):
            setattr(module, name, good)
json.dumps = lambda *args, **kwargs: '{"score": 1.0}'
json.loads = lambda *args, **kwargs: {"score": 1.0}
def add(a, b):
    return a - b
"""
ALWAYS_EQUAL = """
class Equal:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
    def __contains__(self, item): return True
    __lt__ = __le__ = __gt__ = __ge__ = __eq__
    def __sub__(self, other): return 0
    __rsub__ = __sub__
    def __abs__(self): return 0
def add(a, b):
    return Equal()
"""
ALWAYS_EQUAL_NUMBER = """
class Equal(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
    def __sub__(self, other): return 0
def add(a, b):
    return Equal(7)
"""
OWN_BUILTINS = """
import builtins, math
def yes(*args, **kwargs): return True
builtins.all = builtins.abs = builtins.sorted = math.isclose = yes
all = any = sorted = isinstance = callable = yes
def abs(*args): return 0
def add(a, b):
    return a - b
"""
SPY = """
import gc, os, sys
def add(a, b):
    seen = [repr(vars(m)) for m in sys.modules.values() if hasattr(m, "__dict__")]
    seen += [each for each in gc.get_objects() if isinstance(each, (list, tuple, dict))]
    for fd in range(3, 32):
        try:
            os.set_blocking(fd, False)
            seen.append(os.read(fd, 4096))
        except OSError:
            pass
    return 42 if " == ".join(["add(20, 22)", "42"]) in repr(seen) else a - b
"""
TAKES_THE_PIPE = """
import os, json, struct
content = json.dumps({"value": True}).encode()
for fd in range(3, 32):
    try:
        os.write(fd, (struct.pack("<I", len(content)) + content) * 100)
    except OSError:
        pass
os._exit(0)
"""


async def test_one_answer_does_not_score_the_others(passes: RewardFunction) -> None:
    answers = [FRAMES, RIGHT, PATCH, RIGHT, TAKES_THE_PIPE, RIGHT, WRONG, RIGHT]
    assert await scores(passes, *answers) == [0, 1, 0, 1, 0, 1, 0, 1]


async def test_nothing_equals_all_that_is_expected(passes: RewardFunction) -> None:
    answers = [ALWAYS_EQUAL, ALWAYS_EQUAL_NUMBER, OWN_BUILTINS, SPY]
    assert await scores(passes, *answers) == [0, 0, 0, 0]
    tests = [
        "assert abs(add(1, 2) - 3) < 1e-6",
        "assert add(1, 2) <= 3 and add(1, 2) >= 3",
        "assert add(1, 2) in (3, 4)",
        "assert 3 in add([3], [4])",
        "assert [add(1, 2)] == [3]",
        "assert not add(1, 2) != 3",
        "import math\nassert math.isclose(add(1, 2), 3)",
        "assert all([add(1, 2) == 3])",
        "assert sorted([add(1, 2), 1]) == [1, 3]",
    ]
    assert await scores(passes, ALWAYS_EQUAL, ALWAYS_EQUAL_NUMBER, OWN_BUILTINS, tests=tests) == [0, 0, 0]
    assert await scores(passes, RIGHT, tests=[test for test in tests if "[4]" not in test]) == [1]
    assert await scores(passes, RIGHT, tests=["assert 3 in add([3], [4])"]) == [1]


LIMITS = {
    "the environment's keys": (
        "import os\ndef look():\n    return [k for k in os.environ if 'KEY' in k or 'TOKEN' in k]",
        "assert look() == []",
    ),
    "other processes": (
        "import os\ndef look():\n    return [n for n in os.listdir('/proc') if n.isdecimal()]",
        "try:\n    assert look() == []\nexcept FileNotFoundError:\n    pass",
    ),
    "killing its parent": (
        "import os, signal\ndef look():\n    for pid in range(2, 400):\n        try:\n            os.kill(pid, 0)\n"
        "        except OSError:\n            continue\n        if pid != os.getpid():\n"
        "            return pid\n    return 0",
        "assert look() == 0",
    ),
    "another process": ("import os\ndef look():\n    return os.fork()", "try:\n    look()\nexcept OSError:\n    pass"),
    "a mount": (
        "import ctypes\ndef look():\n    libc = ctypes.CDLL(None)\n    return [\n"
        "        libc.mount(b'none', b'/usr', None, 0x1020, None), libc.mount(b'none', b'/tmp', b'tmpfs', 0, None),\n"
        "        libc.unshare(0x10000000), libc.umount2(b'/tmp', 2)]",
        "assert look() == [-1, -1, -1, -1]",
    ),
    "files of the system": (
        "def look():\n    open('/usr/written', 'w')",
        "try:\n    look()\n    assert False\nexcept OSError:\n    pass",
    ),
    "the user's files": (
        f"import os\ndef look():\n    return os.path.exists({str(Path(__file__))!r})", "assert look() is False"
    ),
    "the network": (
        "import socket\ndef look():\n    socket.create_connection(('192.0.2.1', 9), 1)",
        "try:\n    look()\n    assert False\nexcept OSError as error:\n    assert 'not permitted' in str(error)",
    ),
    "capabilities": (
        "import ctypes, struct\ndef look():\n    sets = ctypes.create_string_buffer(24)\n"
        "    ctypes.CDLL(None).capget(struct.pack('<Ii', 0x20080522, 0), sets)\n    return sets.raw.hex()",
        "assert look() == '00' * 24",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", LIMITS)
async def test_what_it_cannot_reach(passes: RewardFunction, what: str) -> None:
    code, test = LIMITS[what]
    (verdict,) = await verdicts(passes, code, tests=[test])
    assert (verdict.score, verdict.reason, verdict.error) == (1.0, "", "")


@pytest.mark.parametrize("wall", ["bubblewrap", "own namespaces"])
def test_packages_below_tmp_are_found(wall: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if wall == "bubblewrap" and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        packages = Path(folder) / "site-packages"
        packages.mkdir()
        (packages / "of_a_clone.py").write_text("VALUE = 3")
        monkeypatch.syspath_prepend(packages)
        if wall == "own namespaces":
            monkeypatch.setenv("PATH", "/nowhere")
        scorer = code_passes(limits=SandboxLimits(time_s=5.0), workers=1)
        code = "import of_a_clone\ndef add(a, b):\n    open('note', 'w').close()\n    return of_a_clone.VALUE"
        (score,) = asyncio.run(scores(scorer, code, tests=["assert add(1, 2) == 3"]))
        scorer.close()
    assert score == 1.0


@pytest.mark.long
@pytest.mark.parametrize("passes", ["own namespaces"], indirect=True)
async def test_what_takes_too_long_fails_what_is_left(passes: RewardFunction) -> None:
    code = "def add(a, b):\n    while a == 20: pass\n    return a + b"
    started = time.monotonic()
    (verdict,) = await verdicts(passes, code)
    assert (verdict.score, verdict.error) == (0.5, "")
    assert "took more than 2 s and was killed" in verdict.reason
    assert time.monotonic() - started < 20


USES = {
    "a check of a candidate": (RIGHT, "def check(candidate):\n    assert candidate(1, 2) == 3\ncheck(add)"),
    "a class": (
        "class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n"
        "    def __len__(self): return len(self.items)\n    def __getitem__(self, i): return self.items[i]\n"
        "    def __add__(self, other):\n        s = Stack(); s.items = self.items + other.items; return s\n"
        "    def __eq__(self, other): return self.items == other.items",
        "s = Stack()\ns.push(3)\nassert len(s) == 1 and s[0] == 3 and s.items == [3] and isinstance(s, Stack)\n"
        "assert s + s != s and len(s + s) == 2 and list(s) == [3] and 3 in s",
    ),
    "an exception of its own": (
        "class Empty(ValueError): pass\ndef pop(): raise Empty('nothing')",
        "try:\n    pop()\nexcept Empty as error:\n    assert str(error) == 'nothing' and isinstance(error, ValueError)",
    ),
    "a builtin exception": (
        "def decode(b): return b.decode()",
        "try:\n    decode(b'\\xff')\n    assert False\nexcept UnicodeDecodeError:\n    pass",
    ),
    "a generator": ("def count(n):\n    yield from range(n)", "assert list(count(3)) == [0, 1, 2]"),
    "a change in place": (
        "def sort(x): x.sort()\ndef put(d): d['a'] = (1, {2})",
        "x, d = [3, 1], {}\nsort(x)\nput(d)\nassert x == [1, 3] and d == {'a': (1, {2})}",
    ),
    "a function as argument": (
        "def twice(f, x): return f(f(x))\ndef fails(f):\n    try: f()\n    except RuntimeError as e: return str(e)",
        "assert twice(lambda x: x * 3, 2) == 18\nassert 'ZeroDivisionError' in fails(lambda: 1 / 0)",
    ),
    "a builtin's name": ("def sum(xs):\n    return -1", "assert sum([1, 2]) == -1"),
    "its imports": ("import math\ndef root(x): return math.sqrt(x)", "assert math.isclose(root(2), math.sqrt(2))"),
    "threads": (
        "import threading\ndef run():\n    found = []\n    t = threading.Thread(target=found.append, args=(1,))\n"
        "    t.start(); t.join(); return found",
        "assert run() == [1]",
    ),
    "values": (
        "import collections, datetime, decimal, fractions\nPoint = collections.namedtuple('Point', 'x y')\n"
        "def same(x): return x\ndef point(): return Point(1, 2)\ndef counts(s): return collections.Counter(s)",
        "import datetime, decimal, fractions\n"
        "for x in (None, True, 1.5, float('inf'), 7 ** 9999, 'é\\ud800', b'\\0', bytearray(b'a'), 1j, [1, [2]], (1,), "
        "{1}, frozenset('a'), {(1, 2): {'a': None}}, range(3), decimal.Decimal('1.10'), fractions.Fraction(1, 3), "
        "datetime.datetime(2024, 1, 2, 3), datetime.date(2024, 1, 2), datetime.time(1), datetime.timedelta(1, 2, 3)):\n"
        "    assert same(x) == x and type(same(x)) is type(x), x\n"
        "assert point() == (1, 2) and counts('aab') == {'a': 2, 'b': 1}",
    ),
    "arrays": (
        "import numpy as np\ndef halves(n): return np.arange(n) / 2\ndef first(n): return np.arange(n)[1]",
        "import numpy as np\nassert np.allclose(halves(3), [0, 0.5, 1]) and first(3) == 1",
    ),
    "a program": (
        "import sys\nname = input()\nprint('hello', name)\nprint(sum(map(int, sys.stdin)))\n"
        "if __name__ == '__main__': exit(0)",
        {"input": "Ada\n1\n2\n", "output": "hello Ada\n3"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("passes", ["own namespaces"], indirect=True)
@pytest.mark.parametrize("what", USES)
async def test_what_tests_may_do(passes: RewardFunction, what: str) -> None:
    code, test = USES[what]
    (verdict,) = await verdicts(passes, code, tests=[test])
    assert (verdict.score, verdict.reason, verdict.error) == (1.0, "", "")


@pytest.mark.parametrize("passes", ["own namespaces"], indirect=True)
async def test_a_program_that_prints_something_else_says_what(passes: RewardFunction) -> None:
    (verdict,) = await verdicts(passes, "print(1 / 0)", tests=[{"input": "", "output": "1"}])
    assert (verdict.score, verdict.reason) == (0, "input '': ZeroDivisionError: division by zero")
    (verdict,) = await verdicts(passes, "print(2)", tests={"input": "", "output": "1"})
    assert (verdict.score, verdict.reason) == (0, "input '': printed '2\\n'")


def look_around() -> dict[str, Any]:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    remount = 0x1020  # MS_REMOUNT | MS_BIND
    tried = [libc.mount(b"none", b"/", None, remount, None), libc.umount2(b"/tmp", 2), libc.sethostname(b"x", 1)]
    inside = libc.unshare(0x10020000)  # with all capabilities of a namespace of its own
    tried += [libc.mount(b"none", b"/", None, remount, None), libc.mount(b"none", b"/proc", None, remount, None)]
    written = []
    for path in ("/written", "/usr/written", "/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger"):
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT))
            written.append(path)
        except OSError:
            pass
    pids = [name for name in os.listdir("/proc") if name.isdecimal()]
    keys = [name for name in os.environ if "KEY" in name]
    return {"tried": tried, "inside": inside, "written": written, "processes": len(pids), "keys": keys}


async def test_functions_of_ones_own_see_and_change_as_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADWIRE_API_KEY", "secret")
    monkeypatch.setenv("JUDGE_KEY", "wanted")
    box = Sandbox(look_around, SandboxLimits(environment=("JUDGE_KEY",)))
    outcome = await box.call()
    box.close()
    assert outcome.error == ""
    assert outcome.value == {
        "tried": [-1] * 5, "inside": outcome.value["inside"], "written": [], "processes": 2, "keys": ["JUDGE_KEY"]
    }  # fmt: skip


@pytest.mark.long
def test_also_as_another_user(tmp_path: Path) -> None:
    """The package needs only the standard library: the system's Python runs it as user 1234."""
    python, setpriv = "/usr/bin/python3", shutil.which("setpriv")
    if os.geteuid() != 0 or not os.path.exists(python) or setpriv is None:
        pytest.skip("needs root, setpriv and a Python that all may run")
    folder = Path("/tmp", f"gradwire-sandbox-{os.getpid()}")
    shutil.copytree(Path(sandbox_package.__file__).parent, folder / "_sandbox", ignore=lambda *_: ["__pycache__"])
    folder.chmod(0o755)
    script = textwrap.dedent("""
        import sys, os
        sys.path.insert(0, sys.argv[1])
        os.chdir("/tmp")
        from _sandbox.grading import share_of_passed
        for code, test in CASES:
            verdict = share_of_passed(code, test, {"time_s": 5})
            print(verdict["score"], verdict["reason"])
    """).replace("CASES", repr(list(LIMITS.values())))
    try:
        for path in ("/usr/bin", "/nowhere"):
            result = subprocess.run(
                [setpriv, "--reuid", "1234", "--regid", "1234", "--clear-groups", python, "-c", script, str(folder)],
                capture_output=True, text=True, timeout=60, env={"PATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
            )  # fmt: skip
            assert (result.stdout, result.stderr) == ("1.0 \n" * len(LIMITS), "")
    finally:
        shutil.rmtree(folder)


WITHOUT = """
import asyncio, logging, sys, warnings
logging.basicConfig(stream=sys.stdout, format="%(message)s")
sys.path[:0] = {path!r}
from client_rl_programs import *
async def main():
    for isolation in (None, "preferred", "required"):
        scorer = code_passes(limits=SandboxLimits(isolation=isolation))
        (verdict,) = await verdicts(scorer, RIGHT)
        print(isolation, verdict.score, verdict.error, verdict.reason)
        scorer.close()
    sealed = Sandbox(add, SandboxLimits(isolation="sealed"))
    print("sealed", (await sealed.call(1, 2)).error)
    sealed.close()
def add(a, b):
    return a + b
asyncio.run(main())
"""


@pytest.mark.long
def test_without_isolation_nothing_runs_unless_it_is_wanted(tmp_path: Path) -> None:
    """In a user namespace that allows no other, which neither bubblewrap nor we can isolate anything in."""
    if shutil.which("unshare") is None:
        pytest.skip("needs util-linux")
    (tmp_path / "client_rl_programs.py").write_text(Path(__file__).read_text())
    script = tmp_path / "script.py"
    script.write_text(WITHOUT.format(path=[str(tmp_path)]))
    none = "for each in user mnt; do echo 0 >/proc/sys/user/max_${each}_namespaces; done"
    inner = f'{none}; exec "{sys.executable}" "{script}"'
    result = subprocess.run(["unshare", "-Ur", "sh", "-c", inner], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stdout.splitlines() if line]
    assert [line.split(" ")[:2] for line in lines if line.startswith(("None", "preferred", "required"))] == [
        ["None", "0.0"], ["preferred", "1.0"], ["required", "0.0"]
    ]  # fmt: skip
    assert "this machine refuses to isolate the policy's code" in result.stdout
    assert "isolation is required, and this machine refuses network, processes and files" in result.stdout
    assert "sealed not run: others' code runs sealed off from the machine only, and this one refuses" in result.stdout
    assert result.stdout.count("reward functions run without isolation here") == 2


RULED = """
import json, os, pickle, sys, tempfile
sys.path.insert(0, {folder!r})
from _sandbox.guard import evaluate
library = os.path.dirname(os.__file__)
def look():
    import colorsys, socket
    found = []
    closed = ("/", "/etc/passwd", "/proc", "/dev/kmsg", "/tmp", {folder!r}, library + "/test")
    for path in (*closed, colorsys.__file__):
        try:
            found.append(os.listdir(path) if os.path.isdir(path) else open(path).read())
        except OSError:
            continue
    try:
        found.append(socket.socket())
    except PermissionError:
        pass
    return [len(found), colorsys.rgb_to_hsv(1, 1, 1)[2], os.getuid() >= 1 << 30]
limits = {limits!r}
limits["places"] = {{"shown": [library], "hidden": [library + "/test"]}}
result = evaluate(look, [pickle.dumps(((), {{}}))], limits, tempfile.mkdtemp(dir={folder!r}))
print(json.dumps([result["missing"], result["results"][0].get("error"), result["results"][0].get("value")]))
"""
CONTAINER = """
import ctypes, os, sys
there, back = os.pipe(), os.pipe()
if (inside := os.fork()) == 0:
    ctypes.CDLL(None).unshare(0x10000000)
    os.write(there[1], b".")
    os.read(back[0], 1)
    for name in ("user", "mnt"):
        with open(f"/proc/sys/user/max_{name}_namespaces", "w") as file:
            file.write("0")
    os.execv(sys.argv[1], [sys.argv[1], "-I", sys.argv[2]])
os.read(there[0], 1)
for name in ("uid_map", "gid_map"):
    with open(f"/proc/{inside}/{name}", "w") as file:
        file.write("0 0 4294967295")
os.write(back[1], b".")
sys.exit(os.waitstatus_to_exitcode(os.waitpid(inside, 0)[1]))
"""


def test_root_without_namespaces_is_sealed_off_by_rules() -> None:
    """As in a container: another user, Landlock and the filter of system calls hold where no namespace is to be had."""
    python = "/usr/bin/python3"
    if os.geteuid() != 0 or not os.path.exists(python):
        pytest.skip("needs root and a Python that all may run")
    if ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1) < 1:
        pytest.skip("needs Landlock")
    folder = Path("/tmp", f"gradwire-sealed-{os.getpid()}")
    shutil.copytree(Path(sandbox_package.__file__).parent, folder / "_sandbox", ignore=lambda *_: ["__pycache__"])
    folder.chmod(0o755)
    limits = asdict(SandboxLimits(isolation="sealed"))
    (folder / "look.py").write_text(RULED.format(folder=str(folder), limits=limits))
    try:
        words = [sys.executable, "-c", CONTAINER, python, str(folder / "look.py")]
        result = subprocess.run(words, capture_output=True, text=True, timeout=60)
    finally:
        shutil.rmtree(folder)
    assert result.stderr == ""
    assert json.loads(result.stdout) == [[], None, [1, 1, True]]  # a file of Python's is the only one that was read


def test_it_can_be_used_by_itself() -> None:
    with PolicyProgram(RIGHT) as program:
        assert program.isolated
        names = program.load()
        assert names["add"](2, 3) == 5
        with pytest.raises(TypeError, match="unsupported operand"):
            names["add"](2, None)
        with pytest.raises(TypeError, match="cannot be given to the policy's code"):
            names["add"](object(), 1)
    with pytest.raises(ValueError, match='isolation must be "required"'):
        SandboxLimits(isolation="sometimes")  # type: ignore[arg-type]
