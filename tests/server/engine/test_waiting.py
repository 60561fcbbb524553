"""Whole operations with everything on a device that has no numbers: nothing waits for a GPU but what has to.

See ``server.engine.test_waiting``. Packing, forward, scoring, loss, backward and optimizer run through the engine's own
operations, as a server would run them.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gradwire_losses import host
from gradwire_losses.registry import all_losses, get_loss
from gradwire_proto.codec import Column
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.engine.model.attention.paged import PagedDecode
from gradwire_server.engine.model.loading import compilation
from gradwire_server.engine.model.loading.pool import ModelPool
from gradwire_server.engine.model.split_model import OutputHead, SplitModel
from gradwire_server.engine.sampling.pages import replay
from gradwire_server.engine.sampling.samplers import local
from gradwire_server.engine.sampling.samplers.sampler import SamplingParams
from gradwire_server.engine.scoring.planner import Budget
from gradwire_server.engine.scoring.token_scores import score_tokens
from support.engine import LocalEngine, token_rows
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

META = torch.device("meta")
WAITS = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::unique_dim", "aten::_unique2",
    "aten::unique_consecutive", "aten::is_nonzero", "aten::equal", "aten::bincount", "aten::repeat_interleave",
}  # fmt: skip
"""Operations whose result, or its shape, depends on numbers."""
COPIES = {"aten::_to_copy", "aten::copy_"}


class WaitsForDevice(AssertionError):
    """Something would wait for a GPU, or fail on one."""


class Numberless(TorchDispatchMode):
    """Refuse on a machine without a GPU what would wait for one, or fail on one.

    Tensors on torch's device "meta" have shapes and no numbers. Beside what that device itself refuses, this mode
    refuses every use of a tensor whose result would have to come to the host, and every operation that mixes a tensor
    of the host with one of the device.

    Attributes:
        calls: Name of each operation on the device -> how often it was called.
        sizes: Elements of each float32 tensor that an operation made on the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        on_device = [each for each in tensors if each.is_meta]
        name = func._schema.name
        if on_device:
            self._check(name, args, kwargs, tensors, on_device)
            self.calls[name] = self.calls.get(name, 0) + 1
        result = func(*args, **kwargs)
        made = [each for each in tree_leaves(result) if isinstance(each, Tensor) and each.is_meta]
        if on_device and not func._schema.is_mutable:
            fresh = [each for each in made if each.dtype == torch.float32 and not each._is_view()]
            self.sizes += [each.numel() for each in fresh]
        return result

    @property
    def largest(self) -> int:
        """Elements of the largest of these tensors."""
        return max(self.sizes, default=0)

    def _check(self, name: str, args: Any, kwargs: Any, tensors: Sequence[Tensor], on_device: Sequence[Tensor]) -> None:
        if name in WAITS and not (name == "aten::repeat_interleave" and kwargs.get("output_size")):
            raise WaitsForDevice(f"{name} waits for the device")
        if name in COPIES:
            target = args[0].device if name == "aten::copy_" else torch.device(kwargs.get("device") or args[0].device)
            if target.type != "meta":
                raise WaitsForDevice(f"{name} copies to the host")
            return
        if any(not each.is_meta and each.ndim for each in tensors):
            raise WaitsForDevice(f"{name} mixes a tensor of the host with one of the device")
        indices = tree_leaves(args[1]) if name in ("aten::index", "aten::index_put", "aten::index_put_") else []
        if any(isinstance(index, Tensor) and index.is_meta and index.dtype == torch.bool for index in indices):
            raise WaitsForDevice(f"{name} by a mask on the device waits for it")


Numbers = Callable[[Tensor], Tensor]


@contextmanager
def counted_copies(monkeypatch: pytest.MonkeyPatch, numbers: Numbers = torch.ones_like) -> Iterator[list[int]]:
    """Replace ``host.fetched``: one entry a copy, the number of tensors in it.

    Args:
        numbers: Makes the host's copy of a tensor, given zeros of its shape and dtype.
    """
    counts: list[int] = []

    def fetched(tensors: Sequence[Tensor]) -> list[Tensor]:
        if any(each.is_meta for each in tensors):
            counts.append(len(tensors))
        zeros = (torch.zeros(each.shape, dtype=each.dtype) if each.is_meta else each for each in tensors)
        return [numbers(copy) if each.is_meta else copy for each, copy in zip(tensors, zeros, strict=True)]

    with monkeypatch.context() as patch:
        patch.setattr(host, "fetched", fetched)
        yield counts


def without_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put every model that is loaded from now on, and so its adapters, on the device without numbers."""
    load = ModelPool.load

    def loaded(self: ModelPool, *args: Any, **kwargs: Any) -> SplitModel:
        split_model = load(self, *args, **kwargs)
        split_model.model.to(META)
        split_model.replays = False  # a CPU's forwards are not recorded there
        return split_model

    # The fused step itself computes with shapes; only its list of devices leaves this one out.
    optimizer = importlib.import_module("torch.optim.optimizer")
    devices = [*optimizer._get_fused_kernels_supported_devices(), "meta"]
    autocast = torch.is_autocast_enabled
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind="cpu": kind != "meta" and autocast(kind))
    monkeypatch.setattr(ModelPool, "load", loaded)
    monkeypatch.setattr(optimizer, "_get_fused_kernels_supported_devices", lambda: devices)


BUDGETS = {
    "whole": Budget(10**6, activation_bytes=1 << 40),
    "parts": Budget(40, activation_bytes=1 << 40),
    "recomputed": Budget(40, activation_bytes=0),
}
STEP = pb.OptimStep(learning_rate=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, max_grad_norm=0.5)
_NUMBERS = itertools.count()
MOST_COPIES = 2
"""Copies to the host in one operation."""


@pytest.fixture(scope="module")
def engine(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalEngine]:
    with pytest.MonkeyPatch.context() as patch:
        without_numbers(patch)
        yield LocalEngine({"tiny": model_path}, tmp_path_factory.mktemp("state"))


@pytest.fixture
def run_id() -> str:
    """A new run's id."""
    return f"run-{next(_NUMBERS)}"


def call_of(name: str, **settings: Any) -> pb.LossCall:
    loss = get_loss(name)
    kwargs = ['"reference_model": "base"'] if "reference_model" in loss.config.model_fields else []
    kwargs += ['"reduction_divisor": 4.0'] if name == "dr_grpo" else []
    return pb.LossCall(loss_fn=name, loss_kwargs_json=f"{{{', '.join(kwargs)}}}", **settings)


IN_CI = (
    "bco", "causal_lm", "conservative_ppo", "dpo", "enhanced_ppo", "gkd", "grpo", "gspo", "kto", "reward_modeling",
    "sequence_classification", "top_k_distillation",
)  # fmt: skip
"""One loss of each family; all of them are slow."""


@pytest.mark.parametrize(
    ("name", "budget", "lora"),
    [pytest.param(loss.name, "parts", 4, marks=() if loss.name in IN_CI else pytest.mark.slow) for loss in all_losses()]
    + [("causal_lm", budget, None) for budget in BUDGETS]
    + [("conservative_ppo", budget, 4) for budget in ("whole", "recomputed")],
)
def test_a_step_waits_for_its_figures_only(
    engine: LocalEngine,
    run_id: str,
    batches: Any,
    name: str,
    budget: str,
    lora: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loss = get_loss(name)
    head = loss.head or ("value" if "values" in loss.optional_scores else "")
    labels = 64 if head == "classification" else 0
    created = engine.create(run_id, base_model="tiny", lora=lora, head=head, num_labels=labels)
    assert not created.HasField("error"), created.error
    assert all(master.is_meta for master in engine.context.runs[run_id].policy.masters().values())
    monkeypatch.setattr(engine.context.memory, "budget", lambda *_: BUDGETS[budget])
    columns = batches.columns(loss, 4, 1, 9)
    for _ in range(2 if budget == "whole" else 1):  # the second step has moments, and what was kept of the first
        with counted_copies(monkeypatch) as copies, Numberless() as seen:
            found = engine.op(run_id, columns, forward_backward=call_of(name))
        assert found.ok, found.proto.error
        assert 1 <= len(copies) <= MOST_COPIES and seen.calls
        with counted_copies(monkeypatch) as copies, Numberless() as seen:
            stepped = engine.op(run_id, optim_step=STEP)
        assert stepped.ok, stepped.proto.error
        assert len(copies) == 1
        assert seen.calls["aten::_fused_adamw_"] <= 4 and "aten::_foreach_mul_" not in seen.calls


@pytest.mark.parametrize(
    "settings",
    [
        {"lora": 4, "dropout": 0.1},
        {"lora": {"rank": 4, "target_modules": ["all-linear", "lm_head"]}},
        {"neftune_noise_alpha": 5.0},
        {"lora": 4, "gradient_checkpointing": True},
    ],
    ids=lambda settings: " ".join(settings),
)
def test_what_recipes_do_besides_waits_for_its_figures_only(
    engine: LocalEngine, run_id: str, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their runs' settings, scores by the base, custom losses, moving references."""
    created = engine.create(run_id, base_model="tiny", **settings)
    assert not created.HasField("error"), created.error
    rows = token_rows([[5, 6, 7, 8, 9], [5, 9, 11]])
    kept = {"grad_logprobs": Column(np.ones(6, np.float32), (np.array([4, 2], np.uint32),))}
    steps: list[tuple[Any, dict[str, Any]]] = [
        (rows, {"train_step": pb.TrainStep(loss=call_of("causal_lm"), optim_step=STEP)}),
        (rows, {"forward": pb.LossCall(outputs=["logprobs", "entropy"], model="base")}),
        (rows, {"forward": call_of("causal_lm")}),
        (rows, {"kept_forward": pb.KeptForward(scores=["logprobs"])}),
        (kept, {"backward": pb.Backward(weight=1.0)}),
        (None, {"zero_grad": pb.ZeroGrad()}),
        (None, {"update_reference": pb.UpdateReference(ema=0.9)}),
    ]
    for columns, kind in steps:
        if "backward" in kind:
            kind["backward"].forward_seq = engine.seqs[run_id]
        with counted_copies(monkeypatch) as copies, Numberless():
            done = engine.op(run_id, columns, **kind)
        assert done.ok, (kind, done.proto.error)
        assert len(copies) <= MOST_COPIES + ("train_step" in kind), kind


KINDS: list[dict[str, Any]] = [
    {"n": 3},
    {"temperature": 0.0},
    {"top_p": 0.7, "top_logprobs": 3},
    {"top_k": 5, "min_p": 0.1},
    {"logit_bias": ((5, 2.0),), "repetition_penalty": 1.2, "presence_penalty": 0.5, "n": 2},
]


@pytest.mark.long
def test_a_token_of_any_kinds_waits_once(engine: LocalEngine, run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # It compares numbers, once for each model, and so does the trial of drafts.
    monkeypatch.setattr(local, "paged_token_bytes", lambda policy, agreement: 1)
    engine.create(run_id, base_model="tiny", lora=4)
    policy, sampler = engine.context.runs[run_id].policy, local.LocalSampler(speculate="off")
    for number, settings in enumerate(KINDS):
        prompt = [4 + number] * (9 + 7 * number)
        sampler.begin(policy, [prompt], SamplingParams(max_tokens=6 + number, seed=1, ignore_eos=True, **settings))
    tokens = 0
    while sampler.turn():
        with counted_copies(monkeypatch) as copies, Numberless() as seen:
            sampler.step()
        assert len(copies) == 1 and seen.calls, "one copy for all rows and kinds"
        tokens += 1
    assert tokens == 10


@pytest.mark.long
def test_a_captured_token_uses_nothing_of_the_host(
    engine: LocalEngine, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph has no copies from the host: its one input is the tensor of numbers that is filled before a replay."""
    monkeypatch.setattr(local, "paged_token_bytes", lambda policy, agreement: 1)
    engine.create(run_id, base_model="tiny", lora=4)
    policy, sampler, captured = engine.context.runs[run_id].policy, local.LocalSampler(speculate="off"), []

    class OnDevice(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            tensors = [each for each in tree_leaves((args, kwargs, result)) if isinstance(each, torch.Tensor)]
            assert all(each.is_meta for each in tensors), f"{func} uses a tensor of the host"
            captured.append(func)
            return result

    def capture(compute: Any, pool: Any) -> Any:
        def again() -> torch.Tensor:
            with OnDevice():
                return compute()

        return again

    monkeypatch.setattr(replay, "captured", capture)
    monkeypatch.setattr(replay, "new_pool", lambda device: object())
    monkeypatch.setattr(policy.split_model, "replays", True)
    monkeypatch.setitem(replay._right, policy.split_model, True)  # the comparison with the forward needs numbers
    for number in range(3):  # of different lengths, with pages that they share and pages of their own
        params = SamplingParams(max_tokens=20, seed=number, n=1 + number, ignore_eos=True)
        sampler.begin(policy, [[4 + number] * (9 + 11 * number)], params)
    with counted_copies(monkeypatch), Numberless():
        while sampler.turn():
            sampler.step()
    assert len(captured) > 18 * policy.facts.num_layers


def test_decoding_has_few_shapes(engine: LocalEngine, run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph of kernels is captured once for each, and replayed as long as nothing but numbers changes."""
    monkeypatch.setattr(local, "paged_token_bytes", lambda policy, agreement: 1)
    engine.create(run_id, base_model="tiny")
    policy, sampler, shapes = engine.context.runs[run_id].policy, local.LocalSampler(speculate="off"), []
    attend = PagedDecode.attend

    def seen(self: PagedDecode, layer: Any, query: Any, *others: Any) -> Any:
        classes = [each.table.shape for lists in (self.shared, self.own) for each in lists.classes]
        shapes.append((query.shape, tuple(classes)))
        return attend(self, layer, query, *others)

    monkeypatch.setattr(PagedDecode, "attend", seen)
    for number in range(3):
        prompt = [4 + number] * (17 + number)
        sampler.begin(policy, [prompt], SamplingParams(max_tokens=40, seed=number, n=4, ignore_eos=True))
    with counted_copies(monkeypatch):
        while sampler.turn():
            sampler.step()
    steps = len(shapes) // policy.facts.num_layers
    assert steps == 39
    assert len(set(shapes)) <= 3  # one, two, and four pages of each sample's own


def test_segments_of_similar_lengths_are_one_call(
    engine: LocalEngine, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a kernel for sequences of different lengths, the calls grow with how far the lengths spread."""
    engine.create(run_id, base_model="tiny")
    lengths = list(range(2, 60))
    with counted_copies(monkeypatch), Numberless() as seen:
        rows = token_rows([[5] * length for length in lengths])
        found = engine.op(run_id, rows, forward=pb.LossCall(outputs=["logprobs"]))
    assert found.ok, found.proto.error
    kernels = ("scaled_dot_product", "_softmax")
    named = {name: count for name, count in seen.calls.items() if any(kernel in name for kernel in kernels)}
    calls = sum(count for name, count in named.items() if "log_softmax" not in name)
    assert 0 < calls <= 2 * engine.context.runs[run_id].policy.facts.num_layers * 12


def test_no_chunk_makes_a_second_gradient_of_the_output_weight() -> None:
    vocabulary, width, places = 4096, 64, 96
    weight = torch.nn.Parameter(torch.empty(vocabulary, width, dtype=torch.bfloat16, device=META))
    hidden = torch.empty(places, width, dtype=torch.bfloat16, device=META, requires_grad=True)
    ids = torch.empty(places, 1, dtype=torch.int64, device=META)
    with Numberless() as seen:
        scores = score_tokens(hidden, OutputHead(weight), ids, chunk_elements=16 * vocabulary)
    assert seen.largest <= 16 * vocabulary  # logits of a chunk
    with Numberless() as seen:
        torch.autograd.backward([scores.logprobs], [torch.empty_like(scores.logprobs)])
    made = seen.sizes.count(vocabulary * width)
    assert made <= 1, "the gradient itself, for the whole call"


@pytest.mark.slow
@torch._dynamo.config.patch(recompile_limit=compilation.KINDS)  # restores what the engine sets
def test_compiled_layers_compile_nothing_for_fifty_ragged_batches(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_module = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **how: compile_module(self, backend="eager", **how))
    torch._dynamo.reset()
    engine, rng = LocalEngine({"tiny": model_path}, tmp_path / "state", compile=True), np.random.default_rng(0)
    engine.create("run", base_model="tiny", lora=4)
    for batch in range(50):
        rows = token_rows([[5] * int(length) for length in rng.integers(2, 60, int(rng.integers(1, 9)))])
        engine.train("run", rows)
        if not batch:
            assert counters["stats"]["unique_graphs"] > 0
            counters.clear()
    assert counters["stats"]["unique_graphs"] <= 4
    torch._dynamo.reset()
