"""The real vLLM: models that it can run on a CPU, its server as a process, a comparison of samples with a run's."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gradwire.rl.inference import RunInference, SamplingParams

from support.blocking import DETECTOR
from support.server import free_port
from support.tiny import tiny_model

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
ALLOWED = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_SERVER_DEV_MODE": "1"}

_ENGINES: list[Any] = []
"""Kept until the process ends: the end of one engine would take the process groups of the others with it."""


def model_for_vllm(path: Path, *, tied: bool = True) -> Path:
    """The tests' model with heads of 64, which vLLM's attention on a CPU needs; not tied: with its own output head."""
    tiny_model(path, hidden_size=128, num_heads=2)
    if not tied:
        import torch
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(path)
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().flip(0))
        model.save_pretrained(path)
    return path


def engine_of(model: Path, **options: Any) -> Any:
    """A ``vllm.LLM`` in this process."""
    os.environ.update(ENVIRONMENT)
    import vllm

    settings = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256}
    made = vllm.LLM(str(model), logprobs_mode="processed_logprobs", gpu_memory_utilization=0.2, **settings, **options)
    _ENGINES.append(made)
    return made


class Endpoint:
    """vLLM's OpenAI server as a child process, with ``policy`` as the name of its model."""

    def __init__(self, model: Path, log: Path, *options: str) -> None:
        port = free_port()
        self.root = f"http://127.0.0.1:{port}"
        self._log = log
        command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name",
            "policy", "--dtype", "float32", "--enforce-eager", "--max-model-len", "256", *options,
            "--logprobs-mode", "processed_logprobs", "--host", "127.0.0.1", "--port", str(port),
        ]  # fmt: skip
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                command, stdout=out, stderr=out, env=os.environ | ENVIRONMENT | ALLOWED, start_new_session=True
            )

    @property
    def url(self) -> str:
        return f"{self.root}/v1"

    def wait(self) -> None:
        deadline = time.monotonic() + 900
        while time.monotonic() < deadline:
            assert self._process.poll() is None, self._log.read_text()[-3000:]
            try:
                urllib.request.urlopen(f"{self.root}/health", timeout=5).close()
                return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(1)
        raise TimeoutError(self._log.read_text()[-3000:])

    def resident_mib(self) -> float:
        """Resident memory of the server and its processes."""
        pids = [pid for pid in Path("/proc").iterdir() if pid.name.isdigit() and _session_of(pid) == self._process.pid]
        return sum(resident_mib(int(pid.name)) for pid in pids)

    def end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # its engine, should it be left
            self._process.wait()


@contextlib.contextmanager
def endpoint(model: Path, log: Path, *options: str) -> Iterator[Endpoint]:
    """Run a server until it is no longer needed."""
    with DETECTOR.excused():
        served = Endpoint(model, log, *options)
    try:
        with DETECTOR.excused():
            served.wait()
        yield served
    finally:
        with DETECTOR.excused():
            served.end()


def resident_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def _session_of(process: Path) -> int:
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[3])
    except (FileNotFoundError, ProcessLookupError):
        return 0


async def trained(run: Any) -> None:
    """A large step of the run."""
    run.forward_backward({"input_ids": [[1, 20, 21, 22, 23], [1, 30, 31, 32]]}, "causal_lm")
    await run.optim_step(0.01)


async def check_equal(sampler: Any, own: RunInference, version: int) -> list[list[int]]:
    """Check that greedy tokens and log-probabilities of samples, to 1e-5, equal the run's; return the greedy tokens."""
    prompts = await own.codec.encode(["ab", "abcdef", "hello"])
    theirs, ours = await sampler.generate(prompts, GREEDY), await own.generate(prompts, GREEDY)
    assert [each.token_ids.tolist() for each in theirs] == [each.token_ids.tolist() for each in ours]
    assert {each.version for each in theirs} == {version}
    for temperature in (1.0, 0.7):
        params = SamplingParams(max_tokens=12, temperature=temperature, ignore_eos=True, seed=version)
        written = await sampler.generate(prompts, params)
        rows = [np.append(prompt, each.token_ids) for prompt, each in zip(prompts, written)]
        scores = await own.get_logprobs(rows, temperature=temperature)
        for prompt, each, score in zip(prompts, written, scores):
            np.testing.assert_allclose(each.logprobs, score[len(prompt) - 1 :], atol=1e-5)
    return [each.token_ids.tolist() for each in theirs]


async def follow(sampler: Any, run: Any, own: RunInference, pushes: int = 3) -> None:
    """Check that the sampler equals the run before and after each push, and that pushes change its samples."""
    said = [await check_equal(sampler, own, 0)]
    for version in range(1, pushes + 1):
        await trained(run)
        await sampler.update_weights(run, version)
        said.append(await check_equal(sampler, own, version))
    assert said[0] != said[-1]


class Exported:
    """A run that exports the same weights again and again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    async def export(self, path: Path) -> Path:
        shutil.copytree(self.folder, path, dirs_exist_ok=True)
        return path


def flat(memory: Sequence[float], mib: float) -> bool:
    """Whether memory stays constant after the first fifth of the measurements, within noise."""
    start = len(memory) // 5
    print("resident MiB:", [round(each) for each in memory])
    return max(memory[start + 1 :]) - memory[start] < mib
