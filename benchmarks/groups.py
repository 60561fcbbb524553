"""Groups of samples of long prompts, as GRPO draws them, against transformers' ``generate`` and continuous batching.

In this process, on the same model and the same number of threads: the local sampler of the engine, which computes each
prompt once and stores its keys and values once; ``generate`` with every row of every group in one batch; and
``generate_batch``, transformers' continuous batching, which forks a prompt's pages. All take turns. The memory is that
of the keys and values that the sampler has allocated, over what one prompt and its answers take."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

import torch
from gradwire_server.engine.model.loading.pool import ModelPool
from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.sampling.pages.pages import Pages
from gradwire_server.engine.sampling.samplers.local import LocalSampler
from gradwire_server.engine.sampling.samplers.sampler import SamplingParams
from gradwire_server.engine.sizing.parts import key_value_bytes
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation import ContinuousBatchingConfig

from benchmarks.report import Figure, Size, run_alone
from benchmarks.turns import Turns
from benchmarks.workload import Draw, standard_model

OURS, GENERATE, BATCHING = "ours", "generate", "continuous batching"
TARGETS = {GENERATE: 3.0, BATCHING: 1.2}
MOST_MEMORY = 1.2


class Groups:
    """Samplers of one model, and the prompts of a turn."""

    def __init__(self, model: Path, size: Size) -> None:
        self.prompts, self.samples = size.pick(2, 1), size.pick(16, 4)
        self.prompt_tokens, self.answer_tokens = size.pick(512, 40), size.pick(64, 4)
        self._policy = Policy(ModelPool({"m": str(model)}).get("m"))
        self._sampler = LocalSampler()
        self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self._batching: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.bytes = 0

    @property
    def tokens(self) -> int:
        """Tokens that a turn samples."""
        return self.prompts * self.samples * self.answer_tokens

    def draw(self, seed: int, *, smoke: bool) -> list[list[int]]:
        source = Draw.of(seed, smoke=smoke)
        return [source.tokens(self.prompt_tokens) for _ in range(self.prompts)]

    def ours(self, prompts: list[list[int]]) -> None:
        params = SamplingParams(max_tokens=self.answer_tokens, seed=0, n=self.samples, ignore_eos=True)
        job = self._sampler.begin(self._policy, prompts, params, alone=True)
        (batch,) = self._sampler._batches.values()
        while not job.done:
            self._sampler.step()
            assert isinstance(batch.values, Pages)
            self.bytes = max(self.bytes, batch.values.cache.nbytes)

    @torch.no_grad()
    def generate(self, prompts: list[list[int]]) -> None:
        ids = torch.tensor(prompts)
        out = self._model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=self._config(top_k=0)
        )
        assert out.shape == (self.prompts * self.samples, self.prompt_tokens + self.answer_tokens)

    @torch.no_grad()
    def batched(self, prompts: list[list[int]]) -> None:
        tokens = self.prompts * self.samples * (self.prompt_tokens + self.answer_tokens)
        pages = ContinuousBatchingConfig(page_size=32, num_blocks=tokens // 32 + 64, max_batch_tokens=2048)
        generated = self._batching.generate_batch(
            prompts,
            generation_config=self._config(),
            continuous_batching_config=pages,
            persistent_manager=True,
            warmup=False,
        )
        assert sum(len(each.generated_tokens) for each in generated.values()) == self.tokens

    def close(self) -> None:
        self._batching.destroy_cached_continuous_batching_manager()

    def _config(self, **settings: Any) -> GenerationConfig:
        return GenerationConfig(
            do_sample=True,
            num_return_sequences=self.samples,
            max_new_tokens=self.answer_tokens,
            min_new_tokens=self.answer_tokens,
            eos_token_id=-1,
            pad_token_id=0,
            **settings,
        )

    @property
    def memory(self) -> float:
        """Allocated bytes of keys and values over those of the prompts, once each, and the answers."""
        of_token = key_value_bytes(self._policy.model, torch.float32)
        return self.bytes / (of_token * self.prompts * (self.prompt_tokens + self.samples * self.answer_tokens))


def measure(size: Size) -> list[Figure]:
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    sides = [each for each in (GENERATE, BATCHING) if size.wants(each)] or [GENERATE, BATCHING]
    tables = {side: Turns(OURS, side) for side in sides}
    with tempfile.TemporaryDirectory() as folder:
        groups = Groups(standard_model(Path(folder) / "model", smoke=size.smoke), size)
        ways = {GENERATE: groups.generate, BATCHING: groups.batched}
        for turn in range(size.repeats + 1):
            prompts = groups.draw(turn, smoke=size.smoke)
            for side, table in tables.items():
                with table.turn(OURS, groups.tokens):
                    groups.ours(prompts)
                with table.turn(side, groups.tokens):
                    ways[side](prompts)
        groups.close()
    words = f"{groups.prompts} groups of {groups.samples} x {groups.answer_tokens} tokens, "
    words += f"prompts of {groups.prompt_tokens}"
    figures = []
    for side, table in tables.items():
        table.drop_first()
        name = f"groups: against transformers' {side}"
        detail = f"{words}; {table.said('tokens')}"
        figures.append(Figure(name, table.ratio(), "x", TARGETS[side], detail=detail, samples=table.rates))
    detail = f"{words}; keys and values {groups.bytes / 2**20:.1f} MiB, over one prompt and its answers a group"
    figures.append(Figure("groups: memory", groups.memory, "x", MOST_MEMORY, at_least=False, detail=detail))
    return figures


if __name__ == "__main__":
    run_alone(measure, __doc__)
