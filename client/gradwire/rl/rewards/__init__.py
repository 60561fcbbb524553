"""Rewards: computed after collection, by rules, functions, models or the environment."""

from gradwire.rl.rewards._sandbox.program import IsolationError, PolicyProgram, ProgramError
from gradwire.rl.rewards.aligner import StepAlignmentError, align, align_batch
from gradwire.rl.rewards.answers import find_choice, math_answer, multiple_choice
from gradwire.rl.rewards.computer import (
    ParetoRewardComputer,
    Reward,
    RewardComputer,
    RewardReport,
    SVRLRewardComputer,
    as_computer,
    crowding_distances,
    normalised_ranks,
    pareto_fronts,
)
from gradwire.rl.rewards.functions import RewardFunction, Scorer, reward_function
from gradwire.rl.rewards.length import LengthPenalty, OverlongPenalty
from gradwire.rl.rewards.model import EnvironmentReward, RewardModel, environment_reward
from gradwire.rl.rewards.portable import NotPortableError
from gradwire.rl.rewards.sandbox import Outcome, Sandbox, SandboxLimits
from gradwire.rl.rewards.verifiable import code_passes, find_last_number, json_schema, last_number, regex_match
from gradwire.rl.rewards.weighted import WeightedReward

__all__ = [
    "EnvironmentReward",
    "IsolationError",
    "LengthPenalty",
    "NotPortableError",
    "Outcome",
    "OverlongPenalty",
    "ParetoRewardComputer",
    "PolicyProgram",
    "ProgramError",
    "Reward",
    "RewardComputer",
    "RewardFunction",
    "RewardModel",
    "RewardReport",
    "SVRLRewardComputer",
    "Sandbox",
    "SandboxLimits",
    "Scorer",
    "StepAlignmentError",
    "WeightedReward",
    "align",
    "align_batch",
    "as_computer",
    "code_passes",
    "crowding_distances",
    "environment_reward",
    "find_choice",
    "find_last_number",
    "json_schema",
    "last_number",
    "math_answer",
    "multiple_choice",
    "normalised_ranks",
    "pareto_fronts",
    "regex_match",
    "reward_function",
]
