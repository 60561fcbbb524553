"""`run.history()`: what a training measured, from the server, whatever became of the program and of the server."""

from __future__ import annotations

import csv
import json
import signal
from pathlib import Path

import gradwire
import numpy as np
import pytest
from gradwire_proto.v1 import training_pb2 as pb
from support.batches import VOCAB, causal_lm, ppo
from support.server import Server


@pytest.mark.long
@pytest.mark.holds_loop("it starts and kills servers")
async def test_it_outlives_the_program_and_a_kill_of_the_server(killable: Server, rng: np.random.Generator) -> None:
    seen: list[tuple[float, float]] = []
    async with gradwire.connect(killable.address) as service:
        run = await service.create_run("tiny", lora=2)
        for step in range(1, 4):
            loss = await run.forward_backward(causal_lm(rng, 3, VOCAB), "causal_lm")
            done = await run.optim_step(learning_rate=step * 1e-3)
            seen.append((loss["loss"], done.grad_norm))
        killable.end(signal.SIGKILL)
    killable.start()
    async with gradwire.connect(killable.address) as service:
        history = await service.get_training_client(run.run_id).history()
    assert history.operation.tolist() == ["forward_backward", "optim_step"] * 3
    assert history.step.tolist() == [0, 1, 1, 2, 2, 3]
    assert list(zip(history.loss[::2], history.grad_norm[1::2])) == seen
    assert np.isnan(history.loss[1::2]).all() and np.isnan(history.grad_norm[::2]).all()
    assert history.learning_rate[1::2].tolist() == [0.001, 0.002, 0.003]
    assert (history.tokens[::2] > 0).all() and (history.seconds > 0).all()
    assert (np.diff(history.time) >= 0).all() and history["perplexity"][0] == pytest.approx(np.exp(seen[0][0]))


async def as_points(run: gradwire.TrainingClient, history: gradwire.History) -> None:
    """The same, of the points that an older client asks for and an older server answers with."""
    pages = run._transport._stub.GetHistory(pb.GetHistoryRequest(run_id=run.run_id), metadata=run._transport._metadata)
    found = [page async for page in pages]
    assert all(page.points and not page.HasField("columns") for page in found)
    split = [pb.HistoryPage(points=[point]) for page in found for point in page.points]
    for again in (gradwire.History.from_wire(found), gradwire.History.from_wire(split)):
        assert list(again.columns) == list(history.columns)
        for name, values in history.columns.items():
            np.testing.assert_array_equal(again[name], values, name)
            assert again[name].dtype == values.dtype


@pytest.mark.long
@pytest.mark.holds_loop("matplotlib draws")
async def test_a_fork_begins_with_it_and_files_hold_it(
    service: gradwire.ServiceClient, tmp_path: Path, rng: np.random.Generator
) -> None:
    pytest.importorskip("matplotlib")
    run = await service.create_run("tiny", lora=2, head="value")
    run.forward_backward(causal_lm(rng, 3, VOCAB), "causal_lm")
    run.optim_step()
    checkpoint = await run.save_checkpoint("one")
    await run.forward_backward(causal_lm(rng, 3, VOCAB), "causal_lm")
    fork = await service.fork_run(checkpoint)
    result = await fork.forward_backward(ppo(rng, 3, VOCAB), "enhanced_ppo")
    await fork.optim_step()
    history = await fork.history()
    assert history.run_id.tolist() == [run.run_id] * 3 + [fork.run_id] * 2
    assert history.loss_fn.tolist() == ["causal_lm", "", "", "enhanced_ppo", ""]
    assert {name: history[name][3] for name in result.metrics} == pytest.approx(dict(result.metrics), nan_ok=True)
    await as_points(fork, history)

    with history.to_csv(tmp_path / "new" / "run.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert list(lines[0]) == list(history.columns)
    assert float(lines[3]["loss"]) == result.loss and lines[1]["loss"] == ""
    objects = [json.loads(line) for line in history.to_jsonl(tmp_path / "run.jsonl").read_text().splitlines()]
    assert objects[3]["metrics"]["clip_fraction"] == result["clip_fraction"]
    assert objects[1]["loss"] is None and objects[1]["grad_norm"] == history.grad_norm[1]

    figure = history.plot()
    titles = [axis.get_title() for axis in figure.axes]
    assert titles[:3] == ["loss", "learning_rate", "grad_norm"] and "clip_fraction" in titles
    [line] = figure.axes[2].get_lines()
    assert line.get_xdata().tolist() == [1, 2] and line.get_ydata().tolist() == history.grad_norm[[1, 4]].tolist()
    assert [line.get_label() for line in figure.axes[0].get_lines()] == ["causal_lm", "enhanced_ppo"]
    history.plot("loss", path=tmp_path / "loss.svg")
    assert (tmp_path / "loss.svg").read_text().startswith("<?xml")
    with pytest.raises(gradwire.InvalidArgumentError, match="no column of numbers 'operation'"):
        history.plot("operation")
    with pytest.raises(KeyError, match="'nothing'; it has step, operation"):
        history["nothing"]


async def test_notebooks_show_results_and_complete_names(
    service: gradwire.ServiceClient, rng: np.random.Generator
) -> None:
    run = await service.create_run("tiny", lora=2)
    result = await run.forward_backward(causal_lm(rng, 3, VOCAB), "causal_lm")
    assert result._ipython_key_completions_() == list(result.metrics)
    assert f'<td style="text-align:left">{result.loss:.6g}</td>' in result._repr_html_()
    step = await run.optim_step()
    assert "grad_norm" in step._repr_html_() and f"{step.grad_norm:.6g}" in step._repr_html_()
    history = await run.history()
    assert "forward_backward" in history._repr_html_() and "loss" in history._ipython_key_completions_()
    empty = await (await service.create_run("tiny", lora=2)).history()
    assert len(empty) == 0 and "0 operations" in empty._repr_html_() and not empty.plot().axes


def test_a_script_without_an_event_loop_reads_it(server: Server, rng: np.random.Generator) -> None:
    with gradwire.sync.connect(server.address) as service:
        run = service.create_run("tiny", lora=2)
        loss = run.forward_backward(causal_lm(rng, 3, VOCAB), "causal_lm").result()
        assert run.history().loss.tolist() == [loss.loss]
