"""What the engine's heartbeat says of a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from gradwire_server.config import EngineSettings
from gradwire_server.engine.process.engine import Engine
from gradwire_server.engine.process.heartbeat import Heartbeat

pytestmark = pytest.mark.gpu


def test_the_heartbeat_reports_the_memory_of_the_device(tiny_model_path: Path, tmp_path: Path) -> None:
    import torch

    engine = Engine(EngineSettings(models={"tiny": str(tiny_model_path)}, state_dir=tmp_path, device="cuda"))
    beat = Heartbeat(engine, lambda reply: None)
    before = beat.report().device
    kept = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
    after = beat.report().device
    assert after.allocated_bytes - before.allocated_bytes == kept.nbytes
    assert after.peak_bytes >= after.allocated_bytes
    assert after.allocated_bytes <= after.used_bytes <= after.total_bytes
    assert after.total_bytes == torch.cuda.get_device_properties(0).total_memory
    if after.HasField("utilization"):
        assert 0 <= after.utilization <= 1
