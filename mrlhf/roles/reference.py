"""The frozen reference: where the actor started."""

from __future__ import annotations

from mrlhf.roles.policy import PolicyModel


class Reference(PolicyModel):
    """Gives reference log-probs; its weights never change."""
