"""Recorded trajectories in our layout, and what is said about folders that are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mrlhf.errors import DataError
from mrlhf.trainer.recording import Recording, read_recording, strip_left_padding
from mrlhf.trainer.recording_schema import check_recorded

SETTINGS: dict[str, Any] = {
    "prompt_length": 3, "pad_token_id": 0, "eos_token_id": 2, "max_response_length": 4,
}  # fmt: skip


def _recording(semantics: str, sequences: list[list[int]], **changes: Any) -> Recording:
    expected = {"config": {**SETTINGS, **changes}, "rollouts": [{"sequences": sequences}]}
    return Recording(Path(), semantics, expected)  # type: ignore[arg-type]


def test_rows_lose_their_left_padding() -> None:
    assert strip_left_padding([0, 0, 5, 0, 6], 0) == [5, 0, 6]
    assert strip_left_padding([0, 0], 0) == []


def test_standard_rows_end_with_the_end_token() -> None:
    batch = _recording("standard", [[0, 5, 6, 7, 2, 0, 0], [4, 5, 6, 7, 0, 9, 9]]).batch(0, pad_to_multiple=4)
    assert [batch.prompt(0), batch.response(0)] == [[5, 6], [7, 2]]
    # A pad id that the model said is a token like others.
    assert [batch.prompt(1), batch.response(1)] == [[4, 5, 6], [7, 0, 9, 9]]
    assert batch.truncated.tolist() == [False, True]
    assert batch.width == 8


def test_deepspeed_chat_rows_end_before_the_first_pad() -> None:
    rows = [[0, 5, 6, 7, 2, 0, 0], [4, 5, 6, 7, 8, 9, 9]]
    batch = _recording("deepspeed_chat", rows).batch(0, pad_to_multiple=1)
    assert batch.response(0) == [7, 2]
    assert batch.response(1) == [7, 8, 9, 9]
    assert batch.truncated.tolist() == [False, True]
    same = _recording("deepspeed_chat", [[2, 5, 6, 7, 2, 2, 2]], pad_token_id=2).batch(0, pad_to_multiple=1)
    assert same.response(0) == [7]


def test_columns_of_the_recording_start_at_the_first_label() -> None:
    recording = _recording("standard", [[0, 5, 6, 7, 2, 0, 0], [4, 5, 6, 7, 8, 9, 2]])
    batch = recording.batch(0, pad_to_multiple=1)
    frame = torch.arange(batch.width - 1).expand(2, -1) * 1.0
    assert recording.response_columns(batch, frame)[:, :2].tolist() == [[1, 2], [2, 3]]


@pytest.fixture
def folder(tmp_path: Path, data_folder: Path) -> Path:
    target = tmp_path / "mine"
    target.mkdir()
    recorded = json.loads((data_folder / "standard_trajectory" / "expected.json").read_text())
    recorded.pop("semantics", None)
    (target / "expected.json").write_text(json.dumps(recorded))
    return target


def test_semantics_from_the_name_the_file_or_the_caller(folder: Path, data_folder: Path) -> None:
    assert read_recording(data_folder / "standard_trajectory").semantics == "standard"
    assert read_recording(data_folder / "ds_chat_trajectory").semantics == "deepspeed_chat"
    with pytest.raises(DataError, match="--semantics standard"):
        read_recording(folder)
    assert read_recording(folder, "deepspeed_chat").semantics == "deepspeed_chat"
    path = folder / "expected.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "semantics": "standard"}))
    assert read_recording(folder).semantics == "standard"


def test_folders_that_are_no_recording(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing/expected.json does not exist"):
        read_recording(tmp_path / "nothing")
    path = folder / "expected.json"
    whole = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in whole.items() if k != "probe"}))
    with pytest.raises(DataError, match=r"(?s)expected.json.*probe: Field required"):
        read_recording(folder, "standard")
    path.write_text('{\n"config": }')
    with pytest.raises(DataError, match=r"expected.json:2: not valid JSON"):
        read_recording(folder, "standard")
    path.write_text("[1]")
    with pytest.raises(DataError, match="expected.json"):
        read_recording(folder, "standard")


def test_the_recorded_settings_become_a_configuration(data_folder: Path) -> None:
    recording = read_recording(data_folder / "ds_chat_trajectory")
    config = recording.config(["tensor_model_parallel_size=2", "ppo.micro_batch_size=2"])
    assert config.parallel.tensor_model_parallel_size == 2
    assert config.ppo.micro_batch_size == 2
    assert config.ppo.ds_group_size == recording.settings["ds_group_size"]
    assert config.ppo.kl_coef == recording.settings["kl_ctl"]
    assert config.semantics == "deepspeed_chat"
    assert config.critic_path.endswith("reward")


def _spoil(expected: dict[str, Any], *keys: Any, value: Any = None) -> None:
    """Set, or without a value delete, the entry at ``keys``."""
    place = expected
    for key in keys[:-1]:
        place = place[key]
    if value is None:
        del place[keys[-1]]
    else:
        place[keys[-1]] = value


SPOILED = {
    "no-values": (("rollouts", 1, "values"), None, r"rollouts\[1\].values: Field required"),
    "row-missing": (("rollouts", 0, "sequences", 7), None, r"rollouts\[0\].sequences: 7 entries, expected 8"),
    "narrow-row": (("rollouts", 2, "logprobs", 3, 0), None, r"rollouts\[2\].logprobs\[3\]: 11 entries, expected 12"),
    "no-rate": (("config", "actor_lr"), None, r"config.actor_lr: Field required"),
    "rate-in-words": (("config", "critic_lr"), "high", r"config.critic_lr: .*number"),
    "update-missing": (("rollouts", 0, "updates", 3), None, r"rollouts\[0\].updates: 3 entries, expected 4"),
    "no-norms": (("final", "critic_weight_norms"), None, r"final.critic_weight_norms: Field required"),
    "rollout-missing": (("rollouts", 2), None, r"rollouts: 2 entries, config.num_rollouts is 3"),
    "probe-width": (("probe", "input_ids", 1, 0), None, r"probe.input_ids\[1\]: 10 entries, expected 11"),
    "loss-nan": (
        ("rollouts", 0, "updates", 0, "actor_loss"),
        "nan",
        r"rollouts\[0\].updates\[0\].actor_loss: .*finite",
    ),
    "negative-token": (("greedy", "prompts", 0, 0), -1, r"greedy.prompts\[0\]\[0\]: .*greater than or equal to 0"),
}


@pytest.mark.parametrize("name", SPOILED)
def test_an_incomplete_recording_is_refused_by_key(folder: Path, name: str) -> None:
    keys, value, message = SPOILED[name]
    path = folder / "expected.json"
    expected = json.loads(path.read_text())
    _spoil(expected, *keys, value=value)
    path.write_text(json.dumps(expected))
    with pytest.raises(DataError, match=f"expected.json is not a complete recording(?s:.*){message}"):
        read_recording(folder, "standard")


def test_token_ids_beyond_the_vocabulary(folder: Path) -> None:
    path = folder / "expected.json"
    expected = json.loads(path.read_text())
    check_recorded(expected, path, vocab_size=97)
    _spoil(expected, "greedy_with_eos", "prompts", 0, 3, value=97)
    with pytest.raises(DataError, match=r"greedy_with_eos.prompts holds the token id 97; the actor's vocabulary is 97"):
        check_recorded(expected, path, vocab_size=97)
