"""The vLLM sampler against a stand-in with vLLM's signatures: what is pushed and when, and how requests translate.

The stand-in's ``LLMEngine`` gives, a step each, tokens that the test wrote down. ``tests/vllm_sampler`` runs the real
vLLM.
"""

from __future__ import annotations

import enum
import functools
import os
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from gradwire_proto.v1 import training_pb2
from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.model.loading.pool import ModelPool
from gradwire_server.engine.model.policy import FullPolicy, LoraPolicy, Policy
from gradwire_server.engine.model.tokenizers import TextTokenizer
from gradwire_server.engine.sampling.samplers import vllm as vllm_sampler
from gradwire_server.engine.sampling.samplers.sampler import SamplingParams
from gradwire_server.engine.sampling.samplers.vllm import VllmSampler
from safetensors.torch import load_file
from support.engine import LocalEngine, token_rows


class RequestOutputKind(enum.Enum):
    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass
class VllmParams:
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        if self.n > 1 and not self.temperature:
            raise ValueError("n must be 1 when using greedy sampling")  # as vLLM does


@dataclass
class EngineArgs:
    model: str
    dtype: str = "auto"
    skip_tokenizer_init: bool = False
    enable_lora: bool = False
    max_lora_rank: int = 16
    max_loras: int = 1
    gpu_memory_utilization: float = 0.9
    logprobs_mode: str = "raw_logprobs"
    trust_remote_code: bool = False
    disable_log_stats: bool = False
    enable_sleep_mode: bool = False
    weight_transfer_config: dict[str, str] | None = None


@dataclass
class LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str


@dataclass
class Logprob:
    logprob: float


@dataclass
class CompletionOutput:
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]]
    finish_reason: str
    stop_reason: int | str | None = None


@dataclass
class RequestOutput:
    request_id: str
    outputs: list[CompletionOutput]
    num_cached_tokens: int | None = None
    finished: bool = True


@dataclass
class Asked:
    request_id: str
    prompt: list[int]
    params: VllmParams
    lora: LoRARequest | None


class LLMEngine:
    """Answers one request a step, with ``script``: what each of its samples is."""

    started: ClassVar[list[LLMEngine]] = []

    def __init__(self, arguments: EngineArgs) -> None:
        torch.manual_seed(0)  # as vLLM does
        self.arguments = arguments
        self.script: list[tuple[list[int], str, int | str | None, str]] = [([7, 8, 2], "stop", None, "")]
        self.asked: list[Asked] = []
        self.waiting: list[Asked] = []
        self.loras: dict[int, dict[str, torch.Tensor]] = {}
        self.aborted: list[str] = []
        self.fails = False
        self.called: list[str] = []
        self.weights: dict[str, torch.Tensor] = {}
        LLMEngine.started.append(self)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> LLMEngine:
        return cls(engine_args)

    def add_request(
        self,
        request_id: str,
        prompt: dict[str, list[int]],
        params: VllmParams,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
    ) -> None:
        asked = Asked(request_id, prompt["prompt_token_ids"], params, lora_request)
        self.asked.append(asked)
        self.waiting.append(asked)

    def step(self) -> list[RequestOutput]:
        if self.fails:
            raise ValueError("out of something")
        asked = self.waiting.pop(0)
        outputs = [
            CompletionOutput(index, text, ids, [{token: Logprob(-token / 10)} for token in ids], finish, stop)
            for index, (ids, finish, stop, text) in enumerate(self.script[: asked.params.n])
        ]
        return [RequestOutput(asked.request_id, outputs)]

    def abort_request(self, request_ids: list[str]) -> None:
        self.aborted += request_ids
        self.waiting = [asked for asked in self.waiting if asked.request_id not in request_ids]

    def add_lora(self, lora_request: LoRARequest) -> bool:
        self.loras[lora_request.lora_int_id] = load_file(Path(lora_request.lora_path) / "adapter_model.safetensors")
        return True

    def remove_lora(self, lora_id: int) -> bool:
        return self.loras.pop(lora_id, None) is not None

    def collective_rpc(self, method: str, kwargs: dict[str, Any] | None = None) -> None:
        self.called.append(method)
        if kwargs is not None:
            if self.fails:
                raise ValueError("out of something")
            self.weights = {name: weight.clone() for name, weight in kwargs["update_info"]["weights"]}

    def sleep(self, level: int = 1) -> None:
        self.called.append(f"sleep {level}")

    def wake_up(self) -> None:
        self.called.append("wake_up")

    def reset_prefix_cache(self) -> bool:
        self.called.append("reset_prefix_cache")
        return True


class Registry:
    """vLLM's registry of what transfers weights."""

    @classmethod
    def register_engine(cls, name: str, engine: type) -> None:
        pass


@dataclass
class Stage:
    pool: ModelPool
    sampler: VllmSampler
    made: list[Policy] = field(default_factory=list)

    def lora(self, name: str = "run-a", rank: int = 4) -> LoraPolicy:
        settings = training_pb2.LoraSettings(rank=rank)
        policy = LoraPolicy(self.pool.get("tiny"), name, settings, seed=1)
        self.made.append(policy)
        return policy

    @property
    def engine(self) -> LLMEngine:
        (engine,) = LLMEngine.started
        return engine

    def finish(self) -> None:
        while self.sampler.turn():
            self.sampler.step()


@pytest.fixture
def stage(tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    vllm, lora, sampling = (types.ModuleType(name) for name in ("vllm", "vllm.lora.request", "vllm.sampling_params"))
    vllm.EngineArgs, vllm.LLMEngine = EngineArgs, LLMEngine  # type: ignore[attr-defined]
    lora.LoRARequest = LoRARequest  # type: ignore[attr-defined]
    sampling.SamplingParams, sampling.RequestOutputKind = VllmParams, RequestOutputKind  # type: ignore[attr-defined]
    transfer, factory, reload = (
        types.ModuleType(name)
        for name in (
            "vllm.distributed.weight_transfer.base",
            "vllm.distributed.weight_transfer.factory",
            "vllm.model_executor.model_loader.reload",
        )
    )
    transfer.WeightTransferEngine = object  # type: ignore[attr-defined]
    factory.WeightTransferEngineFactory = Registry  # type: ignore[attr-defined]
    for module in (vllm, lora, sampling, transfer, factory, reload):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(LLMEngine, "started", [])
    pool = ModelPool({"tiny": str(tiny_model_path)})
    stage = Stage(pool, VllmSampler(pool))
    yield stage
    for policy in stage.made:
        policy.close()


def params(**settings: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 5, "seed": 1} | settings)


def test_requests_translate(stage: Stage, tokenizer: TextTokenizer) -> None:
    policy = stage.lora()
    asked = params(n=2, temperature=0.5, stop=("xy",), stop_token_ids=frozenset({9}))
    job = stage.sampler.begin(policy, [[1, 2], [1] * 254], asked, tokenizer)
    engine = stage.engine
    assert engine.arguments == EngineArgs(
        policy.facts.path, "float32", False, True, 64, 8, 0.35, "processed_logprobs", False, True
    )
    first, second = engine.asked
    assert (first.prompt, len(second.prompt)) == ([1, 2], 254)
    assert first.params == VllmParams(
        n=2, temperature=0.5, seed=first.params.seed, stop=["xy"], stop_token_ids=[2, 9], max_tokens=5, logprobs=0,
        skip_special_tokens=False, output_kind=RequestOutputKind.FINAL_ONLY,
    )  # fmt: skip
    assert second.params.max_tokens == 2  # what the context leaves
    assert first.params.seed != second.params.seed and first.params.seed >= 0  # type: ignore[operator]
    assert first.lora is second.lora is not None
    assert stage.sampler.uses(policy) and not job.done


def test_results_translate(stage: Stage, tokenizer: TextTokenizer) -> None:
    job = stage.sampler.begin(
        stage.lora(), [[1, 5]], params(n=4, stop=("!",), stop_token_ids=frozenset({9})), tokenizer
    )
    text, ((end,),) = tokenizer.decode([[40, 41]])[0], tokenizer.encode(["!"], add_special_tokens=False)
    stage.engine.script = [
        ([40, 41, 2], "stop", None, "ignored"),
        ([40, 41, 9], "stop", 9, "ignored"),
        ([40, 41, end], "stop", "!", "ignored"),
        ([40, 41], "length", None, "ignored"),
    ]
    stage.finish()
    samples = job.samples()
    assert samples.stop_reasons == ["eos", "stop", "stop", "length"]
    assert samples.texts == [text, text, text, text]
    assert samples.lengths.tolist() == [3, 3, 3, 2]
    assert samples.token_ids.tolist() == [40, 41, 2, 40, 41, 9, 40, 41, end, 40, 41]
    assert samples.logprobs.tolist() == pytest.approx([-token / 10 for token in samples.token_ids])
    assert not stage.sampler.uses(stage.made[0])


def test_greedy_samples_of_a_prompt_are_one_request(stage: Stage) -> None:
    job = stage.sampler.begin(stage.lora(), [[1, 2], [3]], params(n=3, temperature=0.0))
    assert [asked.params.n for asked in stage.engine.asked] == [1, 1]
    stage.finish()
    assert job.samples().token_ids.tolist() == [7, 8, 2] * 6


def test_an_adapter_is_pushed_when_its_weights_have_changed(stage: Stage) -> None:
    policy, other = stage.lora("run-a"), stage.lora("run-b")
    for _ in range(2):
        stage.sampler.begin(policy, [[1, 2]], params())
    stage.sampler.begin(other, [[1, 2]], params())
    engine = stage.engine
    assert [asked.lora.lora_int_id for asked in engine.asked] == [1, 1, engine.asked[2].lora.lora_int_id]  # type: ignore[union-attr]
    assert len(engine.loras) == 2
    stage.finish()
    with torch.no_grad():
        torch._foreach_add_(list(policy.masters().values()), 0.25)  # a step
    stage.sampler.begin(policy, [[1, 2]], params())
    stage.sampler.begin(other, [[1, 2]], params())
    pushed, same = (asked.lora for asked in engine.asked[3:])
    assert pushed is not None and same is engine.asked[2].lora
    assert set(engine.loras) == {pushed.lora_int_id, same.lora_int_id}  # type: ignore[union-attr]
    for name, weight in policy.state_tensors().items():
        assert torch.equal(engine.loras[pushed.lora_int_id][f"base_model.model.{name}"], weight)
    folder = Path(pushed.lora_path)
    assert folder.is_relative_to("/dev/shm") and folder.is_dir()
    stage.sampler.close()
    assert not folder.parent.exists()


def test_all_weights_are_replaced_between_requests(stage: Stage) -> None:
    """Jobs of one set of weights join those in progress; those of another wait, and so does what comes behind them."""
    first, second = (FullPolicy(stage.pool.load("tiny")) for _ in range(2))
    jobs = [stage.sampler.begin(policy, [[1, 2]], params()) for policy in (first, first, second, first)]
    engine = stage.engine
    assert engine.arguments.weight_transfer_config == {"backend": "gradwire_in_process"}
    assert not engine.arguments.enable_lora and stage.sampler.uses(second)
    in_progress = []
    while stage.sampler.turn():
        stage.sampler.step()
        in_progress.append(len(engine.asked))
    assert all(job.done for job in jobs) and in_progress == [2, 2, 3, 4]
    update = ["start_weight_update", "update_weights", "finish_weight_update", "reset_prefix_cache"]
    assert engine.called == 3 * update
    names = {name for name, _ in first.model.named_parameters()}  # the output head is the embedding
    assert set(engine.weights) == names and "lm_head.weight" not in names
    stage.sampler.begin(first, [[1, 2]], params())
    stage.finish()
    assert engine.called == 3 * update  # vLLM has them
    with torch.no_grad():
        next(iter(first.masters().values())).add_(0.25)  # a step
    stage.sampler.begin(first, [[1, 2]], params())
    stage.finish()
    assert engine.called == 4 * update
    for name, weight in first.model.named_parameters():
        assert torch.equal(engine.weights[name], weight)


@pytest.mark.parametrize("trained", ["adapter", "all weights"])
def test_vllm_sleeps_while_a_batch_is_trained_on(stage: Stage, trained: str) -> None:
    sampler = VllmSampler(stage.pool, sleeps=True)
    policy = stage.lora() if trained == "adapter" else FullPolicy(stage.pool.load("tiny"))
    assert not sampler.make_room()  # there is no engine yet
    for _ in range(2):
        job = sampler.begin(policy, [[1, 2]], params())
        assert not sampler.make_room()  # it has a job
        while sampler.turn():
            sampler.step()
        assert job.done and sampler.make_room() and not sampler.make_room()
    assert stage.engine.arguments.enable_sleep_mode
    update = ["start_weight_update", "update_weights", "finish_weight_update", "reset_prefix_cache"]
    # Weights that are dropped come again; an adapter is in host memory meanwhile.
    of_all = [*update, "sleep 2", "wake_up", *update, "sleep 2"]
    assert stage.engine.called == (["sleep 1", "wake_up", "sleep 1"] if trained == "adapter" else of_all)
    assert not stage.sampler.make_room()  # vLLM does not sleep on a CPU


def test_the_engine_makes_room_before_batches_only(
    stage: Stage, tiny_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sample wakes vLLM, a batch lets it sleep, and a step, which needs no more than is held, leaves it."""
    monkeypatch.setattr(vllm_sampler, "VllmSampler", functools.partial(VllmSampler, sleeps=True))
    engine = LocalEngine({"tiny": tiny_model_path}, tmp_path, sampler="vllm", group_runs="on")
    engine.create("run-a", lora=4)
    call = training_pb2.SampleCall(max_tokens=4, temperature=1.0, seed=1)
    for _ in range(2):
        assert engine.do("run-a", token_rows([[1, 2]], "prompt_ids"), sample=call).ok
        engine.train("run-a", token_rows([[1, 5, 6, 7]]))
    assert stage.engine.called == ["sleep 1", "wake_up", "sleep 1"]


def test_a_request_leaves_or_fails_before_its_weights_come(stage: Stage) -> None:
    first, second = (FullPolicy(stage.pool.load("tiny")) for _ in range(2))
    kept, left = (stage.sampler.begin(policy, [[1, 2]], params()) for policy in (first, second))
    stage.sampler.cancel(left)
    stage.finish()
    assert kept.done and not stage.sampler.uses(second) and len(stage.engine.asked) == 1
    failing = stage.sampler.begin(second, [[1, 2]], params())
    stage.engine.fails = True
    stage.finish()
    with pytest.raises(ValueError, match="out of something"):
        failing.samples()
    stage.engine.fails = False
    again = stage.sampler.begin(first, [[1, 2]], params())  # the weights of a failed update are nobody's
    stage.finish()
    assert again.done and stage.engine.called.count("update_weights") == 3


def test_adapters_of_a_process_that_is_gone_are_removed(stage: Stage) -> None:
    stage.sampler.begin(stage.lora("run-a"), [[1, 2]], params())
    here = Path(stage.engine.asked[0].lora.lora_path).parent  # type: ignore[union-attr]
    gone = here.with_name(here.name.replace(f"-{os.getpid()}-", f"-{2**30}-"))
    gone.mkdir()
    again = VllmSampler(stage.pool)
    again.begin(stage.lora("run-b"), [[1, 2]], params())
    assert here.exists() and not gone.exists()


def test_the_base_model_goes_without_an_adapter(stage: Stage) -> None:
    stage.sampler.begin(Policy(stage.pool.get("tiny")), [[1, 2]], params())
    assert [asked.lora for asked in stage.engine.asked] == [None]


def test_what_vllm_means_otherwise_is_sampled_here(stage: Stage) -> None:
    policy = stage.lora()
    alone = stage.sampler.begin(policy, [[1, 2]], params(), alone=True)
    jobs = [
        alone,
        stage.sampler.begin(policy, [[1, 2]], params(top_k=3)),
        stage.sampler.begin(policy, [[1, 2]], params(top_p=0.5)),
        stage.sampler.begin(policy, [[1, 2]], params(temperature=2.5)),
        stage.sampler.begin(policy, [[1, 2]], params(temperature=0.005)),
        stage.sampler.begin(stage.lora("run-big", rank=65), [[1, 2]], params()),
    ]
    assert not LLMEngine.started
    mine = stage.sampler.begin(policy, [[1, 2]], params())
    turns = []
    while stage.sampler.turn():
        turns.append(mine in stage.sampler.turn())
        stage.sampler.step()
    assert all(job.done for job in [*jobs, mine]) and any(turns) and not all(turns)
    assert mine.samples().token_ids.tolist() == [7, 8, 2]


def test_a_start_leaves_the_generators_alone(stage: Stage) -> None:
    before = torch.get_rng_state()
    stage.sampler.begin(stage.lora(), [[1, 2]], params())
    assert torch.equal(torch.get_rng_state(), before)


def test_failures_and_cancelling(stage: Stage) -> None:
    policy = stage.lora()
    cancelled = stage.sampler.begin(policy, [[1, 2], [3]], params())
    stage.sampler.cancel(cancelled)
    engine = stage.engine
    assert sorted(engine.aborted) == sorted(asked.request_id for asked in engine.asked)
    failing = stage.sampler.begin(policy, [[1, 2]], params())
    engine.fails = True
    stage.finish()
    with pytest.raises(ValueError, match="out of something"):
        failing.samples()


def test_without_vllm_the_reason_is_told(tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(OperationError, match=r"gradwire\[vllm\]"):
        VllmSampler(ModelPool({"tiny": str(tiny_model_path)}))
