"""From human ratings to a better policy: a reward model trained on ratings, then PPO against it.

All training runs on a gradwire server; without an address, an embedded one is started. Methods block, as those of
:mod:`gradwire.sync` do; those named ``..._async`` are the same on an event loop.
"""

from gradwire.rlhf.config import RewardModelConfig, TrainingConfig
from gradwire.rlhf.datasets import MIN_FEEDBACK, Feedback, FeedbackDataset, PPODataset
from gradwire.rlhf.results import CalibrationBin, RewardModelReport, TrainingProgress, TrainingResult
from gradwire.rlhf.reward_model import RewardModel, RewardModelDetails
from gradwire.rlhf.reward_training import train_reward_model, train_reward_model_async
from gradwire.rlhf.state import discard_training
from gradwire.rlhf.trainer import RLHFTrainer

__all__ = [
    "MIN_FEEDBACK",
    "CalibrationBin",
    "Feedback",
    "FeedbackDataset",
    "PPODataset",
    "RLHFTrainer",
    "RewardModel",
    "RewardModelConfig",
    "RewardModelDetails",
    "RewardModelReport",
    "TrainingConfig",
    "TrainingProgress",
    "TrainingResult",
    "discard_training",
    "train_reward_model",
    "train_reward_model_async",
]
