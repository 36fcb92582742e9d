"""A recorded PPO trajectory: its numbers, its settings, its rows in our layout."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from mrlhf.config import load_config
from mrlhf.config_schema import PPOConfig
from mrlhf.config_sections import ParallelConfig
from mrlhf.errors import DataError
from mrlhf.rl import Semantics
from mrlhf.trainer.recording_schema import check_recorded
from mrlhf.types import RolloutBatch

ADAM = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0, "clip_grad": 1.0, "lr_schedule": "constant"}
"""The optimizer of every recording."""


@dataclass(frozen=True)
class Recording:
    """``expected.json`` of a folder with ``actor/`` and ``reward/``."""

    folder: Path
    semantics: Semantics
    expected: dict[str, Any]

    @property
    def settings(self) -> dict[str, Any]:
        """The recorded PPO settings."""
        settings: dict[str, Any] = self.expected["config"]
        return settings

    def batch(self, rollout: int, *, pad_to_multiple: int) -> RolloutBatch:
        """Rows of a recorded rollout, contiguous and right-padded."""
        width, pad = self.settings["prompt_length"], self.settings["pad_token_id"]
        prompts, responses, truncated = [], [], []
        for row in self.expected["rollouts"][rollout]["sequences"]:
            prompts.append(strip_left_padding(row[:width], pad))
            response, cut = self._response(row[width:])
            responses.append(response)
            truncated.append(cut)
        return RolloutBatch.from_sequences(
            prompts, responses, pad_id=pad, pad_to_multiple=pad_to_multiple, truncated=truncated
        )

    def _response(self, tokens: list[int]) -> tuple[list[int], bool]:
        """The response's tokens, and whether the limit cut it off."""
        ending = self.settings["pad_token_id" if self.semantics == "deepspeed_chat" else "eos_token_id"]
        if ending not in tokens:
            return tokens, True
        end = tokens.index(ending)
        return (tokens[:end] if self.semantics == "deepspeed_chat" else tokens[: end + 1]), False

    def response_columns(self, batch: RolloutBatch, x: torch.Tensor) -> torch.Tensor:
        """``[B, W]`` of the label frame as the recording's ``[B, response width]``, from each row's first label on."""
        columns = torch.arange(self.settings["max_response_length"], device=x.device)
        places = batch.prompt_lengths[:, None] - 1 + columns[None, :]
        return x.gather(1, places.clamp(max=x.size(1) - 1))

    def config(self, overrides: list[str]) -> PPOConfig:
        """The recorded settings as a configuration, with overrides (``parallel.`` may be left out)."""
        s, folder = self.settings, self.folder
        base = {
            "semantics": self.semantics,
            "actor.path": folder / "actor",
            "reward.sources": f"[{{kind: model, path: '{folder / 'reward'}'}}]",
            "data.prompts": folder / "expected.json",
            "rollout.prompts_per_iteration": s["rollout_batch_size"],
            "rollout.max_response_length": s["max_response_length"],
            "data.max_prompt_length": s["prompt_length"],
            "ppo.epochs": s["ppo_epochs"],
            "ppo.minibatch_size": s["minibatch_size"],
            "ppo.shuffle": str(s["shuffle"]).lower(),
            "ppo.kl_coef": s["kl_ctl"],
            "ppo.score_clip": s["clip_reward_value"],
            "ppo.clip_eps": s["cliprange"],
            "ppo.value_clip": s["cliprange_value"],
            "ppo.gamma": s["gamma"],
            "ppo.gae_lambda": s["lam"],
            "optimizer.actor.lr": s["actor_lr"],
            "optimizer.critic.lr": s["critic_lr"],
            "trainer.iterations": s["num_rollouts"],
            # Not options: what every recording was made with (its entry "optimizer" says so in words).
            **{f"optimizer.{role}.{key}": value for role in ("actor", "critic") for key, value in ADAM.items()},
        }
        if self.semantics == "deepspeed_chat":
            base["ppo.ds_group_size"] = s["ds_group_size"]
        given = [f"parallel.{o}" if o.partition("=")[0] in ParallelConfig.model_fields else o for o in overrides]
        return load_config(None, [f"{key}={value}" for key, value in base.items()] + given)


def strip_left_padding(row: list[int], pad: int) -> list[int]:
    """A prompt without the pad ids in front of it."""
    start = next((i for i, token in enumerate(row) if token != pad), len(row))
    return row[start:]


def read_recording(folder: Path, semantics: str | None = None) -> Recording:
    """Read ``expected.json``.

    Args:
        folder: with ``actor/``, ``reward/`` and ``expected.json``.
        semantics: by default the entry of that name in ``expected.json``, else from the folder's name.

    Raises:
        DataError: a file or key is missing or malformed; the message names it.
    """
    path = folder / "expected.json"
    try:
        expected = json.loads(path.read_text())
    except FileNotFoundError:
        raise DataError(f"{path} does not exist; a recording holds actor/, reward/ and expected.json") from None
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{error.lineno}: not valid JSON: {error.msg}") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    check_recorded(expected, path)
    chosen = semantics or expected.get("semantics")
    if chosen is None:
        chosen = "deepspeed_chat" if folder.resolve().name.startswith(("ds_chat", "deepspeed_chat")) else None
        chosen = chosen or ("standard" if "standard" in folder.resolve().name else None)
    if chosen not in ("standard", "deepspeed_chat"):
        raise DataError(
            f"{path}: semantics {chosen!r}; name it with --semantics standard or --semantics deepspeed_chat"
        )
    return Recording(folder, cast(Semantics, chosen), expected)
