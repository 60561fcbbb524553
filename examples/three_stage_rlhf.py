"""SFT, a reward model, then PPO against that reward model with KL to the SFT policy, all through a gradwire server.

With no arguments it needs nothing: it makes a small Llama and starts a server on loopback, and teaches it to add
numbers of three digits from demonstrations by careless pupils, who slip at three carries in ten.

1. SFT imitates the pupils, slips included.
2. The reward model learns from pairs of the SFT policy's own answers, one right and one wrong.
3. PPO makes the policy prefer what the reward model prefers, and so unlearns the slips.

With real models and data:

    python examples/three_stage_rlhf.py --model Qwen/Qwen3-0.6B --lora-rank 32 \\
        --sft-data train.jsonl --preference-data preferences.jsonl --prompt-data test.jsonl

The files are JSONL: `question` and `answer` (SFT, prompts; the answer ends in a number), `prompt`, `chosen` and
`rejected` (preferences). Without `--model`, a model of a few million parameters is made, with a tokenizer trained on
those files. `--address` uses a server that runs already; `--model` is then a name that it holds.

Ends with 1 if a stage did not improve its held-out figure.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gradwire
import numpy as np
from _support.answers import Row, accuracy, compared, rollout_rows, row, said, sample
from _support.rates import rate_text, schedule
from _support.report import Report
from _support.small_model import small_model
from _support.tasks import ARITHMETIC_CHARACTERS, Preference, Problem, Task, arithmetic, from_files, spoiled

AHEAD = 4  # steps submitted before the oldest one's result is waited for
SHARE_OF_ANSWERS = "share of answers, sampled at temperature 1"
REWARD_UNIT = "standard deviations of the SFT policy's reward, clipped to -1 and 1"
UNITS = {
    "loss": "nats per token", "token_accuracy": "share of tokens", "grad_norm": "before clipping",
    "preference_accuracy": "share of pairs", "reward_margin": "reward of the right answer less that of the wrong one",
    "reward": REWARD_UNIT, "accuracy": SHARE_OF_ANSWERS, "policy_loss": "clipped surrogate, per token",
    "value_loss": "half the squared error, per token", "kl_per_token": "nats per token, to the SFT policy",
    "clip_fraction": "share of tokens",
}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """Sizes and rates; one set for the arithmetic, one for files."""

    sft_steps: int
    sft_rows: int
    sft_learning_rate: float
    practice_prompts: int  # on which the SFT policy answers, to be compared
    practice_answers: int  # to each of them
    reward_steps: int
    reward_pairs: int
    reward_learning_rate: float
    ppo_steps: int
    ppo_prompts: int
    ppo_epochs: int
    ppo_minibatches: int
    ppo_learning_rate: float
    kl_coef: float
    max_tokens: int


ARITHMETIC = Settings(
    sft_steps=400, sft_rows=64, sft_learning_rate=3e-3,
    practice_prompts=768, practice_answers=4, reward_steps=160, reward_pairs=32, reward_learning_rate=5e-4,
    ppo_steps=14, ppo_prompts=256, ppo_epochs=2, ppo_minibatches=4, ppo_learning_rate=1e-4, kl_coef=0.2,
    max_tokens=40,
)  # fmt: skip
FILES = Settings(
    sft_steps=300, sft_rows=16, sft_learning_rate=1e-3,
    practice_prompts=256, practice_answers=4, reward_steps=150, reward_pairs=8, reward_learning_rate=2e-4,
    ppo_steps=16, ppo_prompts=48, ppo_epochs=2, ppo_minibatches=2, ppo_learning_rate=5e-5, kl_coef=0.2,
    max_tokens=128,
)  # fmt: skip


async def three_stages(
    service: gradwire.ServiceClient, model: gradwire.ModelInfo, task: Task, settings: Settings, report: Report,
    args: argparse.Namespace,
) -> None:  # fmt: skip
    rng = random.Random(args.seed)
    end = model.eos_token_ids[0]

    async def encoded(texts: Sequence[str], special: bool) -> list[list[int]]:
        parts = [texts[start : start + 2048] for start in range(0, len(texts), 2048)]
        ids = [await service.encode(model.name, part, add_special_tokens=special) for part in parts]
        return [list(map(int, row)) for part in ids for row in part]

    async def prompts_of(items: Sequence[Problem | Preference]) -> list[list[int]]:
        return await encoded([item.prompt for item in items], True)

    async def endings(texts: Sequence[str]) -> list[list[int]]:
        return [[*ids, end] for ids in await encoded(texts, False)]

    async def demonstration_rows(items: Sequence[Problem]) -> list[Row]:
        answers = await endings([item.answer for item in items])
        rows = [row(prompt, answer) for prompt, answer in zip(await prompts_of(items), answers)]
        return [each for each in rows if len(each["input_ids"]) <= model.context_length]

    held_out, held_out_prompts = task.held_out, await prompts_of(task.held_out)

    # ------------------------------------------------------------ 1. SFT
    demonstrations = await demonstration_rows(task.demonstrations)
    unseen = await demonstration_rows(task.held_out_demonstrations)
    sft = await service.create_run(model.name, lora=args.lora_rank or None, seed=args.seed, name="SFT")
    report.describe(
        "SFT", starts_from=f"{model.name}, {trained_weights(model, args)}",
        trained_on=f"{len(demonstrations):,} demonstrations, their answers' tokens alone: {task.source}",
        steps=f"{settings.sft_steps} of {settings.sft_rows} demonstrations", loss="causal_lm",
        learning_rate=rate_text(settings.sft_learning_rate), optimizer="AdamW",
        held_out=f"{len(unseen):,} demonstrations for the loss, {len(held_out):,} prompts for the accuracy",
    )  # fmt: skip
    loss_before = (await sft.forward(unseen, "causal_lm", outputs=()))["loss"]
    answers_before = await sample(sft, held_out_prompts, settings.max_tokens)
    await train(
        report, "SFT", sft, batches(demonstrations, settings.sft_rows, rng), "causal_lm", settings.sft_steps,
        settings.sft_learning_rate, ("loss", "token_accuracy"),
    )  # fmt: skip
    sft_checkpoint = await sft.save_checkpoint("sft")
    loss_after = (await sft.forward(unseen, "causal_lm", outputs=()))["loss"]
    answers_after = await sample(sft, held_out_prompts, settings.max_tokens)
    report.figure("SFT", "loss", UNITS["loss"], loss_before, loss_after, "down")
    accuracy_before, accuracy_after = accuracy(held_out, answers_before), accuracy(held_out, answers_after)
    report.figure("SFT", "answer accuracy", SHARE_OF_ANSWERS, accuracy_before, accuracy_after, args.accuracy_aim)

    # ------------------------------------------------------------ 2. the reward model
    if task.preferences:
        pairs, unseen_pairs = task.preferences, task.held_out_preferences
    else:
        practised = task.prompts[: settings.practice_prompts]
        practice = await sample(sft, await prompts_of(practised), settings.max_tokens, n=settings.practice_answers)
        tests = await sample(sft, held_out_prompts, settings.max_tokens, n=settings.practice_answers)
        pairs, unseen_pairs = compared(practised, practice), compared(held_out, tests)
        pairs += [Preference(p, chosen, bad) for p, chosen, _ in pairs if (bad := spoiled(chosen, rng)) != chosen]

    async def pair_rows(items: Sequence[Preference]) -> list[Row]:
        prompts = await prompts_of(items)
        chosen, rejected = await endings([item.chosen for item in items]), await endings([i.rejected for i in items])
        return [
            {"chosen_input_ids": prompt + right, "rejected_input_ids": prompt + wrong}
            for prompt, right, wrong in zip(prompts, chosen, rejected)
            if len(prompt) + max(len(right), len(wrong)) <= model.context_length
        ]

    train_pairs, test_pairs = await pair_rows(pairs), await pair_rows(unseen_pairs)
    report.describe(
        "reward model", starts_from=f"the SFT policy with a fresh reward head, {trained_weights(model, args)}",
        trained_on=f"{len(train_pairs):,} pairs of a better and a worse answer: {task.preference_source}",
        steps=f"{settings.reward_steps} of {settings.reward_pairs} pairs", loss="reward_modeling",
        learning_rate=rate_text(settings.reward_learning_rate), optimizer="AdamW",
        held_out=f"{len(test_pairs):,} pairs on prompts that are not trained on",
    )  # fmt: skip
    judge = await service.fork_run(sft_checkpoint, head="reward", seed=args.seed, name="reward model")
    preferences_before = (await judge.forward(test_pairs, "reward_modeling", outputs=()))["preference_accuracy"]
    await train(
        report, "reward model", judge, batches(train_pairs, settings.reward_pairs, rng), "reward_modeling",
        settings.reward_steps, settings.reward_learning_rate, ("loss", "preference_accuracy", "reward_margin"),
    )  # fmt: skip
    await judge.save_checkpoint("reward-model")
    preferences_after = (await judge.forward(test_pairs, "reward_modeling", outputs=()))["preference_accuracy"]
    share = UNITS["preference_accuracy"]
    report.figure("reward model", "preference accuracy", share, preferences_before, preferences_after, "up")

    # ------------------------------------------------------------ 3. PPO
    policy = await service.fork_run(sft_checkpoint, head="value", seed=args.seed, name="PPO")
    reference = sft_checkpoint.path
    sft_rewards = await judge.compute_rewards(rollout_rows(held_out_prompts, answers_after))
    centre, scale = float(np.mean(sft_rewards)), float(np.std(sft_rewards)) + 1e-6

    def shaped(rewards: np.ndarray, rows: Sequence[Row]) -> np.ndarray:
        """Reward in units of the SFT policy's spread, clipped to its range: beyond it, a reward model can be
        exploited."""
        inside = np.clip((np.asarray(rewards) - centre) / scale, -1.0, 1.0)
        return np.where([each["input_ids"][-1] == end for each in rows], inside, -1.0)  # an answer has to end

    async def held_out_figures() -> tuple[dict[str, float], list[list[gradwire.Sample]]]:
        """Mean reward, accuracy and KL to the SFT policy (nats) on fresh answers, and these answers."""
        answers = await sample(policy, held_out_prompts, settings.max_tokens)
        rows = rollout_rows(held_out_prompts, answers)
        scored = [{"input_ids": each["input_ids"], "loss_mask": each["loss_mask"]} for each in rows]
        rewards, own, theirs = await gradwire.gather(
            judge.compute_rewards([{"input_ids": each["input_ids"]} for each in rows]),
            policy.compute_logprobs(scored),
            policy.compute_logprobs(scored, model=reference),
        )
        kl = [float(np.sum(p) - np.sum(q)) for p, q in zip(own, theirs)]
        figures = {
            "reward": float(np.mean(shaped(rewards, rows))),
            "accuracy": accuracy(held_out, answers),
            "kl_per_answer": float(np.mean(kl)),
            "kl_per_token": sum(kl) / sum(map(len, own)),
        }
        return figures, answers

    before, _ = await held_out_figures()
    loss_kwargs = {
        "reference_model": reference, "beta": settings.kl_coef, "gamma": 1.0, "entropy_coef": 0.0,
        "whiten_advantages": True,
    }  # fmt: skip
    prompts = await prompts_of(task.prompts)
    rounds = batches(list(zip(task.prompts, prompts)), settings.ppo_prompts, rng)
    rates = schedule(settings.ppo_learning_rate, settings.ppo_steps, warmup=0)
    arguments_shown = ", ".join(f"{name} {value}" for name, value in loss_kwargs.items() if name != "reference_model")
    report.describe(
        "PPO", starts_from=f"the SFT policy with a fresh value head, {trained_weights(model, args)}",
        trained_on=f"its own answers to {len(prompts):,} prompts, scored by the reward model: {task.prompt_source}",
        steps=f"{settings.ppo_steps} of {settings.ppo_prompts} answers, each used in {settings.ppo_epochs} epochs of "
        f"{settings.ppo_minibatches} minibatches",
        loss=f"enhanced_ppo with the SFT policy as reference, {arguments_shown}",
        learning_rate=rate_text(settings.ppo_learning_rate, warmup=0), optimizer="AdamW",
        sampling=f"temperature 1, at most {settings.max_tokens} tokens; an answer that does not end has reward -1",
        held_out=f"{len(held_out):,} prompts",
    )  # fmt: skip
    shown = ("reward", "accuracy", "policy_loss", "value_loss", "kl_per_token", "clip_fraction")
    with report.progress("PPO", settings.ppo_steps, {name: UNITS[name] for name in shown}) as show:
        for practised, learning_rate in zip(rounds, rates):
            answers = await sample(policy, [ids for _, ids in practised], settings.max_tokens)
            rows = rollout_rows([ids for _, ids in practised], answers)
            scores, rewards = await gradwire.gather(
                policy.forward(rows, outputs=("logprobs", "values")),
                judge.compute_rewards([{"input_ids": each["input_ids"]} for each in rows]),
            )
            rewards = shaped(rewards, rows)
            for index, each in enumerate(rows):
                each["old_log_probs"] = scores.outputs["logprobs"][index]
                each["old_values"] = scores.outputs["values"][index]
                each["rewards"] = float(rewards[index])
            calls, size = [], math.ceil(len(rows) / settings.ppo_minibatches)
            for _ in range(settings.ppo_epochs):
                rng.shuffle(rows)
                for start in range(0, len(rows), size):
                    calls.append(policy.forward_backward(rows[start : start + size], "enhanced_ppo", loss_kwargs))
                    policy.optim_step(learning_rate=learning_rate)
            results = await gradwire.gather(*calls)
            figures = {
                name: float(np.mean([result[name] for result in results]))
                for name in ("policy_loss", "value_loss", "kl_divergence", "clip_fraction")
            }
            right = accuracy([problem for problem, _ in practised], answers)
            figures["kl_per_token"] = figures.pop("kl_divergence")
            show({"reward": float(np.mean(rewards)), "accuracy": right, **figures})
    await policy.save_checkpoint("ppo")
    after, answers_at_last = await held_out_figures()
    report.figure("PPO", "mean reward", REWARD_UNIT, before["reward"], after["reward"], "up")
    right_before, right_after = before["accuracy"], after["accuracy"]
    report.figure("PPO", "answer accuracy", SHARE_OF_ANSWERS, right_before, right_after, args.accuracy_aim)
    for unit in ("answer", "token"):
        kl_before, kl_after = before[f"kl_per_{unit}"], after[f"kl_per_{unit}"]
        report.figure("PPO", "KL to the SFT policy", f"nats per {unit}", kl_before, kl_after)
    report.note(
        "Held-out answers: what was asked, SFT, PPO",
        "\n".join(
            f"{problem.prompt.strip()}\n  SFT  {said(problem, old)}\n  PPO  {said(problem, new)}"
            for problem, (old,), (new,) in list(zip(held_out, answers_after, answers_at_last))[:12]
        ),
    )


# ---------------------------------------------------------------- helpers of all stages


async def train(
    report: Report, stage: str, run: gradwire.TrainingClient, data: Iterator[list[Row]], loss_fn: str, steps: int,
    learning_rate: float, shown: Sequence[str],
) -> None:  # fmt: skip
    """Train on batch after batch, with a few steps in flight at any time."""
    waiting: deque[tuple[gradwire.Future[gradwire.LossResult], gradwire.Future[gradwire.OptimStepResult]]] = deque()
    with report.progress(stage, steps, {name: UNITS[name] for name in (*shown, "grad_norm")}) as show:

        async def settle() -> None:
            result, step = waiting.popleft()
            show({name: (await result)[name] for name in shown} | {"grad_norm": (await step).grad_norm})

        for batch, rate in zip(data, schedule(learning_rate, steps)):
            waiting.append((run.forward_backward(batch, loss_fn), run.optim_step(learning_rate=rate)))
            if len(waiting) > AHEAD:
                await settle()
        while waiting:
            await settle()


def trained_weights(model: gradwire.ModelInfo, args: argparse.Namespace) -> str:
    return f"LoRA of rank {args.lora_rank}" if args.lora_rank else f"all {model.num_parameters:,} weights trained"


def batches(items: Sequence[Any], size: int, rng: random.Random) -> Iterator[list[Any]]:
    """Yield batches without end, shuffled anew in each epoch."""
    size = min(size, len(items))
    while True:
        shuffled = rng.sample(list(items), len(items))
        for start in range(0, len(items) - size + 1, size):
            yield shuffled[start : start + size]


async def model_info(service: gradwire.ServiceClient, name: str | None) -> gradwire.ModelInfo:
    """Return the model of this name; for None the server's first model."""
    models = {model.name: model for model in await service.list_models()}
    if name is not None and name not in models:
        raise SystemExit(f"the server has no model {name!r}; it has {', '.join(models)}")
    return models[name] if name is not None else next(iter(models.values()))


# ---------------------------------------------------------------- the command


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    summary, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="Hugging Face name or folder; with --address, a model that the server holds")
    parser.add_argument("--model-size", default="192x6", help="of a model that is made: hidden size x layers (192x6)")
    parser.add_argument("--sft-data", type=Path)
    parser.add_argument("--preference-data", type=Path)
    parser.add_argument("--prompt-data", type=Path)
    parser.add_argument("--address", help="HOST:PORT of a running server; none: one is started")
    parser.add_argument("--api-key")
    parser.add_argument("--lora-rank", type=int, default=0, help="0 trains all weights")
    parser.add_argument("--out", type=Path, default=Path("out/three_stage_rlhf"), help="folder of the report")
    parser.add_argument("--seed", type=int, default=0)
    for name in ("sft_steps", "sft_rows", "reward_steps", "practice_prompts", "ppo_steps", "ppo_prompts", "max_tokens"):
        parser.add_argument("--" + name.replace("_", "-"), type=int)
    for name in ("sft_learning_rate", "reward_learning_rate", "ppo_learning_rate", "kl_coef"):
        parser.add_argument("--" + name.replace("_", "-"), type=float)
    args = parser.parse_args(argv)
    files = [args.sft_data, args.preference_data, args.prompt_data]
    if any(files) and not all(files):
        parser.error("give --sft-data, --preference-data and --prompt-data together")
    if args.address and not args.model:
        parser.error("with --address, name the model: --model")
    return args


def make_model(args: argparse.Namespace, task: Task) -> Path:
    if not args.sft_data:
        return small_model(args.out / "model", characters=ARITHMETIC_CHARACTERS, context_length=64, seed=args.seed)
    hidden, layers = map(int, args.model_size.split("x"))
    texts = [text for problem in task.demonstrations for text in (problem.prompt, problem.answer)]
    return small_model(
        args.out / "model", texts=texts, hidden_size=hidden, num_layers=layers, context_length=512, seed=args.seed
    )


async def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    settings = FILES if args.sft_data else ARITHMETIC
    settings = replace(settings, **{name: given for name in vars(settings) if (given := getattr(args, name, None))})
    if args.sft_data:
        task = from_files(args.sft_data, args.preference_data, args.prompt_data, args.seed)
    else:
        task = arithmetic(args.seed, demonstrations=settings.sft_steps * settings.sft_rows)
    args.accuracy_aim = "" if args.sft_data else "up"  # on real data a small model's accuracy is only watched
    report = Report(args.out, "Three stages of RLHF")
    model = args.model or f"small={make_model(args, task)}"
    async with gradwire.connect(args.address, api_key=args.api_key, models=() if args.address else (model,)) as service:
        info = await model_info(service, args.model if args.address else None)
        device = (await service.server_info()).device
        report.describe(
            "Model", model=f"{info.name}, {info.architecture} of {info.num_parameters:,} parameters in {info.dtype}",
            context=f"{info.context_length} tokens, vocabulary of {info.vocab_size:,}",
            device=device, seed=str(args.seed), gradwire=gradwire.__version__,
        )  # fmt: skip
        report.console.print(
            f"{info.name}: {info.num_parameters:,} parameters, on {device}; "
            f"{len(task.demonstrations):,} demonstrations, {len(task.held_out):,} held-out prompts"
        )
        await three_stages(service, info, task, settings, report, args)
    report.console.print(report.table())
    report.console.print(f"report: {report.write()}", soft_wrap=True)
    for figure in report.not_improved():
        report.console.print(f"[red]{figure.stage}: {figure.name} ({figure.unit}) did not improve", soft_wrap=True)
    return 1 if report.not_improved() else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
