"""Start SkyRL 0.3.0's Tinker server: ``python skyrl_server.py PORT CONFIG``, with an ``EngineConfig`` as JSON.

``python -m skyrl.tinker.api`` starts its engine by ``uv run`` with the flags of the ``uv run`` it must itself have been
started by. Here the same module is started by the interpreter of this environment; nothing else is changed.
"""

from __future__ import annotations

import sys

import uvicorn
from skyrl.tinker import api
from skyrl.tinker.config import EngineConfig, config_to_argv


def engine_command(parent_command: list[str], config: EngineConfig) -> list[str]:
    return [sys.executable, "-m", "skyrl.tinker.engine", *config_to_argv(config)]


if __name__ == "__main__":
    api._build_uv_run_cmd_engine = engine_command
    api.app.state.engine_config = EngineConfig.model_validate_json(sys.argv[2])
    uvicorn.run(api.app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
