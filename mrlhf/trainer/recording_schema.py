"""What ``expected.json`` of a recorded trajectory must hold; checked before anything is replayed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from mrlhf.errors import DataError, join_problems

Number = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[int, Field(ge=1)]
Token = Annotated[int, Field(ge=0)]
Matrix = list[list[Number]]
Tokens = list[list[Token]]
SHOWN = 10


class _Part(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)


class RecordedSettings(_Part):
    """The PPO settings of the recording; further keys are left alone."""

    prompt_length: Positive
    max_response_length: Positive
    rollout_batch_size: Positive
    minibatch_size: Positive
    ppo_epochs: Positive
    shuffle: bool
    num_rollouts: Positive
    actor_lr: Number
    critic_lr: Number
    kl_ctl: Number
    clip_reward_value: Number
    cliprange: Number
    cliprange_value: Number
    gamma: Number
    lam: Number
    pad_token_id: Token
    eos_token_id: Token
    ds_group_size: Positive | None = None


class _Greedy(_Part):
    prompts: Tokens
    sequences: Tokens


class _GreedyWithEnds(_Greedy):
    eos_token_ids: list[Token]


class _Probe(_Part):
    input_ids: Tokens
    logits_sum: Matrix
    logits_argmax: Tokens
    logits_first8: list[Matrix]


class _Update(_Part):
    actor_loss: Number
    critic_loss: Number
    actor_grad_norm: Number
    critic_grad_norm: Number


class _Rollout(_Part):
    sequences: Tokens
    logprobs: Matrix
    ref_logprobs: Matrix
    values: Matrix
    reward_scores: list[Number]
    updates: list[_Update]


class _Final(_Part):
    actor_weight_norms: dict[str, Number]
    critic_weight_norms: dict[str, Number]
    probe_logits_sum: Matrix
    probe_logits_argmax: Tokens
    probe_logits_first8: list[Matrix]


class RecordedRun(_Part):
    """The whole of ``expected.json``."""

    config: RecordedSettings
    greedy: _Greedy
    greedy_with_eos: _GreedyWithEnds | None = None
    probe: _Probe
    rollouts: Annotated[list[_Rollout], Field(min_length=1)]
    final: _Final

    @model_validator(mode="after")
    def _shapes(self) -> RecordedRun:
        c, probe = self.config, self.probe
        problems: list[str] = []
        if len(self.rollouts) != c.num_rollouts:
            problems.append(f"rollouts: {len(self.rollouts)} entries, config.num_rollouts is {c.num_rollouts}")
        rows, width, response = c.rollout_batch_size, c.prompt_length + c.max_response_length, c.max_response_length
        updates = c.ppo_epochs * -(-rows // c.minibatch_size)
        for i, rollout in enumerate(self.rollouts):
            name = f"rollouts[{i}]"
            problems += _shape(f"{name}.sequences", rollout.sequences, rows, width)
            for key in ("logprobs", "ref_logprobs", "values"):
                problems += _shape(f"{name}.{key}", getattr(rollout, key), rows, response)
            problems += _length(f"{name}.reward_scores", rollout.reward_scores, rows)
            problems += _length(f"{name}.updates", rollout.updates, updates)
        for key, greedy in (("greedy", self.greedy), ("greedy_with_eos", self.greedy_with_eos)):
            if greedy is not None:
                problems += _shape(f"{key}.prompts", greedy.prompts, len(greedy.prompts), c.prompt_length)
                problems += _shape(f"{key}.sequences", greedy.sequences, len(greedy.prompts), width)
        b, s = len(probe.input_ids), max(map(len, probe.input_ids), default=0)
        problems += _shape("probe.input_ids", probe.input_ids, b, s)
        for name, part, prefix in (("probe", probe, "logits"), ("final", self.final, "probe_logits")):
            for end in ("sum", "argmax", "first8"):
                problems += _shape(f"{name}.{prefix}_{end}", getattr(part, f"{prefix}_{end}"), b, s)
            for row in getattr(part, f"{prefix}_first8"):
                problems += _shape(f"{name}.{prefix}_first8[]", row, len(row), 8)
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def token_rows(self) -> dict[str, Tokens]:
        """Everything that holds token ids, by key."""
        rows = {f"rollouts[{i}].sequences": rollout.sequences for i, rollout in enumerate(self.rollouts)}
        rows |= {"greedy.prompts": self.greedy.prompts, "probe.input_ids": self.probe.input_ids}
        if self.greedy_with_eos is not None:
            rows["greedy_with_eos.prompts"] = self.greedy_with_eos.prompts
        return rows


def check_recorded(expected: Any, path: Path, *, vocab_size: int | None = None) -> None:
    """Refuse a recording that is incomplete.

    Args:
        expected: the content of ``expected.json``.
        path: the file, for messages.
        vocab_size: of the actor; token ids must be below it.

    Raises:
        DataError: naming every missing or malformed key.
    """
    try:
        run = RecordedRun.model_validate(expected)
    except ValidationError as error:
        problems = []
        for entry in error.errors():
            key = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in entry["loc"]).lstrip(".")
            for line in str(entry["ctx"]["error"] if entry["type"] == "value_error" else entry["msg"]).splitlines():
                problems.append(f"{key}: {line}" if key else line)
        more = [f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
        raise DataError(join_problems(f"{path} is not a complete recording:", problems[:SHOWN] + more)) from None
    for key, rows in run.token_rows().items():
        largest = max((max(row, default=0) for row in rows), default=0)
        if vocab_size is not None and largest >= vocab_size:
            raise DataError(f"{path}: {key} holds the token id {largest}; the actor's vocabulary is {vocab_size}")


def _shape(key: str, rows: list[Any], count: int, width: int) -> list[str]:
    wrong = next((i for i, row in enumerate(rows) if len(row) != width), None)
    if wrong is not None:
        return [f"{key}[{wrong}]: {len(rows[wrong])} entries, expected {width}"]
    return _length(key, rows, count)


def _length(key: str, rows: list[Any], count: int) -> list[str]:
    return [] if len(rows) == count else [f"{key}: {len(rows)} entries, expected {count}"]
