"""Time of training on packed rows next to padded ones, where lengths differ much.

    python benchmarks/packing.py [--rows 64] [--longest 512] [--micro-batch-size 16] [--repeats 3]

Lengths are skewed as those of chats are: most rows are short, a few are long (log-normal, cut at ``--longest``). Both
variants take the same rows in the same micro-batches and give the same loss; the ratio of their times is printed,
beside the ratio of the tokens that they compute.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist


def main() -> None:
    """Parse the command line, time both variants by turns, print the ratio."""
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--micro-batch-size", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    store = Path(tempfile.mkdtemp(prefix="mrlhf-packing-")) / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)

    from mrlhf.megatron import device
    from mrlhf.model_config import ModelConfig
    from mrlhf.roles.micro_batches import by_rows

    device.install()
    config = ModelConfig(
        family="llama",
        hidden_size=arguments.hidden,
        num_layers=arguments.layers,
        num_attention_heads=8,
        num_query_groups=8,
        head_dim=arguments.hidden // 8,
        ffn_hidden_size=arguments.hidden * 3,
        vocab_size=4096,
        max_position_embeddings=arguments.longest,
    )
    model, batch = build(config), skewed_batch(arguments.rows, arguments.longest)
    plan = by_rows(batch.size, arguments.micro_batch_size)
    padded_tokens = sum(len(rows) * (int(batch.lengths[rows].max()) + 1) for rows in plan)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    losses: dict[bool, float] = {}
    for repeat in range(arguments.repeats + 1):
        for packed in (False, True):
            begin = time.perf_counter()
            losses[packed] = run(model, batch, plan, packed)
            if repeat:  # the first round warms up
                seconds[packed].append(time.perf_counter() - begin)
    best = {packed: min(times) for packed, times in seconds.items()}
    print(f"{batch.size} rows of {int(batch.lengths.min())} to {int(batch.lengths.max())} tokens, {len(plan)} passes")
    for packed, tokens in ((False, padded_tokens), (True, int(batch.lengths.sum()))):
        name = "packed" if packed else "padded"
        print(f"{name}  {tokens:7d} tokens computed  {best[packed]:7.2f} s  loss {losses[packed]:.6f}")
    print(
        f"padded / packed: tokens {padded_tokens / int(batch.lengths.sum()):.2f}, time {best[False] / best[True]:.2f}"
    )
    dist.destroy_process_group()


def build(config):  # noqa: ANN001, ANN201
    """A model with fresh weights and its optimizer, alone in its world."""
    from mrlhf.checkpoint.random_init import draw_weights
    from mrlhf.checkpoint.transforms import TensorRanks
    from mrlhf.megatron.device import seed_rng_tracker
    from mrlhf.megatron.groups import build_groups
    from mrlhf.megatron.model import build_model
    from mrlhf.megatron.optimizer import AdamSettings, Trainable
    from mrlhf.planner import ParallelSizes
    from mrlhf.roles.model import TrainedModel

    sizes = ParallelSizes()
    groups = build_groups(sizes)
    seed_rng_tracker(0, 0)
    chunks = build_model(config, sizes, groups, head="lm")
    draw_weights(chunks, config, ranks=TensorRanks(0, 1, 0, 1))
    return TrainedModel("model", config, Trainable(chunks, groups, AdamSettings(lr=1e-4)), groups)


def skewed_batch(rows: int, longest: int):  # noqa: ANN201
    """Rows of log-normal length, all but the first token learned."""
    from mrlhf.data.sft import SFTExample, sft_batch

    generator = torch.Generator().manual_seed(0)
    lengths = (torch.randn(rows, generator=generator) + 4).exp().round().clamp(2, longest).long().tolist()
    ids = [torch.randint(3, 4096, (n,), generator=generator).tolist() for n in lengths]
    return sft_batch([SFTExample(row, [False] + [True] * (len(row) - 1), 0) for row in ids], pad_id=0)


def run(model, batch, plan, packed: bool) -> float:  # noqa: ANN001
    """One forward and backward pass over all rows; the loss."""
    from mrlhf.trainer.sft import learned_request, nll_loss

    count = float(batch.response_mask.sum())
    gradients = model.gradients(batch, plan, nll_loss, count, learned_request, packed=packed)
    return float(gradients.metrics["loss"].result())


if __name__ == "__main__":
    main()
