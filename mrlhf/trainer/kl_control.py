"""The adaptive weight of the KL penalty."""

from __future__ import annotations

import math


class AdaptiveKL:
    """Steers ``kl_coef`` so that the KL of whole responses comes near a target (Ziegler et al. 2019, section 2.2).

    After each rollout ``kl_coef *= 1 + clip(kl / target - 1, -0.2, 0.2) * rows / horizon``, where ``kl`` is the mean
    over responses of ``log p - log p_ref`` summed over their tokens, as in the paper and in TRL.
    """

    ERROR_LIMIT = 0.2

    def __init__(self, kl_coef: float, *, target: float, horizon: float) -> None:
        """Begin with ``kl_coef``, which must be above 0 to be steered; ``horizon`` is a number of responses."""
        self.kl_coef = kl_coef
        self.target = target
        self.horizon = horizon

    def update(self, kl: float, rows: int) -> None:
        """Take one rollout into account: its mean ``kl``, and its number of responses over all ranks."""
        if not math.isfinite(kl):
            return  # of a rollout whose step is skipped too; a factor of NaN would stay for ever
        error = min(max(kl / self.target - 1.0, -self.ERROR_LIMIT), self.ERROR_LIMIT)
        self.kl_coef *= 1.0 + error * rows / self.horizon

    def state_dict(self) -> dict[str, float]:
        """What a resumed run needs."""
        return {"kl_coef": self.kl_coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from a saved coefficient; target and horizon are the configuration's."""
        self.kl_coef = float(state["kl_coef"])
