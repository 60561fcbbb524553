"""What keys have used, through a real server: counted, shared among those computed together, kept over a restart."""

from __future__ import annotations

import time
from pathlib import Path

import gradwire
import httpx
import pytest
from gradwire.cli.app import app
from gradwire_server.access.key_file import KeyFile
from support.server import Server, free_port
from support.tinker import HttpServer
from typer.testing import CliRunner

pytestmark = pytest.mark.long

BATCH = {"input_ids": [[5, 9, 23, 7, 11], [3, 14, 15, 9]]}
PROMPTS = [[5, 9], [5, 9, 7]]


def used(server: Server, key: str, *by: str) -> list[gradwire.Usage]:
    with gradwire.sync.connect(server.address, api_key=key) as service:
        return service.usage(by)


def printed(server: Server, key: str, *words: str) -> list[list[str]]:
    shown = CliRunner().invoke(app, ["usage", "--address", server.address, "--api-key", key, *words])
    assert shown.exit_code == 0, shown.output
    return [line.split() for line in shown.output.splitlines()]


def test_what_keys_used_is_counted_and_kept(tiny_model_path: Path, tmp_path: Path) -> None:
    keys = {name: KeyFile(tmp_path).create(name) for name in ("ann", "bob")}
    admin = KeyFile(tmp_path).create("root", role="admin")
    server = Server(tiny_model_path, tmp_path, "--engines", "1", "--price-per-hour", "3600").start()
    with gradwire.sync.connect(server.address, api_key=keys["ann"]) as service:
        assert service.usage() == []
        run = service.create_run("tiny", lora=2, name="a run")
        began = time.monotonic()
        for _ in range(2):
            run.train_step(BATCH, "causal_lm", learning_rate=1e-2).result()
        run.save_checkpoint("kept").result()
        trained_s = time.monotonic() - began
        sampler = service.sampling_client(f"{run.run_id}/kept")
        began = time.monotonic()
        together = [sampler.sample(PROMPTS, n=2, max_tokens=40, ignore_eos=True) for _ in range(8)]
        sampled = [each.result() for each in together]
        sampled_s = time.monotonic() - began
    with gradwire.sync.connect(server.address, api_key=keys["bob"]) as service:
        service.sampling_client("tiny").sample(PROMPTS, max_tokens=3, ignore_eos=True).result()
        with pytest.raises(gradwire.InvalidArgumentError, match="hour, day, owner, run, model, session, and not by"):
            service.usage(["colour"])  # type: ignore[list-item]

    (training, sampling) = used(server, keys["ann"], "run"), used(server, keys["bob"], "run")
    (by_ann,), (by_bob,) = training, sampling
    assert (by_ann.run_id, by_ann.label) == (run.run_id, "a run") and by_ann.owner == by_ann.base_model == ""
    assert (by_ann.training_tokens, by_ann.prompt_tokens, by_ann.sampled_tokens) == (18, 8 * 5, 8 * 2 * 2 * 40)
    assert by_ann.sampled_tokens == sum(
        len(each.token_ids) for result in sampled for row in result.samples for each in row
    )
    assert (by_ann.operations, by_ann.checkpoints) == (2 + 1 + 8, 1)
    assert 0 < by_ann.engine_s <= trained_s + sampled_s, "what is computed together counts once"
    assert (by_bob.run_id, by_bob.training_tokens, by_bob.sampled_tokens) == ("", 0, 6)

    with gradwire.sync.connect(server.address, api_key=keys["ann"]) as service:
        service.delete_run(run.run_id)
    assert server.end() == 0
    server.start()
    assert used(server, keys["ann"], "run") == training, "over a restart and the run's end"
    owners = {each.owner: each for each in used(server, admin, "owner", "model")}
    assert owners["ann"].training_tokens == 18 and owners["bob"].base_model == "tiny"
    assert all(each.start % 86_400 == 0 < each.start <= time.time() for each in used(server, admin, "day", "owner"))
    with gradwire.sync.connect(server.address, api_key=admin) as service:
        assert service.usage(end=1.0) == []
        assert service.server_info().cost(by_ann.engine_s) == pytest.approx(by_ann.engine_s)
    head, *lines, total = printed(server, admin, "--by", "owner")
    assert head[0] == "owner" and head[-1] == "cost" and {line[0] for line in lines} == {"ann", "bob"}
    assert (total[0], total[1], total[3]) == ("all", "18", "1,286")
    (_, only) = printed(server, keys["bob"], "--by", "run", "--by", "run")
    assert only[0] == "none" and only[3] == "6"
    assert server.end() == 0


@pytest.mark.parametrize(
    "options",
    [
        pytest.param((), id="one engine"),
        pytest.param(("--ranks", "2"), id="two ranks", marks=pytest.mark.slow),
        pytest.param(("--engines", "2"), id="two engines", marks=pytest.mark.slow),
    ],
)
def test_what_was_sampled_for_who_leaves_is_counted(
    tiny_model_path: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    key = KeyFile(tmp_path).create("ann")
    server = HttpServer(tiny_model_path, tmp_path, free_port(), *options).start()

    def counted(operations: int) -> gradwire.Usage:
        deadline = time.monotonic() + 60
        while not (found := used(server, key)) or found[0].operations < operations:
            assert time.monotonic() < deadline, "what was stopped is not counted"
            time.sleep(0.05)
        return found[0]

    with gradwire.sync.connect(server.address, api_key=key) as service:
        sampler = service.sampling_client("tiny")
        stream = iter(sampler.stream([5, 9, 7], max_tokens=3000, ignore_eos=True))
        seen = [next(stream) for _ in range(5)]
        del stream
        streamed = counted(1)
        assert streamed.prompt_tokens == 3 and len(seen) <= streamed.sampled_tokens < 3000 and streamed.engine_s > 0
    asked = {"model": "tiny", "prompt": PROMPTS * 4, "max_tokens": 3000, "ignore_eos": True, "stream": True}
    headers = {"Authorization": f"Bearer {key}"}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=asked, headers=headers, timeout=60) as answer:
        assert any(line.startswith("data:") for line in answer.iter_lines())
    whole = counted(2)
    assert whole.prompt_tokens == 3 + 4 * 5
    assert 0 < whole.sampled_tokens - streamed.sampled_tokens < 8 * 3000 and whole.engine_s > streamed.engine_s
    assert server.end() == 0
