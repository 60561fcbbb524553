"""What every process of an engine sets up before it computes."""

from __future__ import annotations

import logging
import os
import signal
import warnings

import torch
from gradwire_losses.registry import load_builtin_losses, load_plugin_losses

from gradwire_server.config import EngineSettings
from gradwire_server.engine.machine import Share
from gradwire_server.engine.process.idle_threads import IdleThreads
from gradwire_server.engine.process.settings_check import check_settings
from gradwire_server.observability import logs

logger = logging.getLogger(__name__)


def set_up(settings: EngineSettings, name: str, share: Share) -> None:
    """Set up logs, signals and threads.

    Args:
        name: The process's in the log.
        share: The engine's share of the machine.
    """
    logs.configure(settings.log_level, settings.log_format, name)
    # peft asks transformers by a name that transformers has renamed.
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the front shuts us down in order
    # Also where nobody says how many: once torch has been told, MKL no longer takes fewer as it likes.
    threads = settings.threads or max(1, torch.get_num_threads() // share.engines)
    torch.set_num_threads(threads)
    if threads > 1 and os.environ.get("OMP_WAIT_POLICY") == "PASSIVE":
        try:
            IdleThreads(threads).watch()
        except OSError as error:
            logger.info("idle threads wait in one way, whatever else the machine does: %s", error)


def load_losses(settings: EngineSettings) -> None:
    """Register all losses, and check what only a process with torch can check.

    Raises:
        OperationError: A setting is wrong; it names the flag.
    """
    load_builtin_losses()
    load_plugin_losses()
    check_settings(settings)
