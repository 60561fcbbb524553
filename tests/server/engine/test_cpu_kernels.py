"""A CPU's kernels against float64, and models that compute with them against those that do not."""

from __future__ import annotations

import logging
import platform
import subprocess
from collections.abc import Callable, Iterator
from functools import partial, partialmethod
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gradwire_server.engine.model.attention.blocks import in_blocks
from gradwire_server.engine.model.attention.paged import PAGE
from gradwire_server.engine.model.layers import cpu_kernels
from gradwire_server.engine.model.layers.cpu_kernels import CpuKernels
from gradwire_server.engine.model.loading.fused_kernels import kernels_for, use_fused_kernels
from gradwire_server.engine.model.loading.pool import ModelPool
from gradwire_server.engine.model.packing import Layout, lay_out
from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.sampling.samplers.sampler import SamplingParams
from gradwire_server.engine.sizing.meta_model import MetaPool
from support.normed import normed_model, states_and_gradients
from support.sampling import samples_of
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, GemmaConfig, LlamaConfig, OlmoConfig, Qwen3Config
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

FAMILIES: dict[str, Any] = {"llama": LlamaConfig, "qwen3": Qwen3Config, "gemma": GemmaConfig, "olmo": OlmoConfig}


@pytest.fixture(params=["native", pytest.param("sse", marks=pytest.mark.slow)])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[CpuKernels]:
    """Those of this processor, and those of one without AVX."""
    if request.param == "sse":
        if platform.machine() != "x86_64":
            pytest.skip("the processor has other instructions")
        flags = [flag for flag in cpu_kernels.FLAGS if not flag.startswith(("-march", "-mprefer"))]
        monkeypatch.setattr(cpu_kernels, "FLAGS", (*flags, "-march=x86-64"))
        cpu_kernels.cpu_kernels.cache_clear()
    if (found := cpu_kernels.cpu_kernels()) is None:
        pytest.skip("there is no C compiler")
    assert request.param == "native" or found.missing(7) == 1  # a panel has 8 columns
    yield found
    if request.param == "sse":
        cpu_kernels.cpu_kernels.cache_clear()


@pytest.fixture
def forgotten() -> Iterator[None]:
    """Kernels are looked for anew, in the test and after it."""
    cpu_kernels.cpu_kernels.cache_clear()
    yield
    cpu_kernels.cpu_kernels.cache_clear()


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("heads", "kv_heads", "size", "value_size"), [(9, 3, 64, 64), (4, 4, 10, 6), (5, 1, 80, 128)])
def test_attention_to_pages(
    kernels: CpuKernels, heads: int, kv_heads: int, size: int, value_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = torch.tensor([1, PAGE - 1, PAGE, PAGE + 1, 6 * PAGE + 5])
    pages = 7
    table = torch.randperm(len(lengths) * pages, generator=torch.Generator().manual_seed(1)).view(-1, pages)
    room = table.numel() * PAGE
    keys, values = torch.zeros(kv_heads, room, size), torch.zeros(kv_heads, room, value_size)
    query = 3 * random(heads, len(lengths), size).transpose(0, 1)  # strided, as queries that were not rotated
    own = []
    for row, length in enumerate(lengths.tolist()):
        places = table[row, torch.arange(length) // PAGE] * PAGE + torch.arange(length) % PAGE
        k, v = 3 * random(length, kv_heads, size, seed=row), random(length, kv_heads, value_size, seed=9 + row)
        kernels.write(k, places, keys)
        kernels.write(v, places, values)
        own.append((k.double(), v.double()))
    monkeypatch.setattr(cpu_kernels, "FEWEST_NUMBERS", 0)
    for threads in (1, 2):
        monkeypatch.setattr(cpu_kernels, "product_threads", lambda: threads)  # noqa: B023
        out, lse = kernels.attend(query, keys, values, table, lengths, 0.3)
        for row, (k, v) in enumerate(own):
            k, v = (each.transpose(0, 1).repeat_interleave(heads // kv_heads, 0) for each in (k, v))
            scores = 0.3 * torch.einsum("hd,htd->ht", query[row].double(), k)
            expected = torch.einsum("ht,htd->hd", scores.softmax(-1), v)
            torch.testing.assert_close(out[row].double(), expected, atol=2e-5, rtol=2e-5)
            torch.testing.assert_close(lse[row].double(), scores.logsumexp(-1), atol=2e-5, rtol=2e-5)


def test_a_number_that_is_none_is_seen_in_its_own_row_alone(kernels: CpuKernels) -> None:
    keys, values = random(1, 4 * PAGE, 8), random(1, 4 * PAGE, 8, seed=1)
    keys[0, 3] = torch.nan
    table, lengths = torch.tensor([[0, 1], [2, 3]]), torch.tensor([20, 20])
    out, lse = kernels.attend(random(2, 2, 8), keys, values, table, lengths, 1.0)
    assert out[0].isnan().all()
    assert lse[0].isnan().all()
    assert out[1].isfinite().all()
    assert lse[1].isfinite().all()


def check(compute: Any, exact: Any, *inputs: Tensor) -> None:
    """Compare results, and gradients in the inputs, with those in float64; and results without a gradient."""
    results = []
    for function, dtype in ((compute, torch.float32), (exact, torch.float64)):
        leaves = [each.detach().to(dtype).requires_grad_() for each in inputs]
        out = function(*leaves)
        results.append([out, *torch.autograd.grad((out * random(*out.shape, seed=7)).sum(), leaves)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        compute(*(each.clone() for each in inputs)).double(), results[1][0], atol=1e-5, rtol=1e-5
    )


LAYOUTS = {
    "one": ([150], [1]),
    "short": ([5, 1, 64, 3, 70, 20, 200, 1], [1] * 8),
    "shared": ([100, 90, 61, 230, 60, 60, 75], [4, 1, 2]),  # of a group, the first 60 tokens
}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 4, 64), (6, 2, 32), (3, 1, 96)])
def test_attention_in_blocks(
    kernels: CpuKernels,
    heads: int,
    kv_heads: int,
    size: int,
    name: str,
    threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu_kernels, "product_threads", lambda: threads)
    lengths, groups = (torch.tensor(each) for each in LAYOUTS[name])
    layout = laid_out(lengths, groups)
    assert bool(layout.prefix_blocks) == (name == "shared")
    blocks, parts, families = layout.query_blocks
    for first, last in pairwise(families.tolist()):  # one thread adds up what keys get from their own family
        own = parts[blocks[first, 2] : blocks[last - 1, 3]]
        assert blocks[first, 0] <= own.min()
        assert own.max() == blocks[last - 1, 1]

    def exact(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = torch.zeros_like(query[0].transpose(0, 1))
        for places in layout.places.split(lengths.tolist()):
            q, *others = (each[0, :, places] for each in (query, key, value))
            k, v = (each.repeat_interleave(heads // kv_heads, 0) for each in others)
            mask = torch.ones(len(places), len(places), dtype=torch.bool).tril()
            scores = (0.1 * q @ k.mT).masked_fill(~mask, -torch.inf)
            out[places] = (scores.softmax(-1) @ v).transpose(0, 1)
        return out[None]

    count = len(layout.input_ids)
    taken = [random(1, count, each, size, seed=each).transpose(1, 2) for each in (heads, kv_heads, kv_heads)]
    check(lambda *given: in_blocks(*given, layout, 0.1, by_kernel=True), exact, *taken)
    leaves = [each.requires_grad_() for each in taken]
    by_kernel = {each.name() for each in graph(in_blocks(*leaves, layout, 0.1, by_kernel=True))}
    assert ("_ByKernelBackward" in by_kernel) == (name != "one" or kv_heads >= threads)


@pytest.mark.parametrize("window", [None, 1, 40, 90, 149])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(6, 2, 64), (3, 3, 128)])
def test_attention_in_order_has_the_same_bits_whatever_is_beside_a_query(
    kernels: CpuKernels, heads: int, kv_heads: int, size: int, window: int | None
) -> None:
    """Alone, behind a shared beginning, as one of a batch and in scattered pages; and it is attention."""
    generator = torch.Generator().manual_seed(2)
    length, more = 150, 70
    q, k, v = (torch.randn(length + more, each, size, generator=generator) for each in (heads, kv_heads, kv_heads))
    whole = lay_out(torch.arange(length), torch.tensor([length]))
    alone, lse = kernels.attend_in_order(q[:length], k[:length], v[:length], whole.ordered, 0.2, window)
    wide = (each[:length].double().repeat_interleave(heads // each.shape[1], 1).transpose(0, 1) for each in (q, k, v))
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    mask = mask if window is None else mask.triu(1 - window)
    expected = F.scaled_dot_product_attention(*wide, attn_mask=mask, scale=0.2).transpose(0, 1)
    torch.testing.assert_close(alone.double(), expected, rtol=1e-4, atol=1e-5)
    for part in (1, 2, 33, 64, 65, 149):  # what comes later is not there yet
        layout = lay_out(torch.arange(part), torch.tensor([part]))
        cut = kernels.attend_in_order(q[:part], k[:part], v[:part], layout.ordered, 0.2, window)[0]
        assert torch.equal(cut, alone[:part])
    # Two rows with a beginning of 80 tokens: of the one that is cut off, and of 70 others.
    ids = torch.cat([torch.arange(length), torch.arange(80), torch.arange(more) + 500])
    shared = lay_out(ids, torch.tensor([length, 80 + more]), torch.tensor([2]))
    assert len(shared.input_ids) == length + more
    places = shared.places[:length]
    q_of, k_of, v_of = (torch.empty_like(each) for each in (q, k, v))
    rest = torch.tensor(sorted(set(range(length + more)) - set(places.tolist())))
    for packed, each in ((q_of, q), (k_of, k), (v_of, v)):
        packed[places], packed[rest] = each[:length], each[length:]
    assert torch.equal(kernels.attend_in_order(q_of, k_of, v_of, shared.ordered, 0.2, window)[0][places], alone)
    pages = torch.randperm(40, generator=generator)
    keys, values = (torch.zeros(kv_heads, 40 * PAGE, size) for _ in range(2))
    for token in range(length):
        place = pages[token // PAGE] * PAGE + token % PAGE
        keys[:, place], values[:, place] = k[token], v[token]
    lengths = torch.tensor([1, 16, 17, 64, 100, length])
    found = kernels.attend_to_pages_in_order(
        q[lengths - 1], keys, values, pages[:10].repeat(len(lengths), 1), lengths, PAGE, 0.2, window
    )
    assert torch.equal(found[0], alone[lengths - 1]) and torch.equal(found[1], lse[lengths - 1])


def test_in_bfloat16_sampling_is_training_to_the_bit_of_a_state(tmp_path: Path) -> None:
    """States of a prompt, and of tokens drawn one by one beside others, are those of the whole sequence at once."""
    config = LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1,
        head_dim=64, vocab_size=200, max_position_embeddings=256, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.model.norm.weight.data.mul_(8)
    model.save_pretrained(tmp_path)
    policy = Policy(ModelPool({"m": str(tmp_path)}, dtype=torch.bfloat16).get("m"))
    assert policy.split_model.in_order
    prompts = [[5, 9, 11, 40] * 5, [12, 33], [7, 41, 8] * 30]
    samples = samples_of(policy, prompts, SamplingParams(max_tokens=40, seed=1, ignore_eos=True))
    ends = samples.lengths.cumsum()[:-1]
    drawn = zip(np.split(samples.token_ids, ends), np.split(samples.logprobs, ends), strict=True)
    for prompt, (token_ids, logprobs) in zip(prompts, drawn, strict=True):
        ids = torch.tensor([*prompt, *token_ids.tolist()])
        with torch.no_grad():
            states = policy.split_model.states(lay_out(ids, torch.tensor([len(ids)])))
            logits = states.float() @ model.model.embed_tokens.weight.bfloat16().float().T
        expected = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[len(prompt) - 1 :, 0]
        torch.testing.assert_close(torch.from_numpy(logprobs), expected, rtol=0, atol=1e-5)


def test_what_is_no_number_stays_in_its_own_sequence(kernels: CpuKernels) -> None:
    lengths, groups = torch.tensor([100, 70, 80, 10, 12, 90]), torch.tensor([3, 1, 1, 1])
    layout = laid_out(lengths, groups)
    shape = (len(layout.input_ids), 2, 32)
    query, key, value = (random(*shape, seed=seed) for seed in range(3))
    for each in (query, key, value):
        each[105] = torch.nan  # in the first branch
    results = kernels.attend_in_blocks(query, key, value, layout.query_blocks, 0.3)
    grads = kernels.attend_in_blocks_gradients(random(*shape), query, key, value, *results, layout.query_blocks, 0.3)
    family, branch = torch.arange(shape[0]) < 130, torch.zeros(shape[0], dtype=torch.bool)
    branch[100:110] = True
    for each in results:
        assert each[~branch].isfinite().all()
        assert each[105].isnan().all()
    assert grads[0][~branch].isfinite().all()
    for each in grads[1:]:
        assert each[~family].isfinite().all()
        assert each[:60].isnan().all()


def laid_out(lengths: Tensor, groups: Tensor) -> Layout:
    """Sequences that have the first 60 tokens in common within a group, and no others."""
    ids = torch.cat(
        [torch.cat([torch.arange(60), 60 + 9 * row + torch.arange(200)])[:count] for row, count in enumerate(lengths)]
    )
    return lay_out(ids, lengths, groups)


@pytest.mark.parametrize("threads", [1, 2])
def test_norms_gates_and_rotations(kernels: CpuKernels, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_kernels, "FEWEST_NUMBERS", 0)
    monkeypatch.setattr(cpu_kernels, "product_threads", lambda: threads)
    hidden, weight = 5 * random(3, 7, 50), random(50, seed=1)
    for offset in (0.0, 1.0):

        def norm(hidden: Tensor, weight: Tensor, offset: float = offset) -> Tensor:
            return hidden * (hidden.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * (offset + weight)

        check(lambda hidden, weight: kernels.norm(hidden, weight, 1e-5, offset), norm, hidden, weight)  # noqa: B023
    gate = torch.cat([torch.linspace(-120, 120, 999), torch.tensor([0.0, -1e-30, 3e2, -3e2])])
    for gelu, activation in ((False, F.silu), (True, partial(F.gelu, approximate="tanh"))):
        exact = lambda gate, up, activation=activation: activation(gate) * up  # noqa: E731
        check(partial(kernels.gated, gelu=gelu), exact, gate, random(len(gate), seed=2))
    states = random(1, 5, 4, 24).transpose(1, 2)  # [1, H, M, D], strided
    angles = 20 * random(1, 5, 12, seed=3).repeat(1, 1, 2)
    cosines, sines = angles.cos(), angles.sin() * torch.linspace(0.5, 1.5, 24)  # of which the halves differ
    rotated = lambda states: apply_rotary_pos_emb(states, states, cosines.double(), sines.double())[0]  # noqa: E731
    check(lambda states: kernels.rotate(states, cosines, sines), rotated, states)


@pytest.mark.parametrize("threads", [1, 2])
def test_products(kernels: CpuKernels, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_kernels, "product_threads", lambda: threads)
    for outputs in (1, 31, 32, 96, 100):
        weight, bias = random(outputs, 70), random(outputs, seed=1)
        panels = kernels.packed(weight)
        rows = random(32, 70, seed=2)
        whole = kernels.product(rows[None], panels, bias, outputs)
        torch.testing.assert_close(
            whole[0].double(), rows.double() @ weight.double().T + bias.double(), atol=1e-4, rtol=1e-5
        )
        torch.testing.assert_close(kernels.product(rows, panels, None, outputs), rows @ weight.T, atol=1e-4, rtol=1e-5)
        for count in range(1, 32):  # a row is the same whatever is beside it
            assert torch.equal(kernels.product(rows[:count], panels, bias, outputs), whole[0, :count])
        strided = rows.T.contiguous().T
        assert torch.equal(kernels.product(strided, panels, bias, outputs), whole[0])


@pytest.mark.parametrize(("inputs", "outputs"), [(576, 16), (20, 70), (3, 5), (40, 1)])
def test_small_products(kernels: CpuKernels, inputs: int, outputs: int) -> None:
    x, weight, onto = torch.randn(11, inputs), torch.randn(outputs, inputs), torch.randn(11, outputs)
    whole, added = kernels.small_product(x, weight), kernels.small_product(x, weight, 0.3, into=onto.clone())
    assert torch.allclose(whole.double(), x.double() @ weight.double().T, atol=1e-4)
    assert torch.allclose(added.double(), onto.double() + 0.3 * (x.double() @ weight.double().T), atol=1e-4)
    for count in range(1, 11):
        assert torch.equal(kernels.small_product(x[:count], weight), whole[:count])
        assert torch.equal(kernels.small_product(x[:count], weight, 0.3, into=onto[:count].clone()), added[:count])


@pytest.mark.parametrize("threads", [1, 2])
def test_drawn_tokens(kernels: CpuKernels, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_kernels, "product_threads", lambda: threads)
    for vocabulary in (1, 5, 128, 129, 4000):
        logits = 3 * random(200, 2 * vocabulary)[:, :vocabulary]
        logits[random(200, vocabulary, seed=1) > 1] = -torch.inf
        logits[:, vocabulary // 2] = 0.0
        uniform = torch.rand(200, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        uniform[:2] = torch.tensor([0.0, 1 - 1e-16])
        tokens, logprobs = kernels.draw(logits, uniform)
        exact = logits.double().log_softmax(-1)
        torch.testing.assert_close(logprobs.double(), exact.gather(1, tokens[:, None])[:, 0], atol=1e-5, rtol=1e-5)
        assert logprobs.isfinite().all()
        ends = exact.exp().cumsum(-1)
        upper = ends.gather(1, tokens[:, None])[:, 0]
        lower = upper - logprobs.double().exp()
        assert (lower - 1e-5 <= uniform).all()
        assert (uniform <= upper + 1e-5).all()


def test_a_draw_from_logits_that_are_no_numbers(kernels: CpuKernels) -> None:
    logits = random(4, 300)
    logits[0, 200], logits[1], logits[2, 0] = torch.nan, -torch.inf, torch.inf
    tokens, logprobs = kernels.draw(logits, torch.full((4,), 0.5, dtype=torch.float64))
    assert logprobs.isnan().tolist() == [True, True, True, False]
    assert ((tokens >= 0) & (tokens < 300)).all()


def built(folder: Path, family: str = "llama") -> str:
    return normed_model(FAMILIES[family], folder / family)


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_models_sample_with_them_as_without(
    kernels: CpuKernels, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = set[str]()

    def counted(own: CpuKernels, name: str, compute: Any, *args: Any, **kwargs: Any) -> Any:
        calls.add(name)
        return compute(own, *args, **kwargs)

    names = {"write", "attend", "norm", "gated", "rotate"}
    for name in names:
        monkeypatch.setattr(CpuKernels, name, partialmethod(counted, name, getattr(CpuKernels, name)))
    models = {"m": built(tmp_path, family)}
    prompts = [[5, 6, 7], list(range(4, 44)), [9] * PAGE]
    found = []
    for fused in (False, True):
        policy = Policy(ModelPool(models, fused=fused).get("m"))
        samples = samples_of(policy, prompts, SamplingParams(max_tokens=40, seed=0, n=3, ignore_eos=True))
        found.append([sample for of_prompt in samples.by_prompt() for sample in of_prompt])
        if not fused:  # rotations are the process's own: a test before may have replaced plain ones
            assert calls <= {"rotate"}
    assert calls == (names - {"norm"} if family == "olmo" else names)  # no RMSNorm there
    for plain, by_kernels in zip(*found, strict=True):
        assert plain.token_ids == by_kernels.token_ids
        assert by_kernels.logprobs == pytest.approx(plain.logprobs, abs=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_models_have_the_gradients_of_those_without(kernels: CpuKernels, family: str, tmp_path: Path) -> None:
    models, found = {"m": built(tmp_path, family)}, []
    for fused in (False, True):
        states, gradients = states_and_gradients(ModelPool(models, fused=fused).load("m"))
        # Rotations are the process's own: plain ones may be of a test before.
        assert ({"_GatedBackward", "_ByKernelBackward"} <= {type(node).__name__ for node in graph(states)}) == fused
        found.append([states, *gradients])
    for plain, by_kernels in zip(*found, strict=True):
        torch.testing.assert_close(by_kernels, plain, atol=1e-5 * float(1 + plain.detach().abs().max()), rtol=1e-5)


def test_a_rotation_has_one_kernel_of_each_device(kernels: CpuKernels, tmp_path: Path) -> None:
    models = {"m": built(tmp_path)}
    for _ in range(3):
        ModelPool(models).load("m")
        MetaPool(models, torch.float32).load("m")
    rotation: Any = modeling_llama.apply_rotary_pos_emb
    assert rotation.devices == {"cpu", "meta"}
    assert not hasattr(rotation.plain.plain, "plain")
    one, angles = torch.ones(1, 2, 3, 8), torch.zeros(1, 3, 8)
    assert torch.equal(rotation(q=one, k=one, cos=angles, sin=angles)[0], 0 * one)  # by name, as Qwen4 calls its own


class Bounded(torch.nn.SiLU):
    def forward(self, gates: torch.Tensor) -> torch.Tensor:
        return super().forward(gates.clamp(max=10.0))


class Dropping(torch.nn.SiLU):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = 0.0

    def forward(self, gates: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(super().forward(gates), self.dropout, self.training)


@pytest.mark.parametrize("scale", [1.0, 0.0], ids=["weights", "no weights"])
@pytest.mark.parametrize("activation", [torch.nn.ReLU, torch.nn.GELU, Bounded, Dropping])
def test_modules_of_one_class_may_differ(
    kernels: CpuKernels, activation: Callable[[], torch.nn.Module], scale: float, tmp_path: Path
) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(built(tmp_path))
    first, second = model.model.layers
    second.input_layernorm.variance_epsilon = 3.0
    second.mlp.act_fn = activation()
    for layer in (first, second):
        layer.mlp.down_proj.weight.data *= scale
    kinds = [type(first.mlp), type(first.input_layernorm)]
    ids = torch.arange(20)[None]
    expected = model(ids).logits
    found = kernels_for(torch.device("cpu"), torch.float32)
    assert found is not None
    use_fused_kernels(model, found)
    torch.testing.assert_close(model(ids).logits, expected, atol=1e-5, rtol=1e-5)
    replaced = [type(each) not in kinds for layer in (first, second) for each in (layer.mlp, layer.input_layernorm)]
    assert replaced == [True, True, False, True]


def graph(tensor: Tensor) -> set[Any]:
    """Nodes of autograd's graph."""
    found, left = set[Any](), [tensor.grad_fn]
    while left:
        node: Any = left.pop()
        if node is not None and node not in found:
            found.add(node)
            left += [before for before, _ in node.next_functions]
    return found


@pytest.mark.long
@pytest.mark.parametrize("relative", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_they_are_compiled_once(
    kernels: CpuKernels, forgotten: None, relative: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "." if relative else str(tmp_path))
    assert cpu_kernels.cpu_kernels() is not None
    cpu_kernels.cpu_kernels.cache_clear()
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: pytest.fail("compiled again"))
    assert cpu_kernels.cpu_kernels() is not None
    assert [each.suffix for each in (tmp_path / "gradwire" / "kernels").iterdir()] == [".so"]


@pytest.mark.slow
def test_a_part_of_a_library_is_compiled_again(
    kernels: CpuKernels, forgotten: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", "cc -g0")
    whole = cpu_kernels._compiled()
    content = whole.read_bytes()
    whole.write_bytes(content[:4096])
    assert cpu_kernels._compiled().read_bytes() == content
    assert whole.stem.startswith(CpuKernels(whole).version + "-")  # of the source, whatever a linker makes of it


def test_without_a_home_torch_computes(
    kernels: CpuKernels, forgotten: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", none)
    assert cpu_kernels.cpu_kernels() is None
    assert "torch computes alone" in caplog.text and "home directory" in caplog.text


@pytest.mark.parametrize("compiler", ["/nowhere/cc", "false"])
def test_without_a_compiler_that_is_said_once_and_torch_computes(
    forgotten: None, compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    models = {"m": built(tmp_path)}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CC", compiler)
    with caplog.at_level(logging.WARNING):
        pools = [ModelPool(models) for _ in range(2)]
    assert sum("torch computes alone" in each.message for each in caplog.records) == 1
    policy = Policy(pools[0].get("m"))
    assert not policy.split_model.by_kernels
    samples = samples_of(policy, [[5, 6]], SamplingParams(max_tokens=3, seed=0, ignore_eos=True))
    assert len(samples.by_prompt()[0][0].token_ids) == 3
