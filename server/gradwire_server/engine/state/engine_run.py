"""One run: everything that is its own. Nothing of a run lives anywhere else."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from gradwire_losses.monitoring import Advisor
from gradwire_proto.v1 import training_pb2
from torch import Tensor

from gradwire_server.engine.generators import generator_states, preserved_rng, set_generator_states
from gradwire_server.engine.model.policy import Policy, make_policy
from gradwire_server.engine.model.pool import ModelPool
from gradwire_server.engine.training.accumulation import GradientAccumulator
from gradwire_server.engine.training.optimizer import Optimizer

if TYPE_CHECKING:
    from gradwire_server.engine.training.differentiable_scores import DifferentiableScores


_EMA_VERSIONS = itertools.count()


class EngineRun:
    """The state of one run.

    Attributes:
        run_id: its id.
        config: how it was created.
        policy: its weights.
        accumulator: gradients since the last step.
        optimizer: AdamW and its moments.
        step: optimizer steps taken.
        seq: the newest operation applied.
        failed_seq: the newest one that failed here.
        kept: the scores of a KeptForward whose Backward has not come, by the forward's number.
        ema: the moving average of the weights, without head, once something has asked for it.
        ema_version: another number, in this process, for each set of weights that an ``ema`` has held.
        advisor: hints about the metrics of its losses.
    """

    def __init__(self, pool: ModelPool, run_id: str, config: training_pb2.RunConfig) -> None:
        self.run_id = run_id
        self.config = config
        self.policy: Policy = make_policy(pool, config, run_id)
        self.accumulator = GradientAccumulator()
        self.optimizer = Optimizer(self.policy)
        self.step = 0
        self.seq = 0
        self.failed_seq = 0
        self.kept: dict[int, DifferentiableScores] = {}
        self.ema: Policy | None = None
        self.ema_version = -1
        self.advisor = Advisor()
        self._pool = pool
        with preserved_rng():
            torch.manual_seed(config.seed)
            self._rng = generator_states()

    @contextmanager
    def rng(self) -> Iterator[None]:
        """Torch's global generators are this run's within: to be held around each operation.

        An operation that raises leaves the run's generators as they were before it.
        """
        with preserved_rng():
            set_generator_states(self._rng)
            yield
            self._rng = generator_states()

    def rng_tensors(self) -> dict[str, Tensor]:
        """The state of the run's generators: "cpu", and "cuda:N" where there are GPUs; uint8."""
        return dict(self._rng)

    def load_rng_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes up these states; generators of devices that are not here, or not in them, are left alone."""
        self._rng |= {name: tensors[name].cpu() for name in self._rng if name in tensors}

    def ensure_ema(self) -> Policy:
        """The moving average; a copy of the weights as they are now where there was none."""
        if self.ema is None:
            config = training_pb2.RunConfig()
            config.CopyFrom(self.config)
            config.head = ""
            self.ema = make_policy(self._pool, config, f"{self.run_id}-ema")
            self.ema.load_state_tensors(self.policy.state_tensors(), head=False)
            self.ema_version = next(_EMA_VERSIONS)
        return self.ema

    @torch.no_grad()
    def move_ema(self, decay: float) -> None:
        """``ema <- decay * ema + (1 - decay) * weights``."""
        ema = self.ensure_ema()
        weights = self.policy.masters()
        averages = ema.masters()
        torch._foreach_lerp_(list(averages.values()), [weights[name] for name in averages], 1.0 - decay)
        ema.sync()
        self.ema_version = next(_EMA_VERSIONS)

    def drop_ema(self) -> None:
        if self.ema is not None:
            self.ema.close()
            self.ema = None

    @property
    def dropout_seed(self) -> str:
        """Of the operation that accumulates next: the same again after a recovery."""
        return f"{self.config.seed}/{self.step}/{self.accumulator.num_operations}"

    def drop_accumulated(self, step_seq: int) -> None:
        """Drops what was accumulated for a step that was not carried out, unless that was before the newest operation.

        Args:
            step_seq: the step's number.
        """
        if step_seq > self.seq:
            self.accumulator.clear()

    def forget_kept(self, seq: int) -> None:
        """Drops the scores whose second half has not come when operation ``seq`` does."""
        for forward_seq in list(self.kept):
            if seq > forward_seq + 1:
                del self.kept[forward_seq]

    def close(self) -> None:
        """Gives back everything that the run holds."""
        self.kept.clear()
        self.drop_ema()
        self.accumulator.clear()
        self.policy.close()
