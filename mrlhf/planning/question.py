"""A configuration on so many GPUs of some kind, and the same with other values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from pydantic import BaseModel

from mrlhf.config_sections import RunConfig
from mrlhf.errors import ConfigError
from mrlhf.model_config import ModelConfig
from mrlhf.planning.from_config import MeanLengths, check_job, make_job
from mrlhf.planning.hardware import Efficiency, Hardware
from mrlhf.planning.job import Job
from mrlhf.planning.plan import iteration_seconds, peak

B = TypeVar("B", bound=BaseModel)


@dataclass(frozen=True)
class Question:
    """What is planned.

    Attributes:
        config: of the run.
        models: architectures by role.
        world_size: ranks, one a GPU.
        hardware: the GPUs.
        efficiency: assumed shares of their peaks.
        reserve: bytes of each GPU that are not for tensors.
        means: lengths for FLOPs and times.
    """

    config: RunConfig
    models: Mapping[str, ModelConfig]
    world_size: int
    hardware: Hardware
    efficiency: Efficiency = field(default_factory=Efficiency)
    reserve: int = 0
    means: MeanLengths = field(default_factory=MeanLengths)

    @property
    def limit(self) -> int:
        """Bytes that a rank may take."""
        return int(self.hardware.memory) - self.reserve

    def job(self) -> Job:
        """The job; raises `ConfigError` when its sizes cannot work together."""
        check_job(self.config, self.world_size, self.models)
        return make_job(self.config, self.models, self.world_size, self.means)

    def valid_job(self) -> Job | None:
        """The job, or None when its sizes cannot work together."""
        try:
            return self.job()
        except ConfigError:
            return None

    def get(self, key: str) -> Any:
        """The value of a dotted key; None where this kind of run has no such key."""
        value: Any = self.config
        for part in key.split("."):
            value = getattr(value, part, None)
        return value

    def has(self, key: str) -> bool:
        """Whether this kind of run has a dotted key."""
        value: Any = self.config
        for part in key.split("."):
            if part not in type(value).model_fields if isinstance(value, BaseModel) else True:
                return False
            value = getattr(value, part)
        return True

    def changed(self, values: Mapping[str, Any], world_size: int | None = None) -> Question:
        """The same question with other values of dotted keys."""
        config = self.config
        for key, value in values.items():
            config = _with_key(config, key.split("."), value)
        return replace(self, config=config, world_size=world_size or self.world_size)

    def peak_bytes(self) -> int | None:
        """Bytes of the rank and phase that need most; None when the sizes cannot work together."""
        job = self.valid_job()
        return None if job is None else peak(job).bytes

    def seconds(self, job: Job) -> float:
        """Of an iteration of ``job``."""
        return iteration_seconds(job, self.hardware, self.efficiency)


def _with_key(section: B, path: list[str], value: Any) -> B:
    name, *rest = path
    inner = _with_key(getattr(section, name), rest, value) if rest else value
    return section.model_copy(update={name: inner})
