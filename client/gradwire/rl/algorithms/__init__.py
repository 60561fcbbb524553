"""Ready-made algorithms: they train a run on tasks with a reward."""

from gradwire.rl.algorithms.base import Algorithm, AlgorithmOptions
from gradwire.rl.algorithms.config import AlgorithmConfig
from gradwire.rl.algorithms.gigpo import GiGPOAlgorithm, GiGPOCredit, GiGPOOptions, gigpo_credit
from gradwire.rl.algorithms.grpo import GRPOAlgorithm
from gradwire.rl.algorithms.hicra import HICRAAlgorithm
from gradwire.rl.algorithms.ppo import PPOAlgorithm
from gradwire.rl.algorithms.reinforce import REINFORCEAlgorithm
from gradwire.rl.algorithms.reporting import RolloutsFailedError

__all__ = [
    "Algorithm",
    "AlgorithmConfig",
    "AlgorithmOptions",
    "GRPOAlgorithm",
    "GiGPOAlgorithm",
    "GiGPOCredit",
    "GiGPOOptions",
    "HICRAAlgorithm",
    "PPOAlgorithm",
    "REINFORCEAlgorithm",
    "RolloutsFailedError",
    "gigpo_credit",
]
