"""The output folder is looked at before any model is loaded, and exports keep what training did."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import torch

from mrlhf.checkpoint.store import CheckpointStore
from mrlhf.config_sections import OutputConfig
from mrlhf.errors import ConfigError
from mrlhf.metrics import cut_lines
from mrlhf.trainer.outputs import check_output_folder, check_writers, export_dtype, written_folders


def _check(output: Path) -> None:
    check_output_folder(output, ["actor"], [], overwrite=False)


def test_a_file_where_the_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"trainer.output_dir: .*file cannot be a folder"):
        _check(tmp_path / "file")
    with pytest.raises(ConfigError, match=r"since .*file is a file; choose another"):
        _check(tmp_path / "file" / "below" / "it")
    _check(tmp_path / "new" / "below")
    assert not (tmp_path / "new").exists()


def test_what_the_run_reads_is_not_replaced(tmp_path: Path) -> None:
    for path in ("actor/x", "actor-000010", "samples.jsonl", "eval_samples.jsonl", "eval.json", "metrics.jsonl"):
        (tmp_path / "actor-000010").mkdir(exist_ok=True)
        with pytest.raises(ConfigError, match=r"trainer.output_dir: the run would write .*, but it reads"):
            check_output_folder(tmp_path, ["actor"], [str(tmp_path / path)], overwrite=True)
    kept = [str(tmp_path / name) for name in ("actor-7b", "actor-000010-mine", "prompts.jsonl")]
    for folder in kept[:2]:
        Path(folder).mkdir()
    check_output_folder(tmp_path, ["actor"], kept, overwrite=True)
    names = {path.name for path in written_folders(tmp_path, ["actor"])}
    assert names == {"actor", "actor-000010", "tensorboard"}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(ConfigError, match=r"cannot be written: .* in .*locked"):
        _check(tmp_path / "locked" / "run")


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed")
def test_wandb_that_is_not_there() -> None:
    check_writers(OutputConfig())
    with pytest.raises(ConfigError, match=r"wandb is not installed; run pip install 'mrlhf\[wandb\]'"):
        check_writers(OutputConfig(wandb=True))


@pytest.mark.parametrize(
    ("asked", "source", "run", "expected"),
    [
        ("auto", "bfloat16", torch.float32, torch.float32),
        ("auto", "bfloat16", torch.bfloat16, torch.bfloat16),
        ("auto", "float32", torch.bfloat16, torch.float32),
        ("auto", "float16", torch.bfloat16, torch.float32),
        ("bf16", "float32", torch.float32, torch.bfloat16),
        ("fp16", "bfloat16", torch.bfloat16, torch.float16),
    ],
)
def test_the_number_format_of_exports(asked: str, source: str, run: torch.dtype, expected: torch.dtype) -> None:
    config = OutputConfig(export_dtype=asked)  # type: ignore[arg-type]
    assert export_dtype(config, source, run) is expected


def test_whose_folder_it_is_when_a_run_resumes(tmp_path: Path) -> None:
    def check(resume: str) -> None:
        check_output_folder(tmp_path, ["actor"], [], overwrite=False, resume=resume)

    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ConfigError, match=r"holds a run already \(metrics.jsonl\); choose another folder, or set"):
        check("never")
    with pytest.raises(ConfigError, match="holds a run already"):
        check(str(tmp_path.parent / "other"))
    (tmp_path / "actor-000010").mkdir()
    check("auto")  # a run that died before its first checkpoint
    (tmp_path / "metrics.jsonl").rename(tmp_path / "metrics.txt")
    with pytest.raises(ConfigError, match=r"holds a run already \(actor-000010\)"):
        check("auto")  # a model, but no run
    (tmp_path / "metrics.txt").rename(tmp_path / "metrics.jsonl")
    (tmp_path / "actor").mkdir()
    with pytest.raises(ConfigError, match=r"holds a run already \(actor\)"):
        check("auto")  # a run that came to its end without any
    store = CheckpointStore(tmp_path / "checkpoints", "a")
    (store.prepare(1) / "file").write_text("x")
    store.commit(1)
    with pytest.raises(ConfigError, match="holds a run already"):
        check(str(tmp_path / "other"))
    for resume in ("auto", str(tmp_path), str(tmp_path / "checkpoints" / "iter_0000001")):
        check(resume)
    with pytest.raises(ConfigError, match="trainer.resume=auto to go on from its checkpoints"):
        check("never")
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "actor").rmdir()
    (tmp_path / "actor-000010").rmdir()
    with pytest.raises(ConfigError, match=r"holds a run already \(checkpoints\)"):
        check("never")


def test_torchrun_finds_what_the_start_before_has_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    check_output_folder(tmp_path, ["actor"], [], overwrite=False, resume=str(tmp_path.parent / "other"))


def test_tables_are_cut_back_to_the_iteration_that_goes_on(tmp_path: Path) -> None:
    table = tmp_path / "metrics.jsonl"
    table.write_text('{"step": 0}\n{"step": 1, "x": "\u2028"}\n{"step": 2}\n{"step": 3, "sco')
    cut_lines(table, "step", 2)
    assert table.read_text() == '{"step": 0}\n{"step": 1, "x": "\u2028"}\n'
    cut_lines(table, "step", 0)
    assert table.read_text() == ""
    cut_lines(tmp_path / "absent.jsonl", "step", 2)
    assert not (tmp_path / "absent.jsonl").exists()
