"""CONTRIBUTING.md is true: what it names exists; a loss, an operation and a door added as it says work."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
PARTS = ("client", "server", "losses", "proto")
NAME = "steady_nll"

LOSS = f'''
"""The mean negative log-probability, weighted."""
from gradwire_losses.batch import Batch, Scores
from gradwire_losses.fields import INPUT_IDS, LOSS_MASK
from gradwire_losses.outputs import LossOutput, Mean, Term
from gradwire_losses.registry import LossConfig, register_loss
from pydantic import Field


class Config(LossConfig):
    weight: float = Field(2.0, ge=0, description="of the whole loss")


@register_loss(
    "{NAME}",
    config=Config,
    fields=(INPUT_IDS, LOSS_MASK),
    metrics={{"mean_logprob": "mean log-probability, in nats"}},
    reference="none",
    formula="-w/T sum log p",
    streams=True,
)
def loss(batch: Batch, scores: Scores, config: Config) -> LossOutput:
    """Mean negative log-probability of the scored tokens."""
    lp = scores.logprobs
    return LossOutput({{"nll": Term(-config.weight * lp.sum(), len(lp), "tokens")}}, {{"mean_logprob": Mean.of(lp)}})
'''

CASES = f'''
import pytest
from support.loss_properties import PROPERTIES
from support.losses import Case, row_columns


def reference(examples, config):
    tokens = [value for [row] in examples for value in row.score_logprobs]
    mean = sum(tokens) / len(tokens)
    return -config.weight * mean, {{"mean_logprob": mean}}


@pytest.mark.parametrize("check", PROPERTIES, ids=lambda check: check.__name__)
@pytest.mark.parametrize("case", [Case("{NAME}", row_columns, {{}}, reference)], ids=lambda case: case.id)
def test_property(case, check, rng):
    check(case, rng)
'''


def test_the_page_names_files_that_exist() -> None:
    named = {each for each in re.findall(r"`([\w./]+/[\w./]*)`", PAGE) if not each.startswith("out/")}
    bases = (ROOT, ROOT / "server/gradwire_server", ROOT / "losses/gradwire_losses")
    assert len(named) > 10
    assert [each for each in sorted(named) if not any((base / each).exists() for base in bases)] == []


ROW = f'''    "{NAME}": [(
        row_columns,
        {{}},
        lambda drawn: {{"mean_logprob": np.mean([lp for row in flat(drawn.examples()) for lp in row.score_logprobs])}},
    )],
'''

HANDLER = '''

def scale_weights(
    context: EngineContext, run: EngineRun, seq: int, call: training_pb2.ScaleWeights, columns: Columns
) -> Outcome:
    """Multiply the trained weights."""
    with torch.no_grad():
        for each in run.policy.masters().values():
            each.mul_(call.factor)
    return Outcome(training_pb2.OperationResult(empty=training_pb2.Empty()))
'''

METHOD = '''
    def scale_weights(self, factor: float, timeout: float | None = None) -> Future[None]:
        """Multiply the trained weights by a factor; ``timeout`` is as for :meth:`optim_step`."""

        def build() -> Request:
            return Request.of(pb.Operation(scale_weights=message(pb.ScaleWeights, factor=factor)))

        return self._queue.submit("scale_weights", build, no_result, timeout)
'''

USES = """
import asyncio, json, signal, socket, sys
from pathlib import Path

import gradwire
from support.server import Server

MODEL, FOLDER = Path(sys.argv[1]), Path(sys.argv[2])
ROWS = {"input_ids": [[5, 6, 7, 8], [9, 10, 11]]}


def ask(door, **question):
    door.write(json.dumps(question) + "\\n")
    door.flush()
    return json.loads(door.readline())


async def scores(run):
    return [float(value) for row in await run.compute_logprobs(ROWS) for value in row]


async def main():
    server = Server(MODEL, FOLDER).start()
    async with gradwire.connect(server.address) as service:
        run = await service.create_run("tiny", seed=1, lora={"rank": 4})
        fresh = await scores(run)
        await run.train_step(ROWS, "causal_lm", learning_rate=0.1)
        assert await scores(run) != fresh
        await run.scale_weights(0.0)
        assert await scores(run) == fresh
        server.end(signal.SIGKILL)
        server.start()
    async with gradwire.connect(server.address) as service:
        assert await scores(service.get_training_client(run.run_id)) == fresh
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(FOLDER / "lines.sock"))
        with connection.makefile("rw") as door:
            run_id = ask(door, do="create", model="tiny", rank=4)["run_id"]
            assert ask(door, do="train", run_id=run_id, rows=ROWS["input_ids"])["step"] == 1
            assert "error" in ask(door, do="nothing")
    assert server.end() == 0


asyncio.run(main())
"""


def copy_to(folder: Path) -> Callable[..., str]:
    """Copy the repository; a call runs a command in the copy with the copy's packages, and returns what it printed."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
    paths = [folder / part for part in (*PARTS, "tests", "examples")]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, paths))

    def run(*words: str) -> str:
        done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def insert(file: Path, anchor: str, text: str) -> None:
    """Write a text in front of the first place of an anchor."""
    before = file.read_text()
    assert anchor in before, f"{file} has no {anchor!r}"
    file.write_text(before.replace(anchor, text + anchor, 1))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_an_operation_and_a_door_that_are_added_as_the_page_says_work(tiny_model_path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    run = copy_to(copy)
    server, operations = copy / "server/gradwire_server", copy / "server/gradwire_server/engine/operations"
    proto = copy / "proto/gradwire_proto/v1/training.proto"
    insert(proto, "    ZeroGrad zero_grad = 6;", "    ScaleWeights scale_weights = 99;\n")
    insert(proto, "message ZeroGrad {}", "message ScaleWeights {\n  double factor = 1;\n}\n\n")
    run("make", "proto")
    row = 'OperationKind("scale_weights", changes_state=True),\n        '
    insert(server / "operation_kinds.py", 'OperationKind("zero_grad"', row)
    insert(operations / "table.py", '    "zero_grad": ', '    "scale_weights": steps.scale_weights,\n')
    insert(operations / "steps.py", "\nfrom gradwire_proto", "import torch")
    with (operations / "steps.py").open("a") as file:
        file.write(HANDLER)
    insert(copy / "client/gradwire/operations/training.py", "    def zero_grad(", METHOD.lstrip("\n") + "\n")
    run(sys.executable, "tests/client/test_surface.py")
    assert "scale_weights(" in (copy / "tests/client/surface.txt").read_text()

    (server / "doors/lines").mkdir()
    (server / "doors/lines/__init__.py").write_text('"""Lines of JSON over a Unix socket."""\n')
    door = (copy / "tests/support/line_door.py").read_text()
    (server / "doors/lines/door.py").write_text(door)
    making = "from gradwire_server.doors.lines.door import LineDoor\n\n\n"
    making += (
        'def _lines(core: Core) -> Door:\n    return LineDoor(core, str(core.config.state_dir / "lines.sock"))\n\n\n'
    )
    insert(server / "doors/registered.py", "DOORS: ", making)
    insert(server / "doors/registered.py", '"http": _http', '"lines": _lines, ')
    (tmp_path / "uses.py").write_text(USES)
    run(sys.executable, str(tmp_path / "uses.py"), str(tiny_model_path), str(tmp_path / "state"))
    run(
        sys.executable,
        "-m",
        "pytest",
        "-n0",
        "-q",
        "tests/client/test_surface.py",
        "tests/server/engine/test_operations.py",
    )


@pytest.mark.slow
def test_a_loss_that_is_added_as_the_page_says_is_tested_by_its_command(tmp_path: Path) -> None:
    run = copy_to(tmp_path)
    (tmp_path / f"losses/gradwire_losses/{NAME}.py").write_text(LOSS)
    (tmp_path / f"tests/losses/test_{NAME}.py").write_text(CASES)
    insert(tmp_path / "tests/losses/test_metrics.py", '    "value_only": ', ROW)
    listing = tmp_path / "tests/losses/test_reduction.py"
    listing.write_text(listing.read_text().replace("OF_SEQUENCES = {", f'OF_SEQUENCES = {{"{NAME}", '))
    run(sys.executable, "tools/make_loss_reference.py")
    assert any(NAME in page.read_text() for page in (tmp_path / "docs/losses").glob("*.md"))
    (command,) = re.findall(r"^\$ \.venv/bin/pytest (.*) -k NAME$", PAGE, re.MULTILINE)
    passed = re.search(r"(\d+) passed", run(sys.executable, "-m", "pytest", "-n0", *command.split(), "-k", NAME))
    assert passed is not None and int(passed[1]) > 5
    run(sys.executable, "-m", "pytest", "-n0", "tests/losses/test_reduction.py", "tests/losses/test_registry.py")
