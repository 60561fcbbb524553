"""Experts, images, quantized weights, runs that are paged to the disk or grouped, on two ranks and in one process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gradwire.wire.images import to_image_columns
from gradwire_losses.registry import get_loss
from gradwire_proto import codec
from gradwire_proto.v1 import engine_pb2
from gradwire_proto.v1 import training_pb2 as pb
from support.engine import Driver, EngineProcess, LocalEngine, token_rows
from support.mixtures import mixture
from support.ranks import CAUSAL, ROWS, STEP, Engines
from support.vision import image_mark, picture, png, vision_model
from transformers import AutoTokenizer

pytestmark = pytest.mark.slow  # a group of its own


@pytest.fixture(scope="module", params=["off", "on"], ids=["whole", "divided"])
def paging(
    request: pytest.FixtureRequest, tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engines]:
    """Engines with room for no second run on the device or in the memory of the host."""
    folder = tmp_path_factory.mktemp("paging")
    settings: dict[str, Any] = {"microbatch_tokens": 16, "threads": 1, "run_memory": 1, "run_host_memory": 1}
    models = {
        "tiny": tiny_model_path,
        "experts": mixture(folder / "experts", "Qwen3-MoE"),
        "images": vision_model(folder / "images", "llava"),
    }
    group = EngineProcess(models, folder / "group", ranks=2, shard=request.param, **settings)
    yield Engines(LocalEngine(models, folder / "one", **settings), group, folder)
    group.kill()


@pytest.fixture(scope="module")
def quantized(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Engines whose weights are in four bits, whole on each rank, and that group runs."""
    pytest.importorskip("bitsandbytes", reason="needs gradwire[quantize]")
    folder = tmp_path_factory.mktemp("quantized")
    settings: dict[str, Any] = {"microbatch_tokens": 16, "threads": 1, "quantize": "nf4", "group_runs": "on"}
    group = EngineProcess({"tiny": tiny_model_path}, folder / "group", ranks=2, **settings)
    yield Engines(LocalEngine({"tiny": tiny_model_path}, folder / "one", **settings), group, folder)
    group.kill()


def by_turns(engine: Driver, prefix: str, **config: Any) -> list[object]:
    """What an engine says of two runs that are trained by turns, so that each leaves the device for the other."""
    runs = [f"{prefix}-{number}" for number in range(2)]
    for number, run_id in enumerate(runs):
        engine.create(run_id, seed=number, lora={"rank": 4}, lanes=2, **config)
    found: list[object] = []
    for _ in range(2):
        for run_id in runs:
            loss = engine.do(run_id, ROWS, forward_backward=CAUSAL).proto.loss
            found += [loss.loss, sorted(loss.metrics.items())]
        found += [engine.do(run_id, optim_step=STEP).proto.optim_step.grad_norm for run_id in runs]
    for run_id in runs:
        engine.do(run_id, save_checkpoint=pb.SaveCheckpoint(name="now"))
    return found


@pytest.mark.parametrize("config", [{}, {"base_model": "experts"}], ids=["paged", "experts"])
def test_runs_that_leave_the_device_have_the_bits_of_one_process(
    paging: Engines, config: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    prefix = request.node.callspec.id
    assert by_turns(paging.one, prefix, **config) == by_turns(paging.group, prefix, **config)
    for number in range(2):
        assert paging.weights("one", f"{prefix}-{number}") == paging.weights("group", f"{prefix}-{number}")


def both(engines: Engines, run_id: str, **config: Any) -> list[Driver]:
    """Both engines, with a run each."""
    found: list[Driver] = [engines.one, engines.group]
    for engine in found:
        engine.create(run_id, seed=3, **{"lora": {"rank": 4}, "lanes": 2} | config)
    return found


def stepped(engine: Driver, run_id: str, columns: Any, call: pb.LossCall) -> list[object]:
    """What an engine says of a step, after which the run is saved."""
    loss = engine.do(run_id, columns, forward_backward=call).proto.loss
    norm = engine.do(run_id, optim_step=STEP).proto.optim_step.grad_norm
    engine.do(run_id, save_checkpoint=pb.SaveCheckpoint(name="now", overwrite=True))
    return [loss.loss, sorted(loss.metrics.items()), loss.num_microbatches, norm]


def test_rows_with_images(paging: Engines) -> None:
    words = AutoTokenizer.from_pretrained(paging.folder / "images")
    texts = ["a row of text", "what is IMAGE? a cat", "IMAGE and IMAGE: two", "one IMAGE"]
    ids = [words(text.replace("IMAGE", image_mark("llava")), add_special_tokens=False).input_ids for text in texts]
    images = [[], [png(picture(1, 16, 24))], [png(picture(2, 32, 16)), png(picture(3, 40, 8))], [png(picture(4, 9, 9))]]
    columns = token_rows(ids) | to_image_columns(images, len(texts))
    one, group = (stepped(engine, "run-i", columns, CAUSAL) for engine in both(paging, "run-i", base_model="images"))
    assert one == group
    assert paging.weights("one", "run-i") == paging.weights("group", "run-i")


def test_a_batch_in_parts_a_moving_average_and_a_quantized_reference(paging: Engines, batches: Any) -> None:
    columns = batches.columns(get_loss("dpo"), rows=5, shortest=3, longest=6)
    quantized = "divided" not in paging.group.hello.hello.device  # which no quantized model can be
    kwargs = {"reference_model": {"name": "base", "quantize": "int8" if quantized else None}}
    dpo = pb.LossCall(loss_fn="dpo", loss_kwargs_json=json.dumps(kwargs))
    found = []
    for engine in both(paging, "run-parts"):
        engine.do("run-parts", ROWS, forward_backward=pb.LossCall(loss_fn="causal_lm", accumulate=True))
        figures = stepped(engine, "run-parts", ROWS, pb.LossCall(loss_fn="causal_lm"))
        engine.do("run-parts", update_reference=pb.UpdateReference(ema=0.5))
        figures += stepped(engine, "run-parts", columns, dpo)
        found.append([*figures, engine.logprobs("run-parts", ROWS, "ema").tolist()])
    assert found[0] == found[1]
    assert paging.weights("one", "run-parts") == paging.weights("group", "run-parts")


def test_an_operation_that_is_late_leaves_its_run_as_it_was(paging: Engines) -> None:
    found = []
    for engine in both(paging, "run-late"):
        specs, _ = codec.encode(ROWS)
        late = {"run_id": "run-late", "seq": 1, "tensors": specs, "deadline": 1e-9}
        operation = engine_pb2.EngineOperation(operation=pb.Operation(forward_backward=CAUSAL), **late)
        reply, _ = engine.request(ROWS, operation=operation)
        engine.seqs["run-late"] = 1
        assert reply.result.error.code == pb.ERROR_CODE_DEADLINE_EXCEEDED
        found.append(stepped(engine, "run-late", ROWS, CAUSAL))
    assert found[0] == found[1]


def test_quantized_weights_are_whole_on_each_rank(quantized: Engines) -> None:
    one, group = (stepped(engine, "run-q", ROWS, CAUSAL) for engine in both(quantized, "run-q"))
    assert one == group
    assert quantized.weights("one", "run-q") == quantized.weights("group", "run-q")


def test_runs_that_are_grouped_get_what_each_gets_alone(quantized: Engines) -> None:
    """Requests that wait together; which of them share a forward is for rank 0 to choose."""
    runs = [f"run-g{number}" for number in range(4)]
    for run_id in runs:
        both(quantized, run_id, lanes=1)
    alone = [quantized.one.do(run_id, ROWS, forward_backward=CAUSAL) for run_id in runs]
    specs, buffers = codec.encode(ROWS)
    for number, run_id in enumerate(runs):
        operation = engine_pb2.EngineOperation(
            run_id=run_id, seq=1, operation=pb.Operation(forward_backward=CAUSAL), tensors=specs
        )
        quantized.group.link.send(engine_pb2.EngineRequest(id=9000 + number, operation=operation), buffers)
        quantized.group.seqs[run_id] = 1
    found = {reply.id - 9000: reply.result.loss.loss for reply, _ in (quantized.group.receive() for _ in runs)}
    for number, result in enumerate(alone):
        np.testing.assert_allclose(found[number], result.proto.loss.loss, rtol=1e-5)
    norms = [
        [engine.do(run_id, optim_step=STEP).proto.optim_step.grad_norm for run_id in runs]
        for engine in (quantized.one, quantized.group)
    ]
    np.testing.assert_allclose(norms[0], norms[1], rtol=1e-4)
