"""Sampling with vLLM on a GPU: ``gradwire serve --sampler vllm``, with ``gradwire[vllm]`` installed.

Each base model has one ``vllm.LLMEngine`` in this process. A LoRA run's adapter is pushed to it when a sample is
requested and the weights have changed since the last push, through a folder in memory (``/dev/shm``). The local sampler
takes what vLLM cannot do with the same meaning: runs that train all weights, adapters on the output head, ranks above
``max_rank``, requests to be computed alone, streams, schemas, and whatever truncates or changes the distribution, for
which vLLM returns log-probabilities of the changed one, and temperatures that vLLM refuses or raises.

This is written against the documented interface of vLLM >= 0.11, and tested with a stand-in for it, and with vLLM 0.32
on a CPU (``make test-vllm``). Random numbers are vLLM's own: a seed gives other samples than the local sampler's.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import logging
import os
import shutil
import tempfile
import weakref
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gradwire_proto.v1 import training_pb2

from gradwire_server.engine.agreement import Agreement
from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.failures import is_fatal
from gradwire_server.engine.generators import preserved_rng
from gradwire_server.engine.model.loading.pool import ModelPool
from gradwire_server.engine.model.policy import LoraPolicy, Policy
from gradwire_server.engine.model.tokenizers import TextTokenizer
from gradwire_server.engine.sampling.jobs import LocalJob
from gradwire_server.engine.sampling.samplers.local import LocalSampler
from gradwire_server.engine.sampling.samplers.sampler import SamplingParams
from gradwire_server.engine.state.exports import save_adapter

logger = logging.getLogger(__name__)

TEMPERATURES = 0.01, 2.0
"""vLLM raises lower temperatures to the first and refuses higher ones than the second; 0 is greedy."""


class VllmSampler:
    """Sampler that uses vLLM; see the module, and :class:`.sampler.Sampler` for its methods.

    Args:
        pool: The base models.
        agreement: Tells whether a step of the local sampler failed.
        max_rank: Maximum rank of adapters.
        max_adapters: Maximum number of adapters in one batch of vLLM.
        memory_share: Share of the GPU's memory, from 0 to 1, that vLLM reserves permanently for each base model.
        cache_bytes: Of the local sampler.

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
        memory_share: float = 0.35,
        cache_bytes: int = 1 << 30,
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
        self._local = LocalSampler(agreement, cache_bytes=cache_bytes)
        self._served: dict[str, _Served] = {}
        self._locals_turn = False

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
    ) -> LocalJob:
        if alone or not self._can(policy, params):
            return self._local.begin(policy, prompts, params, tokenizer, owner=owner, alone=alone, mixed=mixed)
        job = LocalJob(policy, prompts, params, tokenizer)
        with preserved_rng():  # vLLM seeds torch's global generators, which hold the run's state here
            served = self._of(policy, has_tokenizer=tokenizer is not None)
            adapter = served.push(policy) if isinstance(policy, LoraPolicy) else None
            served.add(job, policy, adapter)
        return job

    def cancel(self, job: LocalJob) -> int:
        for served in self._served.values():
            served.cancel(job)  # vLLM does not tell what it has computed of samples that have not ended
        return self._local.cancel(job)

    def uses(self, policy: Policy) -> bool:
        return self._local.uses(policy) or any(served.uses(policy) for served in self._served.values())

    def turn(self) -> Collection[LocalJob]:
        served = self._next()
        return served.jobs if served is not None else self._local.turn()

    def step(self) -> None:
        served = self._next()
        self._locals_turn = not self._locals_turn
        if served is None:
            self._local.step()
            return
        served.step()
        self._served[served.model] = self._served.pop(served.model)  # to the end of the order

    def _next(self) -> _Served | None:
        """The vLLM engine that steps next; None for the local sampler."""
        if self._locals_turn and self._local.turn():
            return None
        return next((served for served in self._served.values() if served.jobs), None)

    def _can(self, policy: Policy, params: SamplingParams) -> bool:
        if params.top_k or params.top_p < 1 or params.min_p or params.adjusts:
            return False
        if params.temperature and not TEMPERATURES[0] <= params.temperature <= TEMPERATURES[1]:
            return False
        if params.forms or params.keep_special_tokens or params.top_logprobs or params.stream or not params.max_tokens:
            return False
        if policy.split_model.vision is not None:
            return False
        name = policy.facts.name
        shared = self._pool.is_loaded(name) and self._pool.get(name) is policy.split_model
        rank = 0
        if isinstance(policy, LoraPolicy):
            rank = _rank(policy)
            if policy.compute(policy.output_head).adapter is not None:  # vLLM applies none to a tied output head
                return False
        return shared and rank <= self._max_rank and (isinstance(policy, LoraPolicy) or type(policy) is Policy)

    def _of(self, policy: Policy, *, has_tokenizer: bool) -> _Served:
        facts = policy.facts
        if facts.name not in self._served:
            logger.info("starting vLLM for %s", facts.name)
            arguments = self._vllm.EngineArgs(
                model=facts.path,
                dtype=facts.dtype,
                skip_tokenizer_init=not has_tokenizer,
                enable_lora=True,
                max_lora_rank=self._max_rank,
                max_loras=self._max_adapters,
                gpu_memory_utilization=self._memory_share,
                logprobs_mode="processed_logprobs",  # at the sampling temperature, as in the local sampler
                trust_remote_code=False,
                disable_log_stats=True,
            )
            engine = self._vllm.LLMEngine.from_engine_args(arguments)
            self._served[facts.name] = _Served(facts.name, engine, self._lora, self._sampling)
        return self._served[facts.name]


class _Served:
    """One base model's vLLM engine."""

    def __init__(self, model: str, engine: Any, lora: Any, sampling: Any) -> None:
        self.model = model
        self._engine, self._lora, self._sampling = engine, lora, sampling
        self._folder = _folder_in_memory()
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._requests: dict[str, tuple[LocalJob, int]] = {}  # request id -> job and prompt's index
        self._policies: dict[LocalJob, Policy] = {}
        self._pushed: dict[str, tuple[tuple[object, ...], Any]] = {}
        self._ids = itertools.count(1)

    @property
    def jobs(self) -> Collection[LocalJob]:
        return self._policies.keys()

    def uses(self, policy: Policy) -> bool:
        return any(used is policy for used in self._policies.values())

    def push(self, policy: LoraPolicy) -> Any:
        """Push an adapter's current weights if they have changed; returns vLLM's request object for it."""
        weights = policy.state_tensors()
        version = (id(policy), *(tensor._version for tensor in weights.values()))  # _version counts in-place changes
        known = self._pushed.get(policy.adapter)
        if known is not None and known[0] == version:
            return known[1]
        # A new number, because vLLM's prefix cache of the old weights must not be used with the new ones.
        number = next(self._ids)
        folder = self._folder / str(number)
        folder.mkdir()
        save_adapter(policy, folder)
        request = self._lora.LoRARequest(f"{policy.adapter}-{number}", number, str(folder))
        self._engine.add_lora(request)
        if known is not None:
            self._engine.remove_lora(known[1].lora_int_id)
            shutil.rmtree(known[1].lora_path)
        self._pushed[policy.adapter] = version, request
        return request

    def add(self, job: LocalJob, policy: Policy, adapter: Any) -> None:
        self._policies[job] = policy
        job.begun = True  # vLLM does not tell when it begins
        params = job.params
        for number, prompt in enumerate(job.prompts):
            request_id = str(next(self._ids))
            self._requests[request_id] = job, number
            self._engine.add_request(
                request_id,
                {"prompt_token_ids": list(prompt)},
                self._sampling.SamplingParams(
                    n=params.n if params.temperature else 1,  # vLLM refuses several greedy samples, which are equal
                    temperature=params.temperature,
                    max_tokens=int(job.limits[number * params.n]),
                    seed=_seed(params.seed, params.first_prompt + number),
                    stop=list(params.stop) or None,
                    stop_token_ids=sorted(job.ends),
                    ignore_eos=params.ignore_eos,
                    logprobs=0,
                    detokenize=bool(params.stop),
                    output_kind=self._sampling.RequestOutputKind.FINAL_ONLY,
                ),
                lora_request=adapter,
            )

    def step(self) -> None:
        try:
            outputs = self._engine.step()
        except Exception as error:  # reported by the jobs, to whoever waits for their samples
            if is_fatal(error):
                raise
            for job in list(self._policies):
                job.error = error
                self.cancel(job)
            return
        for output in outputs:
            if output.finished and output.request_id in self._requests:
                self._take(output, *self._requests.pop(output.request_id))

    def _take(self, output: Any, job: LocalJob, number: int) -> None:
        for sample in output.outputs:
            tokens = np.array(sample.token_ids, np.int32)
            drawn = zip(sample.token_ids, sample.logprobs, strict=True)
            chosen = [of_token[token].logprob for token, of_token in drawn]
            by_text = isinstance(sample.stop_reason, str)
            by_token = sample.finish_reason == "stop" and not by_text
            text = sample.text if by_text else None
            first = number * job.params.n
            rows = [first + sample.index] if job.params.temperature else range(first, first + job.params.n)
            for row in rows:
                job.end(row, tokens, np.array(chosen, np.float32), by_token, text)
        if job.done:
            del self._policies[job]

    def cancel(self, job: LocalJob) -> None:
        if self._policies.pop(job, None) is None:
            return
        gone = [request_id for request_id, (of_job, _) in self._requests.items() if of_job is job]
        for request_id in gone:
            del self._requests[request_id]
        self._engine.abort_request(gone)


def _folder_in_memory() -> Path:
    """Make a folder, in memory if possible, and remove those of processes that have ended."""
    place = Path("/dev/shm")
    if not place.is_dir():
        return Path(tempfile.mkdtemp(prefix="gradwire-adapters-"))
    prefix = f"gradwire-adapters-{os.stat('/proc/self/ns/pid').st_ino}-"  # containers may share the place
    for left in place.glob(f"{prefix}*"):
        if not Path("/proc", left.name.removeprefix(prefix).partition("-")[0]).exists():
            shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=place))


def _rank(policy: LoraPolicy) -> int:
    return int(policy.peft_config.r)


def _seed(seed: int, prompt: int) -> int:
    """Seed of one prompt of a request; vLLM gives its samples this number and the following ones."""
    digest = hashlib.blake2b(f"{seed} {prompt}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2
