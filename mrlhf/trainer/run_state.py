"""What the trainers save besides weights and optimizers, and the marks of what they read."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mrlhf.checkpoint.training_state import Average, SavedModel
from mrlhf.data.prompts import Sample
from mrlhf.parallel.collectives import all_gather_objects
from mrlhf.roles.model import TrainedModel

if TYPE_CHECKING:
    from mrlhf.trainer.ppo import PPOTrainer
    from mrlhf.trainer.supervised import SupervisedTrainer

_SAMPLE = 1 << 20


class PPORunState:
    """Of a `PPOTrainer`."""

    def __init__(self, trainer: PPOTrainer) -> None:
        """Keep the reference."""
        self.trainer = trainer

    def models(self) -> dict[str, SavedModel]:
        """Actor and critic, as far as there are both."""
        trainer = self.trainer
        return saved_models(trainer.actor, *([trainer.critic] if trainer.critic is not None else []))

    def averages(self) -> dict[str, Average]:
        """The actor's, if there is one."""
        ema = self.trainer.ema
        return {} if ema is None else {"ema": Average("actor", ema.state_dict())}

    def inputs(self) -> dict[str, Any]:
        """Prompts, texts, models and seed."""
        trainer, config = self.trainer, self.trainer.config
        marks: dict[str, Any] = {"seed": config.seed, "data.prompts": trainer.dataset.fingerprint}
        if trainer.held_out is not None:
            marks["evaluation.prompts"] = trainer.held_out.fingerprint
        if trainer.updater.ptx is not None:
            marks["ptx.path"] = trainer.updater.ptx.stream.fingerprint
        return marks | model_marks(config.model_folders())

    def state_dict(self) -> dict[str, Any]:
        """Cursors, controllers, statistics, and the rollout that ``deepspeed_chat`` may come back to."""
        trainer = self.trainer
        state: dict[str, Any] = {"stream": trainer.stream.state_dict(), "bad_steps": trainer.updater.bad_steps}
        if trainer.updater.ptx is not None:
            state["ptx"] = trainer.updater.ptx.stream.state_dict()
        if trainer.kl_control is not None:
            state["kl_control"] = trainer.kl_control.state_dict()
        if trainer.normalizer is not None:
            state["normalizer"] = trainer.normalizer.state_dict()
        if trainer.config.semantics == "deepspeed_chat":
            state["rollout"] = self._rollout()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there; what the run did not have before begins anew."""
        trainer = self.trainer
        trainer.stream.load_state_dict(state["stream"])
        same_prompts = state["stream"]["fingerprint"] == trainer.dataset.fingerprint
        trainer.updater.bad_steps = state["bad_steps"]
        if trainer.updater.ptx is not None and "ptx" in state:
            trainer.updater.ptx.stream.load_state_dict(state["ptx"])
        if trainer.kl_control is not None and "kl_control" in state:
            trainer.kl_control.load_state_dict(state["kl_control"])
        if trainer.normalizer is not None and "normalizer" in state:
            trainer.normalizer.load_state_dict(state["normalizer"])
        # Its prompts are places in the stream; those of other data would get responses that are not theirs.
        if state.get("rollout") is not None and same_prompts and trainer.config.semantics == "deepspeed_chat":
            self._set_rollout(state["rollout"])

    def _rollout(self) -> dict[str, Any] | None:
        """The rows of all replicas, their prompts as places in the stream."""
        if self.trainer.sampler.previous is None:
            return None
        batch, width, samples = self.trainer.sampler.previous
        mine = [
            {
                "sample": sample.sample_id,
                "group": sample.group_id,
                "response": batch.response(row),
                "truncated": bool(batch.truncated[row]),
                "logprobs": batch.sampled_logprobs(row),
            }
            for row, sample in enumerate(samples)
        ]
        parts = all_gather_objects(mine, self.trainer.job.groups.dp)
        return {"width": width, "rows": [row for part in parts for row in part]}

    def _set_rollout(self, saved: Mapping[str, Any]) -> None:
        trainer = self.trainer
        share = len(saved["rows"]) // trainer.job.dp_size
        rows = saved["rows"][trainer.job.dp_rank * share : (trainer.job.dp_rank + 1) * share]
        samples = [Sample(row["sample"], row["group"], trainer.stream.prompt(row["group"])) for row in rows]
        responses, truncated = [row["response"] for row in rows], [row["truncated"] for row in rows]
        logprobs = [row.get("logprobs") for row in rows] if trainer.sampler.with_logprobs else None
        if logprobs is not None and None in logprobs:
            # Saved by a run that did not keep them: as if there had been no rollout before.
            return
        batch = trainer.sampler.to_batch(samples, responses, truncated, logprobs)
        trainer.sampler.previous = (batch, saved["width"], samples)


class SupervisedRunState:
    """Of a `SupervisedTrainer`."""

    def __init__(self, trainer: SupervisedTrainer[Any]) -> None:
        """Keep the reference."""
        self.trainer = trainer

    def models(self) -> dict[str, SavedModel]:
        """The trained one."""
        return saved_models(self.trainer.model)

    def averages(self) -> dict[str, Average]:
        """None."""
        return {}

    def inputs(self) -> dict[str, Any]:
        """Examples, models and seed."""
        trainer, config = self.trainer, self.trainer.config
        marks: dict[str, Any] = {"seed": config.seed, "data.train": trainer.examples.fingerprint}
        if trainer.validation is not None:
            marks["data.validation"] = trainer.validation.fingerprint
        return marks | model_marks(config.model_folders())

    def state_dict(self) -> dict[str, Any]:
        """The cursor, the validations so far, the steps skipped in a row."""
        trainer = self.trainer
        return {
            "stream": trainer.stream.state_dict(),
            "bad_steps": trainer.bad_steps,
            "validations": [[validation.step, validation.metrics] for validation in trainer.validations],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.trainer.stream.load_state_dict(state["stream"])
        self.trainer.bad_steps = state["bad_steps"]
        # That module is above this one.
        from mrlhf.trainer.supervised import Validation

        self.trainer.validations = [Validation(step, metrics) for step, metrics in state["validations"]]


def model_marks(folders: Mapping[str, str]) -> dict[str, str]:
    """A mark of each model folder's weights, wherever it lies: names, sizes, and the ends of every weight file."""
    known: dict[str, str] = {}
    for path in set(folders.values()):
        digest, root = hashlib.sha256(), Path(path)
        for file in sorted(p for p in root.rglob("*") if p.suffix in (".safetensors", ".distcp")):
            size = file.stat().st_size
            digest.update(f"{file.relative_to(root)} {size}\n".encode())
            with file.open("rb") as stream:
                digest.update(stream.read(_SAMPLE))
                stream.seek(max(size - _SAMPLE, 0))
                digest.update(stream.read(_SAMPLE))
        known[path] = digest.hexdigest()[:16]
    return {key: known[path] for key, path in folders.items()}


def saved_models(*models: TrainedModel) -> dict[str, SavedModel]:
    """Trained models by role, as checkpoints take them."""
    return {model.name: SavedModel(model.trainable, model.config) for model in models}


def named_difference(key: str, saved: Any, now: Any) -> str:
    """What the mark of an input was and is; None: there is none."""
    if saved is None or now is None:
        return f"{key} ({'not' if saved is None else 'only'} in the checkpoint)"
    return f"{key} was {saved}, now {now}"


def flat_keys(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested sections by dotted key."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        flat |= flat_keys(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat
