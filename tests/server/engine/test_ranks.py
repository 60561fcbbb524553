"""An engine of two ranks gives what one process gives, and lives and dies as one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.engine.process.watch import BROKEN
from gradwire_server.engine_link.frames import LinkClosed
from support.engine import Driver, EngineProcess, token_rows
from support.stage import wait_for

ROWS = token_rows([[1, 20, 30, 40, 50], [1, 9, 8, 7, 6, 5, 4], [1, 60, 61], [1, 2, 3, 4]])
PAIRS = token_rows([[1, 20, 30, 40], [1, 5, 6]], "chosen_input_ids") | token_rows(
    [[1, 20, 50], [1, 5, 9, 9]], "rejected_input_ids"
)
STEP = pb.OptimStep(learning_rate=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, max_grad_norm=1.0)
CAUSAL = pb.LossCall(loss_fn="causal_lm", outputs=["logprobs"])
DPO = pb.LossCall(loss_fn="dpo", loss_kwargs_json='{"reference_model": "base"}')


def engine_of(model: Path, state_dir: Path, ranks: int) -> EngineProcess:
    return EngineProcess({"tiny": model}, state_dir, ranks=ranks, microbatch_tokens=8, log_level="info")


@pytest.fixture(scope="module")
def pair(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EngineProcess, ...]]:
    """Engines of one rank and of two."""
    engines = tuple(engine_of(tiny_model_path, tmp_path_factory.mktemp(f"ranks-{ranks}"), ranks) for ranks in (1, 2))
    yield engines
    for engine in engines:
        engine.kill()


def trained(engine: Driver, run_id: str, **config: object) -> list[object]:
    """What an engine says of two steps of two losses, a failure between them, samples and a checkpoint."""
    engine.create(run_id, seed=3, **config)
    figures: list[object] = []
    for _ in range(2):
        first = engine.do(run_id, ROWS, forward_backward=CAUSAL)
        figures += [first.proto.loss.loss, first.proto.loss.num_microbatches, first.columns["logprobs"].values.tolist()]
        bad = engine.op(run_id, token_rows([[1, 99999]]), forward_backward=CAUSAL)
        figures += [bad.proto.error.code, bad.proto.error.message]
        figures.append(engine.do(run_id, PAIRS, train_step=pb.TrainStep(loss=DPO, optim_step=STEP)).proto.train_step)
        figures.append(engine.do(run_id, ROWS, forward_backward=CAUSAL).proto.loss.metrics)
        figures.append(engine.do(run_id, optim_step=STEP).proto.optim_step)
    call = pb.SampleCall(max_tokens=6, temperature=1.0, ignore_eos=True)
    sampled = engine.do(run_id, token_rows([[1, 20, 30], [1, 5]], "prompt_ids"), sample=call)
    figures += [sampled.columns[name].values.tolist() for name in ("token_ids", "logprobs")]
    saved = engine.do(run_id, save_checkpoint=pb.SaveCheckpoint(name="now")).proto.checkpoint
    engine.do(run_id, export=pb.ExportModel(name="out"))
    engine.do(run_id, load_checkpoint=pb.LoadCheckpoint(checkpoint="now"))
    return [*figures, saved.size_bytes, engine.logprobs(run_id, ROWS).tolist()]


@pytest.mark.parametrize("config", [{"lora": {"rank": 4, "dropout": 0.2}}, {}], ids=["lora", "full"])
def test_two_ranks_give_the_bits_of_one(pair: tuple[EngineProcess, ...], config: dict[str, object]) -> None:
    run_id = "lora" if config else "full"
    one, two = (trained(engine, run_id, **config) for engine in pair)
    assert one == two
    assert pair[1].hello.hello.device == "2 ranks, cpu"


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_group_that_loses_a_rank_ends_as_one(tiny_model_path: Path, tmp_path: Path, how: signal.Signals) -> None:
    engine = engine_of(tiny_model_path, tmp_path, 2)
    try:
        engine.create("run-a", seed=1, lora=4)
        engine.train("run-a", ROWS)
        (other,) = children(engine.process.pid)
        os.kill(other, how)
        with pytest.raises(LinkClosed):
            while True:
                engine.receive()
        assert engine.process.wait(60) == BROKEN
        wait_for("the other rank's end", lambda: not Path(f"/proc/{other}").exists())
    finally:
        engine.kill()
