"""Print which architectures train and sample with the numbers of transformers: ``make architectures``.

    python tools/make_architectures.py [NAME ...]

Each row is a tiny random model, made from a configuration. The reference is transformers alone, one row at a time,
without padding, cache or dropout. In float64: log-probabilities and gradients of rows of different lengths, of all
weights and of LoRA with random factors; log-probabilities in training mode again, with gradient checkpointing, and of
each row alone. In bfloat16: log-probabilities within a small multiple of what rounding costs transformers itself. In
float32: samples, four of each prompt, that end at different times, against a forward of their tokens.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from architecture_configs import CONFIGURATIONS, SIZES
from gradwire_losses.layouts import read_batch
from gradwire_losses.registry import get_loss, load_builtin_losses
from gradwire_proto.codec import Column
from gradwire_proto.v1.training_pb2 import LoraSettings, RunConfig
from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.model.loading.pool import ModelPool
from gradwire_server.engine.model.policy import LoraPolicy, Policy
from gradwire_server.engine.sampling.samplers.local import LocalSampler
from gradwire_server.engine.sampling.samplers.sampler import SamplingParams
from gradwire_server.engine.scoring.planner import Budget
from gradwire_server.engine.state.engine_run import EngineRun
from gradwire_server.engine.step import checked, commit, pass_over
from peft import get_peft_model
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, __version__
from transformers.pytorch_utils import Conv1D

LENGTHS = (12, 40, 2, 5, 16, 17, 7)
"""Tokens of the rows, around the boundaries that the configurations name: 6, 8 and 16."""
PROMPTS = (5, 14, 2, 21)
EXACT, SAMPLED = 1e-5, 3e-5
"""Largest difference of log-probabilities and (relative to the largest) gradients in float64, and in float32."""
ROUNDING = 4.0
"""Largest difference in bfloat16, as a multiple of that of transformers; one of 0.05 nats is never too large."""
SEEDS = (5, 6, 7)
"""Tried in turn until samples end at different times."""
STOPS = (3, 11, 19, 27, 35, 43)


@dataclass
class Found:
    """What was found of one configuration.

    Attributes:
        refusal: The sentence by which it is refused whatever the settings.
        wrong: What differs, or failed without a sentence.
        figures: Largest difference of each check.
        limits: The form that it computes in, and the sentences that refuse LoRA, bfloat16 or sampling.
        rounding: Largest difference between float32 and float64 in transformers itself.
    """

    refusal: str = ""
    wrong: list[str] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    limits: list[str] = field(default_factory=list)
    rounding: float = 0.0

    @property
    def verdict(self) -> str:
        return "wrong" if self.wrong else "refused" if self.refusal else "exact"


def rows_of(lengths: Iterable[int], seed: int) -> list[list[int]]:
    """Rows of random tokens without the special ones."""
    rng = np.random.default_rng(seed)
    return [rng.integers(4, SIZES["vocab_size"], length).tolist() for length in lengths]


def save_model(name: str, folder: Path) -> None:
    """Save a random model of a configuration, whose parameters that begin at 0 or 1 are moved away from there."""
    kind, settings = CONFIGURATIONS[name]
    sizes = {key: value for key, value in (dict(SIZES) | dict(settings)).items() if value is not None}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes), dtype=torch.float32)
        for parameter in model.parameters():
            parameter.data += 0.02 * torch.randn_like(parameter)
    model.save_pretrained(folder)


def served_configuration(folder: Path) -> Any:
    """The configuration with the long factors of LongRoPE for all lengths, as rows are served."""
    config = AutoConfig.from_pretrained(folder)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        if "long_mscale" in rope:  # Phi-MoE changes nothing but the scale
            rope["short_mscale"] = rope["long_mscale"]
        else:
            rope["short_factor"] = rope["long_factor"]
    return config


def plain(folder: Path, dtype: torch.dtype) -> Any:
    """The model in transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(folder, config=served_configuration(folder), dtype=dtype).eval()
    if dtype == torch.float64 and getattr(model.config, "_experts_implementation", None) == "grouped_mm":
        model.set_experts_implementation("eager")
    return model


def widest(folder: Path, result: Found) -> torch.dtype:
    """The dtype to compare in: float64, unless transformers itself cannot compute the model in it.

    Also measures what float32 costs transformers, in one forward and where it adds token after token to its own cache.
    """
    rows, model = rows_of([max(LENGTHS)] * 3, 4), plain(folder, torch.float32)
    with torch.no_grad():
        narrow = [logprobs_of(model, row) for row in rows]
        with suppress(ValueError):  # some caches of transformers take no single tokens
            result.rounding = max(apart(by_own_cache(model, row), of) for row, of in zip(rows, narrow, strict=True))
    try:
        model = plain(folder, torch.float64)
        with torch.no_grad():
            wide = max(apart(of, logprobs_of(model, row)) for row, of in zip(rows, narrow, strict=True))
        result.rounding = max(result.rounding, wide)
    except RuntimeError:
        result.limits.append("float32")
        return torch.float32
    return torch.float64


def by_own_cache(model: Any, row: Sequence[int]) -> Tensor:
    """``[T]`` log-probabilities of a row's tokens but the first, token after token by transformers' own cache."""
    cache, logprobs = None, []
    for token, after in pairwise(row):
        output = model(input_ids=torch.tensor([[token]]), past_key_values=cache, use_cache=True)
        cache = getattr(output, "past_key_values", None)
        if cache is None:
            return logprobs_of(model, row)
        logprobs.append(output.logits[0, -1].float().log_softmax(-1)[after])
    return torch.stack(logprobs)


def logprobs_of(model: Any, row: Sequence[int]) -> Tensor:
    """``[T]`` log-probabilities of a row's tokens but the first, alone."""
    ids = torch.tensor([row])
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return logits.log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)


def reference(model: Any, rows: Sequence[Sequence[int]]) -> Tensor:
    """``[T]`` log-probabilities of all rows, shortest first as some models never forget a long one; sets grad."""
    parts: dict[int, Tensor] = {}
    tokens = sum(len(row) - 1 for row in rows)
    for number in sorted(range(len(rows)), key=lambda number: len(rows[number])):
        result = logprobs_of(model, rows[number])
        (-result.sum() / tokens).backward()
        parts[number] = result.detach()
    return torch.cat([parts[number] for number in range(len(rows))])


def trained(run: EngineRun, rows: Sequence[Sequence[int]], tokens: int = 1 << 20) -> Tensor:
    """``[T]`` log-probabilities of a training call."""
    loss, facts = get_loss("causal_lm"), run.policy.facts
    columns = {"input_ids": Column.from_rows([np.array(row, np.int32) for row in rows])}
    batch = read_batch(loss, columns, vocab_size=facts.vocab_size, context_length=facts.context_length)
    step = checked(loss, loss.config(), run.policy, batch, outputs=["logprobs"], budget=Budget(tokens))
    with run.rng():
        (passed,) = pass_over([step])
    assert passed is not None
    return commit(run, step, passed).outputs["logprobs"].detach().double()


def apart(result: Tensor, expected: Tensor) -> float:
    """Largest difference; infinite if anything is not a number."""
    largest = (result.double() - expected.double()).abs().max().item()
    return largest if largest == largest else float("inf")


def gradients_apart(run: EngineRun, expected: dict[str, Tensor]) -> float:
    """Largest difference of the gradients, relative to the largest entry."""
    sums, factor = run.accumulator.normalised()
    scale = max(each.abs().max().item() for each in expected.values())
    return max(apart(sums.get(key, torch.zeros_like(each)) * factor, each) for key, each in expected.items()) / scale


def check_training(folder: Path, result: Found, lora: bool, dtype: torch.dtype) -> None:
    """Log-probabilities and gradients."""
    kind = "LoRA" if lora else "full"
    rows = rows_of(LENGTHS, 1)
    config = RunConfig(base_model="m", lora=LoraSettings(rank=2)) if lora else RunConfig(base_model="m")
    run = EngineRun(ModelPool({"m": str(folder)}, "cpu", dtype), "run-a", config)
    model = plain(folder, dtype)
    if lora:
        expected, gradients = lora_reference(run, model, rows)
    else:
        expected = reference(model, rows)
        gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    computed = trained(run, rows)
    result.figures[f"{kind} log-probabilities"] = apart(computed, expected)
    result.figures[f"{kind} gradients"] = gradients_apart(run, gradients)
    run.accumulator.clear()
    result.figures[f"{kind} log-probabilities again"] = apart(trained(run, rows), expected)
    run.accumulator.clear()
    result.figures[f"{kind} in micro-batches"] = apart(trained(run, rows, 48), expected)
    result.figures[f"{kind} gradients in micro-batches"] = gradients_apart(run, gradients)
    run.accumulator.clear()
    if run.policy.model.supports_gradient_checkpointing:
        run.policy.gradient_checkpointing = True
        result.figures[f"{kind} log-probabilities recomputed"] = apart(trained(run, rows), expected)
        result.figures[f"{kind} gradients recomputed"] = gradients_apart(run, gradients)
        run.policy.gradient_checkpointing = False
    if not lora:
        alone = [trained(run, [row]) for row in rows]
        result.figures["rows alone"] = apart(torch.cat(alone), expected)
        result.limits.append(run.policy.split_model.packing.name.lower())


def lora_reference(run: EngineRun, model: Any, rows: Sequence[Sequence[int]]) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probabilities and gradients with random factors, merged into the weights where these are of linear layers."""
    policy = run.policy
    assert isinstance(policy, LoraPolicy)
    generator = torch.Generator().manual_seed(2)
    factors = {
        name: torch.randn(each.shape, generator=generator, dtype=each.dtype) * 0.1
        for name, each in policy.state_tensors().items()
    }
    policy.load_state_tensors(factors)
    scale = policy.peft_config.lora_alpha / policy.peft_config.r
    modules = dict(model.named_modules())
    places = {name: name.removesuffix(".lora_A.weight") for name in factors if name.endswith(".lora_A.weight")}
    held = [id(each) for name, each in model.named_parameters(remove_duplicate=False)]
    tied = any(
        held.count(id(modules[place].weight)) > 1 for place in places.values() if hasattr(modules.get(place), "weight")
    )
    if tied or not all(type(modules.get(place)) in (nn.Linear, Conv1D) for place in places.values()):
        return peft_reference(policy, model, factors, rows)
    for name, place in places.items():
        added = scale * factors[name.replace("lora_A", "lora_B")] @ factors[name]
        weight = modules[place].weight
        weight.data += added.T if type(modules[place]) is Conv1D else added
    expected = reference(model, rows)
    gradients = {}
    for name, place in places.items():
        weight, other = modules[place].weight, name.replace("lora_A", "lora_B")
        if weight.grad is None:
            continue
        of_weight = weight.grad.T if type(modules[place]) is Conv1D else weight.grad
        gradients[name] = scale * factors[other].T @ of_weight
        gradients[other] = scale * of_weight @ factors[name].T
    return expected, gradients


def peft_reference(
    policy: LoraPolicy, model: Any, factors: dict[str, Tensor], rows: Sequence[Sequence[int]]
) -> tuple[Tensor, dict[str, Tensor]]:
    """The same by peft."""
    wrapped: Any = get_peft_model(model, policy.peft_config, autocast_adapter_dtype=False).eval()
    own = {
        name.removeprefix("base_model.model.").replace(".default", ""): each
        for name, each in wrapped.named_parameters()
        if "lora_" in name
    }
    for name, each in own.items():
        each.data = factors[name].clone()
    expected = reference(wrapped, rows)
    return expected, {name: each.grad for name, each in own.items() if each.grad is not None}


def check_rounding(folder: Path, result: Found) -> None:
    """Log-probabilities in bfloat16, of all weights and of LoRA that changes nothing yet."""
    rows = rows_of(LENGTHS, 1)
    with torch.no_grad():
        true = torch.cat([logprobs_of(plain(folder, torch.float32), row) for row in rows])
        try:
            usual = apart(torch.cat([logprobs_of(plain(folder, torch.bfloat16), row) for row in rows]), true)
        except RuntimeError:  # of transformers itself: the model must be refused
            usual = 0.0
    for kind in ("full", "LoRA"):
        config = RunConfig(base_model="m", lora=LoraSettings(rank=2)) if kind == "LoRA" else RunConfig(base_model="m")
        run = EngineRun(ModelPool({"m": str(folder)}, "cpu", torch.bfloat16), "run-a", config)
        result.figures[f"{kind} bfloat16"] = apart(trained(run, rows), true) / max(usual, 0.05 / ROUNDING)


def check_sampling(folder: Path, result: Found) -> None:
    """Samples in float32 against a forward of their tokens."""
    policy = Policy(ModelPool({"m": str(folder)}, "cpu", torch.float32).get("m"))
    prompts = rows_of(PROMPTS, 3)
    sampler, drawn, lengths, stops = LocalSampler(), [], set[int](), STOPS
    for seed in SEEDS:
        params = SamplingParams(max_tokens=24, seed=seed, n=4, stop_token_ids=stops, ignore_eos=True)
        job = sampler.begin(policy, prompts, params)
        while not job.done:
            sampler.step()
        drawn = job.samples().by_prompt()
        lengths = {len(sample.token_ids) for samples in drawn for sample in samples}
        if len(lengths) >= 3:
            break
        stops = tuple(
            {
                samples[at].token_ids[4 * at]
                for samples in drawn
                for at in (1, 2, 3)
                if len(samples[at].token_ids) > 4 * at
            }
        )
    model, worst = plain(folder, torch.float32), 0.0
    for prompt, samples in zip(prompts, drawn, strict=True):
        for sample in samples:
            with torch.no_grad():
                expected = logprobs_of(model, [*prompt, *sample.token_ids])[len(prompt) - 1 :]
            worst = max(worst, apart(torch.tensor(sample.logprobs), expected))
    if len(lengths) < 3:
        result.wrong.append("sampling: the samples end together")
    result.figures["sampling"] = worst
    if not sampler._fits_pages(policy):
        result.limits.append("own cache")


def limit_of(check: str, result: Found) -> float:
    """A float32 figure may also be as far off as a small multiple of what rounding costs transformers itself."""
    if check.endswith("bfloat16"):
        return ROUNDING
    return max(SAMPLED, ROUNDING * result.rounding) if check == "sampling" or "float32" in result.limits else EXACT


def check(name: str) -> Found:
    """Check one configuration."""
    result = Found()
    with tempfile.TemporaryDirectory() as folder:
        save_model(name, Path(folder))
        dtype = widest(Path(folder), result)
        checks: dict[str, Callable[[Path, Found], None]] = {
            "full": lambda path, result: check_training(path, result, False, dtype),
            "LoRA": lambda path, result: check_training(path, result, True, dtype),
            "bfloat16": check_rounding,
            "sampling": check_sampling,
        }
        for what, run in checks.items():
            try:
                run(Path(folder), result)
            except OperationError as error:
                if what == "full":
                    result.refusal = str(error)
                    break
                result.limits.append(f"{what}: {error}")
            except Exception as error:  # a failure without a sentence is what this looks for
                result.wrong.append(f"{what}: {type(error).__name__}: {str(error).partition(chr(10))[0][:160]}")
    result.wrong += [
        f"{what} {figure:.1e}" for what, figure in result.figures.items() if not figure <= limit_of(what, result)
    ]
    return result


FORMS = {"shared": "packed, prefixes shared", "packed": "packed", "padded": "padded"}
PAGE = Path(__file__).parent.parent / "docs" / "architectures.md"
HEAD = f"""# Architectures

Every architecture below trains and samples with the numbers of transformers alone, or is refused when a run is
created, with a sentence. `make architectures` made this page with transformers {__version__}: each entry is a tiny
random model with all that makes the architecture different, and `model_type` where the name does not tell it.

Compared are log-probabilities and gradients of all weights and of LoRA in float64, of rows of different lengths and of
each alone, and samples in float32. A model is checked in the same way when it is loaded, whatever its name.

Rows are packed without padding and share prefixes (fastest) where the model allows it. Samples grow in pages of keys
and values, or in transformers' own cache.

| rows and samples | architectures |
| --- | --- |
"""
ORDINARY = 1e-5
"""Differences, relative to the largest value, of which the page says no more."""


class Line(NamedTuple):
    """What the page says of an architecture: ``form`` is empty where it is refused."""

    label: str
    form: str
    difference: float
    notes: list[str]


def label_of(name: str) -> str:
    """An architecture's name, with its variant, or its model_type where the name does not tell it."""
    kind, _ = CONFIGURATIONS[name]
    if ", " in name:
        return f"{name.replace(', ', ' (', 1)})"
    same = "".join(filter(str.isalnum, name)).lower() == "".join(filter(str.isalnum, kind))
    return name if same else f"{name} (`{kind}`)"


def line_of(name: str, result: Found) -> Line:
    """The line of an architecture that was checked."""
    label = label_of(name)
    notes = [*result.limits, *result.wrong, *([result.refusal] if result.refusal else [])]
    form = [FORMS[note] for note in notes if note in FORMS] + ["own cache" for note in notes if note == "own cache"]
    said = [
        "compared in float32" if note == "float32" else note.replace("model 'm' ", "")
        for note in notes
        if note not in FORMS and note != "own cache"
    ]
    worst = max((value for key, value in result.figures.items() if "bfloat" not in key), default=0.0)
    return Line(label, "" if result.refusal else ", ".join(form), 0.0 if result.refusal else worst, said)


def page_of(lines: Sequence[Line]) -> str:
    """The page: architectures by form, then those of which there is more to say."""
    forms = sorted({line.form for line in lines if line.form}, reverse=True)
    table = "".join(f"| {form} | {', '.join(line.label for line in lines if line.form == form)} |\n" for form in forms)
    beyond = [f"{line.label} {line.difference:.0e}" for line in lines if line.difference > ORDINARY]
    notes = [
        f"- {line.label}{'' if line.form else ', refused'}: {'; '.join(line.notes)}." for line in lines if line.notes
    ]
    rest = "\n".join(notes)
    return f"""{HEAD}{table}
Numbers differ by {ORDINARY:.0e} of the largest at most. It is more where transformers computes a part in float32
itself, or its own cache of a recurrent state rounds more than a forward: {", ".join(beyond)}.

{rest}
"""


def main(arguments: Sequence[str]) -> int:
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    load_builtin_losses()
    names = list(arguments) or list(CONFIGURATIONS)
    counts: dict[str, int] = {}
    lines: list[Line] = []
    for name in names:
        result = check(name)
        counts[result.verdict] = counts.get(result.verdict, 0) + 1
        lines.append(line_of(name, result))
        print(name, result.verdict, *lines[-1], sep=", ", flush=True)
    print(counts)
    if not arguments:
        PAGE.write_text(page_of(lines))
    return int("wrong" in counts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
