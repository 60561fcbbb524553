"""Training on rows that begin alike: an agent's conversations, one row a turn, each token computed once.

In this process, a forward and backward of LoRA by turns on one batch: with the trees of prefixes that the engine finds,
without them, and on one row a conversation without them. All three have the same loss, as each turn is scored once. The
memory is what autograd saves for a token of the batch that no other row has computed, over that of a token alone."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from gradwire_losses.batch import Batch
from gradwire_losses.registry import get_loss, load_builtin_losses
from gradwire_proto.v1 import training_pb2
from gradwire_server.engine.model.loading.pool import ModelPool
from gradwire_server.engine.model.packing import Packing
from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.model.policy_from_config import make_policy
from gradwire_server.engine.scoring.forward import Scoring, compute_scores
from gradwire_server.engine.scoring.memory import ActivationMeter
from gradwire_server.engine.scoring.planner import Budget
from gradwire_server.engine.step import checked, pass_over

from benchmarks.report import Figure, Size, run_alone
from benchmarks.turns import Turns, check_losses
from benchmarks.workload import Draw, standard_model

TREES, TURNS, CONVERSATIONS = "trees", "one row a turn", "one row a conversation"
TARGETS = {TURNS: 4.0, CONVERSATIONS: 1.6}
MOST_MEMORY = 1.1


class Agents:
    """Conversations that begin alike; ``distinct`` tokens of all their turns."""

    def __init__(self, size: Size) -> None:
        self.head, self.turn = size.pick(1024, 64), size.pick(64, 8)
        self.conversations, self.turns = size.pick(8, 3), size.pick(8, 3)
        self.distinct = self.head + self.conversations * self.turns * self.turn

    def draw(self, seed: int, *, smoke: bool) -> dict[str, Batch]:
        """The same turns as one row each, and as one row a conversation."""
        source = Draw.of(seed, smoke=smoke)
        head = source.tokens(self.head)
        told = [head + source.tokens(self.turns * self.turn) for _ in range(self.conversations)]
        ends = [self.head + (number + 1) * self.turn for number in range(self.turns)]
        turns = [(row[:end], self.turn) for row in told for end in ends]
        return {TURNS: _batch(turns), CONVERSATIONS: _batch([(row, self.turns * self.turn) for row in told])}


def _batch(rows: list[tuple[list[int], int]]) -> Batch:
    """Rows of which so many last tokens are scored."""
    lengths = torch.tensor([len(row) for row, _ in rows])
    scored = torch.cat([torch.arange(len(row)) >= len(row) - last for row, last in rows])
    return Batch(torch.tensor([token for row, _ in rows for token in row]), lengths, scored, torch.ones_like(lengths))


def _loss(policy: Policy, batch: Batch, packing: Packing) -> float:
    policy.split_model.packing = packing
    loss = get_loss("causal_lm")
    (passed,) = pass_over([checked(loss, loss.config(), policy, batch, budget=Budget(kept_tokens=1 << 14))])
    assert passed is not None and passed.report.loss is not None
    return passed.report.loss


def _saved_bytes(policy: Policy, batch: Batch, packing: Packing) -> int:
    """Bytes that autograd saves of the batch as one micro-batch."""
    policy.split_model.packing = packing
    meter = ActivationMeter(policy)
    with meter:
        kept = compute_scores([Scoring(policy, batch, ["logprobs"], 1.0, None, Budget())], training=True)
    del kept
    return meter.bytes


def measure(size: Size) -> list[Figure]:
    load_builtin_losses()
    agents = Agents(size)
    sides = [each for each in TARGETS if size.wants(each)] or list(TARGETS)
    tables = {side: Turns(TREES, side) for side in sides}
    config = training_pb2.RunConfig(base_model="m")
    config.lora.rank = 8
    with tempfile.TemporaryDirectory() as folder:
        shape = {} if size.smoke else {"hidden_size": 128, "context_length": 2048}
        model = standard_model(Path(folder) / "model", smoke=size.smoke, **shape)
        policy = make_policy(ModelPool({"m": str(model)}), config, "run")
        warm = agents.draw(99, smoke=size.smoke)
        _loss(policy, warm[CONVERSATIONS], Packing.SHARED)
        for turn in range(size.repeats):
            batches = agents.draw(turn, smoke=size.smoke)
            for side, table in tables.items():
                with table.turn(TREES, agents.distinct):
                    ours = _loss(policy, batches[TURNS], Packing.SHARED)
                with table.turn(side, agents.distinct):
                    theirs = _loss(policy, batches[side], Packing.PACKED)
                check_losses([ours], [theirs], rtol=1e-5)
        alone = _saved_bytes(policy, warm[CONVERSATIONS], Packing.PACKED) / len(warm[CONVERSATIONS].input_ids)
        of_token = _saved_bytes(policy, warm[TURNS], Packing.SHARED) / agents.distinct
    words = f"{agents.conversations} conversations of {agents.turns} turns of {agents.turn} tokens after {agents.head}"
    figures = []
    for side, table in tables.items():
        detail = f"{words}; {table.said('distinct tokens')}; losses equal"
        figures.append(
            Figure(f"trees: against {side}", table.ratio(), "x", TARGETS[side], detail=detail, samples=table.rates)
        )
    detail = f"{words}; {of_token / 1024:.1f} KiB saved for a distinct token, {alone / 1024:.1f} for one of a flat row"
    figures.append(Figure("trees: memory", of_token / alone, "x", MOST_MEMORY, at_least=False, detail=detail))
    return figures


if __name__ == "__main__":
    run_alone(measure, __doc__)
