"""Time and bytes of a checkpoint beside ``torch.save`` of the same state.

    python benchmarks/checkpoint.py [--layers 30] [--hidden 576]

The default has the 135M parameters of SmolLM2-135M in fp32 with Adam's state after one step, in one process. Both write
to the same disk and are brought onto it (fsync).
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mrlhf.checkpoint.saved import file_records
from mrlhf.checkpoint.training_state import AsyncCallsQueue, SavedModel, finish, load_state, save_state
from mrlhf.megatron import device
from mrlhf.megatron.groups import build_groups
from mrlhf.megatron.model import build_model
from mrlhf.megatron.optimizer import AdamSettings, Trainable
from mrlhf.model_config import ModelConfig
from mrlhf.planner import ParallelSizes


def build(layers: int, hidden: int) -> tuple[Trainable, ModelConfig]:
    """The model after one step of Adam, with gradients of 1."""
    from mrlhf.checkpoint.hf_config import read_model_config
    from tools.make_tiny_model import make_tiny_model

    heads = hidden // 64
    with tempfile.TemporaryDirectory() as folder:
        path = make_tiny_model(
            Path(folder) / "model",
            hidden_size=64 * heads,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=heads // 3,
            ffn_hidden_size=hidden * 8 // 3,
            vocab_size=49152,
            tied=True,
            tokenizer=False,
        )
        config = read_model_config(path)
    sizes = ParallelSizes()
    groups = build_groups(sizes)
    device.seed_rng_tracker(0, 0)
    trainable = Trainable(build_model(config, sizes, groups, head="lm"), groups, AdamSettings(lr=1e-3))
    trainable.zero_grad()
    for chunk in trainable.modules:
        for parameter in chunk.parameters():
            parameter.main_grad.fill_(1.0)  # type: ignore[attr-defined]
    trainable.step()
    return trainable, config


def timed(work: Any) -> float:
    """Seconds that ``work`` takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--hidden", type=int, default=576)
    options = parser.parse_args()
    device.install()
    store = tempfile.mkdtemp()
    dist.init_process_group("gloo", init_method=f"file://{store}/store", rank=0, world_size=1)
    trainable, config = build(options.layers, options.hidden)
    models, root = {"model": SavedModel(trainable, config)}, Path(store)
    common: dict[str, Any] = {"averages": {}, "common": {}, "per_rank": None, "layout": {}}

    def ours(name: str, queue: AsyncCallsQueue | None = None) -> None:
        (root / name).mkdir()
        save_state(root / name, models, queue=queue, **common)

    def theirs() -> None:
        inner = trainable.optimizer.chained_optimizers[0].optimizer
        with (root / "plain.pt").open("wb") as file:
            torch.save({"model": trainable.modules[0].state_dict(), "optimizer": inner.state_dict()}, file)
            file.flush()
            os.fsync(file.fileno())

    plain = timed(theirs)
    save = timed(lambda: ours("first"))
    marks = timed(lambda: file_records(root / "first"))
    queue = AsyncCallsQueue(persistent=False)
    waited = timed(lambda: ours("second", queue))
    rest = timed(lambda: finish(queue, blocking=True))
    load = timed(lambda: load_state(root / "first", models, averages={}, layout={}))
    again = timed(lambda: torch.load(root / "plain.pt", weights_only=False))
    size = sum(path.stat().st_size for path in (root / "first").rglob("*") if path.is_file())
    reference = (root / "plain.pt").stat().st_size
    parameters = sum(p.numel() for p in trainable.modules[0].parameters())
    print(f"{parameters / 1e6:.0f}M parameters, fp32, Adam, one process")
    print(f"torch.save        {plain:6.2f} s  {reference / 1e9:.3f} GB")
    print(f"checkpoint        {save:6.2f} s  {size / 1e9:.3f} GB   ratio {save / plain:.2f} in time, "
          f"{size / reference:.3f} in bytes")  # fmt: skip
    print(f"  checksums, sync {marks:6.2f} s")
    print(f"asynchronous      {waited:6.2f} s until training goes on, {rest:.2f} s more until it is written")
    print(f"load              {load:6.2f} s  (torch.load {again:.2f} s, ratio {load / again:.2f})")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
