"""Saves a run at intervals and finds the checkpoint that it goes on from, whatever it trains."""

from __future__ import annotations

import contextlib
import difflib
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from mrlhf.checkpoint.plan import state_bytes
from mrlhf.checkpoint.saved import (
    Checkpoint,
    FileRecord,
    file_names,
    file_records,
    latest,
    list_checkpoints,
    locate,
    verify,
)
from mrlhf.checkpoint.store import CheckpointStore, Rotation, leftover_owner, new_run_id
from mrlhf.checkpoint.training_state import (
    AsyncCallsQueue,
    Average,
    LoadedState,
    SavedModel,
    finish,
    load_state,
    read_state,
    save_state,
    together,
)
from mrlhf.config_sections import OutputConfig, RunConfig
from mrlhf.errors import CheckpointError
from mrlhf.megatron import device
from mrlhf.parallel.collectives import all_gather_objects
from mrlhf.trainer.job import Job
from mrlhf.trainer.outputs import CHECKPOINTS, check_shared, resume_now
from mrlhf.trainer.run_state import flat_keys, named_difference

# What a resumed run may have otherwise: nothing that is computed depends on it.
_FREE = ("trainer.", "checkpoint.", "launch.", "parallel.", "placement", "critic_ranks", "inference.", "offload.")


class RunState(Protocol):
    """What a trainer hands to its `Checkpointer`."""

    def models(self) -> dict[str, SavedModel]:
        """The trained models by role."""

    def averages(self) -> dict[str, Average]:
        """Averages of their weights by name."""

    def inputs(self) -> dict[str, Any]:
        """Marks of everything that the run reads, by configuration key; rank 0's count."""

    def state_dict(self) -> dict[str, Any]:
        """Everything else, as JSON can hold it and the same under every layout; all ranks call this together."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""


class Checkpointer:
    """The checkpoints of one run; every rank calls the same methods in the same order."""

    def __init__(
        self,
        job: Job[Any],
        trainer: OutputConfig,
        state: RunState,
        *,
        iterations: int,
    ) -> None:
        """Nothing is read or written yet.

        Args:
            job: the world and the configuration.
            trainer: its part with ``resume``.
            state: of the trainer.
            iterations: of the run; after the last one there is a save.
        """
        self.job, self.trainer, self.state, self.iterations = job, trainer, state, iterations
        self.message: Callable[[str], None] = _say
        """Shows a line to the user."""
        self.first = 0
        """Iterations that were done before this process: 0 unless `resume` found some."""
        self.own = True
        """Whether the run goes on in its own folder, not from another run's checkpoint."""
        self._saved = 0
        self._told = False
        # Only rank 0's counts.
        self._attempt, self._saves = uuid.uuid4().hex[:8], 0
        self._wanted: tuple[int, Mapping[str, float]] | None = None
        config: RunConfig = job.config
        self.config, self.settings = config, config.checkpoint
        self.root = config.output_dir / CHECKPOINTS
        self.run_id = ""
        self.wandb_id: str | None = None
        self.save_seconds = 0.0
        """Of the last save, as far as training waited for it."""
        self._queue = AsyncCallsQueue(persistent=False) if self.settings.asynchronous else None
        self._pending: tuple[int, Path, dict[str, float]] | None = None
        self._inputs: dict[str, Any] | None = None

    def resume(self) -> int:
        """Put the checkpoint in place that ``trainer.resume`` names, if any.

        Returns:
            The iteration to go on with: 0 without a checkpoint, or with its weights only.

        Raises:
            CheckpointError: on every rank: no such checkpoint, a damaged file, another architecture, or other inputs.
            ConfigError: on every rank: there are to be checkpoints, but the ranks do not share the output folder.
        """
        if self.settings.interval:
            check_shared(self.config.output_dir)
        self._marks()
        checkpoint, how = self._find()
        self.own = own = checkpoint is None or self.root.resolve() in checkpoint.path.resolve().parents
        weights_only = self.trainer.weights_only and how != "auto"
        if checkpoint is not None and own and weights_only:
            raise CheckpointError(
                f"trainer.weights_only begins a new run, but trainer.output_dir is that of the run whose weights it "
                f"takes ({self.root}); choose another trainer.output_dir"
            )
        if checkpoint is None or not own:
            together(lambda: self._make_room() if dist.get_rank() == 0 else None, str(self.root))
            # Also for a run that goes on from another one's checkpoint: that one may go on as well.
            self.run_id = self._new_id()
        if checkpoint is None:
            return 0
        names = sorted(checkpoint.files)[dist.get_rank() :: dist.get_world_size()]
        together(lambda: verify(checkpoint, names), str(checkpoint.path))
        if not weights_only:
            self._compare(checkpoint, read_state(checkpoint.path)["common"])
        loaded = load_state(
            checkpoint.path,
            self.state.models(),
            averages=self.state.averages(),
            layout=self.job.described_layout(),
            weights_only=weights_only,
        )
        if weights_only:
            self.message(f"begins with the weights of {checkpoint.path}")
            return 0
        return self._go_on(checkpoint, loaded)

    def after(self, done: int, metrics: Mapping[str, float]) -> None:
        """Look after the saves once ``done`` iterations are complete: one that is due, or one under way.

        Raises:
            CheckpointError: a save failed and ``checkpoint.on_save_error`` is ``stop``.
        """
        interval = self.settings.interval
        if interval and (done % interval == 0 or done == self.iterations):
            self.save(done, metrics)
        elif self._pending is not None:
            self._complete(blocking=False)

    def stop(self, done: int, metrics: Mapping[str, float]) -> None:
        """Save before the run ends early, whatever the interval, unless that has just been done.

        Raises:
            CheckpointError: it failed, and a second time as well: the run must not say that it can go on from here.
        """
        self._complete(blocking=True)
        for _ in range(2):
            if self._saved != done:
                self.save(done, metrics)
                self._complete(blocking=True)
        if self._saved != done:
            kept = f"the newest one is that of iteration {self._saved}" if self._saved else "there is none"
            raise CheckpointError(
                f"the run ends early after iteration {done}, but its state could not be saved, see the warnings "
                f"above; earlier checkpoints are as they were ({kept})"
            )

    def save(self, done: int, metrics: Mapping[str, float]) -> bool:
        """Save the state after ``done`` iterations; an asynchronous save goes on after this.

        Returns:
            Whether it went well so far, the same on every rank.
        """
        start = time.perf_counter()
        self._complete(blocking=True)
        self._wanted = (done, metrics)
        self._saves += 1
        self._look_for_best(metrics)
        store = self._store()
        common = {
            "iteration": done,
            "run_id": self.run_id,
            "wandb_id": self.wandb_id,
            "inputs": self._marks(),
            "config": flat_keys(self.config.model_dump(mode="json")),
            "trainer": self.state.state_dict(),
        }
        folders: list[Path] = []
        optimizer = self.settings.optimizer
        expected = state_bytes(self.state.models(), self.state.averages(), optimizer=optimizer)

        def write() -> None:
            """Make the folder, and write this rank's part into it."""
            made: list[Path] = []
            together(
                lambda: made.append(store.prepare(done, expected)) if dist.get_rank() == 0 else None,
                "the checkpoint's folder",
            )
            folders.append(all_gather_objects(made)[0][0])
            save_state(
                folders[0],
                self.state.models(),
                averages=self.state.averages(),
                common=common,
                per_rank={"rank": dist.get_rank()},
                layout=self.job.described_layout(),
                optimizer=optimizer,
                queue=self._queue,
            )

        good = self._guarded(done, write)
        if good:
            numbers = {name: float(value) for name, value in metrics.items()}
            self._pending = (done, folders[0], numbers)
            good = self._complete(blocking=False) if self._queue is not None else self._commit()
        self.save_seconds = time.perf_counter() - start
        return good

    def finish(self) -> None:
        """Wait for a save that is under way; the one after the last iteration is tried again if it failed."""
        self._complete(blocking=True)
        if self._wanted is not None and self._wanted[0] == self.iterations:
            self.save(*self._wanted)
            self._complete(blocking=True)

    def _complete(self, *, blocking: bool) -> bool:
        """Commit the save under way once all ranks have written; whether nothing went wrong."""
        if self._pending is None or self._queue is None:
            return True
        queue, done = self._queue, self._pending[0]
        finished: list[bool] = []
        if not self._guarded(done, lambda: finished.append(finish(queue, blocking=blocking))):
            self._pending = None
            return False
        return self._commit() if finished[0] else True

    def _commit(self) -> bool:
        """Checksums, taken by all ranks, then the marker and the name, by rank 0."""
        assert self._pending is not None
        (done, folder, metrics), self._pending = self._pending, None
        store, records = self._store(), {}

        def own() -> None:
            """Checksums of this rank's share of the files."""
            names = file_names(folder)[dist.get_rank() :: dist.get_world_size()]
            records.update(file_records(folder, names))

        def commit() -> None:
            """All checksums together into the marker, and the final name."""
            together(own, str(folder))
            files: dict[str, FileRecord] = {}
            for part in all_gather_objects(records):
                files.update(part)
            layout = self.job.described_layout()
            together(
                lambda: (
                    store.commit(done, layout=layout, metrics=metrics, files=files) if dist.get_rank() == 0 else None
                ),
                str(folder),
            )

        good = self._guarded(done, commit)
        if good:
            self._saved, self._wanted = done, None
            self.message(f"checkpoint after iteration {done}: {self.root / f'iter_{done:07d}'}")
        return good

    def _guarded(self, done: int, work: Callable[[], object]) -> bool:
        """Do ``work``, which fails on all ranks or on none, and treat a failure as the configuration says."""
        try:
            work()
        except CheckpointError as error:
            if dist.get_rank() == 0:
                # Where the folder cannot be reached, that is why the save failed.
                with contextlib.suppress(OSError):
                    self._store().abandon(done)
            if self.settings.on_save_error == "stop":
                raise CheckpointError(
                    f"the save after iteration {done} failed: {error}; set checkpoint.on_save_error=warn to go on "
                    "after such a failure"
                ) from error
            self.message(f"warning: the save after iteration {done} failed, the run goes on: {error}")
            return False
        return True

    def _look_for_best(self, metrics: Mapping[str, float]) -> None:
        """Say once that the metric of the best is not there: misspelt, or not measured in this iteration."""
        name = self.settings.best_metric
        if name is not None and name not in metrics and not self._told:
            self._told = True
            near = difflib.get_close_matches(name, metrics, n=3, cutoff=0.5)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            self.message(
                f"warning: checkpoint.best_metric={name} is not among the metrics of this iteration, so that its "
                f"checkpoint cannot be the best{hint}"
            )

    def _store(self) -> CheckpointStore:
        settings = self.settings
        rotation = Rotation(settings.keep_last, settings.keep_every, settings.best_metric, settings.best_mode)
        return CheckpointStore(self.root, self.run_id, rotation, attempt=f"{self._attempt}-{self._saves:x}")

    def _find(self) -> tuple[Checkpoint | None, str]:
        """The checkpoint to resume from, and ``trainer.resume`` as it counts now; rank 0 looks for them."""
        found: list[tuple[Checkpoint | None, str]] = [(None, "never")]

        def look() -> None:
            """On rank 0, the rank whose view of the folder counts."""
            resume = resume_now(self.config.output_dir, self.trainer.resume)
            if resume != "never" and dist.get_rank() == 0:
                found[0] = latest(self.root) if resume == "auto" else locate(Path(resume)), resume

        together(look, "trainer.resume")
        return all_gather_objects(found[0])[0]

    def _make_room(self) -> None:
        """Move the checkpoints of a run that is replaced aside: a later ``trainer.resume=auto`` would choose them."""
        if not self.trainer.overwrite or not list_checkpoints(self.root):
            return
        aside = self.root.with_name(f"{CHECKPOINTS}.replaced")
        shutil.rmtree(aside, ignore_errors=True)
        self.root.rename(aside)
        self.message(f"trainer.overwrite: the checkpoints of the run before are now in {aside}, until the next time")

    def _new_id(self) -> str:
        """Of a run that begins: a fresh one, or that of the same run when it died in its first save."""
        found: list[str] = []

        def look() -> None:
            """On rank 0, the rank whose view of the folder counts."""
            if dist.get_rank() == 0:
                found.append(leftover_owner(self.root) or new_run_id())

        together(look, str(self.root))
        return str(all_gather_objects(found)[0][0])

    def _compare(self, checkpoint: Checkpoint, common: Mapping[str, Any]) -> None:
        """Name what is not as it was when the checkpoint was saved; inputs must be the same unless that is allowed."""
        saved, now = common["inputs"], self._marks()
        other = [key for key in sorted({*saved, *now}) if saved.get(key) != now.get(key)]
        if other and not self.trainer.allow_changes:
            named = "; ".join(named_difference(key, saved.get(key), now.get(key)) for key in other)
            raise CheckpointError(
                f"trainer.resume: {checkpoint.path} was saved by a run with other inputs: {named}; give the same ones, "
                "set trainer.allow_changes=true to go on with these, or trainer.resume=never to begin anew"
            )
        before, after = common["config"], flat_keys(self.config.model_dump(mode="json"))
        for key in sorted({*before, *after}):
            if before.get(key) != after.get(key) and not key.startswith(_FREE) and key not in now:
                self.message(f"{key} was {before.get(key)!r} in the checkpoint, now it is {after.get(key)!r}")

    def _go_on(self, checkpoint: Checkpoint, loaded: LoadedState) -> int:
        common = loaded.common
        if self.own:
            self.run_id, self.wandb_id = common["run_id"], common["wandb_id"]
        self.state.load_state_dict(common["trainer"])
        self.first = self._saved = iteration = int(common["iteration"])
        if not loaded.same_layout:
            groups = self.job.groups
            # Not the numbers of the start again.
            seed = (self.config.seed + 7919 * iteration) % 2**63
            device.seed_rng_tracker(seed, groups.tp.rank(), pp_rank=groups.pp.rank(), dp_rank=groups.dp_cp.rank())
        how = "" if loaded.same_layout else ", under another layout: the same up to rounding, dropout drawn anew"
        self.message(f"goes on after iteration {iteration} from {checkpoint.path}{how}")
        return iteration

    def _marks(self) -> dict[str, Any]:
        """As of the start: what the run has read, whatever lies there when it saves."""
        if self._inputs is None:
            marks = self.state.inputs() if dist.get_rank() == 0 else {}
            self._inputs = all_gather_objects(marks)[0]
        return self._inputs


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, file=sys.stderr)
