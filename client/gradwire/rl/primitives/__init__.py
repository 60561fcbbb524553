"""The toolkit for plain scripts: the same parts without ``await``, under the names of docs/rl_primitives.md.

Calls block while the asynchronous parts of :mod:`gradwire.rl` run in their own thread.
``python -m gradwire.rl.primitives.environment`` and ``…inference`` are demonstrations.
"""

from gradwire.rl.primitives.algorithms import AlgorithmConfig, GRPOAlgorithm, PPOAlgorithm, REINFORCEAlgorithm
from gradwire.rl.primitives.backprop import BackpropConfig, BackpropModule, PPOLoss
from gradwire.rl.primitives.environments import (
    BaseEnvironment,
    ConversationEnvironment,
    SimpleTextEnvironment,
    State,
    SVRLEnvironment,
)
from gradwire.rl.primitives.inference_module import GeneratedText, HuggingFaceBackend, InferenceModule, VLLMBackend
from gradwire.rl.primitives.rewards import ParetoRewardComputer, SVRLRewardComputer
from gradwire.rl.primitives.rollouts import RolloutConfig, RolloutManager
from gradwire.rl.primitives.tools import register_tool
from gradwire.rl.types import Trajectory

__all__ = [
    "AlgorithmConfig",
    "BackpropConfig",
    "BackpropModule",
    "BaseEnvironment",
    "ConversationEnvironment",
    "GRPOAlgorithm",
    "GeneratedText",
    "HuggingFaceBackend",
    "InferenceModule",
    "PPOAlgorithm",
    "PPOLoss",
    "ParetoRewardComputer",
    "REINFORCEAlgorithm",
    "RolloutConfig",
    "RolloutManager",
    "SVRLEnvironment",
    "SVRLRewardComputer",
    "SimpleTextEnvironment",
    "State",
    "Trajectory",
    "VLLMBackend",
    "register_tool",
]
