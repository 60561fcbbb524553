"""Measure time and memory of one forward and backward of every loss relative to ``causal_lm`` on as many tokens.

    python tools/measure_losses.py [--tokens 8192] [--repeats 5] [LOSS ...]

In one process, without a server: a Llama with random weights, sequences of 128 tokens of which 96 are scored, and given
reference log-probabilities (computing them costs a forward, and is cached). Memory is the peak of the process (or
the GPU) above its start; time is processor time without a GPU. The table is the second of
``tools/loss_checks.md``.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gradwire_losses.layouts import read_batch
from gradwire_losses.registry import LossConfig, LossSpec, all_losses, load_builtin_losses
from gradwire_proto.codec import Column
from gradwire_proto.v1.training_pb2 import RunConfig
from gradwire_server.engine.model.loading.pool import ModelPool
from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.scoring.planner import Budget
from gradwire_server.engine.state.engine_run import EngineRun
from gradwire_server.engine.step import Step, checked, commit, pass_over

LENGTH, PROMPT, SAMPLES, CANDIDATES = 128, 32, 4, 8
RESPONSE = LENGTH - PROMPT
RNG = np.random.default_rng(0)
LIBC = ctypes.CDLL(None)


def model(path: Path, vocab_size: int, hidden_size: int, layers: int) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=hidden_size // 32,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def columns(loss: LossSpec, sequences: int, vocab_size: int) -> dict[str, Column]:
    """Build a valid batch of this many sequences, with every field that changes the computation."""
    two = loss.layout == "pairs" or loss.name == "kto"
    rows = sequences // (SAMPLES if loss.layout == "groups" else 2 if two else 1)
    wanted = {field.name for field in loss.fields if field.required}
    wanted |= {"prompt_lengths", "kl_input_ids", "old_values"}
    wanted |= {"rewards", "mask" if "target_tokens" in wanted else "loss_mask"}
    wanted |= {"importance_sampling": {"behavior_log_probs"}, "gigpo": {"advantages"}}.get(loss.name, set())
    if loss.layout == "groups" or loss.name in ("reinforce", "remax", "reinforce_plus_plus"):
        wanted.add("old_log_probs")
    made = {}
    for field in loss.fields:
        if field.name not in wanted:
            continue
        shape = field.shapes[-1] if "tokens" in field.shapes[-1] else field.shapes[0]
        levels: tuple[np.ndarray, ...] = ()
        if "samples" in shape:
            levels = (np.full(rows, SAMPLES, np.uint32),)
        if "tokens" in shape:
            per = RESPONSE if levels else PROMPT if field.name == "prompt_ids" else LENGTH
            levels = (*levels, np.full(rows * (SAMPLES if levels else 1), per, np.uint32))
        size: tuple[int, ...] = (int(levels[-1].sum()) if levels else rows,)
        if "candidates" in shape:
            size = (*size, CANDIDATES)
        made[field.name] = Column(_values(field.name, field.dtype, size, vocab_size), levels)
    return made


def _values(name: str, dtype: str, size: tuple[int, ...], vocab_size: int) -> np.ndarray:
    if name == "prompt_lengths":
        return np.full(size, PROMPT)
    if name in ("loss_mask", "mask"):
        return np.tile(np.arange(LENGTH) >= PROMPT, size[0] // LENGTH)
    if name in ("label", "token_labels"):
        return RNG.integers(0, 2, size)
    if dtype == "int":
        return RNG.integers(0, vocab_size, size)
    if name == "step_labels":
        return np.where(RNG.random(size) < 0.1, 1.0, -100.0).astype(np.float32)
    mean = -9.0 if "log_probs" in name or "logprobs" in name else 0.5
    return RNG.normal(mean, 0.2, size).astype(np.float32)


def config_of(loss: LossSpec) -> LossConfig:
    kwargs: dict[str, Any] = {"reference_model": "base"} if "reference_model" in loss.config.model_fields else {}
    return loss.config(**kwargs, **({"reduction_divisor": RESPONSE} if loss.name == "dr_grpo" else {}))


class PeakMemory:
    """Peak memory within the block above its start, in bytes."""

    def __enter__(self) -> PeakMemory:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
        else:
            LIBC.malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")
            self._before = _status("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else _status("VmHWM")
        self.bytes = peak - self._before


def _status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return 1024 * int(line.split()[1])


def seconds_of(step: Callable[[], object]) -> float:
    """Seconds of the GPU, or processor time, which is independent of other load on the machine."""
    if not torch.cuda.is_available():
        start = time.process_time()
        step()
        return time.process_time() - start
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(step: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Return the median seconds and the peak bytes."""
    step()
    with PeakMemory() as memory:
        step()
    return statistics.median(seconds_of(step) for _ in range(repeats)), memory.bytes


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("losses", nargs="*", help="names; all by default")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    settings = parser.parse_args(arguments)
    load_builtin_losses()
    names = [spec for spec in all_losses() if not settings.losses or spec.name in (*settings.losses, "causal_lm")]
    names.sort(key=lambda spec: spec.name != "causal_lm")
    budget = Budget(microbatch_tokens=settings.tokens, activation_bytes=1 << 40)
    with tempfile.TemporaryDirectory() as folder:
        path = model(Path(folder) / "llama", settings.vocab_size, settings.hidden_size, settings.layers)
        host = ModelPool({"llama": str(path)})
        print("| loss | ms | of `causal_lm` | MiB | of `causal_lm` |\n| --- | --- | --- | --- | --- |")
        base = (1.0, 1.0)
        for spec in names:
            head = spec.head or ("value" if "values" in spec.optional_scores else "")
            run = EngineRun(host, spec.name, RunConfig(base_model="llama", head=head, num_labels=2 * (head[:1] == "c")))
            batch = read_batch(
                spec, columns(spec, settings.tokens // LENGTH, settings.vocab_size), vocab_size=settings.vocab_size
            )
            reference = torch.full((batch.num_scored,), -9.0)
            teacher, config = Policy(run.policy.split_model), config_of(spec)

            step = partial(
                checked, spec, config, run.policy, batch, reference=lambda *_, r=reference: r, teacher=teacher,
                budget=budget,
            )  # fmt: skip
            seconds, held = measure(partial(one_step, run, step), settings.repeats)
            base = (seconds, held) if spec.name == "causal_lm" else base
            time_columns = f"{1000 * seconds:.1f} | {seconds / base[0]:.2f}"
            memory_columns = f"{held / 2**20:.0f} | {held / base[1]:.2f}"
            print(f"| `{spec.name}` | {time_columns} | {memory_columns} |", flush=True)
            run.close()


def one_step(run: EngineRun, make_step: Callable[[], Step]) -> None:
    run.accumulator.clear()
    step = make_step()
    (passed,) = pass_over([step])
    assert passed is not None
    commit(run, step, passed)


if __name__ == "__main__":
    sys.exit(main())
