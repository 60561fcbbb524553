"""Images through the public door: the page's code runs, each image is sent once, and a kill changes no bit."""

from __future__ import annotations

import ast
import inspect
import signal
from pathlib import Path
from typing import Any

import gradwire
import numpy as np
import pytest
from support.server import Server
from support.vision import picture, png, vision_model

from tests.examples.test_docs import ROOT, blocks

pytestmark = pytest.mark.long

PAGE = ROOT / "docs" / "images.md"
SMOLVLM = "HuggingFaceTB/SmolVLM-256M-Instruct"
CAT, DOG = picture(1, 16, 24), picture(2, 32, 16)


async def steps(service: gradwire.ServiceClient, run: gradwire.TrainingClient, model: str, count: int) -> list[float]:
    """Supervised and preference steps on rows with and without images, and samples."""
    asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}]
    answers = [[*asked, {"role": "assistant", "content": text}] for text in ("a cat", "a dog")]
    (cat, dog), text = (
        await service.render(answers, model=model),
        await service.render([{"role": "assistant", "content": "of text"}], model=model),
    )
    rows = [cat | {"images": [CAT]}, dog | {"images": [png(DOG)]}, text | {"images": []}]
    pair = {"chosen_input_ids": [cat["input_ids"]], "rejected_input_ids": [dog["input_ids"]], "images": [[CAT]]}
    seen: list[float] = []
    for _ in range(count):
        supervised = run.forward_backward(rows, "causal_lm")
        preferred = run.forward_backward(pair, "dpo", {"reference_model": "base"})
        step = run.optim_step(learning_rate=1e-2)
        sampled = run.sample([cat["input_ids"][:-8].tolist()], images=[[CAT]], max_tokens=4)
        seen += [(await supervised).metrics["loss"], (await preferred).metrics["loss"], (await step).grad_norm]
        seen += list((await sampled).samples[0][0].logprobs)
    return seen


async def sampler_scores_as_forward(service: gradwire.ServiceClient, run: gradwire.TrainingClient, model: str) -> None:
    """Prompts with an image and without one are scored as rows of the model are."""
    asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}]
    (cat,) = await service.render([[*asked, {"role": "assistant", "content": "a cat"}]], model=model)
    ids = cat["input_ids"].tolist()
    seen, text = await service.sampling_client(model).compute_logprobs([ids, [5, 6, 7]], images=[[CAT], []])
    rows = [{"input_ids": ids, "images": [CAT]}, {"input_ids": [5, 6, 7], "images": []}]
    scored_seen, scored_text = await run.compute_logprobs(rows, model="base")
    np.testing.assert_allclose(text, scored_text, atol=1e-5)
    assert len(seen) == len(ids) - 1 == len(scored_seen) + 1  # rows leave the image's token out
    assert any(np.allclose(np.delete(seen, place), scored_seen, atol=1e-5) for place in range(len(seen)))


@pytest.mark.holds_loop("the page's code is compiled and run on the loop")
@pytest.mark.slow  # three starts
async def test_the_page_runs_and_a_kill_changes_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smolvlm, qwen = (vision_model(tmp_path / kind, kind) for kind in ("smolvlm", "qwen2_vl"))
    server = Server(smolvlm, tmp_path / "state", "--model", f"qwen={qwen}", name=SMOLVLM).start()
    connect = gradwire.connect
    monkeypatch.setattr(gradwire, "connect", lambda *_, **__: connect(server.address))
    session: dict[str, Any] = {"__name__": "page"}
    for line, source in blocks(PAGE):
        code = compile(
            ast.increment_lineno(ast.parse(source), line), str(PAGE), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        )
        if inspect.iscoroutine(waiting := eval(code, session)):
            await waiting
    assert session["result"].num_tokens > len(session["row"]["input_ids"])
    seen, expected, runs = {}, {}, {}
    async with connect(server.address) as service:
        for model in (SMOLVLM, "qwen"):
            settings: dict[str, Any] = {"seed": 3, "lora": {"rank": 4, "target_modules": ["all-linear", "vision"]}}
            calm = await service.create_run(model, **settings)
            expected[model] = await steps(service, calm, model, 3)
            run = await service.create_run(model, **settings)
            runs[model], seen[model] = run.run_id, await steps(service, run, model, 2)
        with pytest.raises(gradwire.InvalidBatchError, match="row 0: 1 images and 0 image tokens"):
            await calm.forward({"input_ids": [[5, 6, 7]], "images": [[CAT]]})
        server.end(signal.SIGKILL)
    server.start()
    async with connect(server.address) as service:
        for model in (SMOLVLM, "qwen"):
            run = service.get_training_client(runs[model])
            seen[model] += await steps(service, run, model, 1)
            await sampler_scores_as_forward(service, run, model)
    assert server.end() == 0
    assert seen == expected
    assert all(np.isfinite(values).all() for values in seen.values())


async def other_operations(
    service: gradwire.ServiceClient, run: gradwire.TrainingClient, model: str, count: int
) -> list[float]:
    """What takes rows beside ``forward_backward``, and references that the run made itself."""

    def doubled(batch: Any, scores: dict[str, Any]) -> Any:
        return -2.0 * sum(each.sum() for each in scores["logprobs"])

    asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}]
    answers = [[*asked, {"role": "assistant", "content": text}] for text in ("a cat", "a dog")]
    cat, dog = await service.render(answers, model=model)
    rows = [cat | {"images": [CAT]}, dog | {"images": [DOG]}]
    pair = {"chosen_input_ids": [cat["input_ids"]], "rejected_input_ids": [dog["input_ids"]], "images": [[CAT]]}
    seen: list[float] = []
    for _ in range(count):
        seen += [float(value) for each in await run.compute_logprobs(rows) for value in each]
        saved = await run.save_checkpoint("then", overwrite=True)
        await run.update_reference(ema=0.5)
        custom = await run.forward_backward_custom(rows, doubled)
        step = await run.train_step(rows, "causal_lm", learning_rate=1e-2)
        seen += [custom.metrics["loss"], step.metrics["loss"], step.grad_norm]
        for reference in ("ema", saved.path, "base"):
            compared = await run.forward_backward(pair, "dpo", {"reference_model": reference})
            seen.append(compared.metrics["loss"])
        await run.zero_grad()
        result = await run.forward(rows, "causal_lm", outputs=("logprobs", "entropy"))
        seen += [result.metrics["loss"], *(float(value) for each in result.outputs["entropy"] for value in each)]
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_vl", "smolvlm"])
async def test_in_bfloat16_every_operation_takes_images_and_a_kill_changes_no_bit(tmp_path: Path, kind: str) -> None:
    path = vision_model(tmp_path / kind, kind)
    settings: dict[str, Any] = {"seed": 3, "lora": {"rank": 4, "target_modules": ["all-linear", "vision"]}}
    found: dict[str, list[float]] = {}
    for dtype in ("float32", "bfloat16"):
        server = Server(path, tmp_path / dtype, "--dtype", dtype, name="m").start()
        async with gradwire.connect(server.address) as service:
            calm = await service.create_run("m", **settings)
            found[dtype] = await other_operations(service, calm, "m", 3)
            if dtype == "bfloat16":
                run = await service.create_run("m", **settings)
                seen = await other_operations(service, run, "m", 2)
                server.end(signal.SIGKILL)
                server.start()
        if dtype == "bfloat16":
            async with gradwire.connect(server.address) as service:
                seen += await other_operations(service, service.get_training_client(run.run_id), "m", 1)
            assert seen == found[dtype]
        assert server.end() == 0
    first = len(found["float32"]) // 3  # later steps drift apart as their weights do
    np.testing.assert_allclose(found["bfloat16"][:first], found["float32"][:first], rtol=0.05, atol=0.05)
    assert found["bfloat16"] != found["float32"]
    assert all(np.isfinite(values).all() for values in found.values())
