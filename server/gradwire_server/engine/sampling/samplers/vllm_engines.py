"""vLLM's engines of a base model, stepped in this process: one for adapters, and one for whole models' weights.

An adapter is pushed when a sample is requested and its weights have changed since the last push, through a folder in
memory (``/dev/shm``), from which vLLM reads it again if it has evicted it. Whole weights are replaced in place by
vLLM's weight transfer (:mod:`.vllm_weights`), while no request is in progress that samples with others: such requests
wait. So a sample is of one version of the weights, that of its request.

Engines sleep while a batch is trained on and no sample is in progress, and wake when the next job comes.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gradwire_server.engine.failures import is_fatal
from gradwire_server.engine.model.policy import LoraPolicy, Policy
from gradwire_server.engine.sampling.jobs import LocalJob
from gradwire_server.engine.sampling.samplers.vllm_weights import checkpoint_weights
from gradwire_server.engine.state.exports import save_adapter


class VllmEngine(ABC):
    """One ``vllm.LLMEngine``, and the jobs that it computes.

    Args:
        key: Names it among the engines of a sampler.
        lora, sampling: vLLM's modules ``lora.request`` and ``sampling_params``.
    """

    sleep_level = 1
    """Level of vLLM's sleep: keys and values are dropped, and weights move to the host (1) or are dropped, too (2)."""

    def __init__(self, key: tuple[str, bool], engine: Any, lora: Any, sampling: Any) -> None:
        self.key = key
        self._asleep = False
        self._engine, self._lora, self._sampling = engine, lora, sampling
        self._requests: dict[str, tuple[LocalJob, int]] = {}  # request id -> job and prompt's index
        self._policies: dict[LocalJob, Policy] = {}
        self._ids = itertools.count(1)

    @property
    def jobs(self) -> Collection[LocalJob]:
        return self._policies.keys()

    def uses(self, policy: Policy) -> bool:
        return any(used is policy for used in self._policies.values())

    def sleep(self) -> bool:
        """Free the memory until the next job, unless there are jobs; returns whether any was freed."""
        if self._asleep or self._policies:
            return False
        self._engine.sleep(self.sleep_level)
        self._asleep = True
        return True

    def _wake(self) -> None:
        if self._asleep:
            torch.cuda.empty_cache()  # what training has kept of the memory that vLLM takes back
            self._engine.wake_up()
            self._asleep = False

    @abstractmethod
    def begin(self, job: LocalJob, policy: Policy) -> None:
        """Take a job, whose samples are of the policy's weights as they are now."""

    def _add(self, job: LocalJob, adapter: Any = None) -> None:
        """Hand a job's prompts to vLLM."""
        job.begun = True  # vLLM does not tell when it begins
        params = job.params
        for number, prompt in enumerate(job.prompts):
            request_id = str(next(self._ids))
            self._requests[request_id] = job, number
            self._engine.add_request(
                request_id,
                {"prompt_token_ids": list(prompt)} | ({"cache_salt": job.tree.hex()} if job.tree else {}),
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
                    skip_special_tokens=False,  # a stop string may have one; the text is ours
                    output_kind=self._sampling.RequestOutputKind.FINAL_ONLY,
                ),
                lora_request=adapter,
            )

    def step(self) -> None:
        try:
            outputs = self._engine.step()
        except Exception as error:  # reported by the jobs, to whoever waits for their samples
            self._fail(error)
            return
        for output in outputs:
            if output.finished and output.request_id in self._requests:
                self._take(output, *self._requests.pop(output.request_id))

    def _fail(self, error: Exception) -> None:
        if is_fatal(error):
            raise error
        for job in list(self._policies):
            job.error = error
            self.cancel(job)

    def _take(self, output: Any, job: LocalJob, number: int) -> None:
        job.find(number * job.params.n, output.num_cached_tokens or 0)
        for sample in output.outputs:
            tokens = np.array(sample.token_ids, np.int32)
            drawn = zip(sample.token_ids, sample.logprobs, strict=True)
            chosen = [of_token[token].logprob for token, of_token in drawn]
            by_text = isinstance(sample.stop_reason, str)
            by_token = sample.finish_reason == "stop" and not by_text
            first = number * job.params.n
            rows = [first + sample.index] if job.params.temperature else range(first, first + job.params.n)
            text = job.text_before_stop(first, sample.token_ids) if by_text else None
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


class AdapterEngine(VllmEngine):
    """The engine of LoRA runs, and of the base model itself."""

    def __init__(self, key: tuple[str, bool], engine: Any, lora: Any, sampling: Any) -> None:
        super().__init__(key, engine, lora, sampling)
        self._folder = _folder_in_memory()
        self.close = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._pushed: dict[str, tuple[tuple[object, ...], Any]] = {}

    def begin(self, job: LocalJob, policy: Policy) -> None:
        self._wake()
        adapter = self._push(policy) if isinstance(policy, LoraPolicy) else None
        self._policies[job] = policy
        self._add(job, adapter)

    def _push(self, policy: LoraPolicy) -> Any:
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


class WeightsEngine(VllmEngine):
    """The engine of runs that train all weights; it holds one of them at a time."""

    sleep_level = 2

    def __init__(self, key: tuple[str, bool], engine: Any, lora: Any, sampling: Any) -> None:
        super().__init__(key, engine, lora, sampling)
        self._waiting: deque[LocalJob] = deque()
        self._held: tuple[weakref.ref[Policy], object] | None = None

    def begin(self, job: LocalJob, policy: Policy) -> None:
        self._policies[job] = policy
        self._waiting.append(job)

    def sleep(self) -> bool:
        slept = super().sleep()
        if slept:
            self._held = None
        return slept

    def step(self) -> None:
        try:
            self._admit()
        except Exception as error:  # as of super().step()
            self._fail(error)
            return
        super().step()

    def cancel(self, job: LocalJob) -> None:
        if job in self._waiting:
            self._waiting.remove(job)
        super().cancel(job)

    def _admit(self) -> None:
        """Hand over the first waiting jobs of the weights that vLLM has; of others, once no request is in progress."""
        self._wake()
        while self._waiting:
            job = self._waiting[0]
            if not self._has(self._policies[job]):
                if self._requests:
                    return
                self._replace(self._policies[job])
            self._add(self._waiting.popleft())

    def _has(self, policy: Policy) -> bool:
        return self._held is not None and self._held[0]() is policy and self._held[1] == policy.version

    def _replace(self, policy: Policy) -> None:
        """Replace the weights in place. No request is in progress, so there is none to pause."""
        self._held = None  # whatever happens on the way
        call = self._engine.collective_rpc
        call("start_weight_update")
        call("update_weights", kwargs={"update_info": {"weights": checkpoint_weights(policy)}})
        call("finish_weight_update")
        self._engine.reset_prefix_cache()
        self._held = weakref.ref(policy), policy.version


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


def _seed(seed: int, prompt: int) -> int:
    """Seed of one prompt of a request; vLLM gives its samples this number and the following ones."""
    digest = hashlib.blake2b(f"{seed} {prompt}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2
