"""The output folder of a run: guarded against overwriting, prepared, and filled with exported models."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
import time
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from mrlhf.checkpoint.convert import DTYPES
from mrlhf.checkpoint.hf_export import export_hf
from mrlhf.checkpoint.saved import list_checkpoints
from mrlhf.config import to_yaml
from mrlhf.config_sections import OutputConfig, RunConfig
from mrlhf.data.tokenizer import Tokenizer
from mrlhf.errors import ConfigError
from mrlhf.folders import check_writable
from mrlhf.metrics import Writers, cut_lines, open_writers
from mrlhf.parallel.collectives import all_gather_objects
from mrlhf.roles.model import RoleModel

CHECKPOINTS, TENSORBOARD = "checkpoints", "tensorboard"
SAMPLE_TABLES = ("samples.jsonl", "eval_samples.jsonl")
REPLACED_TABLES = (*SAMPLE_TABLES, "metrics.jsonl", "eval.json")


def check_output_folder(
    output: Path, names: Sequence[str], inputs: Iterable[str], *, overwrite: bool, resume: str = "never"
) -> None:
    """Refuse an output folder that holds another run, or whose exports would replace something that the run reads.

    Args:
        output: the run's folder.
        names: of the models that the run exports.
        inputs: files and folders that it reads.
        overwrite: an earlier run may be replaced.
        resume: ``trainer.resume``; a run that goes on with its own checkpoint finds its own files.

    Raises:
        ConfigError: naming the folder and a way out.
    """
    check_writable(output, "trainer.output_dir")
    # Also a bare model folder: the export would be refused only after all the training.
    there = [path for path in (output / "metrics.jsonl", *written_folders(output, names)) if path.exists()]
    if continues(output, resume):
        # Without a checkpoint it died before its first one, and begins anew; a finished run has exports of its end.
        models = (
            written_folders(output, names) if not (output / "metrics.jsonl").exists() else map(output.joinpath, names)
        )
        finished = [path for path in models if path.name != TENSORBOARD and path.exists()]
        there = [] if list_checkpoints(output / CHECKPOINTS) else finished
    elif list_checkpoints(output / CHECKPOINTS):
        there.append(output / CHECKPOINTS)
    if there and not overwrite:
        saved = ", trainer.resume=auto to go on from its checkpoints" if list_checkpoints(output / CHECKPOINTS) else ""
        raise ConfigError(
            f"trainer.output_dir: {output} holds a run already ({there[0].name}); choose "
            f"another folder{saved}, or set trainer.overwrite=true to replace it"
        )
    for path in inputs:
        parents = {Path(path).resolve(), *Path(path).resolve().parents}
        for place in (*written_folders(output, names), *(output / name for name in REPLACED_TABLES)):
            if place.resolve() in parents:
                raise ConfigError(
                    f"trainer.output_dir: the run would write {place}, but it reads {path}; choose another output_dir"
                )


def check_shared(output: Path, seconds: float = 30.0) -> None:
    """Refuse an output folder that is not the same one for all ranks, such as a disk of each node; all call this.

    Args:
        output: the run's folder; rank 0 makes it.
        seconds: that a network file system may take to show the others what rank 0 has written.

    Raises:
        ConfigError: on every rank, with the ranks that see another folder.
    """
    token = all_gather_objects(uuid.uuid4().hex)[0]
    mark, problem = output / ".shared", ""
    if dist.get_rank() == 0:
        try:
            output.mkdir(parents=True, exist_ok=True)
            mark.write_text(token)
        except OSError as error:
            problem = f"{output} cannot be written: {error}"
    problem = all_gather_objects(problem)[0]
    if problem:
        raise ConfigError(f"trainer.output_dir: {problem}")
    seen, deadline = _reads(mark, token), time.monotonic() + seconds
    while not seen and time.monotonic() < deadline:
        time.sleep(0.2)
        seen = _reads(mark, token)
    blind = [rank for rank, sees in enumerate(all_gather_objects(seen)) if not sees]
    if dist.get_rank() == 0:
        mark.unlink(missing_ok=True)
    if blind:
        raise ConfigError(
            f"trainer.output_dir: {output} is another folder for ranks {blind} than for rank 0, but all ranks write "
            "checkpoints into it; choose one on a file system that all nodes share, or checkpoint.interval=0"
        )


def _reads(path: Path, text: str) -> bool:
    try:
        return path.read_text() == text
    except OSError:
        return False


def continues(output: Path, resume: str) -> bool:
    """Whether what is in ``output`` is this run's: it goes on with the newest checkpoint there, or with a named one.

    A checkpoint below ``output`` but not in its ``checkpoints`` is that of another run.
    """
    if resume in ("auto", "never"):
        return resume == "auto"
    if restarted_by_torchrun():
        return True
    named, root = Path(resume).resolve(), (output / CHECKPOINTS).resolve()
    return named in (output.resolve(), root) or root in named.parents


def restarted_by_torchrun() -> bool:
    """Whether torchrun has started the ranks again after a failure: the folder was looked at the first time."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def resume_now(output: Path, resume: str) -> str:
    """``trainer.resume`` as it counts for this start.

    Ranks that torchrun has started again go on with the run's own newest checkpoint, once there is one, and not again
    with the one that ``trainer.resume`` names.
    """
    named = resume not in ("auto", "never")
    return "auto" if named and restarted_by_torchrun() and list_checkpoints(output / CHECKPOINTS) else resume


def check_writers(trainer: OutputConfig) -> None:
    """Refuse W&B where it is not installed. Raises `ConfigError`."""
    if trainer.wandb and importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            "trainer.wandb is true, but wandb is not installed; run pip install 'mrlhf[wandb]' or set it to false"
        )


def export_dtype(trainer: OutputConfig, source: str, run: torch.dtype) -> torch.dtype:
    """Number format of exported weights: ``trainer.export_dtype``, or the wider of the source's and the run's.

    A run in fp32 on bf16 weights would lose most of what small updates did if it went back to bf16 unasked.
    """
    if trainer.export_dtype != "auto":
        return DTYPES[trainer.export_dtype]
    return torch.promote_types(getattr(torch, source), run)


def written_folders(output: Path, names: Sequence[str]) -> list[Path]:
    """Folders that a run replaces: its exports and its TensorBoard events."""
    fixed = [output / name for name in (*names, TENSORBOARD)]
    # The number has six digits or more: a folder such as model-7b is not ours.
    numbered = [(name, path) for name in names for path in output.glob(f"{name}-[0-9]*")]
    return fixed + [path for name, path in numbered if re.fullmatch(r"\d{6,}", path.name[len(name) + 1 :])]


def open_output(
    config: RunConfig,
    trainer: OutputConfig,
    names: Sequence[str],
    *,
    first_step: int = 0,
    run_id: str | None = None,
    own: bool = True,
) -> Writers:
    """Prepare the output folder on rank 0: ``config.yaml`` and the writers of metrics, nothing of an earlier run.

    Args:
        config: of the run.
        trainer: its part about the output.
        names: of the models that the run exports.
        first_step: above 0, the run goes on: the tables are cut back to the steps before it.
        run_id: of the W&B run that goes on.
        own: it goes on with its own tables; False for one that goes on from another run's checkpoint.
    """
    start = first_step if own else 0
    output = config.output_dir
    output.mkdir(parents=True, exist_ok=True)
    for name in SAMPLE_TABLES if start else ():
        cut_lines(output / name, "iteration", start)
    for name in () if start else (*SAMPLE_TABLES, "eval.json"):
        (output / name).unlink(missing_ok=True)
    if not start and config.metrics_path.exists():
        # What is left of a run that is replaced would be taken for the new one's.
        for folder in written_folders(output, names):
            # Without overwrite, exports on the way are those of this run before it died.
            if trainer.overwrite or folder.name not in names:
                shutil.rmtree(folder, ignore_errors=True)
        config.metrics_path.unlink()
    (output / "config.yaml").write_text(to_yaml(config))
    return open_writers(
        output,
        trainer.tensorboard,
        trainer.wandb,
        first_step=first_step,
        run_id=run_id,
        config=config.model_dump(mode="json"),
    )


def export_model(
    model: RoleModel,
    target: Path,
    *,
    source: str,
    head: str,
    groups: object,
    tokenizer: Tokenizer,
    overwrite: bool,
    dtype: torch.dtype,
) -> None:
    """Write ``model`` as a Hugging Face folder with the tokenizer that it was trained with; all ranks call it.

    Args:
        model: whose weights.
        target: the folder.
        source: the folder that it came from, for ``config.json`` and the generation configuration.
        head: ``"lm"`` or ``"value"``.
        groups: the model's process groups.
        tokenizer: the run's; its files and its chat template go along.
        overwrite: an earlier export may be replaced.
        dtype: of the written weights, see `export_dtype`.
    """
    export_hf(
        model.chunks,
        model.config,
        target,
        source_folder=source,
        groups=groups,  # type: ignore[arg-type]
        head=head,
        dtype=dtype,
        overwrite=overwrite,
        tokenizer=tokenizer.path,
        chat_template=tokenizer.chat_template,
    )
    if dist.get_rank(model.groups.intra_dist_opt) == 0:
        print(f"{model.name} exported to {target}", file=sys.stderr)
