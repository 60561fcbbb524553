"""Promotion: replace the production policy by a candidate, only on request and only if it is better."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

from gradwire.router.evaluation import HeldOut
from gradwire.router.policy import LinearPolicy
from gradwire.whole_files import whole_file

PREVIOUS = ".previous"


class NotBetterError(ValueError):
    """The candidate is not better than the policy that it would replace."""


@dataclass(frozen=True)
class Promotion:
    """The result of a promotion.

    Attributes:
        candidate_reward, reward_to_beat: Mean rewards on the same held-out requests.
        beaten: The source of ``reward_to_beat``: the policy in place, or the best single mode if there is none.
        previous: Path of the replaced policy; None if there was none.
    """

    candidate_reward: float
    reward_to_beat: float
    beaten: str
    previous: Path | None


def promote(candidate: Path | str, target: Path | str, held_out: HeldOut, *, force: bool = False) -> Promotion:
    """Copy the candidate's file to the path that production reads.

    The policy in place is kept beside it as ``NAME.previous``; ``NAME.json`` records the promotion.

    Args:
        candidate: A policy file from a training.
        target: The file that production reads.
        held_out: Requests that decide.
        force: Promote a candidate that is not better.

    Raises:
        FileNotFoundError, ValueError: The candidate, or the file at the target, is not a policy.
        NotBetterError: The candidate earns no more than the policy in place, or than the best single mode.
    """
    candidate, target = Path(candidate), Path(target)
    policy = LinearPolicy.load(candidate)
    in_place = LinearPolicy.load(target) if target.exists() else None
    ours = held_out.mean_reward(policy)
    if in_place is not None:
        beaten, to_beat = f"the policy at {target}", held_out.mean_reward(in_place)
    else:
        beaten, to_beat = "the best single mode", float(held_out.tables["reward"].mean(0).max())
    if ours <= to_beat and not force:
        raise NotBetterError(
            f"{candidate} earns {ours:.4f} on held-out requests, {beaten} {to_beat:.4f}: nothing was promoted. "
            "To promote it anyway, use --force"
        )
    previous = target.with_name(target.name + PREVIOUS) if in_place is not None else None
    if in_place is not None and previous is not None:
        in_place.save(previous)
    policy.save(target)
    record = {
        "candidate": str(candidate),
        "candidate_reward": ours,
        "beaten": beaten,
        "reward_to_beat": to_beat,
        "forced": force and ours <= to_beat,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    with whole_file(target.with_name(target.name + ".json")) as file:
        file.write((json.dumps(record, indent=1) + "\n").encode())
    return Promotion(ours, to_beat, beaten, previous)
