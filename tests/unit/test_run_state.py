"""What a run takes from its saved state, and what it does not when its data are others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mrlhf.trainer.run_state import PPORunState


@pytest.mark.parametrize(("saved", "kept"), [("a", True), ("b", False)])
def test_the_previous_rollout_belongs_to_its_prompts(saved: str, kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    streams: list[Any] = []
    trainer: Any = SimpleNamespace(
        stream=SimpleNamespace(load_state_dict=streams.append),
        dataset=SimpleNamespace(fingerprint="a"),
        updater=SimpleNamespace(bad_steps=0, ptx=None),
        kl_control=None,
        normalizer=None,
        config=SimpleNamespace(semantics="deepspeed_chat"),
    )
    state, rollouts = PPORunState(trainer), []
    monkeypatch.setattr(state, "_set_rollout", rollouts.append)
    state.load_state_dict({"stream": {"fingerprint": saved}, "bad_steps": 1, "rollout": {"rows": []}})
    assert streams == [{"fingerprint": saved}]
    assert bool(rollouts) is kept
