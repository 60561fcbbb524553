"""Blocking advantages, losses and updates of a model that a server trains."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from gradwire.errors import UnsupportedError
from gradwire.rl.advantages import Floats, gae, whiten
from gradwire.rl.inference import LocalInference
from gradwire.rl.primitives.background import wait_for
from gradwire.rl.primitives.hosting import ServedModel
from gradwire.rl.primitives.inference_module import InferenceModule
from gradwire.rl.rows import rows_of
from gradwire.rl.types import Trajectory
from gradwire.training import TrainingClient

logger = logging.getLogger("gradwire.rl")

ADAM = {"betas": (0.9, 0.999), "eps": 1e-8}


@dataclass(frozen=True)
class BackpropConfig:
    """Settings of advantages and losses.

    Attributes:
        gamma: Discount per token.
        gae_lambda: Trade-off between bias and variance of the advantages.
        ppo_clip_range: The ratio is clipped to ``1 - ppo_clip_range`` and ``1 + ppo_clip_range``.
        kl_coef: Weight of the KL to the reference: ``ref_model``, or the initial policy; 0: no KL.
        normalize_advantages: Scale advantages to mean 0 and variance 1 over a batch.
        entropy_coef: Weight of an entropy bonus.
        max_grad_norm: Gradient clipping norm.
        learning_rate: Learning rate if there is no optimizer.
    """

    gamma: float = 0.99
    gae_lambda: float = 0.95
    ppo_clip_range: float = 0.2
    kl_coef: float = 0.1
    normalize_advantages: bool = True
    entropy_coef: float = 0.0
    max_grad_norm: float = 1.0
    learning_rate: float = 1e-5


class PPOLoss:
    """A lazily computed loss: ``float(loss)`` computes it, ``BackpropModule.update`` trains on it."""

    def __init__(self, owner: BackpropModule, batch: Mapping[str, Any], loss_kwargs: Mapping[str, Any]) -> None:
        self.owner, self.batch, self.loss_kwargs = owner, batch, loss_kwargs

    def item(self) -> float:
        """Compute the loss under the current weights by a forward pass."""

        async def forward() -> float:
            run = await self.owner.run()
            result = await run.forward(self.batch, "enhanced_ppo", self.loss_kwargs, outputs=())
            return float(result.loss if result.loss is not None else np.nan)

        return wait_for(forward())

    __float__ = item


class BackpropModule:
    """Trains a model on a gradwire server.

    An embedded server, started at first use, serves a loaded ``transformers`` model, and the trained weights are
    written back into the model after each update. The server computes the gradients; torch's autograd is not used here.

    Args:
        model: A loaded model, a name or path, or an :class:`InferenceModule` with ``backend="server"``.
        ref_model: The reference of the KL: a loaded model, a name or path; by default the model as it is now.
        optimizer: ``torch.optim.Adam`` or ``AdamW`` of the model's parameters: its settings are used, its moments are
            not.
        config: The settings.
        options: Options of :class:`~gradwire.rl.primitives.hosting.ServedModel`: ``lora``, ``address``, ``state_dir``,
            …
    """

    def __init__(
        self,
        model: Any,
        ref_model: Any = None,
        optimizer: Any = None,
        config: BackpropConfig | None = None,
        **options: Any,
    ) -> None:
        self.config = config or BackpropConfig()
        self.optimizer_settings = settings_of(optimizer) if optimizer is not None else {}
        self.version = 0
        self._model, self._ref_model = model, ref_model
        # A copy of the model equals the current model, which the server already has.
        self._own_reference = ref_model is None or same_weights(ref_model, model)
        self._moves = self._own_reference or (options.get("lora") is None and same_shapes(ref_model, model))
        if isinstance(model, InferenceModule):
            if model.served is None:
                raise TypeError(
                    'only an InferenceModule with backend="server" can be trained; otherwise pass its model'
                )
            if not self._own_reference:
                raise ValueError("ref_model must be on the server of the InferenceModule; leave it out")
            self.served = model.served
        else:
            reference = None if self._own_reference else ref_model
            self.served = ServedModel(model, reference=reference, moves=self._moves, **options)
        self._written_back = LocalInference(model, None) if hasattr(model, "load_state_dict") else None

    @property
    def learning_rate(self) -> float:
        """The learning rate of the optimizer, or of the config."""
        return float(self.optimizer_settings.get("learning_rate", self.config.learning_rate))

    def reference(self) -> dict[str, Any]:
        """The KL arguments of the losses."""
        if not self.config.kl_coef:
            return {}
        return {"reference_model": "ema" if self._moves else "reference", "beta": self.config.kl_coef}

    async def run(self) -> TrainingClient:
        """The run on the server, which starts at the first use."""
        return await self.served.run()

    def keep_state_in(self, folder: Path) -> None:
        """Set the folder for the embedded server's checkpoints, if the server has not started."""
        self.served.keep_state_in(folder)

    def compute_values(self, trajectories: Sequence[Trajectory]) -> list[Floats]:
        """Compute per trajectory ``[tokens]``: the critic's value of the state before each policy token."""

        async def scored() -> list[Floats]:
            rows = rows_of(trajectories)
            batch = {"input_ids": [row.ids for row in rows], "loss_mask": [row.written for row in rows]}
            values = await (await self.run()).compute_values(batch)
            of: list[list[Any]] = [[] for _ in trajectories]
            for row, each in zip(rows, values):
                of[row.trajectory].append(each)
            return [np.concatenate(each).astype(np.float64) if each else np.zeros(0) for each in of]

        return wait_for(scored())

    def compute_advantages(self, rewards: Any, values: Any = None) -> Any:
        """Compute generalised advantage estimates, normalised if the config says so.

        Args:
            rewards: One number per trajectory, or a sequence of numbers per trajectory (per step, or per token).
            values: The same shape; zeros by default. One number per trajectory is its baseline.

        Returns:
            An array ``[trajectories]``, or a list of one array per trajectory.
        """
        flat = not any(np.ndim(each) for each in rewards)
        rows = [np.atleast_1d(np.asarray(each, np.float64)) for each in rewards]
        baselines = [np.zeros_like(row) for row in rows] if values is None else [
            np.atleast_1d(np.asarray(each, np.float64)) for each in values
        ]  # fmt: skip
        lengths = [len(row) for row in rows]
        if lengths != [len(row) for row in baselines]:
            raise ValueError(f"rewards and values differ in shape: {lengths} and {[len(row) for row in baselines]}")
        if not rows:
            return np.zeros(0) if flat else []
        advantages, _ = gae(
            np.concatenate(rows), np.concatenate(baselines), lengths,
            gamma=self.config.gamma, gae_lambda=self.config.gae_lambda,
        )  # fmt: skip
        if self.config.normalize_advantages:
            advantages = whiten(advantages)
        return advantages if flat else np.split(advantages, np.cumsum(lengths)[:-1])

    def compute_ppo_loss(self, trajectories: Sequence[Trajectory], advantages: Sequence[Any]) -> PPOLoss:
        """Build the clipped surrogate loss with the KL to the reference.

        Args:
            trajectories: Trajectories of rollouts, with the log-probabilities of the policy that wrote them.
            advantages: Per trajectory one number, or one per step, or one per policy token.
        """
        if len(trajectories) != len(advantages):
            raise ValueError(f"there are {len(advantages)} advantages for {len(trajectories)} trajectories")
        rows = rows_of(trajectories)
        if not rows:
            raise ValueError("the trajectories have no tokens of the policy's to train on")
        written = np.bincount([row.trajectory for row in rows], [row.written.sum() for row in rows], len(trajectories))
        used = np.zeros(len(trajectories), np.int64)
        columns: dict[str, list[Any]] = {"input_ids": [], "loss_mask": [], "old_log_probs": [], "advantages": []}
        for row in rows:
            index, steps = row.trajectory, len(trajectories[row.trajectory].steps)
            of_row = np.asarray(advantages[index], np.float64)
            tokens = np.zeros(len(row.ids), np.float32)
            if of_row.ndim == 0:
                tokens[row.written] = of_row
            elif len(of_row) == steps:
                tokens = row.spread(of_row)
            elif len(of_row) == written[index]:
                tokens[row.written] = of_row[used[index] : used[index] + row.written.sum()]
            else:
                raise ValueError(
                    f"trajectory {index} has {steps} steps and {int(written[index])} tokens of the policy's, and "
                    f"{len(of_row)} advantages"
                )
            used[index] += row.written.sum()
            for name, value in zip(columns, (row.ids, row.written, row.logprobs, tokens)):
                columns[name].append(value)
        return PPOLoss(self, columns, self.ppo_arguments())

    def ppo_arguments(self) -> dict[str, Any]:
        """The config as the arguments of the server's PPO loss."""
        config = self.config
        return {
            "gamma": config.gamma,
            "gae_lambda": config.gae_lambda,
            "clip_epsilon": config.ppo_clip_range,
            "whiten_advantages": config.normalize_advantages,
            "entropy_coef": config.entropy_coef,
            **self.reference(),
        }

    def update(self, loss: PPOLoss) -> dict[str, float]:
        """Take one optimizer step on a loss of :meth:`compute_ppo_loss`.

        Returns the metrics, with ``loss`` and ``grad_norm``.

        The weights are written back into a loaded model.
        """
        if not isinstance(loss, PPOLoss):
            raise TypeError(f"update needs the result of compute_ppo_loss, got {type(loss).__name__}")

        async def step() -> dict[str, float]:
            run = await self.run()
            forward = run.forward_backward(loss.batch, "enhanced_ppo", loss.loss_kwargs)
            settings = {name: value for name, value in self.optimizer_settings.items() if name != "learning_rate"}
            taken = run.optim_step(self.learning_rate, max_grad_norm=self.config.max_grad_norm, **settings)
            result, done = await forward, await taken
            self.version += 1
            if self._written_back is not None:
                await self._written_back.update_weights(run, self.version)
            return {**result.metrics, "grad_norm": done.grad_norm}

        return wait_for(step())

    def update_ref_model(self, method: Literal["ema", "copy"] = "ema", decay: float = 0.99) -> None:
        """Move the reference towards the policy (``ema``), or set it to the policy (``copy``).

        A loaded ``ref_model`` is updated as well. It may have other weights than the model, of the same shapes if all
        of them are trained; another one, such as a name, is frozen on the server.

        Args:
            decay: Share of the old reference that is kept.
        """
        if method not in ("ema", "copy"):
            raise ValueError(f'method must be "ema" or "copy", got {method!r}')
        if not self._moves:
            raise UnsupportedError(
                "this ref_model is frozen: a loaded one of the model's own shapes moves, with lora= only a copy of it"
            )
        share = decay if method == "ema" else 0.0

        async def move() -> None:
            await (await self.run()).update_reference(ema=share)

        wait_for(move())
        if hasattr(self._ref_model, "parameters") and hasattr(self._model, "parameters"):
            for theirs, ours in zip(self._ref_model.parameters(), self._model.parameters()):
                theirs.data.mul_(share).add_(ours.data, alpha=1 - share)

    def close(self) -> None:
        """Close the connection and stop the embedded server."""
        self.served.close()

    def __enter__(self) -> BackpropModule:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def settings_of(optimizer: Any) -> dict[str, Any]:
    """Convert a torch optimizer to the arguments of ``optim_step``.

    Raises:
        ValueError: The server has no such optimizer.
    """
    groups, name = optimizer.param_groups, type(optimizer).__name__
    first = {key: value for key, value in groups[0].items() if key != "params"}
    if name not in ("Adam", "AdamW") or any(first.get(each) for each in ("amsgrad", "maximize")):
        raise ValueError(f"the server uses AdamW; {name} with these settings cannot be used: {first}")
    if name == "Adam" and first["weight_decay"] and not first.get("decoupled_weight_decay"):
        raise ValueError(
            "Adam's weight_decay is added to the gradient, the server's is decoupled: use torch.optim.AdamW"
        )
    if any({key: value for key, value in group.items() if key != "params"} != first for group in groups[1:]):
        raise ValueError("the server has one group of parameters; this optimizer has several, of different settings")
    return {
        "learning_rate": float(first["lr"]), "betas": tuple(map(float, first["betas"])), "eps": float(first["eps"]),
        "weight_decay": float(first["weight_decay"]),
    }  # fmt: skip


def same_weights(reference: Any, model: Any) -> bool:
    """Whether a reference is the model, or a copy of it."""
    if reference is model or isinstance(reference, str) or isinstance(model, str):
        return bool(reference == model)
    if not same_shapes(reference, model):
        return False
    theirs = reference.state_dict()
    return all(bool((ours == theirs[name]).all()) for name, ours in model.state_dict().items())


def same_shapes(reference: Any, model: Any) -> bool:
    """Whether two loaded models have weights of the same names and shapes."""
    if not hasattr(reference, "state_dict") or not hasattr(model, "state_dict"):
        return False
    ours, theirs = ({name: each.shape for name, each in of.state_dict().items()} for of in (model, reference))
    return ours == theirs
