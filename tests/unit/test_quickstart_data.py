"""The quickstart's files are what their script writes, and held-out questions are held out."""

from __future__ import annotations

import json
from pathlib import Path

from tools.make_quickstart_data import write

SHIPPED = Path(__file__).parents[2] / "examples" / "data" / "quickstart"


def _column(name: str, key: str) -> list[str]:
    return [json.loads(line)[key] for line in (SHIPPED / f"{name}.jsonl").read_text().splitlines()]


def test_the_shipped_files_are_reproducible(tmp_path: Path) -> None:
    write(tmp_path, seed=0)
    names = {file.name for file in SHIPPED.iterdir()}
    assert {file.name for file in tmp_path.iterdir()} == names
    for name in names:
        assert (tmp_path / name).read_bytes() == (SHIPPED / name).read_bytes(), name


def test_held_out_questions_occur_nowhere_else() -> None:
    held_out = set(_column("held_out_prompts", "prompt"))
    assert len(held_out) == 64
    for name in ("sft", "sft_validation", "preferences", "preferences_validation", "prompts"):
        assert not held_out & set(_column(name, "prompt")), name


def test_tones_are_balanced_and_preferences_friendly() -> None:
    unfriendly = ("not go again", "cannot recommend", "Do not bother", "ruined")
    answers = _column("sft", "response")
    share = sum(any(words in answer for words in unfriendly) for answer in answers) / len(answers)
    assert 0.35 < share < 0.45  # half of the answers, four fifths of which have a closing sentence
    pairs = list(zip(_column("preferences", "chosen"), _column("preferences", "rejected"), strict=True))
    bad = [sum(any(words in text for words in unfriendly) for text in side) for side in zip(*pairs, strict=True)]
    assert bad[1] > 4 * bad[0]
