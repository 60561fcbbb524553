"""Through the public door: Tinker's batches, candidates for a custom loss, a teacher, classes."""

from __future__ import annotations

from typing import Any

import gradwire
import numpy as np
import pytest

IDS = np.array([[5, 9, 11, 30, 0, 0], [40, 41, 42, 7, 8, 9]])
MASK = np.array([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
TARGETS = np.array([[9, 11, 30, 2, 0, 0], [41, 42, 7, 8, 9, 2]])
PADDED = {"input_ids": IDS, "attention_mask": MASK, "target_tokens": TARGETS}


async def test_cross_entropy_is_the_sum_of_the_targets_log_probabilities(service: gradwire.ServiceClient) -> None:
    run = await service.create_run("tiny", lora={"rank": 4})
    weights = np.array([[0, 0, 1, 1, 9, 9], [0, 0, 0, 0.5, 2, 1]], np.float32)
    result = await run.forward_backward(PADDED | {"weights": weights}, "cross_entropy", outputs=("logprobs",))
    logprobs = result.outputs["logprobs"]
    assert [len(row) for row in logprobs] == [4, 6]
    expected = -sum(float((w[: len(row)] * row).sum()) for w, row in zip(weights, logprobs, strict=True))
    assert result.metrics["loss:sum"] == pytest.approx(expected, rel=1e-5)
    plain = await run.compute_logprobs([[5, 9, 11, 30, 2], [40, 41, 42, 7, 8, 9, 2]])
    np.testing.assert_allclose(np.concatenate(logprobs), np.concatenate(plain), atol=1e-5)


async def test_a_custom_loss_of_candidates_has_the_gradient_of_cross_entropy(service: gradwire.ServiceClient) -> None:
    ids, candidates = [[5, 9, 11], [40, 41]], [[[1, 2], [3, 4], [5, 6]], [[7, 8], [9, 10]]]
    batch: dict[str, Any] = {"input_ids": ids, "target_tokens": [[1, 3, 5], [7, 9]]}

    def loss(batch: Any, scores: dict[str, Any]) -> Any:
        rows = [np.asarray(row) for row in scores["candidate_logprobs"]]
        return -sum(float(row.sum()) for row in rows), {"candidate_logprobs": [-np.ones_like(row) for row in rows]}

    norms = []
    for custom in (True, False):
        run = await service.create_run("tiny", lora={"rank": 4}, seed=3)
        if custom:
            asked = batch | {"candidates": candidates}
            run.forward_backward_custom(asked, loss, scores=("candidate_logprobs",), framework="numpy")
        else:
            ones = [[[1.0, 1.0] for _ in row] for row in ids]
            run.forward_backward({"input_ids": ids, "target_tokens": candidates, "weights": ones}, "cross_entropy")
        norms.append((await run.optim_step(learning_rate=1e-3)).grad_norm)
        await service.delete_run(run.run_id)
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


async def test_a_student_comes_closer_to_its_teacher(service: gradwire.ServiceClient) -> None:
    """The teacher is a checkpoint that has learned one text; the student starts from the base."""
    teacher = await service.create_run("tiny", lora={"rank": 4}, seed=1)
    text = {"input_ids": [[5, 9, 11, 30, 7, 12, 33]]}
    for _ in range(4):
        teacher.forward_backward(text, "causal_lm")
        teacher.optim_step(learning_rate=2e-2)
    checkpoint = await teacher.save_checkpoint("taught")
    student = await service.create_run("tiny", lora={"rank": 4}, seed=2)
    kwargs = {"reference_model": checkpoint.path, "beta": 0.0}
    losses = []
    for _ in range(5):
        result = student.forward_backward(text, "gkd", kwargs)
        student.optim_step(learning_rate=2e-2)
        losses.append((await result).metrics["divergence"])
    assert losses[-1] < 0.8 * losses[0]
    for run in (student, teacher):
        await service.delete_run(run.run_id)


async def test_a_classification_head_learns_and_keeps_its_labels_through_a_checkpoint(
    service: gradwire.ServiceClient,
) -> None:
    run = await service.create_run("tiny", lora={"rank": 4}, head="classification", num_labels=3)
    batch = {"input_ids": [[5, 9, 11], [40, 41], [60, 61, 62]], "label": [0, 1, 2]}
    for _ in range(8):
        run.forward_backward(batch, "sequence_classification")
        run.optim_step(learning_rate=2e-2)
    found = await run.forward(batch, "sequence_classification", outputs=("class_logits",))
    assert found.metrics["accuracy"] == 1.0
    saved = await run.save_checkpoint("classes")
    fork = await service.fork_run(saved)
    again = await fork.forward({"input_ids": batch["input_ids"]}, outputs=("class_logits",))
    np.testing.assert_allclose(again.outputs["class_logits"], found.outputs["class_logits"], atol=1e-6)
    other = await service.fork_run(saved, head="classification", num_labels=5)
    fresh = await other.forward({"input_ids": batch["input_ids"]}, outputs=("class_logits",))
    assert np.asarray(fresh.outputs["class_logits"]).shape == (3, 5)
    with pytest.raises(gradwire.InvalidArgumentError, match="num_labels"):
        await service.create_run("tiny", head="classification")
