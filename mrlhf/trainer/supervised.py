"""The loop of every training on written examples: batches, steps, validation, metrics, export."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeAlias, TypeVar

from mrlhf.config_supervised import SupervisedConfig
from mrlhf.data.stream import ExampleSet, ExampleStream
from mrlhf.data.tokenizer import Tokenizer
from mrlhf.megatron.model import Head
from mrlhf.megatron.optimizer import peak_memory_bytes
from mrlhf.parallel.collectives import all_reduce_metrics
from mrlhf.parallel.layout import data_parallel_slice
from mrlhf.progress import Display
from mrlhf.roles.micro_batches import Plan, make_plan
from mrlhf.roles.model import TrainedModel, Update
from mrlhf.trainer.checkpointing import Checkpointer
from mrlhf.trainer.job import Job, load_model, make_trainable
from mrlhf.trainer.loop import run_loop
from mrlhf.trainer.outputs import export_dtype, export_model
from mrlhf.trainer.precision import kernel_lines
from mrlhf.trainer.report import PhaseTimer
from mrlhf.trainer.run_state import SupervisedRunState
from mrlhf.trainer.skipped import count_skipped
from mrlhf.trainer.stopping import open_heartbeat
from mrlhf.trainer.supervised_inputs import MODEL
from mrlhf.types import Metric, RolloutBatch, merge_metrics

E = TypeVar("E")
S = TypeVar("S", bound=SupervisedConfig)
SupervisedJob: TypeAlias = Job[SupervisedConfig]
Collate = Callable[[Sequence[E], int], RolloutBatch]
"""Rows from examples and the number of the first one in the stream; no examples give no rows."""


class Objective(Protocol):
    """What is learned: the loss, and what has to be computed for it.

    Attributes:
        model: the trained model, for its rate, its export and its place in the layout.
    """

    model: TrainedModel

    def prepare(self, batch: RolloutBatch) -> RolloutBatch:
        """Add what passes without gradient compute to this rank's rows; the batch itself where there is none."""

    def denominator(self, batch: RolloutBatch) -> float:
        """What the loss sum is divided by, from the rows of all ranks; lengths and masks alone decide it."""

    def step(self, batch: RolloutBatch, denominator: float) -> Update:
        """One optimizer step on this rank's rows."""

    def evaluate(self, batch: RolloutBatch) -> dict[str, Metric]:
        """The metrics of this rank's rows without a gradient; empty except on tensor rank 0 of the last stage.

        Collectives stay within the replica: replicas may call it a different number of times.
        """


@dataclass(frozen=True)
class Validation:
    """The result of one validation: after which step, and its metrics."""

    step: int
    metrics: dict[str, float]


def build_trained(
    job: Job[S], head: Head, steps: int, *, head_init: str = "auto", masked: bool = False
) -> TrainedModel:
    """``model.path`` on this rank with its optimizer, whose schedule ends after ``steps``; see `load_model`."""
    config = job.config
    chunks = load_model(
        job,
        MODEL,
        config.model.path,
        head,
        dropout=config.model.dropout,
        trainable=True,
        head_init=head_init,
        init=config.model.init,
        masked=masked,
    )
    adam = config.optimizer
    trainable = make_trainable(job, MODEL, chunks, adam, total_steps=steps, distributed=adam.distributed)
    return TrainedModel(MODEL, job.models[MODEL], trainable, job.groups)


def micro_batch_plan(config: SupervisedConfig, batch: RolloutBatch, model: TrainedModel, *, training: bool) -> Plan:
    """The micro-batches of this rank's rows as the ``train`` section says."""
    train = config.train
    return make_plan(
        batch,
        rows=train.micro_batch_size,
        tokens=train.micro_batch_tokens,
        multiple=model.micro_batch_multiple if training else 1,
        packed=train.packing,
    )


def _nothing_derived(metrics: dict[str, float]) -> dict[str, float]:
    return {}


class SupervisedTrainer(Generic[E]):
    """A run on this rank."""

    def __init__(
        self,
        job: SupervisedJob,
        objective: Objective,
        tokenizer: Tokenizer,
        train: ExampleSet[E],
        validation: ExampleSet[E] | None,
        collate: Collate[E],
        *,
        steps: int,
        head: Head = "lm",
        derived: Callable[[dict[str, float]], dict[str, float]] = _nothing_derived,
    ) -> None:
        """Keep references and start the stream of examples.

        Args:
            job: the world, its groups and the configuration.
            objective: with its model built.
            tokenizer: goes along with exports.
            train: at least one example.
            validation: held-out examples, or None.
            collate: makes rows of examples, on the CPU.
            steps: see `total_steps`.
            head: of the exported model.
            derived: further numbers from the loss's metrics, such as the perplexity.
        """
        self.job, self.config, self.objective = job, job.config, objective
        self.tokenizer, self.steps, self.head, self.derived = tokenizer, steps, head, derived
        self.examples, self.validation, self.collate = train, validation, collate
        self.validations: list[Validation] = []
        self.bad_steps = 0
        self.stopped: str | None = None
        self.heartbeat = open_heartbeat(self.config.output_dir, self.config.launch.timeout_minutes)
        self.stream = ExampleStream(
            train.examples,
            train.fingerprint,
            seed=self.config.seed,
            batch_size=self.config.train.batch_size,
            shuffle=self.config.data.shuffle,
        )
        self.checkpoints = Checkpointer(job, self.config.trainer, SupervisedRunState(self), iterations=steps)

    @property
    def model(self) -> TrainedModel:
        """The trained model."""
        return self.objective.model

    def train(self) -> None:
        """All steps, or those up to a request to stop, with validations and exports between them.

        Raises:
            MrlhfError: more gradients in a row are not finite than ``trainer.max_bad_steps`` allows.
        """
        run_loop(self, self.config.trainer, iterations=self.steps, exports=[MODEL], noun="step")

    def advance(self, index: int, display: Display) -> dict[str, float]:
        """`iterate`."""
        return self.iterate(index, display)

    def measure(self, index: int, display: Display) -> dict[str, float]:
        """Metrics ``validation/...`` after every ``trainer.eval_interval`` steps and the last one."""
        if self.validation is None or not self._due(index, self.config.trainer.eval_interval):
            return {}
        return self._validate(index + 1, display)

    def iterate(self, step: int, display: Display) -> dict[str, float]:
        """One optimizer step; returns the metrics, complete on every rank."""
        self.heartbeat.iteration(step + 1)
        timer = PhaseTimer(display, self.heartbeat)
        with timer.phase("data"):
            first = self.stream.position
            examples = next(self.stream)
            whole = self.collate(examples, first)
            mine = data_parallel_slice(len(examples), self.job.dp_rank, self.job.dp_size)
            batch = self.collate(examples[mine], first + mine.start).to(self.job.device)
        with timer.phase("train"):
            batch = self.objective.prepare(batch)
            update = self.objective.step(batch, self.objective.denominator(whole))
        self.bad_steps = count_skipped(
            self.bad_steps,
            {MODEL: update},
            where=f"step {step}",
            rates={MODEL: "optimizer.lr"},
            limit=self.config.trainer.max_bad_steps,
        )
        rate = self.model.trainable.learning_rate
        self.model.trainable.advance_schedule()
        # Ranks disagree about time and memory; the slowest and the largest count.
        worst = {f"time_{name}": Metric("max", seconds, 1.0) for name, seconds in timer.seconds().items()}
        worst["peak_memory_gib"] = Metric("max", peak_memory_bytes() / 2**30, 1.0)
        counted = update.metrics if self.model.counts_metrics else {}
        reduced = {name: m.result() for name, m in all_reduce_metrics({**counted, **worst}).items()}
        measured = {name: reduced.pop(name) for name in worst}
        return {
            **reduced,
            **self.derived(reduced),
            "grad_norm": update.grad_norm,
            "lr": rate,
            "skipped_updates": float(not update.updated),
            "tokens_per_second": float(whole.lengths.sum()) / measured["time_iteration"],
            **measured,
            "epoch": self.stream.position / len(self.examples.examples),
        }

    def evaluate(self) -> dict[str, float]:
        """The objective's metrics over the whole validation set, the same on every rank.

        Replicas take turns of different length where the set does not divide evenly; one reduction at the end puts
        sums and counts together, so every example counts once.

        Raises:
            ValueError: there is no validation set.
        """
        if self.validation is None:
            raise ValueError("there is no validation set")
        examples, size = self.validation.examples, self.job.dp_size
        share, piece = examples[self.job.dp_rank :: size], max(self.config.train.batch_size // size, 1)
        parts = []
        for start in range(0, math.ceil(len(examples) / size), piece):
            mine = share[start : start + piece]
            # Replicas that share experts take turns together, so that one without examples left goes on with any.
            batch = self.collate(mine or examples[:1], start).to(self.job.device)
            part = self.objective.evaluate(self.objective.prepare(batch))
            parts += [part] if mine else []
        merged = merge_metrics(parts) if self.model.counts_metrics else {}
        reduced = {name: metric.result() for name, metric in all_reduce_metrics(merged).items()}
        return {**reduced, **self.derived(reduced)}

    def export(self, suffix: str = "") -> None:
        """Write the model as a Hugging Face folder into the output folder, in the dtype it came in.

        Args:
            suffix: of the folder's name.
        """
        export_model(
            self.model,
            self.config.output_dir / f"{MODEL}{suffix}",
            source=self.config.model.path,
            head=self.head,
            groups=self.job.groups,
            tokenizer=self.tokenizer,
            overwrite=self.config.trainer.overwrite or self.checkpoints.first > 0,
            dtype=export_dtype(self.config.trainer, self.model.config.dtype, self.job.dtype),
        )

    def _due(self, step: int, interval: int) -> bool:
        return step + 1 == self.steps or bool(interval and (step + 1) % interval == 0)

    def _validate(self, step: int, display: Display) -> dict[str, float]:
        display.phase("validate")
        self.heartbeat.phase("validate")
        metrics = self.evaluate()
        self.validations.append(Validation(step, metrics))
        display.message(f"validation after {step} steps: {_numbers(metrics)}")
        return {f"validation/{name}": value for name, value in metrics.items()}

    def announce(self, display: Display) -> None:
        """Say how the run is laid out, and what it reads."""
        job, data = self.job, self.examples
        masked = self.model.attention_mask is not None
        parts, *warnings = kernel_lines(job.config, job.models, trained=(MODEL,), masked=masked)
        for line in (f"{job.env.launcher}: {job.sizes.describe()}; {parts}", *warnings):
            display.message(line)
        left_out = {"malformed lines skipped": data.skipped, "over-long dropped": data.dropped}
        left_out["over-long cut"] = data.truncated
        counted = "".join(f", {count} {what}" for what, count in left_out.items() if count)
        held = f", {len(self.validation.examples)} held out" if self.validation is not None else ""
        display.message(f"{len(data.examples)} training examples{held}{counted}; {self.steps} steps")

    def summary(self, first: int, begun: Mapping[str, float], last: Mapping[str, float]) -> str:
        """The best and the last validation; without any, the last loss."""
        lines = []
        scored = [v for v in self.validations if "loss" in v.metrics]
        if scored:
            best = min(scored, key=lambda v: v.metrics["loss"])
            lines.append(f"best validation, after {best.step} steps: {_numbers(best.metrics)}")
            lines.append(f"last validation, after {scored[-1].step} steps: {_numbers(scored[-1].metrics)}")
        elif "loss" in last:
            lines.append(f"loss {last['loss']:.4f} in the last step")
        return "\n".join([*lines, f"see {self.config.metrics_path}"])


def _numbers(metrics: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
