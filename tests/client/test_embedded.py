"""A server of one's own: started with the service, ended with it, and heard when it does not start."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import gradwire
import pytest

pytestmark = pytest.mark.long


async def test_what_it_wrote_is_shown_when_it_does_not_start() -> None:
    with pytest.raises(gradwire.ServerStartError, match="no-such-flag") as caught:
        await gradwire.connect(models=["tiny"], server_args=["--no-such-flag"])
    assert "ended with exit code 2" in str(caught.value)


async def test_broken_weights_are_the_reason_in_one_sentence(tiny_model_path: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model_path, tmp_path / "broken")
    (tmp_path / "broken" / "model.safetensors").unlink()
    with pytest.raises(
        gradwire.ServerStartError, match=r"'broken' cannot be loaded .* no file named model.safetensors"
    ):
        await gradwire.connect(models=[str(tmp_path / "broken")])


async def test_a_service_of_ones_own(tiny_model_path: Path) -> None:
    async with gradwire.connect(models=[f"tiny={tiny_model_path}"], api_key="mine") as service:
        assert service.api_key == "mine"
        run = await service.create_run("tiny", lora=2)
        fb, step = run.forward_backward({"input_ids": [[4, 5, 6]]}, "causal_lm"), run.optim_step()
        assert (await fb).num_loss_tokens == 2
        assert (await step).step == 1
        embedded = service._embedded
        assert embedded is not None
        process, folder = embedded._process, embedded._folder.name
        assert process.poll() is None and os.path.exists(folder)  # noqa: ASYNC240
    assert process.poll() == 0
    assert not os.path.exists(folder)  # noqa: ASYNC240


INTERRUPTED = """
import signal
import sys
import gradwire

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell begins with it ignored
with gradwire.sync.connect(models=[sys.argv[1]]) as service:
    run = service.create_run("tiny", lora=2)
    try:
        while True:
            step = run.forward_backward({"input_ids": [[4, 5, 6]]}, "causal_lm")
            print(step.result().loss, flush=True)
    except KeyboardInterrupt:
        print("saved", run.save_checkpoint("interrupted").result().name)
"""


def test_ctrl_c_is_the_programs_which_may_still_save(tiny_model_path: Path) -> None:
    command = [sys.executable, "-c", INTERRUPTED, f"tiny={tiny_model_path}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as program:
        assert program.stdout is not None
        program.stdout.readline()
        os.killpg(program.pid, signal.SIGINT)  # as a terminal does, and a notebook's kernel
        said, _ = program.communicate()
    assert said.splitlines()[-1] == "saved interrupted"
    assert program.returncode == 0


@pytest.mark.slow
def test_it_ends_with_a_script_that_does_not_close_it(tiny_model_path: Path) -> None:
    code = (
        "import sys, gradwire; service = gradwire.sync.connect(models=[sys.argv[1]])\n"
        "service.create_run('tiny', lora=2).forward(dict(input_ids=[[4, 5]]))\n"
        "print(service._client._embedded._process.pid)"
    )
    command = [sys.executable, "-c", code, f"tiny={tiny_model_path}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert not Path(f"/proc/{done.stdout.strip()}").exists()


async def test_its_death_is_not_waited_out(tiny_model_path: Path) -> None:
    async with gradwire.connect(models=[f"tiny={tiny_model_path}"]) as service:
        run = await service.create_run("tiny", lora=2)
        assert service._embedded is not None
        os.kill(service._embedded._process.pid, signal.SIGKILL)
        with pytest.raises(gradwire.ConnectionLostError, match="embedded server ended with exit code -9"):
            await run.optim_step()


async def test_nobody_else_on_the_machine_gets_in(
    tiny_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADWIRE_API_KEY", "of-another-server")
    async with gradwire.connect(models={"tiny": tiny_model_path}, state_dir=tmp_path / "state") as service:
        run = await service.create_run("tiny", lora=2)
        for key in (None, "a-guess"):
            with pytest.raises(gradwire.UnauthenticatedError):
                await gradwire.connect(service.address, api_key=key)
        assert (await run.save_checkpoint("mine")).name == "mine"
        loaded = await run.load_checkpoint("mine")
        assert (loaded.name, loaded.path) == ("mine", f"{run.run_id}/mine")
        assert service._embedded is not None
        async with gradwire.connect(service.address, api_key=service._embedded.key) as other:
            assert [each.run_id for each in await other.list_runs()] == [run.run_id]
    with (tmp_path / "state" / "lock").open("a") as lock:  # which a server holds while it runs
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
