"""Failures of a save: those that every rank knows of leave the run going, those of one rank alone end the job."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from mrlhf.checkpoint.training_state import _agreed
from mrlhf.errors import CheckpointError, MrlhfError


@pytest.mark.parametrize("world_size", [1, 2])
def test_who_knows_of_a_failed_save(world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: world_size)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)

    def failed(error: Exception) -> BaseException:
        with pytest.raises(Exception) as caught, _agreed("x"):  # noqa: PT011
            raise error
        return caught.value

    assert type(failed(CheckpointException("write", {}))) is CheckpointError
    for error in (OSError(28, "No space left on device"), RuntimeError("PytorchStreamWriter failed writing file")):
        found = failed(error)
        # A CheckpointError is a warning under checkpoint.on_save_error=warn, and rank 1 would wait in vain.
        assert type(found) is (CheckpointError if world_size == 1 else MrlhfError)
        assert str(error) in str(found)
    gone = RuntimeError("[../third_party/gloo/pair.cc:547] Connection closed by peer [127.0.0.1]:1234")
    assert failed(gone) is gone
