"""Adds up metrics and writes them: JSON lines, TensorBoard, Weights & Biases.

Only rank 0 builds writers. Values are put together over ranks first, by a collective in which all ranks take part
(`mrlhf.parallel.collectives.all_reduce_metrics`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mrlhf.errors import ConfigError
from mrlhf.lines import LineFile, cut_lines
from mrlhf.types import Metric, merge_metrics

if TYPE_CHECKING:
    from torch import Tensor

Scalar = float | int | str | None


class MetricAccumulator:
    """Named metrics that grow part by part. Tensors stay on their device until `results` is asked for."""

    def __init__(self) -> None:
        self._metrics: dict[str, Metric] = {}

    def add(self, metrics: Mapping[str, Metric], prefix: str = "") -> None:
        """Merge parts, as losses return them, under ``prefix + name``. Raises ValueError for another reduction."""
        named = {prefix + name: metric for name, metric in metrics.items()}
        self._metrics = merge_metrics([self._metrics, named])

    def mean(self, name: str, total: float | Tensor, count: float | Tensor = 1) -> None:
        """Add a sum and the count that it is a sum of."""
        self.add({name: Metric("mean", total, count)})

    def max(self, name: str, value: float | Tensor) -> None:
        """Keep the largest value; NaN wins over all."""
        self.add({name: Metric("max", value, 1)})

    def min(self, name: str, value: float | Tensor) -> None:
        """Keep the smallest value; NaN wins over all."""
        self.add({name: Metric("min", value, 1)})

    def metrics(self) -> dict[str, Metric]:
        """What has been added up so far, by name."""
        return dict(self._metrics)

    def results(self) -> dict[str, float]:
        """The numbers to log, by name in the order of first appearance; NaN where nothing was counted."""
        return {name: metric.result() for name, metric in self._metrics.items()}


class MetricsWriter(Protocol):
    """Somewhere metrics go."""

    def write(self, step: int, metrics: Mapping[str, Scalar]) -> None:
        """Record one iteration."""

    def close(self) -> None:
        """Finish; nothing is written afterwards."""


class JsonlWriter:
    """One JSON object per iteration, see `LineFile`.

    JSON has no NaN: such a value is written as null, and ``nonfinite`` in the same object tells which it was.
    """

    def __init__(self, path: Path, *, append: bool = False):
        path.parent.mkdir(parents=True, exist_ok=True)
        if not append:
            path.unlink(missing_ok=True)
        path.touch()
        self._file = LineFile(path)

    def write(self, step: int, metrics: Mapping[str, Scalar]) -> None:
        """Append one line with ``step`` and all metrics."""
        row: dict[str, Any] = {"step": step, **metrics}
        bad = {name: value for name, value in row.items() if isinstance(value, float) and not math.isfinite(value)}
        row.update(dict.fromkeys(bad))
        if bad:
            row["nonfinite"] = {name: str(value) for name, value in bad.items()}
        self._file.write([row])

    def close(self) -> None:
        """Try once more to write what could not be written."""
        self._file.write([])


class TensorBoardWriter:
    """TensorBoard scalars; text is left out. Earlier events from ``purge_step`` on are hidden (a resumed run)."""

    def __init__(self, folder: Path, *, purge_step: int | None = None):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=purge_step)

    def write(self, step: int, metrics: Mapping[str, Scalar]) -> None:
        """Record every number under its name."""
        for name, value in metrics.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class WandbWriter:
    """A Weights & Biases run; ``run_id`` continues an earlier one."""

    def __init__(self, folder: Path, *, run_id: str | None = None, config: Mapping[str, Any] | None = None):
        try:
            import wandb
        except ImportError:
            raise ConfigError(
                "trainer.wandb is true, but wandb is not installed; run pip install 'mrlhf[wandb]' or set it to false"
            ) from None
        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(dir=str(folder), id=run_id, resume="allow", config=dict(config or {}))
        # Our own axis: W&B's step only goes up, and a run that goes on from a checkpoint makes some steps again.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    @property
    def run_id(self) -> str:
        """What a later run passes to continue this one."""
        return str(self._run.id)

    def write(self, step: int, metrics: Mapping[str, Scalar]) -> None:
        """Log all metrics at ``step``."""
        self._run.log({**metrics, "step": step})

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class Writers:
    """Several writers behind the interface of one."""

    def __init__(self, writers: Sequence[MetricsWriter]):
        self.writers = tuple(writers)

    @property
    def run_id(self) -> str | None:
        """What continues the W&B run later; None without one."""
        return next((writer.run_id for writer in self.writers if isinstance(writer, WandbWriter)), None)

    def write(self, step: int, metrics: Mapping[str, Scalar]) -> None:
        """Hand one iteration to every writer; one whose disk or service fails is told of and left out from then on."""
        for writer in self.writers:
            try:
                writer.write(step, metrics)
            except OSError as error:
                self.writers = tuple(other for other in self.writers if other is not writer)
                warnings.warn(f"{type(writer).__name__} stops in step {step}: {error}", stacklevel=2)

    def close(self) -> None:
        """Close every writer."""
        for writer in self.writers:
            writer.close()


def open_writers(
    output_dir: str | Path,
    tensorboard: bool,
    wandb: bool,
    *,
    first_step: int = 0,
    run_id: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> Writers:
    """The writers of a run, for rank 0: ``metrics.jsonl`` always, ``tensorboard/`` and W&B where asked.

    With a ``first_step`` above 0 an existing ``metrics.jsonl`` is cut back to the steps before it and continued.
    Raises `ConfigError` when W&B is asked for and not installed.
    """
    folder = Path(output_dir)
    # W&B first: it is the one that can be missing, and nothing should be overwritten before that is known.
    optional: list[MetricsWriter] = [WandbWriter(folder, run_id=run_id, config=config)] if wandb else []
    cut_lines(folder / "metrics.jsonl", "step", first_step)
    writers: list[MetricsWriter] = [JsonlWriter(folder / "metrics.jsonl", append=first_step > 0)]
    if tensorboard:
        writers.append(TensorBoardWriter(folder / "tensorboard", purge_step=first_step or None))
    return Writers([*writers, *optional])
