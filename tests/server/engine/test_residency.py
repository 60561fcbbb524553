"""Runs that move between the device, host memory and disk: the same bits as alone, within the budgets."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gradwire_losses.batch import Batch
from gradwire_proto.v1.training_pb2 import OptimStep
from gradwire_server.engine.errors import DamagedFile
from gradwire_server.engine.failures import is_fatal
from gradwire_server.engine.state.engine_run import EngineRun
from gradwire_server.engine.state.packed import Packed, PackedLayout
from gradwire_server.engine.state.residency import Residency
from gradwire_server.engine.state.snapshot import capture
from support.training import take_step
from torch import Tensor

SETTINGS: list[dict[str, Any]] = [
    {"rank": 4},
    {"rank": 2, "target_modules": ["q_proj", "down_proj"], "alpha": 3.0},
    {"rank": 8, "alpha": 5.0},
    {"rank": 3, "dropout": 0.3},
    {"rank": 2, "target_modules": ["embed_tokens", "v_proj"]},
]
STEP = OptimStep(learning_rate=1e-2, beta1=0.9, beta2=0.99, eps=1e-8)
EVERYTHING = 1 << 40


def rows(number: int) -> Batch:
    ids = (torch.arange(9) * (number + 3)) % 64
    return Batch(ids, torch.tensor([5, 4]), torch.ones(9, dtype=torch.bool), torch.ones(2, dtype=torch.int64))


def accumulate(run: EngineRun, number: int) -> None:
    """One gradient of a run, merged under a loss of its own each other time."""
    batch = rows(number)
    with run.rng():
        states = run.policy.hidden(batch.input_ids, batch.lengths, training=True)
        parameters = run.policy.trainable_parameters()
        found = torch.autograd.grad(states.sin().sum(), list(parameters.values()))
    gradients = dict(zip(parameters, [each.float().contiguous() for each in found], strict=True))
    run.accumulator.merge({(f"loss-{number % 2}", "tokens"): gradients}, {(f"loss-{number % 2}", "tokens"): 9.0})


def train(run: EngineRun, number: int) -> None:
    accumulate(run, number)
    if number % 3 == 1:
        take_step(run, STEP)
        run.step += 1
    if number % 5 == 2:
        run.move_ema(0.9)


def state(run: EngineRun) -> dict[str, Tensor]:
    return {f"{file}/{name}": each.clone() for file, tensors in capture(run).items() for name, each in tensors.items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.fixture
def residency(tmp_path: Path) -> Callable[..., Residency]:
    made = []

    def make(device_bytes: int = EVERYTHING, host_bytes: int = EVERYTHING, **more: Any) -> Residency:
        made.append(Residency(tmp_path / "spilled", device_bytes, host_bytes, **more))
        return made[-1]

    yield make
    for each in made:
        each.close()


def settled(residency: Residency) -> None:
    """Wait until the mover's thread has done what it was given."""
    residency._mover.submit(lambda: None).result(60)


@pytest.mark.long
@pytest.mark.parametrize(("device", "host"), [(EVERYTHING, EVERYTHING), (60_000, EVERYTHING), (60_000, 50_000), (0, 0)])
def test_each_run_gets_the_bits_that_it_gets_alone(make_run: Any, residency: Any, device: int, host: int) -> None:
    moving = residency(device, host)
    runs = [make_run(lora=SETTINGS[i % 5], seed=i, run_id=f"run-{i}") for i in range(10)]
    for run in runs:
        moving.add(run)
    order = [number for number in range(10) for _ in range(6)]
    random.Random(5).shuffle(order)
    count, largest = [0] * 10, 0
    for place, number in enumerate(order):
        ahead = order[min(place + 2, len(order) - 1)]
        moving.prefetch(f"run-{ahead}")
        with moving.executing([f"run-{number}"]):
            moving.use(runs[number])
            train(runs[number], count[number])
            largest = max(largest, PackedLayout.of(runs[number].tensors()).nbytes)
        count[number] += 1
        settled(moving)
        held = moving.held()
        assert sum(each.runs for each in held.values()) == 10
        assert held["device"].nbytes <= device and held["host"].nbytes <= host + largest
    for number, run in enumerate(runs):
        moving.use(run)
        found = state(run)
        alone = make_run(lora=SETTINGS[number % 5], seed=number, run_id=f"alone-{number}")
        for each in range(6):
            train(alone, each)
        assert_same(found, state(alone))
    if device == 0:
        assert moving.moves["to_disk"].runs >= 50 and moving.read_ahead > 0
    elif device == EVERYTHING:
        assert not any(each.runs for each in moving.moves.values())


def test_the_least_recently_used_leave_first(make_run: Any, residency: Any) -> None:
    runs = [make_run(lora=4, seed=i) for i in range(4)]
    one = runs[0].nbytes
    moving = residency(2 * one, one)
    for run in runs:
        moving.add(run)
    settled(moving)
    assert [moving.place(run.run_id) for run in runs] == ["disk", "host", "device", "device"]
    moving.use(runs[2])
    moving.use(runs[1])
    settled(moving)
    assert [moving.place(run.run_id) for run in runs] == ["disk", "device", "device", "host"]
    moving.prefetch(runs[0].run_id)
    settled(moving)
    assert [moving.place(run.run_id) for run in runs] == ["host", "device", "device", "disk"]
    moving.use(runs[0])
    assert moving.read_ahead == 1


def test_runs_read_ahead_beside_those_in_use_lose_nothing(make_run: Any, residency: Any) -> None:
    runs = [make_run(lora=SETTINGS[i % 5], seed=i, run_id=f"run-{i}") for i in range(8)]
    before = [state(run) for run in runs]
    one = max(PackedLayout.of(run.tensors()).nbytes for run in runs)
    moving = residency(one, 2 * one)
    for run in runs:
        moving.add(run)
    ended = threading.Event()

    def read_ahead() -> None:
        draw = random.Random(3)
        while not ended.wait(0.0002):
            moving.prefetch(f"run-{draw.randrange(8)}")

    thread = threading.Thread(target=read_ahead)
    thread.start()
    draw = random.Random(4)
    try:
        for _ in range(400):
            number = draw.randrange(8)
            with moving.executing([f"run-{number}"]):
                moving.use(runs[number])
                assert runs[number].nbytes > 0
    finally:
        ended.set()
        thread.join()
    for run, expected in zip(runs, before, strict=True):
        moving.use(run)
        assert_same(state(run), expected)
    held = moving.held()
    assert sum(each.runs for each in held.values()) == 8


def test_a_run_in_use_stays(make_run: Any, residency: Any) -> None:
    sampled, kept, trained, executed, idle = (make_run(lora=4, seed=i) for i in range(5))
    kept.kept[3] = object()
    full = make_run()
    moving = residency(0, 0, in_use=lambda run: run is sampled)
    with moving.executing([executed.run_id]):
        for run in (sampled, kept, full, executed, idle, trained):
            moving.add(run)
    settled(moving)
    kept.kept.clear()
    places = [moving.place(run.run_id) for run in (sampled, kept, full, executed, idle, trained)]
    assert places == ["device", "device", "device", "disk", "disk", "disk"]


def test_a_removed_run_leaves_nothing(make_run: Any, residency: Any, tmp_path: Path) -> None:
    runs = [make_run(lora=4, seed=i) for i in range(6)]
    one = runs[0].nbytes
    moving = residency(2 * one, 2 * one)
    for run in runs:
        moving.add(run)
    settled(moving)
    assert len(list((tmp_path / "spilled").iterdir())) == 2
    for run in runs:
        moving.remove(run.run_id)
        run.close()
    settled(moving)
    assert not list((tmp_path / "spilled").iterdir())
    assert all(held.runs == held.nbytes == 0 for held in moving.held().values())


def test_files_of_another_process_are_ignored(make_run: Any, residency: Any, tmp_path: Path) -> None:
    (tmp_path / "spilled").mkdir()
    (tmp_path / "spilled" / "run-0").write_bytes(b"half of a run")
    moving = residency(0, 0)
    assert not (tmp_path / "spilled").exists()
    run = make_run(lora=4)
    before = state(run)
    moving.add(run)
    moving.use(run)
    assert_same(state(run), before)


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: data[:70] + b"x" + data[71:], None])
def test_a_damaged_file_is_never_trained_on(make_run: Any, residency: Any, tmp_path: Path, damage: Any) -> None:
    run = make_run(lora=4)
    moving = residency(0, 0)
    moving.add(run)
    settled(moving)
    file = tmp_path / "spilled" / run.run_id
    file.write_bytes(damage(file.read_bytes())) if damage else file.unlink()
    with pytest.raises(DamagedFile) as caught:
        moving.use(run)
    assert is_fatal(caught.value)


def test_a_full_disk_keeps_runs_in_memory(
    make_run: Any, residency: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(self: Packed, file: Path) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Packed, "write", full)
    runs = [make_run(lora=4, seed=i) for i in range(4)]
    before = [state(run) for run in runs]
    moving = residency(0, 0)
    for run in runs:
        moving.add(run)
    settled(moving)
    assert moving.held()["host"].runs == 4
    assert caplog.text.count("No space left") == 1 and "--run-host-memory" in caplog.text
    for run, expected in zip(runs, before, strict=True):
        moving.use(run)
        assert_same(state(run), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.uint8])
def test_packed_tensors_come_back(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {"a": torch.arange(6).view(2, 3).to(dtype), "empty": torch.empty(0, dtype=dtype), "b": torch.tensor(3.0)}
    packed = Packed.of(tensors)
    checksum = packed.write(tmp_path / "file")
    for each in (packed, Packed.read(tmp_path / "file", packed.layout, checksum)):
        found = each.unpacked()
        assert list(found) == list(tensors)
        assert [each.dtype for each in found.values()] == [each.dtype for each in tensors.values()]
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert Packed.of(tensors).layout is packed.layout
