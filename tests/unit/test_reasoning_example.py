"""Prompts whose answers can be checked: from the tool through the prompt reader to the scores."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mrlhf.data.prompts import read_prompts
from mrlhf.roles.reward import RewardFunction
from tools.make_reasoning_prompts import make_reasoning_prompts

pytest.importorskip("reasoning_gym", reason='pip install "mrlhf[reasoning]"')
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("task", ["chain_sum", "spell_backward", "countdown"])
def test_right_and_wrong_answers(task: str, tmp_path: Path) -> None:
    file = make_reasoning_prompts(task, 8, 0, tmp_path / "p.jsonl")
    records, skipped = read_prompts(file)
    assert (len(records), skipped) == (8, 0)
    assert len({str(r.prompt) for r in records}) == 8
    meta = {key: [r.meta[key] for r in records] for key in records[0].meta}
    assert set(meta) == {"answer", "metadata"}
    source = RewardFunction("examples.rewards:verified_answer")
    source.check_fields({*meta, "note"})
    prompts = [str(r.prompt) for r in records]
    assert source.scores(prompts, [f" {answer}\n" for answer in meta["answer"]], meta) == [1.0] * 8
    for wrong in ("", "qqq", "((", "-999999999", "\u00bd/0"):
        assert max(source.scores(prompts, [wrong] * 8, meta)) <= 0.1
    again = make_reasoning_prompts(task, 8, 0, tmp_path / "again.jsonl")
    assert again.read_text() == file.read_text()
    assert make_reasoning_prompts(task, 8, 1, tmp_path / "other.jsonl").read_text() != file.read_text()


def test_settings_and_errors_of_the_tool(tmp_path: Path) -> None:
    file = tmp_path / "sub" / "p.jsonl"
    command = [sys.executable, "tools/make_reasoning_prompts.py", "--task", "chain_sum", "--output", str(file)]
    settings = ["--count", "5", "--chat", "min_terms=2", "max_terms=2", "max_digits=1"]
    done = subprocess.run([*command, *settings], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, f"{file}: 5 prompts of chain_sum\n")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["metadata"]["num_terms"] for line in lines] == [2] * 5
    assert lines[0]["prompt"][0]["role"] == "user"
    for task, options in (("no_such_task", {}), ("chain_sum", {"max_terms": 0}), ("chain_sum", {"colour": 1})):
        with pytest.raises(ValueError, match=f"refuses the task '{task}'"):
            make_reasoning_prompts(task, 1, 0, file, settings=options)
