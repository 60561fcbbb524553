"""Start SkyRL 0.3.0's Tinker server: ``python skyrl_server.py PORT CONFIG``, with an ``EngineConfig`` as JSON.

Two things differ from ``python -m skyrl.tinker.api``, which starts its engine by ``uv run`` with the flags of the
``uv run`` that it must itself have been started by. The engine is started by this file (``python skyrl_server.py engine
FLAGS``) with the interpreter of this environment. And ``typing.TypedDict`` is that of ``typing_extensions``: pydantic
refuses the other before Python 3.12, and SkyRL uses it.
"""

from __future__ import annotations

import sys
import typing

import typing_extensions

typing.TypedDict = typing_extensions.TypedDict  # before SkyRL is imported


def serve(port: int, config: str) -> None:
    import uvicorn
    from skyrl.tinker import api
    from skyrl.tinker.config import EngineConfig, config_to_argv

    def engine_command(parent_command: list[str], config: EngineConfig) -> list[str]:
        return [sys.executable, __file__, "engine", *config_to_argv(config)]

    api._build_uv_run_cmd_engine = engine_command
    api.app.state.engine_config = EngineConfig.model_validate_json(config)
    uvicorn.run(api.app, host="127.0.0.1", port=port, log_level="warning")


def run_engine() -> None:
    from skyrl.tinker.engine import main

    del sys.argv[1]
    main()


if __name__ == "__main__":
    if sys.argv[1] == "engine":
        run_engine()
    else:
        serve(int(sys.argv[1]), sys.argv[2])
