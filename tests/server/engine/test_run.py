"""A run's generators are its own, and runs in turns are what each would be alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch


def test_draws_within_a_run_depend_on_its_seed_alone(make_run: Any) -> None:
    first, second, again = make_run(lora=2, seed=7), make_run(lora=2, seed=8), make_run(lora=2, seed=7)
    draws: dict[str, list[torch.Tensor]] = {}
    for _ in range(3):
        for run in (first, second, again):
            with run.rng():
                draws.setdefault(run.run_id, []).append(torch.rand(4))
        torch.rand(9)
    one, two, three = (torch.cat(draws[run.run_id]) for run in (first, second, again))
    assert torch.equal(one, three) and not torch.equal(one, two)
    assert len(one.unique()) == 12


def test_the_global_generator_is_left_as_it_was(make_run: Any) -> None:
    run = make_run(lora=2)
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    with run.rng():
        torch.rand(100)
    assert torch.equal(torch.rand(2), expected)


def test_an_operation_that_raises_has_drawn_nothing(make_run: Any) -> None:
    run, untouched = make_run(lora=2, seed=3), make_run(lora=2, seed=3)
    with pytest.raises(RuntimeError, match="halfway"), run.rng():
        torch.rand(5)
        raise RuntimeError("halfway")
    with run.rng():
        after = torch.rand(3)
    with untouched.rng():
        assert torch.equal(torch.rand(3), after)


def test_generator_states_round_trip(make_run: Any) -> None:
    run, other = make_run(lora=2, seed=3), make_run(lora=2, seed=4)
    with run.rng():
        torch.rand(3)
    other.load_rng_tensors({name: tensor.clone() for name, tensor in run.rng_tensors().items()})
    draws = []
    for each in (run, other):
        with each.rng():
            draws.append(torch.rand(3))
    assert torch.equal(*draws)
