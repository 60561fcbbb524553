"""The complete state of one run in the engine."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from gradwire_losses.monitoring import Advisor
from gradwire_proto.v1 import training_pb2
from torch import Tensor

from gradwire_server.engine.generators import (
    generator_states,
    preserved_rng,
    restore,
    seed_generators,
    set_generator_states,
)
from gradwire_server.engine.model.layers.heads import Head
from gradwire_server.engine.model.loading.pool import ModelPool
from gradwire_server.engine.model.placement import is_sharded
from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.model.policy_from_config import make_policy
from gradwire_server.engine.training.accumulation import GradientAccumulator
from gradwire_server.engine.training.optimizer import Optimizer

if TYPE_CHECKING:
    from gradwire_server.engine.training.differentiable_scores import DifferentiableScores


_EMA_VERSIONS = itertools.count()


class EngineRun:
    """The state of one run.

    Attributes:
        config: Its configuration; its head is the one that the run has now.
        accumulator: Gradients since the last step.
        optimizer: AdamW and its moments.
        step: Optimizer steps taken.
        seq: Newest finished operation.
        failed_seq: Newest operation that failed in this process.
        kept: Scores of a KeptForward that wait for its Backward, by the forward's number.
        ema: Moving average of the weights, without head; None until something uses it.
        ema_version: Number that is unique in this process for each set of weights in ``ema``.
        advisor: Hints about the metrics of its losses.
        told_activations: The ways of handling its activations that were logged.
    """

    def __init__(self, pool: ModelPool, run_id: str, config: training_pb2.RunConfig) -> None:
        self.run_id = run_id
        self.config = training_pb2.RunConfig()
        self.config.CopyFrom(config)
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
        self.told_activations: set[str] = set()
        self._pool = pool
        self._nbytes: dict[tuple[object, ...], int] = {}
        with preserved_rng():
            seed_generators(config.seed)
            self._rng = generator_states()

    @contextmanager
    def rng(self) -> Iterator[None]:
        """Use the run's generators as torch's global ones in the body, which executes an operation.

        If it raises, the run's generators are unchanged.
        """
        before = generator_states()
        try:
            set_generator_states(self._rng)
            yield
            self._rng = generator_states()
        finally:
            restore(before)

    def rng_tensors(self) -> dict[str, Tensor]:
        """State of the run's generators: "cpu", and "cuda:N" for each GPU; uint8."""
        return dict(self._rng)

    def load_rng_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Set these states; generators whose devices are missing here or in ``tensors`` are unchanged."""
        self._rng |= {name: tensors[name].cpu() for name in self._rng if name in tensors}

    def ensure_ema(self) -> Policy:
        """The moving average; created from the current weights if there is none."""
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
        """Update ``ema <- decay * ema + (1 - decay) * weights``."""
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

    def add_value_head(self) -> None:
        """Give a run without a head a value head that starts at zero."""
        head = Head("value", self.policy.facts.hidden_size, self.config.seed, self.policy.device)
        self.optimizer.add(self.policy.add_head(head))
        self.config.head = head.kind

    def drop_added_head(self) -> None:
        """Undo :meth:`add_value_head`, in the operation that called it."""
        self.policy.drop_head()
        self.optimizer.drop_added()
        self.config.head = ""

    @property
    def lanes(self) -> int:
        """Number of its :mod:`.lanes`."""
        return max(1, self.config.lanes)

    @property
    def dropout_seed(self) -> str:
        """Dropout seed of the next operation that accumulates; a recovery reproduces it."""
        return f"{self.config.seed}/{self.step}/{self.accumulator.num_operations}"

    def digest(self) -> int:
        """A number that differs if any bit of the trained weights does, but for chance; waits for the device.

        Weights of which each rank holds another part are left out.
        """
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}
        masters = [each.detach().contiguous() for each in self.policy.masters().values() if not is_sharded(each)]
        sums = [each.view(bits[each.element_size()]).sum() for each in masters]
        return int(torch.stack(sums).sum()) if sums else 0

    def drop_accumulated(self, step_seq: int) -> None:
        """Clear the accumulation for a step that was dropped unexecuted, if the step is newer than :attr:`seq`."""
        if step_seq > self.seq:
            self.accumulator.clear()

    def forget_kept(self, seq: int) -> None:
        """Drop kept scores whose Backward did not come before operation ``seq``."""
        for forward_seq in list(self.kept):
            if seq > forward_seq + 1:
                del self.kept[forward_seq]

    def tensors(self) -> dict[str, Tensor]:
        """The run's tensors themselves: weights, moments, accumulated gradient, moving average; parts of a batch.

        They may be released and put back only while no graph and no sample uses them.
        """
        return self._tensors(self.accumulator.tensors())

    def _tensors(self, accumulated: Mapping[str, Tensor]) -> dict[str, Tensor]:
        parts = {"weights": self.policy.state_tensors(), "moments": self.optimizer.state_tensors()}
        parts["gradient"] = dict(accumulated)
        if self.ema is not None:
            parts["ema"] = self.ema.state_tensors()
        return {f"{part}:{name}": tensor for part, tensors in parts.items() for name, tensor in tensors.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of :meth:`tensors`; only while the run has them."""
        shape = (self.optimizer.num_updated, self.accumulator.num_sums, self.ema is not None, self.config.head)
        if shape not in self._nbytes:
            self._nbytes[shape] = sum(each.nbytes for each in self._tensors(self.accumulator.sums()).values())
        parts = self.accumulator.parts
        return self._nbytes[shape] + (parts.nbytes if parts else 0)

    def release_tensors(self) -> None:
        """Give up the tensors of :meth:`tensors`, which somebody else keeps until :meth:`put_tensors`."""
        self.policy.release_tensors()
        self.optimizer.release_tensors()
        self.accumulator.release_tensors()
        if self.ema is not None:
            self.ema.release_tensors()

    def put_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Take tensors, as of :meth:`tensors`, as this run's own, without a copy."""
        parts: dict[str, dict[str, Tensor]] = {"weights": {}, "moments": {}, "gradient": {}, "ema": {}}
        for path, tensor in tensors.items():
            part, _, name = path.partition(":")
            parts[part][name] = tensor
        self.policy.put_tensors(parts["weights"])
        self.optimizer.put_tensors(parts["moments"])
        self.accumulator.put_tensors(parts["gradient"])
        if self.ema is not None:
            self.ema.put_tensors(parts["ema"])

    def close(self) -> None:
        """Release everything that the run holds."""
        self.kept.clear()
        self.drop_ema()
        self.accumulator.clear()
        self.policy.close()
