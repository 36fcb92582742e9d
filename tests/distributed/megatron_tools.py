"""Tiny Megatron models under any layout, and the same model unsharded in transformers as their reference."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mrlhf.checkpoint.hf import export_hf
from tests.distributed.hf_tools import read_tensors

LENGTHS = (7, 12, 9, 12, 5, 16, 10, 8)
VOCAB = 97
TP2, PP2, PP4 = ({f"{kind}_model_parallel_size": n} for kind, n in (("tensor", 2), ("pipeline", 2), ("pipeline", 4)))
SP = {"sequence_parallel": True}
VPP2 = {"virtual_pipeline_model_parallel_size": 2}


@dataclass(frozen=True)
class Layout:
    """World size, parallel sizes, rows of a micro-batch."""

    world: int = 1
    sizes: dict[str, Any] = field(default_factory=dict)
    rows: int = 2
    distributed: bool = False


@dataclass(frozen=True)
class Batch:
    """Rows of one micro-batch: ``[b, s]`` tokens, targets, wanted positions and weights of their log-probs."""

    tokens: torch.Tensor
    targets: torch.Tensor
    wanted: torch.Tensor
    weights: torch.Tensor


def make_rows(lengths: Sequence[int] = LENGTHS, seed: int = 3) -> list[Batch]:
    """Rows of their own length; about two thirds of the positions are wanted."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for length in lengths:
        tokens = torch.randint(3, VOCAB, (1, length + 1), generator=generator)
        wanted = torch.rand(1, length, generator=generator) < 0.7
        weights = torch.rand(1, length, generator=generator) + 0.5
        rows.append(Batch(tokens[:, :-1], tokens[:, 1:], wanted, weights))
    return rows


def micro_batches(rows: Sequence[Batch], size: int, multiple: int = 1) -> list[Batch]:
    """Consecutive rows together, right-padded to the longest of them and to a multiple of ``multiple``."""
    result = []
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        width = -(-max(r.tokens.size(1) for r in part) // multiple) * multiple
        stacked = [
            torch.cat([torch.nn.functional.pad(getattr(r, n), (0, width - r.tokens.size(1))) for r in part])
            for n in ("tokens", "targets", "wanted", "weights")
        ]
        result.append(Batch(*stacked))
    return result


def count(rows: Sequence[Batch]) -> float:
    return float(sum(int(r.wanted.sum()) for r in rows))


def build(path: str | Path, sizes: dict[str, Any], head: str = "lm", timeout: Any = None, **options: Any) -> Any:
    """``(model config, groups, chunks)`` with the weights of ``path``."""
    from mrlhf.checkpoint.convert import load_weights
    from mrlhf.checkpoint.hf_config import read_model_config
    from mrlhf.megatron.device import seed_rng_tracker
    from mrlhf.megatron.groups import build_groups
    from mrlhf.megatron.model import build_model
    from mrlhf.planner import ParallelSizes

    layout = ParallelSizes(world_size=dist.get_world_size(), **sizes)
    config, groups = read_model_config(path), build_groups(layout, timeout)
    seed_rng_tracker(0, groups.tp.rank())
    chunks = build_model(config, layout, groups, head=head, **options)
    load_weights(chunks, config, path, groups=groups, head=head)
    return config, groups, chunks


def request(batch: Batch) -> Any:
    from mrlhf.megatron.model import LogprobRequest

    return LogprobRequest(batch.targets, batch.wanted)


def weighted_nll(batch: Batch, logprobs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``-sum(weights * logprobs)``; the metric is the loss itself, so that scaling in place would show."""
    loss = -(logprobs * batch.weights)[batch.wanted].sum()
    return loss, loss.detach()


def own_rows(rows: Sequence[Batch], groups: Any) -> Sequence[Batch]:
    share = len(rows) // groups.dp.size()
    return rows[groups.dp.rank() * share : (groups.dp.rank() + 1) * share]


def accumulate(trainable: Any, rows: Sequence[Batch], size: int, denominator: float, lengths: Any = None) -> float:
    """Gradient of the mean loss over all rows of all ranks; this rank's part of the loss sum (0 before the head)."""
    from mrlhf.megatron.schedule import forward_backward

    groups = trainable.groups
    multiple = groups.tp.size() if trainable.config.sequence_parallel else 1
    multiple *= 2 * groups.cp.size() if groups.cp.size() > 1 else 1
    trainable.zero_grad()
    losses = forward_backward(
        trainable.chunks,
        micro_batches(own_rows(rows, groups), size, multiple),
        weighted_nll,
        denominator,
        groups=groups,
        tokens=lambda batch: batch.tokens,
        request=request,
        lengths=lengths,
    )
    return float(sum(losses))


def total_loss(part: float, groups: Any) -> float:
    """The loss sum over data-parallel ranks, on every rank."""
    total = torch.tensor(part if groups.tp.rank() == 0 else 0.0, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total)


def whole(chunks: Any, config: Any, path: str | Path, groups: Any, out: str | Path) -> dict[str, torch.Tensor] | None:
    """Every parameter of the unsharded model by its Hugging Face name, on rank 0."""
    export_hf(chunks, config, out, source_folder=path, groups=groups, dtype=torch.float32)
    tensors = None
    if dist.get_rank() == 0:
        tensors = {name: value.clone() for name, value in read_tensors(out).items()}
        shutil.rmtree(out)
    dist.barrier()
    return tensors


@torch.no_grad()
def whole_gradient(trainable: Any, config: Any, path: str | Path, out: str | Path) -> dict[str, torch.Tensor] | None:
    """Every gradient of the unsharded model by its Hugging Face name, on rank 0."""
    parameters = [p for chunk in trainable.modules for p in chunk.parameters()]
    saved = [p.detach().clone() for p in parameters]
    for parameter in parameters:
        parameter.copy_(parameter.main_grad)
    gradients = whole(trainable.modules, config, path, trainable.groups, out)
    for parameter, value in zip(parameters, saved, strict=True):
        parameter.copy_(value)
    return gradients


class Reference:
    """The unsharded model, a row at a time, in fp32."""

    def __init__(self, path: str | Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")

    def logprobs(self, row: Batch) -> torch.Tensor:
        table = torch.log_softmax(self.model(row.tokens).logits.float(), -1)
        return table.gather(2, row.targets[..., None])[..., 0]

    def accumulate(self, rows: Sequence[Batch], denominator: float) -> float:
        self.model.zero_grad()
        total = 0.0
        for row in rows:
            loss, _ = weighted_nll(row, self.logprobs(row))
            (loss / denominator).backward()
            total += float(loss.detach())
        return total

    def named(self, gradients: bool = False) -> dict[str, torch.Tensor]:
        return {n: (p.grad if gradients else p).detach().clone() for n, p in self.model.named_parameters()}


def gradient_norm(gradients: dict[str, torch.Tensor]) -> float:
    return float(torch.stack([g.double().norm() for g in gradients.values()]).norm())


def assert_gradients_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], rtol: float) -> None:
    """Each tensor within ``rtol`` of its own largest entry."""
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        error = float((ours[name] - value).abs().max() / value.abs().max())
        assert error < rtol, f"{name}: {error:.1e}"
