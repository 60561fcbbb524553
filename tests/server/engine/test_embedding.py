"""Embeddings that add their gradient in place give PyTorch's own gradient."""

from __future__ import annotations

import copy

import pytest
import torch
from gradwire_server.engine.model.layers.embedding import add_rows_in_place
from gradwire_server.engine.model.placement import Placement
from torch import nn


@pytest.mark.parametrize("padding_idx", [None, 3])
@pytest.mark.parametrize("tied", [False, True])
def test_gradients_are_pytorchs(padding_idx: int | None, tied: bool) -> None:
    theirs = nn.Embedding(11, 4, padding_idx=padding_idx)
    ours = copy.deepcopy(theirs)
    add_rows_in_place(ours, Placement())
    for batch in range(3):
        ids = torch.tensor([[3, 1, 1, 7], [batch, 3, 9, 1]])
        for embedding in (theirs, ours):
            embedded = embedding(ids).sin()
            (embedded @ embedding.weight.T if tied else embedded).square().sum().backward()
        before = ours.weight.grad
        assert before is not None and theirs.weight.grad is not None
        torch.testing.assert_close(before, theirs.weight.grad)
    ours(ids).sum().backward()
    assert ours.weight.grad is before


def test_other_embeddings_are_left_alone() -> None:
    embedding = nn.Embedding(11, 4, sparse=True)
    add_rows_in_place(embedding, Placement())
    embedding(torch.tensor([1, 2])).sum().backward()
    assert embedding.weight.grad is not None and embedding.weight.grad.is_sparse
