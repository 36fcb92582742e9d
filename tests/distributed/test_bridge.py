"""Tensors from one part of the world to the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mrlhf.parallel.bridge import Bridge
from mrlhf.roles.model import Gradients, Update
from mrlhf.trainer.split import Agreement


def _cross() -> dict[str, Any]:
    import torch.distributed as dist

    bridge = Bridge([0, 1], [2, 3])
    cpu = torch.device("cpu")
    question = {
        "ids": torch.tensor([[1, 2**40], [3, 4]]),
        "mask": torch.tensor([True, False]),
        "none": torch.zeros(0, 5),
    }
    if bridge.on_actor_ranks:
        # What the first rank has counts; the others' part is not looked at.
        bridge.send({"asked": "values"}, question if dist.get_rank() == 0 else {"other": torch.ones(1)})
        said, tensors = bridge.receive(cpu)
        return {"said": said, "tensors": tensors}
    said, tensors = bridge.receive(cpu)
    half = tensors["ids"].to(torch.bfloat16) / 2
    bridge.send({"failure": None}, {"half": half[:, ::2]})
    return {"said": said, "tensors": tensors}


def test_both_directions(run_ranks: Callable[..., list[Any]]) -> None:
    first, second, third, fourth = run_ranks(_cross, 4)
    for answer in (first, second):
        assert answer["said"] == {"failure": None}
        assert torch.equal(answer["tensors"]["half"], torch.tensor([[0.5], [1.5]], dtype=torch.bfloat16))
    for question in (third, fourth):
        assert question["said"] == {"asked": "values"}
        tensors = question["tensors"]
        assert tensors["ids"].tolist() == [[1, 2**40], [3, 4]]
        assert tensors["mask"].dtype == torch.bool
        assert tensors["mask"].tolist() == [True, False]
        assert tensors["none"].shape == (0, 5)


def _agree() -> list[Any]:
    import torch.distributed as dist

    trains_actor = dist.get_rank() < 2
    agreement = Agreement("critic" if trains_actor else "actor", texts=True)
    found = []
    for actor, critic, stop in (
        (Gradients(True, 1.5, {}), Gradients(True, 2.5, {}), False),
        (Gradients(True, 1.5, {}), Gradients(False, float("inf"), {}, scale_exhausted=True), False),
        (None, Gradients(True, 2.5, {}), True),
        (None, None, False),
    ):
        own = {"actor": actor} if trains_actor else {"critic": critic}
        given = {name: gradients for name, gradients in own.items() if gradients is not None}
        # Only the actor's ranks know that it stops.
        both, stopped = agreement.agree(given, stop and trains_actor)
        found.append(([(n, g.finite, repr(g.norm), g.scale_exhausted) for n, g in both.items()], stopped))
    made = agreement.agree_on_texts(Update(False, float("nan"), {}) if trains_actor else None)
    assert made is not None
    return [*found, made.updated]


def test_every_rank_knows_of_both_gradients(run_ranks: Callable[..., list[Any]]) -> None:
    answers = run_ranks(_agree, 3)
    for rank, answer in enumerate(answers):
        good, bad, stopped, nothing, texts = answer
        assert good == ([("actor", True, "1.5", False), ("critic", True, "2.5", False)], False)
        # The norm of the other part's bad gradient is only known to be none.
        assert bad[0] == [("actor", True, "1.5", False), ("critic", False, "inf" if rank == 2 else "nan", True)]
        assert stopped == ([("critic", True, "2.5", False)], True)
        assert nothing == ([], False)
        assert texts is False


def test_without_texts_nothing_is_asked() -> None:
    """No collective: there is no process group here."""
    assert Agreement("critic", texts=False).agree_on_texts(None) is None
