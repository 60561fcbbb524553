"""Environments: interaction only. Rewards are computed afterwards by ``gradwire.rl.rewards``."""

from gradwire.rl.environments.agents import AgentEnvironment, AgentOptions
from gradwire.rl.environments.base import (
    BaseEnvironment,
    Environment,
    EpisodeEnvironment,
    Policy,
    StepResult,
    first_messages,
)
from gradwire.rl.environments.conversation import ConversationEnvironment
from gradwire.rl.environments.groups import GroupBuilder
from gradwire.rl.environments.gymnasium import GymnasiumEnvironment
from gradwire.rl.environments.programs import Exit, Program, run_program
from gradwire.rl.environments.svrl import SVRLEnvironment
from gradwire.rl.environments.text import SimpleTextEnvironment
from gradwire.rl.environments.tools import Tool, Toolbox, ToolEnvironment, parse_tool_calls
from gradwire.rl.environments.verifiers import VerifiersEnvironment, verifiers_tasks

__all__ = [
    "AgentEnvironment",
    "AgentOptions",
    "BaseEnvironment",
    "ConversationEnvironment",
    "Environment",
    "EpisodeEnvironment",
    "Exit",
    "GroupBuilder",
    "GymnasiumEnvironment",
    "Policy",
    "Program",
    "SVRLEnvironment",
    "SimpleTextEnvironment",
    "StepResult",
    "Tool",
    "ToolEnvironment",
    "Toolbox",
    "VerifiersEnvironment",
    "first_messages",
    "parse_tool_calls",
    "run_program",
    "verifiers_tasks",
]
