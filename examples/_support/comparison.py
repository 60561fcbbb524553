"""Compare trainings: a table of held-out success over seeds, and the curves in one picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

Curve = list[tuple[int, float]]
"""Held-out success by iteration."""


@dataclass(frozen=True)
class Training:
    """One training: algorithm, task, seed, and its held-out success from the first iteration to the last."""

    algorithm: str
    task: str
    seed: int
    curve: Curve

    def __str__(self) -> str:
        return " ".join(f"{success:.2f}" for _, success in self.curve)

    @property
    def before(self) -> float:
        return self.curve[0][1]

    @property
    def after(self) -> float:
        return self.curve[-1][1]


def table(trainings: Sequence[Training]) -> str:
    """Build a Markdown table: one row per algorithm and task, with before → after of each seed and the mean."""
    seeds = sorted({each.seed for each in trainings})
    head = ["task", "algorithm", *(f"seed {seed}" for seed in seeds), "mean"]
    lines = [head, ["---"] * len(head)]
    for task, algorithm in dict.fromkeys((each.task, each.algorithm) for each in trainings):
        of = sorted(_of(trainings, task, algorithm), key=lambda each: each.seed)
        mean = f"**{fmean(each.before for each in of):.2f} → {fmean(each.after for each in of):.2f}**"
        lines.append([task, algorithm, *(f"{each.before:.2f} → {each.after:.2f}" for each in of), mean])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def means(trainings: Sequence[Training]) -> str:
    """Build a Markdown table of means over seeds: one row per task, with before → after of each algorithm."""
    algorithms = list(dict.fromkeys(each.algorithm for each in trainings))
    lines = [["task", *algorithms], ["---"] * (1 + len(algorithms))]
    for task in dict.fromkeys(each.task for each in trainings):
        of = [_of(trainings, task, algorithm) for algorithm in algorithms]
        cells = [f"{fmean(run.before for run in runs):.2f} → {fmean(run.after for run in runs):.2f}" for runs in of]
        lines.append([task, *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def draw(trainings: Sequence[Training], path: Path) -> None:
    """Draw one panel per task: each algorithm's mean over seeds, with the single seeds in the background."""
    import matplotlib
    from matplotlib.figure import Figure

    tasks = list(dict.fromkeys(each.task for each in trainings))
    figure = Figure(figsize=(4.6 * len(tasks), 3.4), layout="constrained")
    for axis, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks):
        for number, algorithm in enumerate(dict.fromkeys(each.algorithm for each in trainings)):
            curves = [each.curve for each in _of(trainings, task, algorithm)]
            for curve in curves:
                axis.plot(*zip(*curve), color=f"C{number}", alpha=0.25, linewidth=0.8)
            mean = [(points[0][0], fmean(success for _, success in points)) for points in zip(*curves)]
            axis.plot(*zip(*mean), color=f"C{number}", linewidth=1.8, label=algorithm)
        axis.set(title=task, xlabel="iteration", ylim=(0, 1))
        axis.grid(alpha=0.3)
    axis.legend(loc="lower right", fontsize=9)
    figure.axes[0].set_ylabel("held-out success")
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "gradwire"}):
        figure.savefig(path, metadata={"Date": None})


def _of(trainings: Sequence[Training], task: str, algorithm: str) -> list[Training]:
    return [each for each in trainings if (each.task, each.algorithm) == (task, algorithm)]
