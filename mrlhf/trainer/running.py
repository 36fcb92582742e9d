"""Running statistics of scores."""

from __future__ import annotations

import torch

from mrlhf.parallel.collectives import Group, all_reduce_moments
from mrlhf.rl import masked_moments


class RunningMoments:
    """Mean and variance of all scores so far, over all ranks (Chan, Golub and LeVeque 1979)."""

    def __init__(self) -> None:
        self.count = self.mean = self.m2 = 0.0

    def normalize(self, scores: torch.Tensor, group: Group, eps: float = 1e-8) -> torch.Tensor:
        """Add ``scores [B]`` to the statistics, then return ``(scores - mean) / std``.

        Every rank of the data-parallel group calls this together; a rank may have no rows.
        """
        everything = torch.ones_like(scores, dtype=torch.bool)
        moments = all_reduce_moments(*masked_moments(scores, everything), group)
        self._add(*(float(x) for x in moments))
        variance = self.m2 / max(self.count, 1.0)
        return ((scores.double() - self.mean) / (variance + eps) ** 0.5).to(scores.dtype)

    def _add(self, count: float, mean: float, m2: float) -> None:
        total = self.count + count
        if not total:
            return
        difference = mean - self.mean
        self.m2 += m2 + difference**2 * self.count * count / total
        self.mean += difference * count / total
        self.count = total

    def state_dict(self) -> dict[str, float]:
        """The statistics."""
        return {"count": self.count, "mean": self.mean, "m2": self.m2}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from saved statistics."""
        self.count, self.mean, self.m2 = state["count"], state["mean"], state["m2"]
