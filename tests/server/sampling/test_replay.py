"""Tokens replayed as graphs of kernels: a CPU's recordings, and what stands for a GPU's graphs, which computes the
captured forward again, on the captured tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gradwire_proto.v1 import training_pb2
from gradwire_server.engine.model.attention.paged import PAGE
from gradwire_server.engine.model.loading.pool import ModelPool
from gradwire_server.engine.model.policy import LoraPolicy, Policy
from gradwire_server.engine.sampling.pages import pages, replay
from gradwire_server.engine.sampling.pages.recording import Memory, recorded
from gradwire_server.engine.sampling.samplers.local import LocalSampler
from gradwire_server.engine.sampling.samplers.sampler import SamplingParams
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

FullLogprobs = Callable[..., Tensor]
Compute = Callable[[], Tensor]


class Kernels(TorchDispatchMode):
    """The operations of a forward, with the shapes that they make and the addresses of what was there before."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, Any, list[int]]] = []
        self._made: list[Tensor] = []  # kept, so that no address is used twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        own = {each.untyped_storage().data_ptr() for each in self._made}
        given, made = ([each for each in tree_leaves(some) if isinstance(each, Tensor)] for some in (args, result))
        before = [address for each in given if (address := each.untyped_storage().data_ptr()) not in own]
        self.calls.append((str(func), [each.shape for each in made], before))
        self._made += [each for each in made if each.untyped_storage().data_ptr() not in before]
        return result


class Graphs:
    """How many were captured and replayed, and what is added to the states that they give.

    A graph of a GPU is what its capture was: the same kernels on the same addresses, whatever Python would do now.
    """

    def __init__(self) -> None:
        self.captured = self.replayed = 0
        self.error = 0.0

    def capture(self, compute: Compute, pool: Any) -> Compute:
        def again() -> Tensor:
            self.replayed += 1
            with Kernels() as kernels:
                states = compute()
            assert kernels.calls == captured.calls
            return states + self.error

        self.captured += 1
        with Kernels() as captured:
            compute()
        return again


class Recordings(Graphs):
    """The same of recordings."""

    def capture(self, compute: Compute, pool: Any) -> Compute:
        again = recorded(compute, pool)
        assert torch.equal(again().clone(), compute()), "a journal's replay gives the same bits"
        self.captured += 1

        def counted() -> Tensor:
            self.replayed += 1
            return again() + self.error

        return counted


@pytest.fixture(params=["recordings", "graphs"])
def graphs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Graphs:
    made = Recordings() if request.param == "recordings" else Graphs()
    monkeypatch.setattr(replay, "captured", made.capture)
    if request.param == "graphs":
        monkeypatch.setattr(pages, "fills_up", lambda device: True)
        monkeypatch.setattr(replay, "new_pool", lambda device: object())
    return made


@pytest.fixture
def policy(tiny_model_path: Path) -> Policy:
    split_model = ModelPool({"tiny": str(tiny_model_path)}, "cpu").load("tiny")
    split_model.model.requires_grad_(False)
    split_model.replays = True
    lora = LoraPolicy(split_model, "a", training_pb2.LoraSettings(rank=4), seed=0)
    with torch.no_grad():
        for weight in lora.masters().values():
            weight.normal_(std=0.2)
    return lora


def test_samples_are_scored_as_a_fresh_forward_scores_them(
    policy: Policy, graphs: Graphs, full_logprobs: FullLogprobs, rng: np.random.Generator
) -> None:
    sampler, jobs = LocalSampler(), []
    for number, count in enumerate((3, 1, 5)):
        prompts = [rng.integers(4, 60, length).tolist() for length in (5 + number, PAGE, 3 * PAGE + 2)]
        params = SamplingParams(max_tokens=2 * PAGE + number, seed=number, n=count, ignore_eos=True)
        jobs.append((prompts, sampler.begin(policy, prompts, params)))
        for _ in range(5):
            sampler.step()
    steps = 15
    while sampler.turn():
        sampler.step()
        steps += 1
    for prompts, job in jobs:
        for prompt, of_prompt in zip(prompts, job.samples().by_prompt(), strict=True):
            for sample in of_prompt:
                expected = full_logprobs(policy, prompt, sample.token_ids)
                torch.testing.assert_close(torch.tensor(sample.logprobs), expected, atol=1e-5, rtol=0)
    assert graphs.replayed > steps / 2


def test_a_graph_is_dropped_when_weights_move(policy: Policy, graphs: Graphs) -> None:
    sampler = LocalSampler()
    job = sampler.begin(policy, [[4, 5, 6]], SamplingParams(max_tokens=12, seed=0, ignore_eos=True))
    for _ in range(5):
        sampler.step()
    captured = graphs.captured
    assert captured and graphs.replayed
    policy.put_tensors({name: weight.clone() for name, weight in policy.state_tensors().items()})
    while not job.done:
        sampler.step()
    assert graphs.captured == captured + 1


def test_a_wrong_graph_is_used_for_no_token(
    policy: Policy, graphs: Graphs, full_logprobs: FullLogprobs, rng: np.random.Generator
) -> None:
    graphs.error = 1.0
    sampler, prompt = LocalSampler(), rng.integers(4, 60, 9).tolist()
    job = sampler.begin(policy, [prompt], SamplingParams(max_tokens=12, seed=0, ignore_eos=True))
    while not job.done:
        sampler.step()
    (sample,) = job.samples().by_prompt()[0]
    expected = full_logprobs(policy, prompt, sample.token_ids)
    torch.testing.assert_close(torch.tensor(sample.logprobs), expected, atol=1e-5, rtol=0)
    assert graphs.replayed == 1


def test_a_forward_that_cannot_be_captured_is_computed(
    policy: Policy, graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def refused(compute: Compute, pool: Any) -> Compute:
        tried.append(pool)
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(replay, "captured", refused)
    sampler = LocalSampler()
    job = sampler.begin(policy, [[4, 5, 6]], SamplingParams(max_tokens=12, seed=0, ignore_eos=True))
    while not job.done:
        sampler.step()
    assert len(job.samples().by_prompt()[0][0].token_ids) == 12
    assert len(tried) == 1


def test_pages_that_rows_share_are_read_where_they_are(
    policy: Policy,
    graphs: Graphs,
    full_logprobs: FullLogprobs,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pages, "FEW", 0)
    for number in range(2):  # the second prompt's pages begin elsewhere
        sampler, prompt = LocalSampler(), rng.integers(4, 60, 3 * PAGE + 2).tolist()
        other = sampler.begin(policy, [prompt[:5]], SamplingParams(max_tokens=3 + 9 * number, seed=0, n=2))
        params = SamplingParams(max_tokens=9, seed=number, n=4 + 6 * number, ignore_eos=True)
        job = sampler.begin(policy, [prompt], params)
        while not (job.done and other.done):
            sampler.step()
        for sample in job.samples().by_prompt()[0]:
            expected = full_logprobs(policy, prompt, sample.token_ids)
            torch.testing.assert_close(torch.tensor(sample.logprobs), expected, atol=1e-5, rtol=0)
        replayed, graphs.replayed = graphs.replayed, 0
        assert replayed


def test_a_recording_computes_other_numbers() -> None:
    numbers, weight = torch.arange(6.0), torch.randn(6, 4, generator=torch.Generator().manual_seed(0))

    def compute() -> Tensor:
        wide = (numbers.view(2, 3) @ weight[:3]).relu()
        low, high = wide.split(2, dim=1)
        low = low.clone().mul_(numbers[0] + 2)
        total = torch.cat([low, high], dim=1).sort(dim=1).values
        return total + torch.zeros(4).index_add_(0, torch.tensor([1, 1, 3]), numbers[:3])

    again = recorded(compute, Memory())
    for _ in range(3):
        numbers += 1.5
        assert torch.equal(again(), compute())


def test_a_computation_that_reads_numbers_is_not_recorded() -> None:
    numbers = torch.ones(3)
    for read in (lambda: numbers * float(numbers.sum()), numbers.nonzero, lambda: numbers + torch.rand(3)):
        with pytest.raises(RuntimeError, match="depends on the numbers in a tensor"):
            recorded(read, Memory())


def test_memory_is_taken_again_once_nobody_holds_it() -> None:
    memory = Memory()
    first = memory.like(torch.empty(100, 7))
    address, part = first.data_ptr(), first[50:]
    again = memory.kept(part)
    assert again.data_ptr() == part.data_ptr() and again.shape == part.shape
    del first
    beside = memory.like(torch.empty(100, 7))
    assert beside.data_ptr() != address, "a part of it is held"
    del part
    assert memory.like(torch.empty(2, 10)).data_ptr() != address, "it is far too large"
    assert memory.like(torch.empty(50, 8, dtype=torch.int64)).data_ptr() != address, "it is too small"
    assert memory.like(torch.empty(7, 99).T).data_ptr() == address
