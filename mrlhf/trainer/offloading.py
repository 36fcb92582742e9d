"""Which models wait in host memory in which phase of an iteration."""

from __future__ import annotations

from collections.abc import Sequence

from mrlhf.config_sections import OffloadConfig
from mrlhf.roles.model import RoleModel, TrainedModel


class Offloading:
    """Moves what the configuration names out of the way of the phases that do not need it."""

    def __init__(
        self,
        settings: OffloadConfig,
        *,
        reference: RoleModel | None = None,
        rewards: Sequence[RoleModel] = (),
        trained: Sequence[TrainedModel] = (),
        idle_reference: bool = False,
    ) -> None:
        """Keep references.

        Args:
            settings: what is moved.
            reference: frozen.
            rewards: frozen.
            trained: models with optimizers.
            idle_reference: whether the reference is there for evaluations alone.
        """
        references = [reference] if reference is not None and settings.reference else []
        scoring = list(rewards) if settings.reward else []
        self.frozen = [*references, *scoring]
        self.inferring = scoring if idle_reference else self.frozen
        self.trained = list(trained) if settings.optimizer else []

    def before_rollout(self) -> None:
        """Generation needs the actor's weights alone."""
        for model in self.frozen:
            model.offload()
        for model in self.trained:
            model.trainable.offload()

    def before_inference(self) -> None:
        """Frozen models that are asked then come back, while those that did not go away have their turn."""
        for model in self.inferring:
            model.prefetch()

    def before_evaluation(self) -> None:
        """Generation and passes without gradient; frozen models come when they are asked for, and stay."""
        for model in self.trained:
            model.trainable.offload()

    def before_train(self) -> None:
        """Frozen models go, optimizers come back while the first gradients are computed."""
        for model in self.frozen:
            model.offload()
        for model in self.trained:
            model.trainable.prefetch()
