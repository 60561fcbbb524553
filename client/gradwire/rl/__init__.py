"""The RL toolkit: environments, rollouts, rewards and ready-made algorithms on top of a run.

The parts are loosely coupled and can be replaced one by one:

* ``environments``: interaction. ``inference``: text generation. ``rollouts``: many episodes at once.
* ``rewards``: scores after collection. ``advantages``, ``hicra``: credit assignment.
* ``algorithms``: PPO, GRPO, REINFORCE and GiGPO built from these parts.
* ``curricula``, ``replay``, ``recording``, ``viewer`` and ``gradwire.loop.loggers``: tools for long training runs.
"""

from gradwire.loop.loggers import (
    JsonlLogger,
    MlflowLogger,
    PrometheusLogger,
    TensorBoardLogger,
    TrackioLogger,
    WandbLogger,
)
from gradwire.rl.algorithms import (
    Algorithm,
    AlgorithmConfig,
    AlgorithmOptions,
    GiGPOAlgorithm,
    GiGPOOptions,
    GRPOAlgorithm,
    HICRAAlgorithm,
    PPOAlgorithm,
    REINFORCEAlgorithm,
    RolloutsFailedError,
)
from gradwire.rl.algorithms.gigpo import calculate_advantages
from gradwire.rl.curricula import Curriculum, ShuffledCurriculum, StagedCurriculum, SuccessCurriculum
from gradwire.rl.environments import (
    AgentEnvironment,
    AgentOptions,
    BaseEnvironment,
    ConversationEnvironment,
    EpisodeEnvironment,
    Exit,
    GroupBuilder,
    GymnasiumEnvironment,
    Policy,
    Program,
    SimpleTextEnvironment,
    StepResult,
    SVRLEnvironment,
    Tool,
    ToolEnvironment,
    VerifiersEnvironment,
    run_program,
)
from gradwire.rl.hicra import HICRACreditAssigner, build_hicra_from_dict
from gradwire.rl.inference import (
    InferenceModule,
    LocalInference,
    OpenAIInference,
    OpenAIOptions,
    RunInference,
    SamplingParams,
)
from gradwire.rl.mixture import Mixture, Part
from gradwire.rl.recording import RunRecorder, TrajectoryRecorder
from gradwire.rl.replay import ReplayBuffer
from gradwire.rl.rewards import (
    LengthPenalty,
    OverlongPenalty,
    ParetoRewardComputer,
    RewardComputer,
    RewardModel,
    Sandbox,
    SandboxLimits,
    SVRLRewardComputer,
    code_passes,
    environment_reward,
    json_schema,
    last_number,
    math_answer,
    multiple_choice,
    regex_match,
    reward_function,
)
from gradwire.rl.rewards.aligner import align_rewards_with_step_data
from gradwire.rl.rewards.functions import RewardSandbox
from gradwire.rl.rollout_statistics import Rollouts
from gradwire.rl.rollouts import RolloutManager, RolloutOptions
from gradwire.rl.strategic_grams import GramCluster, StrategicGrams, find_strategic_grams
from gradwire.rl.types import (
    Action,
    EvaluateResult,
    Message,
    Prompt,
    State,
    StepData,
    StepOutput,
    Task,
    ToolCall,
    ToolResult,
    Trajectory,
)
from gradwire.rl.worker import RLRolloutWorker

TaskDefinitionModel = Task
AgentPolicy = InferenceModule
OpenAIAgentPolicy = OpenAIInference

__all__ = [
    "Action",
    "AgentEnvironment",
    "AgentOptions",
    "AgentPolicy",
    "Algorithm",
    "AlgorithmConfig",
    "AlgorithmOptions",
    "BaseEnvironment",
    "ConversationEnvironment",
    "Curriculum",
    "EpisodeEnvironment",
    "EvaluateResult",
    "Exit",
    "GRPOAlgorithm",
    "GiGPOAlgorithm",
    "GiGPOOptions",
    "GramCluster",
    "GroupBuilder",
    "GymnasiumEnvironment",
    "HICRAAlgorithm",
    "HICRACreditAssigner",
    "InferenceModule",
    "JsonlLogger",
    "LengthPenalty",
    "LocalInference",
    "Message",
    "Mixture",
    "MlflowLogger",
    "OpenAIAgentPolicy",
    "OpenAIInference",
    "OpenAIOptions",
    "OverlongPenalty",
    "PPOAlgorithm",
    "ParetoRewardComputer",
    "Part",
    "Policy",
    "Program",
    "PrometheusLogger",
    "Prompt",
    "REINFORCEAlgorithm",
    "RLRolloutWorker",
    "ReplayBuffer",
    "RewardComputer",
    "RewardModel",
    "RewardSandbox",
    "RolloutManager",
    "RolloutOptions",
    "Rollouts",
    "RolloutsFailedError",
    "RunInference",
    "RunRecorder",
    "SVRLEnvironment",
    "SVRLRewardComputer",
    "SamplingParams",
    "Sandbox",
    "SandboxLimits",
    "ShuffledCurriculum",
    "SimpleTextEnvironment",
    "StagedCurriculum",
    "State",
    "StepData",
    "StepOutput",
    "StepResult",
    "StrategicGrams",
    "SuccessCurriculum",
    "Task",
    "TaskDefinitionModel",
    "TensorBoardLogger",
    "Tool",
    "ToolCall",
    "ToolEnvironment",
    "ToolResult",
    "TrackioLogger",
    "Trajectory",
    "TrajectoryRecorder",
    "VerifiersEnvironment",
    "WandbLogger",
    "align_rewards_with_step_data",
    "build_hicra_from_dict",
    "calculate_advantages",
    "code_passes",
    "environment_reward",
    "find_strategic_grams",
    "json_schema",
    "last_number",
    "math_answer",
    "multiple_choice",
    "regex_match",
    "reward_function",
    "run_program",
]
