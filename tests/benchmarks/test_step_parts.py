"""The time of a training step by part: all of it is counted, each operation in its part, and nothing is added to it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import roofline, step_parts
from benchmarks.gpu import steps_table
from benchmarks.gpu_service import least
from benchmarks.in_process import InProcess
from benchmarks.qwen import SMOKE, Shape, qwen
from benchmarks.roofline import PARTS
from benchmarks.workload import Rows

VOCABULARY = SMOKE["vocab_size"]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> InProcess:
    folder = tmp_path_factory.mktemp("parts")
    return InProcess(qwen(folder / "model", Shape(**SMOKE), device="cpu"), folder / "state")


@pytest.fixture
def batches() -> list[Rows]:
    rng = np.random.default_rng(0)
    return [[rng.integers(4, VOCABULARY, 24).tolist() for _ in range(4)] for _ in range(3)]


def recorded(work: Any) -> Any:
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        work()
    return profiled.events()


def test_the_parts_are_the_whole_time_of_the_steps_operations(engine: InProcess, batches: list[Rows]) -> None:
    engine.train(batches[:1])
    events = recorded(lambda: engine.train(batches[:1]))
    parts = step_parts.by_part(events, VOCABULARY, "cpu")
    assert list(parts) == list(PARTS)
    assert all(parts.values())
    outermost = [each for each in events if each.cpu_parent is None and not each.is_user_annotation]
    labelled = [each for each in events if each.cpu_parent is not None and each.cpu_parent.name == "optimizer"]
    assert sum(parts.values()) == pytest.approx(sum(each.cpu_time_total for each in outermost + labelled))
    assert parts["optimizer"] == pytest.approx(sum(each.cpu_time_total for each in labelled))
    assert step_parts.covered(events, "cpu") == pytest.approx(sum(parts.values()), rel=1e-3)


@pytest.mark.parametrize(("outputs", "part"), [(500, "vocabulary"), (48, "products")])
def test_a_layer_of_the_vocabularys_size_is_the_vocabularys_backward_too(outputs: int, part: str) -> None:
    layer, rows = torch.nn.Linear(16, outputs, bias=False), torch.randn(9, 16, requires_grad=True)
    events = recorded(lambda: layer(rows).backward(torch.ones(9, outputs)))
    products = [each for each in events if each.name == "aten::mm"]
    assert len(products) == 3  # forward, and the gradients of rows and weight
    parts = step_parts.by_part(products, 500, "cpu")
    assert [name for name, each in parts.items() if each] == [part]


def test_a_look_up_is_not_the_vocabularys_but_its_gradient_is() -> None:
    table, ids = torch.nn.Embedding(500, 16), torch.arange(9)
    forward = step_parts.by_part(recorded(lambda: table(ids)), 500, "cpu")
    assert forward["other"] and not forward["vocabulary"]
    backward = step_parts.by_part(recorded(lambda: table(ids).backward(torch.ones(9, 16))), 500, "cpu")
    assert backward["vocabulary"]


def event(name: str, began: float, took: float, *, on_gpu: bool = False, **more: Any) -> FunctionEvent:
    kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
    shapes = {"input_shapes": [], "concrete_inputs": []} | more
    return FunctionEvent(1, name, 1, began, began + took, device_type=kind, use_device="cuda", **shapes)


def test_a_kernels_time_belongs_to_the_operation_that_launched_it() -> None:
    operations = {
        "products": [("aten::mm", [[9, 16], [16, 48]]), ("aten::addmm_", [[9, 48], [9, 16], [16, 48]])],
        "vocabulary": [("aten::mm", [[9, 16], [16, 500]]), ("LigerCrossEntropyFunction", [[9, 500]])],
        "attention": [
            ("aten::_cudnn_attention_forward", [[1, 4, 9, 8]]),
            ("torch_attn::_varlen_attn", [[9, 4, 8]]),
            ("FlashAttnVarlenFuncBackward", [[9, 4, 8]]),
        ],
        "other": [("LigerRMSNormFunction", [[9, 16]]), ("bitsandbytes::dequantize_4bit", [[99]])],
        "optimizer": [("aten::_foreach_norm", [[500, 16]])],
    }
    label = event("optimizer", 0, 90, is_user_annotation=True)
    events = [label, event("optimizer", 1000, 90, on_gpu=True, is_user_annotation=True)]
    expected = dict.fromkeys(PARTS, 0.0)
    for part, several in operations.items():
        for name, shapes in several:
            launched = event(name, len(events), 1, input_shapes=shapes)
            if part == "optimizer":
                launched.set_cpu_parent(label)
            took = 2.0 ** len(events)
            launched.append_kernel("kernel", 0, took)
            events += [launched, event("kernel", 10 * took, took, on_gpu=True)]
            expected[part] += took
    same_number = event("cudaLaunchKernel", 0, 1)
    same_number.append_kernel("kernel", 0, 4.0)
    unknown = event("triton_kernel", 5, 3, on_gpu=True)  # launched by nothing that torch knows
    overlapping = event("Memcpy HtoD", 6, 4, on_gpu=True)
    expected["other"] += 3 + 4
    assert step_parts.by_part([*events, same_number, unknown, overlapping], 500, "cuda") == expected
    assert step_parts.covered([*events, unknown, overlapping], "cuda") == sum(expected.values()) - 2


class Operations(TorchDispatchMode):
    """Count operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def order(engine: InProcess, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens to the device and in the engine, in order."""
    seen: list[str] = []
    do = engine._engine.do
    monkeypatch.setattr(step_parts, "wait_for", lambda device: seen.append("wait"))
    monkeypatch.setattr(engine._engine, "do", lambda *args, **kind: (seen.extend(kind), do(*args, **kind))[1])
    return seen


def test_measuring_adds_no_wait_and_no_operation_to_a_step(
    engine: InProcess, batches: list[Rows], order: list[str]
) -> None:
    found = step_parts.step_parts(engine, batches, VOCABULARY, "cpu")
    step = ["forward_backward", "optim_step"]
    assert order == [*["wait", *step, *step, "wait"] * 2, "wait", *step, "wait"]
    assert all(each > 0 for each in found.values()), found
    counts = []
    for measure in (lambda work: work(), recorded):
        with Operations() as operations:
            measure(lambda: engine.train(batches[:1]))
        counts.append(operations.calls)
    assert counts[0] == counts[1]
    assert counts[0]["aten.mm.default"] and counts[0]["aten._local_scalar_dense.default"]


def test_the_engine_has_the_settings_of_the_servers_flags() -> None:
    found = step_parts.engine_settings(["--model", "m=x", "--device", "cuda", "--quantize", "nf4", "--compile"])
    assert found | {"device": "cuda", "quantize": "nf4", "compile": True} == found
    assert not {"models", "state_dir", "dtype", "metrics_address"} & {*found}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # a name that peft uses
def test_the_least_time_is_the_rooflines_for_the_same_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    (case,) = [each for each in roofline.CASES if each.size == "0.6B"]
    found = least("0.6B:full", [*case.rows], "cuda", smoke=False)
    assert found == roofline.milliseconds(case, roofline.BANDWIDTH["H100"])
    assert least("8B:nf4", [4096], "cuda", smoke=False) is None
    assert least("0.6B:full", [24], "cpu", smoke=True) is None


def test_the_table_has_the_least_time_below_the_measured() -> None:
    measured = {part: 100.0 + index for index, part in enumerate((*PARTS, step_parts.IDLE, step_parts.UNPROFILED))}
    least = dict.fromkeys(PARTS, 7.0)
    steps = {"4k": {"measured": measured, "least": least}, "16k": {"measured": measured, "least": None}}
    console = Console(width=80, record=True)
    console.print(steps_table({"cases": {"4B:lora:service": {"parts": {}, "steps": steps}}}))
    lines = [line.split() for line in console.export_text().splitlines() if line.strip()]
    shown = [f"{each:.1f}" for each in measured.values()]
    assert lines[1] == [*PARTS, "idle", "step"]
    first, below, second = lines[3:]
    assert (first, second) == (["4B", "lora", "4k", *shown], ["4B", "lora", "16k", *shown])
    assert below == ["at", "least", *["7.0"] * 5, "35.0"]
