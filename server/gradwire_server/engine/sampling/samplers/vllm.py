"""Sampling with vLLM on a GPU: ``gradwire serve --sampler vllm``, with ``gradwire[vllm]`` installed.

Each base model has one ``vllm.LLMEngine`` in this process for the adapters of LoRA runs, and one for the runs that
train all weights: see :mod:`.vllm_engines`. The local sampler takes what vLLM cannot do with the same meaning:
adapters on the output head, ranks above ``max_rank``, requests to be computed alone, streams, schemas, and whatever
truncates or changes the distribution, for which vLLM returns log-probabilities of the changed one, and temperatures
that vLLM refuses or raises.

This is tested with a stand-in for vLLM, and with vLLM 0.32 on a CPU (``make test-vllm``). Random numbers are vLLM's
own: a seed gives other samples than the local sampler's.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Collection, Sequence
from typing import Any

import torch
from gradwire_proto.v1 import training_pb2

from gradwire_server.engine.agreement import Agreement
from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.generators import preserved_rng
from gradwire_server.engine.model.loading.pool import ModelPool
from gradwire_server.engine.model.policy import FullPolicy, LoraPolicy, Policy
from gradwire_server.engine.model.tokenizers import TextTokenizer
from gradwire_server.engine.sampling.jobs import LocalJob
from gradwire_server.engine.sampling.samplers.local import LocalSampler
from gradwire_server.engine.sampling.samplers.sampler import SamplingParams
from gradwire_server.engine.sampling.samplers.vllm_engines import AdapterEngine, VllmEngine, WeightsEngine
from gradwire_server.engine.sampling.samplers.vllm_weights import IN_PROCESS, allow_in_process
from gradwire_server.engine.sampling.speculation import Mode
from gradwire_server.engine.sizing.estimate import MEMORY_SHARE

logger = logging.getLogger(__name__)

TEMPERATURES = 0.01, 2.0
"""vLLM raises lower temperatures to the first and refuses higher ones than the second; 0 is greedy."""


class VllmSampler:
    """Sampler that uses vLLM; see the module, and :class:`.sampler.Sampler` for its methods.

    Args:
        agreement: Tells whether a step of the local sampler failed.
        max_rank: Maximum rank of adapters.
        max_adapters: Maximum number of adapters in one batch of vLLM.
        memory_share: Share of the GPU's memory, from 0 to 1, that each of vLLM's engines reserves while it is awake.
        sleeps: Whether they sleep while a batch is trained on; by default on a GPU, as vLLM cannot on a CPU.
        cache_bytes, speculate: Settings of the local sampler.

    Raises:
        OperationError: UNSUPPORTED if vLLM is not installed.
    """

    def __init__(
        self,
        pool: ModelPool,
        agreement: Agreement | None = None,
        *,
        max_rank: int = 64,
        max_adapters: int = 8,
        memory_share: float = MEMORY_SHARE,
        sleeps: bool | None = None,
        cache_bytes: int = 1 << 30,
        speculate: Mode = "auto",
    ) -> None:
        # In this process, so that vLLM ends with it and runs only when stepped.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        try:
            self._vllm: Any = importlib.import_module("vllm")
            self._lora: Any = importlib.import_module("vllm.lora.request")
            self._sampling: Any = importlib.import_module("vllm.sampling_params")
        except ImportError as error:
            raise OperationError(
                training_pb2.ERROR_CODE_UNSUPPORTED, f"--sampler vllm needs vLLM ({error}): pip install gradwire[vllm]"
            ) from error
        self._pool = pool
        self._max_rank, self._max_adapters, self._memory_share = max_rank, max_adapters, memory_share
        self._sleeps = pool.device.type == "cuda" if sleeps is None else sleeps
        self.beside_batches = not self._sleeps
        self._local = LocalSampler(agreement, cache_bytes=cache_bytes, speculate=speculate)
        self._engines: dict[tuple[str, bool], VllmEngine] = {}
        self._locals_turn = False
        self.prompt_tokens = self._local.prompt_tokens

    def begin(
        self,
        policy: Policy,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        tokenizer: TextTokenizer | None = None,
        *,
        owner: str = "",
        alone: bool = False,
        mixed: bool = False,
        salt: str | None = None,
    ) -> LocalJob:
        if alone or not self._can(policy, params):
            return self._local.begin(
                policy, prompts, params, tokenizer, owner=owner, alone=alone, mixed=mixed, salt=salt
            )
        job = LocalJob(policy, prompts, params, tokenizer, tree=(owner if salt is None else salt).encode())
        with preserved_rng():  # vLLM seeds torch's global generators, which hold the run's state here
            self._of(policy, has_tokenizer=tokenizer is not None).begin(job, policy)
        return job

    def cancel(self, job: LocalJob) -> int:
        for engine in self._engines.values():
            engine.cancel(job)  # vLLM does not tell what it has computed of samples that have not ended
        return self._local.cancel(job)

    def uses(self, policy: Policy) -> bool:
        return self._local.uses(policy) or any(engine.uses(policy) for engine in self._engines.values())

    def make_room(self) -> bool:
        slept = [engine.sleep() for engine in self._engines.values()] if self._sleeps else []
        return any(slept)

    def turn(self) -> Collection[LocalJob]:
        engine = self._next()
        return engine.jobs if engine is not None else self._local.turn()

    def step(self) -> None:
        engine = self._next()
        self._locals_turn = not self._locals_turn
        if engine is None:
            self._local.step()
            return
        jobs = list(engine.jobs)
        engine.step()
        for job in (job for job in jobs if job.done):
            self.prompt_tokens.count(job.prompts, job.num_cached_tokens)
        self._engines[engine.key] = self._engines.pop(engine.key)  # to the end of the order

    def close(self) -> None:
        for engine in self._engines.values():
            if isinstance(engine, AdapterEngine):
                engine.close()

    def _next(self) -> VllmEngine | None:
        """The vLLM engine that steps next; None for the local sampler."""
        if self._locals_turn and self._local.turn():
            return None
        return next((engine for engine in self._engines.values() if engine.jobs), None)

    def _can(self, policy: Policy, params: SamplingParams) -> bool:
        if params.top_k or params.top_p < 1 or params.min_p or params.adjusts:
            return False
        if params.temperature and not TEMPERATURES[0] <= params.temperature <= TEMPERATURES[1]:
            return False
        if params.forms or params.keep_special_tokens or params.top_logprobs or params.stream or not params.max_tokens:
            return False
        if policy.split_model.vision is not None:
            return False
        if type(policy) is FullPolicy:
            return True
        name = policy.facts.name
        shared = self._pool.is_loaded(name) and self._pool.get(name) is policy.split_model
        rank = 0
        if isinstance(policy, LoraPolicy):
            rank = _rank(policy)
            if policy.compute(policy.output_head).adapter is not None:  # vLLM applies none to a tied output head
                return False
        return shared and rank <= self._max_rank and (isinstance(policy, LoraPolicy) or type(policy) is Policy)

    def _of(self, policy: Policy, *, has_tokenizer: bool) -> VllmEngine:
        facts = policy.facts
        key = facts.name, isinstance(policy, FullPolicy)
        if key not in self._engines:
            logger.info("starting vLLM for %s", facts.name)
            options: dict[str, Any] = {
                "model": facts.path,
                "dtype": facts.dtype,
                "skip_tokenizer_init": not has_tokenizer,
                "gpu_memory_utilization": self._memory_share,
                "logprobs_mode": "processed_logprobs",  # at the sampling temperature, as in the local sampler
                "trust_remote_code": False,
                "disable_log_stats": True,
                "enable_sleep_mode": self._sleeps,
            }
            if isinstance(policy, FullPolicy):
                allow_in_process()
                options["weight_transfer_config"] = {"backend": IN_PROCESS}
            else:
                options |= {"enable_lora": True, "max_lora_rank": self._max_rank, "max_loras": self._max_adapters}
            torch.cuda.empty_cache()  # for what vLLM reserves
            engine = self._vllm.LLMEngine.from_engine_args(self._vllm.EngineArgs(**options))
            kind = WeightsEngine if isinstance(policy, FullPolicy) else AdapterEngine
            self._engines[key] = kind(key, engine, self._lora, self._sampling)
        return self._engines[key]


def _rank(policy: LoraPolicy) -> int:
    return int(policy.peft_config.r)
