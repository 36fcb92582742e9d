"""Tensors that wait in host memory: freed, and the same when they are back."""

from __future__ import annotations

import torch

from mrlhf.config_sections import OffloadConfig
from mrlhf.megatron.offload import HostCopy
from mrlhf.model_config import ModelConfig
from mrlhf.roles.model import RoleModel
from mrlhf.trainer.offloading import Offloading

CONFIG = ModelConfig("llama", 64, 4, 4, 2, 16, 128, 97, 256)


def test_memory_is_free_in_between_and_the_content_is_back() -> None:
    base = torch.randn(4, 6)
    tensors = [base, base.view(-1)[3:9], torch.arange(5)]
    scratch = torch.ones(8)
    content = [tensor.clone() for tensor in tensors]
    copy = HostCopy(lambda: tensors, lambda: [scratch, base])
    copy.offload()
    assert [tensor.untyped_storage().nbytes() for tensor in (*tensors, scratch)] == [0, 0, 0, 0]
    assert copy.bytes_away == 4 * 6 * 4 + 5 * 8 + 8 * 4
    copy.offload()  # once is enough
    copy.prefetch()
    assert copy.bytes_away == 0
    copy.load()
    copy.load()
    assert all(torch.equal(tensor, before) for tensor, before in zip(tensors, content, strict=True))
    assert scratch.numel() == 8
    assert base.data_ptr() == tensors[1].data_ptr() - 3 * 4


def test_what_came_back_for_nothing_goes_again() -> None:
    """A phase that was prepared for may not take place: the actor's updates while the critic warms up."""
    tensor = torch.arange(4.0)
    copy = HostCopy(lambda: [tensor])
    for _ in range(2):
        copy.offload()
        copy.prefetch()
    copy.offload()
    assert (copy.bytes_away, tensor.untyped_storage().nbytes()) == (16, 0)
    copy.load()
    assert tensor.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_what_changes_is_copied_each_time_and_what_does_not_once() -> None:
    for constant in (False, True):
        tensor = torch.zeros(3)
        copy = HostCopy(lambda tensor=tensor: [tensor], constant=constant)
        copy.offload()
        copy.load()
        tensor.fill_(1.0)
        copy.offload()
        copy.load()
        # A constant tensor that was changed after all shows that it was not copied again.
        assert tensor.tolist() == [0.0 if constant else 1.0] * 3


def test_memory_that_numpy_looks_into_stays() -> None:
    tensor, other = torch.ones(3), torch.ones(2)
    view = tensor.numpy()
    copy = HostCopy(lambda: [tensor, other])
    copy.offload()
    assert copy.bytes_away == 8
    tensor += 1
    copy.load()
    assert view.tolist() == tensor.tolist() == [2.0] * 3


def test_a_reference_that_inference_does_not_ask_stays_away() -> None:
    for idle in (False, True):
        reference, reward = (RoleModel(name, CONFIG, [torch.nn.Linear(4, 3)], None) for name in ("reference", "reward"))
        settings = OffloadConfig(reference=True, reward=True)
        phases = Offloading(settings, reference=reference, rewards=[reward], idle_reference=idle)

        def away(models: tuple[RoleModel, ...] = (reference, reward)) -> list[int]:
            return [model._weights.bytes_away for model in models if model._weights is not None]

        phases.before_rollout()
        assert away() == [4 * 15, 4 * 15]
        phases.before_inference()
        assert away() == [4 * 15 if idle else 0, 0]
        # An evaluation brings it, the next phase takes it away.
        assert sum(p.untyped_storage().nbytes() for p in reference.chunks[0].parameters()) == 4 * 15
        assert away() == [0, 0]
        phases.before_train()
        assert away() == [4 * 15, 4 * 15]


def test_new_tensors_are_asked_for_at_every_turn() -> None:
    tensors = [torch.ones(2)]
    copy = HostCopy(lambda: tensors)
    copy.offload()
    copy.load()
    tensors.append(torch.full((4,), 2.0))
    copy.offload()
    assert copy.bytes_away == 8 + 16
    copy.load()
    assert tensors[1].tolist() == [2.0] * 4
