"""The functions of rl/ against recorded outputs of DeepSpeed-Chat's step 3 (float64)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mrlhf import rl
from mrlhf.types import RolloutBatch

TOLERANCE = {"rtol": 0, "atol": 1e-8}
FRAMES = ["logprobs", "ref_logprobs", "old_values", "new_logprobs", "new_values"]


def double(x: Any) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.float64)


class Case:
    """One recorded case, moved from left-padded prompts to contiguous right-padded rows."""

    def __init__(self, case: dict[str, Any]):
        self.inputs, self.expected = case["inputs"], case["expected"]
        self.start = self.inputs["prompt_length"]
        attention = torch.tensor(self.inputs["attention_mask"])
        self.rows, total = attention.shape
        self.full = total - self.start
        self.prompt_lengths = attention[:, : self.start].sum(1)
        self.response_lengths = attention[:, self.start :].sum(1)
        self.width = total  # one label slot more than recorded: garbage
        self.shift = self.start - self.prompt_lengths
        self.frames = {}
        for name in FRAMES:
            source = double(self.inputs[name])
            target = torch.full((self.rows, self.width), torch.nan, dtype=torch.float64)
            for row in range(self.rows):
                kept = source[row, self.shift[row] :]
                target[row, : kept.shape[0]] = kept
            self.frames[name] = target
        self.response_mask, self.gae_mask = rl.response_masks(
            self.prompt_lengths,
            self.response_lengths,
            width=self.width,
            semantics="deepspeed_chat",
            response_width=self.full,
        )

    def recorded_frame(self, x: torch.Tensor) -> torch.Tensor:
        """Right-padded frame -> recorded frame from label position P - 1 on."""
        result = torch.zeros((self.rows, self.full), dtype=x.dtype)
        for row in range(self.rows):
            begin = int(self.prompt_lengths[row]) - 1
            part = x[row, begin : begin + self.full]
            result[row, : part.shape[0]] = part
        return result

    def shaped(self) -> tuple[torch.Tensor, torch.Tensor]:
        return rl.shape_rewards(
            double(self.inputs["scores"]),
            self.frames["logprobs"],
            self.frames["ref_logprobs"],
            self.gae_mask,
            kl_coef=self.inputs["kl_ctl"],
            score_clip=self.inputs["clip_reward_value"],
        )

    def advantages(self) -> tuple[torch.Tensor, torch.Tensor]:
        return rl.gae(
            self.shaped()[0],
            self.frames["old_values"],
            self.gae_mask,
            gamma=self.inputs["gamma"],
            gae_lambda=self.inputs["lam"],
        )


@pytest.fixture(params=range(5))
def case(request: pytest.FixtureRequest, ds_chat_functions: dict[str, Any]) -> Case:
    assert len(ds_chat_functions["cases"]) == 5
    return Case(ds_chat_functions["cases"][request.param])


def test_rewards(case: Case) -> None:
    rewards, kl = case.shaped()
    ends = torch.tensor(case.expected["ends"]) - (case.start - 1)
    inside = torch.arange(case.full) < ends.unsqueeze(1)
    assert torch.equal(case.recorded_frame(case.gae_mask), inside)
    expected = double(case.expected["rewards"])
    torch.testing.assert_close(case.recorded_frame(rewards), torch.where(inside, expected, 0.0), **TOLERANCE)
    assert rewards.dtype == kl.dtype == torch.float64
    assert not rewards[~case.gae_mask].any()


def test_advantages_and_returns(case: Case) -> None:
    advantages, returns = case.advantages()
    inside = case.recorded_frame(case.gae_mask)
    for mine, name in ((advantages, "advantages"), (returns, "returns")):
        expected = double(case.expected[name])
        torch.testing.assert_close(case.recorded_frame(mine), torch.where(inside, expected, 0.0), **TOLERANCE)


@pytest.mark.parametrize("weighted", [False, True])
def test_losses_and_gradients(case: Case, weighted: bool) -> None:
    advantages, returns = case.advantages()
    logprobs = case.frames["new_logprobs"].clone().requires_grad_()
    values = case.frames["new_values"].clone().requires_grad_()
    weights = rl.ds_group_row_weights(case.response_mask, case.rows) if weighted else None
    actor = rl.policy_loss(
        logprobs,
        case.frames["logprobs"],
        advantages,
        case.response_mask,
        clip_eps=case.inputs["cliprange"],
        row_weights=weights,
    )
    critic = rl.value_loss(
        values,
        case.frames["old_values"],
        returns,
        case.response_mask,
        value_clip=case.inputs["cliprange_value"],
        row_weights=weights,
    )
    if weighted:
        torch.testing.assert_close(actor.count, double(1.0), **TOLERANCE)
        actor_loss, critic_loss = actor.loss_sum, critic.loss_sum
    else:
        assert actor.count == case.response_lengths.sum()
        actor_loss, critic_loss = actor.loss_sum / actor.count, critic.loss_sum / critic.count
    torch.testing.assert_close(actor_loss, double(case.expected["actor_loss"]), **TOLERANCE)
    torch.testing.assert_close(critic_loss, double(case.expected["critic_loss"]), **TOLERANCE)
    actor_loss.backward()
    critic_loss.backward()
    for leaf, name in ((logprobs, "d_actor_loss_d_new_logprobs"), (values, "d_critic_loss_d_new_values")):
        assert leaf.grad is not None
        assert not leaf.grad[~case.response_mask].any()
        torch.testing.assert_close(case.recorded_frame(leaf.grad), double(case.expected[name]), **TOLERANCE)


def test_masks_fit_the_frame_of_a_batch(case: Case) -> None:
    prompts = [[5] * int(n) for n in case.prompt_lengths]
    responses = [[6] * int(n) for n in case.response_lengths]
    batch = RolloutBatch.from_sequences(prompts, responses, pad_id=0)
    assert torch.equal(batch.prompt_lengths, case.prompt_lengths)
    _, gae_mask = rl.response_masks(
        batch.prompt_lengths,
        batch.response_lengths,
        width=batch.width - 1,
        semantics="deepspeed_chat",
        response_width=case.full,
    )
    assert torch.equal(gae_mask.sum(1), case.gae_mask.sum(1))
