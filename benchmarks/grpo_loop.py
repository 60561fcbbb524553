"""Whole iterations of GRPO against TRL's GRPOTrainer with its own ``generate``: sampling, rewards, one training step.

Same model, shapes, threads, temperature and AdamW, all weights trained, no KL; the reward is the share of even
token ids in an answer. Answers have a fixed length, so that both sides sample the same number of tokens. Ours goes
through the service, with its journal; TRL runs in a process of its own, in turns with ours. A rate counts the sampled
tokens of an iteration over its whole time."""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import dataclass
from pathlib import Path

import gradwire

from benchmarks.against_trl import TRL_PYTHON, Trainer
from benchmarks.report import Figure, Size, run_alone
from benchmarks.training import LEARNING_RATE, grpo_batch
from benchmarks.turns import Turns
from benchmarks.workload import FIRST_WORD, Draw, standard_model

TARGET = 3.0


@dataclass(frozen=True)
class Shape:
    """An iteration: prompts, samples of each, and their tokens."""

    prompts: int
    samples: int
    prompt_tokens: int
    answer_tokens: int

    @property
    def tokens(self) -> int:
        """Tokens that an iteration samples."""
        return self.prompts * self.samples * self.answer_tokens

    def __str__(self) -> str:
        return f"{self.prompts} x {self.samples} answers of {self.answer_tokens} tokens to {self.prompt_tokens}"


SHAPES = {"long prompts": Shape(2, 16, 512, 64), "short prompts": Shape(8, 8, 64, 64)}
SMOKE = Shape(1, 4, 20, 4)


async def iterate(run: gradwire.TrainingClient, shape: Shape, prompts: list[list[int]]) -> None:
    """Sample, reward, train."""
    sampled = await run.sample(prompts, n=shape.samples, max_tokens=shape.answer_tokens, ignore_eos=True)
    groups = []
    for prompt, samples in zip(prompts, sampled.samples, strict=True):
        responses = [list(sample.token_ids) for sample in samples]
        rewards = [sum(token % 2 == 0 for token in one) / len(one) for one in responses]
        groups.append({"prompt": prompt, "responses": responses, "rewards": rewards})
    loss = run.forward_backward(grpo_batch(groups), "grpo", {"beta": 0.0})
    await run.optim_step(learning_rate=LEARNING_RATE)
    assert (await loss).num_loss_tokens == shape.tokens


async def compare(name: str, size: Size) -> Figure:
    shape, turns = (SMOKE if size.smoke else SHAPES[name]), Turns("ours", "TRL")
    source = Draw.of(3, smoke=size.smoke)
    batches = [
        [source.tokens(shape.prompt_tokens - 1) for _ in range(shape.prompts)] for _ in range(2 * (size.repeats + 1))
    ]
    with tempfile.TemporaryDirectory() as folder:
        model = standard_model(Path(folder) / "model", smoke=size.smoke)
        texts = [["".join(chr(0x4E00 + token - FIRST_WORD) for token in ids) for ids in batch] for batch in batches]
        plan = {
            "kind": "grpo-loop",
            "model": str(model),
            "batches": [*texts, texts[0]],  # the last step's end is the trainer's, and not waited for
            "samples": shape.samples,
            "answer_tokens": shape.answer_tokens,
            "learning_rate": LEARNING_RATE,
            "threads": 0,
            "device": "cpu",
            "dtype": "float32",
        }
        async with gradwire.connect(models=[f"m={model}"]) as service:
            run = await service.create_run("m")
            with Trainer(plan, Path(folder) / "trl") as trainer:
                for turn in range(size.repeats + 1):
                    theirs = await asyncio.to_thread(trainer.steps, 1)
                    turns.add("TRL", shape.tokens, theirs["seconds"], theirs["cpu_seconds"])
                    with turns.turn("ours", shape.tokens):
                        await iterate(run, shape, [[1, *ids] for ids in batches[turn]])
    turns.drop_first()
    detail = f"{shape}; {turns.said('sampled tokens')}"
    label = f"GRPO iteration against TRL's, {name}"
    return Figure(label, turns.ratio(), "x", TARGET, detail=detail, samples=turns.rates)


def measure(size: Size) -> list[Figure]:
    """Measure one figure per shape.

    Raises:
        FileNotFoundError: TRL's environment does not exist.
    """
    if not TRL_PYTHON.exists():
        raise FileNotFoundError(f"{TRL_PYTHON} is not there: make .venv-parity/.installed, or set GRADWIRE_TRL_PYTHON")
    return [asyncio.run(compare(name, size)) for name in SHAPES if size.wants(name)]


if __name__ == "__main__":
    run_alone(measure, __doc__)
