"""How near decoding comes to the memory's bandwidth, and training to the rate of matrix products, measured beside it.

    python benchmarks/roofline.py [--shape 135M] [--batch 8]

A decode step must read all weights and the keys and values so far once; a training step must do 6 floating point
operations per weight and token (8 with the log-prob head, whose logits are computed twice) and attention's on top. The
bandwidth is that of a matrix-vector product far larger than the caches, the rate that of a product of the layers' own
sizes. The peer's figure is the time that these allow, so that the ratio is the share of the possible.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

os.environ.setdefault("RANK", "0")

import torch
import torch.distributed as dist

from benchmarks.measure import Report, alternate, compare, finish, parser
from mrlhf.parallel.allocator import keep_freed_memory

BANDWIDTH_BYTES = 1 << 29


def bandwidth_time(read: float) -> float:
    """Seconds to read so many bytes, by a matrix-vector product over 512 MiB."""
    rows = BANDWIDTH_BYTES // 4 // 4096
    matrix, vector = _kept("matrix", rows, 4096), _kept("vector", 4096)
    begin = time.perf_counter()
    torch.mv(matrix, vector)
    return (time.perf_counter() - begin) / BANDWIDTH_BYTES * read


def product_time(operations: float, tokens: int, hidden: int, ffn: int) -> float:
    """Seconds for so many floating point operations at the rate of an MLP's products."""
    a, b, c = _kept("a", tokens, hidden), _kept("b", hidden, ffn), _kept("c", tokens, ffn)
    begin = time.perf_counter()
    for _ in range(4):
        torch.mm(a, b, out=c)
    return (time.perf_counter() - begin) / (4 * 2.0 * tokens * hidden * ffn) * operations


_TENSORS: dict[str, torch.Tensor] = {}


def _kept(name: str, *shape: int) -> torch.Tensor:
    if name not in _TENSORS:
        _TENSORS[name] = torch.rand(*shape)
    return _TENSORS[name]


def main() -> None:
    """Measure both."""
    warnings.filterwarnings("ignore")
    options = parser(__doc__)
    options.add_argument("--shape", default="135M", choices=["small", "135M"])
    options.add_argument("--vocab", type=int, default=49_152)
    options.add_argument("--batch", type=int, default=8, help="sequences decoded at once")
    options.add_argument("--prompt", type=int, default=64)
    options.add_argument("--response", type=int, default=32)
    options.add_argument("--rows", type=int, default=4, help="rows of a training step")
    options.add_argument("--length", type=int, default=128, help="tokens of a row")
    arguments = options.parse_args()
    keep_freed_memory()  # as in any run of ours on CPU
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    from benchmarks.models import build_trained, make_rows
    from mrlhf.planner import ParallelSizes
    from mrlhf.roles.language_model import learned_request, nll_loss
    from mrlhf.roles.micro_batches import by_rows
    from mrlhf.rollout.engine import GenerationRequest, RolloutEngine
    from mrlhf.rollout.sampling import SamplingParams

    length = max(arguments.prompt + arguments.response, arguments.length)
    model = build_trained(ParallelSizes(), vocab=arguments.vocab, length=length, shape=arguments.shape)
    config = model.config
    engine = RolloutEngine(
        model.trainable.modules,
        model.groups,
        vocab_size=config.vocab_size,
        kv_heads=config.num_query_groups,
        head_dim=config.head_dim,
        max_length=length,
        slots=arguments.batch,
    )

    def generate(tokens: int) -> float:
        prompts = make_rows([arguments.prompt] * arguments.batch, vocab=config.vocab_size).tokens
        requests = [
            GenerationRequest(i, prompts[i, : arguments.prompt].tolist(), tokens) for i in range(arguments.batch)
        ]
        begin = time.perf_counter()
        engine.generate(requests, SamplingParams(), stop_ids=[], seed=0, step=0)
        return time.perf_counter() - begin

    parameters = sum(p.numel() for chunk in model.chunks for p in chunk.parameters())
    # Of the input embedding a step reads a few rows.
    active = parameters - config.vocab_size * config.hidden_size
    cached = 2 * config.num_layers * config.num_query_groups * config.head_dim * 4 * arguments.batch
    read = 4 * active + cached * (arguments.prompt + arguments.response / 2)
    report = Report("roofline")
    figures = alternate(
        {
            "decode step": lambda: (generate(arguments.response) - generate(1)) / (arguments.response - 1),
            "bytes / bandwidth": lambda: bandwidth_time(read),
        },
        repeats=arguments.repeats,
    )
    case = f"{arguments.shape}, batch {arguments.batch}, {read / 2**20:.0f} MiB a step"
    report.add(compare(case, figures, "decode step", "bytes / bandwidth", target=0.6))

    batch = make_rows([arguments.length - 1] * arguments.rows, vocab=config.vocab_size)
    tokens = arguments.rows * arguments.length
    head = config.vocab_size * config.hidden_size
    attention = 6 * 2 * config.num_layers * config.hidden_size * arguments.length / 2
    operations = tokens * (6 * (active - head) + 8 * head + attention)

    def train() -> float:
        begin = time.perf_counter()
        model.update(batch, by_rows(batch.size, batch.size), nll_loss, float(tokens), learned_request)
        return time.perf_counter() - begin

    figures = alternate(
        {
            "training step": train,
            "operations / rate": lambda: product_time(operations, tokens, config.hidden_size, config.ffn_hidden_size),
        },
        repeats=arguments.repeats,
    )
    case = f"{arguments.shape}, {arguments.rows} rows of {arguments.length}, {operations / 1e9:.0f} GFLOP"
    report.add(compare(case, figures, "training step", "operations / rate"))
    dist.destroy_process_group()
    finish(report, arguments.json)


if __name__ == "__main__":
    main()
