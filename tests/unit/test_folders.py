"""Output that cannot be written is refused by its key."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mrlhf.config import load_config
from mrlhf.config_inference import EvalConfig, GenerateConfig
from mrlhf.errors import ConfigError
from mrlhf.folders import check_writable, check_writable_file
from mrlhf.trainer import evaluate, generate
from tests.tiny_run import SIZES
from tools.make_tiny_model import make_tiny_model


def test_folders(tmp_path: Path) -> None:
    check_writable(tmp_path / "new" / "folder", "key")
    assert not (tmp_path / "new").exists()
    assert list(tmp_path.iterdir()) == []
    file = tmp_path / "file"
    file.write_text("")
    for folder in (file, file / "below"):
        with pytest.raises(ConfigError, match=f"key: {folder} cannot be a folder, since {file} is a file"):
            check_writable(folder, "key")
    # Even root cannot write there, though the permissions say so.
    with pytest.raises(ConfigError, match="key: /proc/folder cannot be written: .* in /proc; choose another"):
        check_writable(Path("/proc/folder"), "key")
    with pytest.raises(ConfigError, match=f"key: {tmp_path} is a folder; give the name of a file in it"):
        check_writable_file(tmp_path, "key")


def test_prompts_are_not_replaced_by_what_is_made_of_them(tmp_path: Path) -> None:
    actor = make_tiny_model(tmp_path / "actor", **SIZES)
    prompts = tmp_path / "out" / "eval_samples.jsonl"
    prompts.parent.mkdir()
    prompts.write_text(json.dumps({"prompt": "a"}) + "\n")
    source = "reward.sources=[{kind: function, target: 'tests.tiny_run:letters'}]"
    keys = [f"actor.path={actor}", f"data.prompts={prompts}", "rollout.max_response_length=4", source]
    before = prompts.read_text()
    with pytest.raises(ConfigError, match="--output: .* is the file of the prompts, which would be lost"):
        generate.run(load_config(None, keys, GenerateConfig), prompts=prompts, output=prompts)
    with pytest.raises(ConfigError, match=r"evaluation\.output_dir: the evaluation would replace the prompts"):
        evaluate.run(load_config(None, [*keys, f"evaluation.output_dir={prompts.parent}"], EvalConfig))
    with pytest.raises(ConfigError, match=r"evaluation\.output_dir: .* cannot be a folder"):
        evaluate.run(load_config(None, [*keys, f"evaluation.output_dir={prompts}"], EvalConfig))
    assert prompts.read_text() == before
