"""What stays of a training: logs, recorded trajectories, and the pages that show them."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
import types
import venv
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gradwire.loop.loggers import (
    JsonlLogger,
    MlflowLogger,
    TensorBoardLogger,
    TrackioLogger,
    WandbLogger,
    read_jsonl,
)
from gradwire.rl.group_log import GroupLog, read_group
from gradwire.rl.metrics import Elapsed, Max, Mean, Std
from gradwire.rl.recording import RunRecorder, TrajectoryRecorder
from gradwire.rl.rows import rows_of
from gradwire.rl.types import Action, EvaluateResult, StepData, StepOutput, Task, ToolCall, ToolResult, Trajectory
from gradwire.rl.viewer import app, colour, page, view


def trajectory(reward: float = 1.0, status: Any = "completed") -> Trajectory:
    step = StepData(
        0, "what is <2+3>?", "s", np.array([1]), Action("5<b>"), np.array([ord(c) for c in "5<b>"]),
        np.array([-0.01, -5.0, -1.0, -0.2], np.float32), reward=reward, advantage=-0.25, value=0.5,
        tool_results=(ToolResult(ToolCall("add", {"a": 2}), "", "missing b"),), metrics={"words": 1.0},
    )  # fmt: skip
    verdict = EvaluateResult(reward, reason="as it should be")
    return Trajectory(Task("q", "5", "t1"), 3, 1, steps=[step], reward=reward, status=status, evaluation=verdict)


async def test_a_group_is_read_as_it_was_collected(tmp_path: Path) -> None:
    """Prompts that continue or replace what was before, keys of tuples, versions of tokens, scores of steps."""
    task, log = Task("q", "5", "t1"), GroupLog(tmp_path / "groups.jsonl")
    ids, said = np.arange(3, 9), ({"role": "user", "content": "q"}, {"role": "assistant", "content": "a"})

    def step(index: int, prompt: Any, **changes: Any) -> StepData:
        logprobs = np.linspace(-3, -0.1, 6, dtype=np.float32)
        return StepData(index, "o", (index, ("x", 2)), np.array(prompt), Action("a", {1}), ids, logprobs, **changes)

    results = (ToolResult(ToolCall("add", {"a": [1, {"b": 2}]}), "3", cost=0.5),)
    group = []
    for member in range(3):
        steps = [
            step(0, [1, 2], messages=said[:1], policy_version=4, token_versions=np.array([4, 4, 4, 5, 5, 6])),
            step(1, [1, 2, *ids, 7], messages=said, tool_results=results, reward=0.1 + member, rewarded=True),
            step(2, [1, 9], messages=said[1:], value=0.25, metrics={"words": np.float64(2)}, stop_reason="eos"),
            step(3, [], policy_version=7),
        ]
        verdict = EvaluateResult(step_outputs=[StepOutput(1, 0.1 + member, {"m": 1.0}, "why")], metrics={"n": 2.0})
        group.append(Trajectory(task, 12, member, 99, steps, said, "truncated", seconds=1.5, reward=0.1 + member,
                                evaluation=verdict))  # fmt: skip
    metrics = {"a": Mean(3.0, 2), "b": Std.of([1, 2, 5]), "c": Elapsed(0, 1), "d": Max(4.0)}
    assert await log.add([(12, 3, task, group, metrics), (13, None, task, group[:1], {})]) == [0, 1]
    with log.path.open("a") as file:  # type: ignore[union-attr]
        file.write('14\t{"task": "t1", "traj')  # the process was killed here
    (number, content), (following, _) = log.lines()
    read = read_group(content, task)
    assert read is not None and (number, following) == (12, 13)
    assert read[1:] == ({name: each for name, each in metrics.items() if name != "c"}, 3)
    for before, after in zip(group, read[0], strict=True):
        for one, other in zip(before.steps, after.steps, strict=True):
            for name, value in vars(one).items():
                given = getattr(other, name)
                if isinstance(value, np.ndarray):
                    np.testing.assert_array_equal(given, value)
                    assert given.dtype == value.dtype, name
                else:
                    assert given == (Action("a") if name == "action" else value), name
        assert vars(after) | {"steps": 0} == vars(before) | {"steps": 0}
        assert rows_of([after])[0].ids.tolist() == rows_of([before])[0].ids.tolist()
    assert read_group(content, Task("another")) is None
    await log.keep(lambda number: number == 13)
    assert [number for number, _ in log.lines()] == [13]
    assert await log.add([(15, 0, task, group, {})]) == [2]
    assert [number for number, _ in log.lines()] == [13, 15]


async def record(path: Path, rule_inference: Callable[..., Any], **rule: Any) -> list[dict[str, Any]]:
    codec = rule_inference(lambda t, n: "").codec
    recorder = TrajectoryRecorder(path, **rule)
    for iteration in range(4):
        await recorder.record(iteration, [trajectory(1.0), trajectory(0.0, "failed")], codec)
    return read_jsonl(path) if path.exists() else []  # noqa: ASYNC240 - a test


async def test_rules_of_recording(tmp_path: Path, rule_inference: Callable[..., Any]) -> None:
    every_other = await record(tmp_path / "a", rule_inference, every=2, limit=1)
    assert [r["iteration"] for r in every_other] == [0, 2]
    failed = await record(
        tmp_path / "b", rule_inference, every=0, condition=lambda i, t: t.status == "failed" and i > 1
    )
    assert [(r["iteration"], r["status"]) for r in failed] == [(2, "failed"), (3, "failed")]
    assert failed[0]["steps"][0]["tokens"] == [
        ["5", pytest.approx(-0.01)],
        ["<", -5.0],
        ["b", -1.0],
        [">", pytest.approx(-0.2)],
    ]
    assert "tokens" not in (await record(tmp_path / "c", rule_inference, tokens=False))[0]["steps"][0]
    assert await record(tmp_path / "d", rule_inference, every=0) == []


async def test_rollouts_are_recorded_with_the_run(rule_inference: Callable[..., Any]) -> None:
    kept: dict[int, list[Any]] = {}

    class Run:
        async def record_rollouts(self, iteration: int, rollouts: list[Any]) -> int:
            kept[iteration] = rollouts
            return len(rollouts)

    recorder = RunRecorder(Run(), every=2, limit=2)  # type: ignore[arg-type]
    codec = rule_inference(lambda t, n: "").codec
    said = [await recorder.record(iteration, [trajectory(1.0)] * 3, codec) for iteration in range(4)]
    assert said == [2, 0, 2, 0] and list(kept) == [0, 2]
    first = kept[0][0]
    assert (first["group"], first["reward"], first["reason"]) == (3, 1.0, "as it should be")
    assert first["steps"][0]["tool_results"][0]["error"] == "missing b"


class Balanced(HTMLParser):
    """Collects text and fails for a tag that is not closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag != "meta":
            self.open.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        while self.open[-1] != tag and self.open[-1] in ("p",):
            self.open.pop()
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


async def test_trajectories_are_shown(tmp_path: Path, rule_inference: Callable[..., Any]) -> None:
    file, target = tmp_path / "t.jsonl", tmp_path / "t.html"
    await record(file, rule_inference)
    out = io.StringIO()
    view(file, html_path=target, iteration=2, out=out)
    text = out.getvalue()
    assert "iteration 2" in text and "iteration 1" not in text
    assert "what is <2+3>?" in text and "5<b>" in text and "advantage -0.25" in text
    assert 'add({"a": 2}) -> error: missing b' in text
    parser = Balanced()
    parser.feed(target.read_text())
    assert parser.open == [] and parser.links == []
    assert "what is <2+3>?" in parser.text and "5<b>" in parser.text
    assert f'background:{colour(-5.0)}" title="-5.000"' in target.read_text()


def test_a_page_does_not_run_what_a_policy_wrote() -> None:
    record = {"iteration": 0, "group": 0, "member": 0, "reward": 0.0, "status": "completed", "ground_truth": None}
    step = {
        "index": 0,
        "observation": "<script>x</script>",
        "action": "<img onerror=x>",
        "reward": 0.0,
        "advantage": 0.0,
    }
    shown = page([record | {"steps": [step]}], "<script>")
    assert "<script" not in shown and "<img" not in shown


@pytest.mark.long
def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refusal(file: Path) -> str:
        with pytest.raises(SystemExit) as status:
            app([str(file)])
        assert status.value.code == 2
        return " ".join(capsys.readouterr().err.replace("│", " ").split())  # typer draws a frame

    assert "does not exist" in refusal(tmp_path / "none.jsonl")
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 0}\n')
    assert "line 1 is not a trajectory" in refusal(tmp_path / "metrics.jsonl")
    (tmp_path / "empty.jsonl").write_text("")
    for command in (["gradwire.cli", "trajectories", "view"], ["gradwire.rl.viewer"]):
        result = subprocess.run(
            [sys.executable, "-m", *command, tmp_path / "empty.jsonl"], capture_output=True, text=True, timeout=60
        )
        assert result.stdout == "0 trajectories, 0 shown\n"


def test_jsonl_is_json_whatever_the_numbers(tmp_path: Path) -> None:
    log = JsonlLogger(tmp_path / "folder" / "m.jsonl")
    log.log(3, {"loss": math.nan, "reward": 0.5})
    with (tmp_path / "folder" / "m.jsonl").open("a") as file:
        file.write('{"torn": ')
    (line,) = read_jsonl(log.path)
    assert (line["iteration"], line["loss"], line["reward"]) == (3, None, 0.5)


@pytest.mark.parametrize(("name", "logger"), [("wandb", WandbLogger), ("trackio", TrackioLogger)])
def test_other_loggers(name: str, logger: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    module: Any = types.ModuleType(name)
    module.init = lambda **options: calls.append(options)
    module.log = lambda metrics, step: calls.append((metrics, step))
    module.finish = lambda: calls.append("finished")
    monkeypatch.setitem(sys.modules, name, module)
    log = logger(project="p")
    log.log(2, {"reward": 1.0})
    log.close()
    assert calls == [{"project": "p"}, ({"reward": 1.0}, 2), "finished"]


@pytest.mark.parametrize(("logger", "extra"), [(WandbLogger, "wandb"), (TrackioLogger, "trackio")])
def test_a_library_that_is_missing_is_named(logger: Any, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, extra, None)
    with pytest.raises(ImportError, match=rf"needs {extra}: pip install 'gradwire\[{extra}\]'"):
        logger()


def test_tensorboard_scalars(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    scalars: list[Any] = []

    class Writer:
        def __init__(self, folder: str) -> None:
            scalars.append(folder)

        def add_scalar(self, tag: str, data: float, step: int) -> None:
            scalars.append((tag, data, step))

        def flush(self) -> None: ...

        def close(self) -> None: ...

    summary: Any = types.ModuleType("tensorboard.summary")
    summary.Writer = Writer
    monkeypatch.setitem(sys.modules, "tensorboard", types.ModuleType("tensorboard"))
    monkeypatch.setitem(sys.modules, "tensorboard.summary", summary)
    log = TensorBoardLogger(tmp_path)
    log.log(1, {"reward": 0.5})
    log.close()
    assert scalars == [str(tmp_path), ("reward", 0.5, 1)]


def test_the_toolkit_is_light() -> None:
    """No torch, no optional library, and no server behind ``import gradwire.rl``."""
    heavy = [
        "torch",
        "transformers",
        "gradwire_server",
        "gradwire_losses",
        "rich",
        "ray",
        "gymnasium",
        "wandb",
        "jsonschema",
    ]
    code = f"import sys, json, gradwire.rl; print(json.dumps([name for name in {heavy} if name in sys.modules]))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(result.stdout) == []


def test_mlflow_gets_each_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in of the module: MLflow itself is not among the test suite's packages."""
    calls: list[Any] = []
    module = types.SimpleNamespace(
        start_run=lambda **options: calls.append(options),
        log_metrics=lambda metrics, step: calls.append((metrics, step)),
        end_run=lambda: calls.append("end"),
    )
    monkeypatch.setitem(sys.modules, "mlflow", module)
    logger = MlflowLogger(run_name="a")
    logger.log(3, {"train/loss": 0.5, "eval/pass@1": 1.0})
    logger.close()
    assert calls == [{"run_name": "a"}, ({"train/loss": 0.5, "eval/pass_1": 1.0}, 3), "end"]


@pytest.mark.slow
@pytest.mark.install
def test_the_extra_of_mlflow_logs(tmp_path: Path) -> None:
    """In an environment of its own: MLflow pins versions that others need newer."""
    venv.create(tmp_path / "venv", with_pip=True, system_site_packages=False)
    python, root = tmp_path / "venv" / "bin" / "python", Path(__file__).parents[3]
    subprocess.run([python, "-m", "pip", "install", "--quiet", f"{root}[mlflow]"], check=True, timeout=600)
    code = (
        "from gradwire.rl import MlflowLogger; import mlflow; each = MlflowLogger(run_name='a');"
        "each.log(3, {'eval/pass@1': 0.5}); each.close();"
        "print(mlflow.MlflowClient().search_runs(['0'])[0].data.metrics)"
    )
    said = subprocess.run([python, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True)
    assert said.stdout == "{'eval/pass_1': 0.5}\n"
