"""Time of sampling with log-probs, next to transformers' ``generate`` and to our own static batch.

    make peers && python benchmarks/rollout.py [--cases 8k 32k skewed smollm2] [--dtypes fp32 bf16] [--threads 2]

Cases:

- ``8k``, ``32k``: a Llama-like model (4 layers, hidden size 256) with random weights and that vocabulary; 16 prompts of
  64 tokens, 64 sampled tokens each. The peer samples with a dynamic and with a static cache (bf16: a dynamic one).
- ``skewed``: 48 requests through 8 slots. Their responses end by chance, so that no length is known before, and the
  longest is about three times the mean. Next to our own engine on static batches of 8, once as usual (all rows are
  computed until the longest has ended), once with ended rows left out of the later steps.
- ``smollm2``: SmolLM2-135M-Instruct (``tools/make_smollm2.py``), 32 chat prompts of mixed length, up to 64 tokens.

Both sides draw from the whole distribution at temperature 1 and give the log-prob of every token, each in a process of
its own (`rollout_peer.py`). ``generate (no log-probs)`` leaves these out.

On a machine that does other work at the same time, ``--threads 1 --clock cpu`` compares processor times.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

from benchmarks.measure import ROOT, Report, Worker, alternate, compare, finish, parser
from mrlhf.parallel.allocator import keep_freed_memory

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
TARGETS = {("8k", "fp32"): 2.0, ("8k", "bf16"): 2.0, ("32k", "fp32"): 3.0, ("32k", "bf16"): 3.5}
SMOLLM2_TARGET = 3.0
OURS, DYNAMIC, STATIC, BARE = "mrlhf", "generate (dynamic cache)", "generate (static cache)", "generate (no log-probs)"
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass(frozen=True)
class Job:
    """What both sides are given: a model, prompts, and what ends a response."""

    folder: str
    prompts: list[list[int]]
    limit: int
    stop_ids: list[int]
    dtype: str


def main() -> None:
    """Parse the command line, run the cases, print the table."""
    warnings.filterwarnings("ignore")
    options = parser(__doc__)
    options.add_argument("--cases", nargs="+", default=["8k", "32k", "skewed", "smollm2"])
    options.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES), help="of 8k and 32k")
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--clock", choices=sorted(CLOCKS), default="wall")
    options.add_argument("--peers", type=Path, default=ROOT / ".venv-peers", help="environment with transformers")
    options.add_argument("--smollm2", type=Path, default=Path(".cache/smollm2"), help="folder of the model")
    arguments = options.parse_args()
    keep_freed_memory()  # as every run on a CPU does; the peer has a process of its own
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory(prefix="mrlhf-rollout-") as work:
        dist.init_process_group("gloo", init_method=f"file://{work}/store", rank=0, world_size=1)
        from mrlhf.megatron import device

        device.install()
        report = Report("rollout")
        for case in arguments.cases:
            if case == "skewed":
                skewed(report, arguments, Path(work))
            elif case == "smollm2":
                smollm2(report, arguments, Path(work))
            else:
                for dtype in arguments.dtypes:
                    vocabulary(case, dtype, report, arguments, Path(work))
        finish(report, arguments.json)
        dist.destroy_process_group()


def vocabulary(case: str, dtype: str, report: Report, arguments: Any, work: Path) -> None:
    """Equal prompts, equal responses: what a step costs."""
    size = {"8k": 8192, "32k": 32768}[case]
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, size, (16, 64), generator=generator).tolist()
    job = Job(make_llama(work / case, size), prompts, 64, [], DTYPES[dtype])
    with peer_of(job, arguments, work) as peer:
        variants: dict[str, Callable[[], Any]] = {OURS: timed(Ours(job, slots=16).run, arguments)}
        variants[DYNAMIC] = lambda: peer.ask()["seconds"]
        if dtype == "fp32":
            variants[STATIC] = lambda: peer.ask(cache="static")["seconds"]
            variants[BARE] = lambda: peer.ask(logprobs=False)["seconds"]
        times = alternate(variants, repeats=arguments.repeats)
    for name in list(variants)[1:]:
        target = TARGETS[case, dtype] if name != BARE else None
        report.add(compare(f"{case} {dtype}, 16 x (64 + 64)", times, OURS, name, target=target))


@contextmanager
def peer_of(job: Job, arguments: Any, work: Path) -> Iterator[Worker]:
    """The peer's process."""
    python = arguments.peers / "bin" / "python"
    if not python.exists():
        raise SystemExit(f"no environment with transformers in {arguments.peers}: make peers")
    path = work / "job.json"
    path.write_text(json.dumps(asdict(job)))
    script = str(Path(__file__).with_name("rollout_peer.py"))
    environment = {"OMP_NUM_THREADS": str(arguments.threads), "PYTHONPATH": str(ROOT)}
    worker = Worker([str(python), script, str(path), arguments.clock], **environment)
    try:
        yield worker
    finally:
        worker.close()


def skewed(report: Report, arguments: Any, work: Path) -> None:
    """Responses as rollouts have them: most are short, a few are long, and nobody knows which."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 8192, (16 + i % 17,), generator=generator).tolist() for i in range(48)]
    # Random weights say everything with about the same probability: one token in 40 ends a response.
    stop_ids = torch.randperm(8192, generator=generator)[: 8192 // 40].tolist()
    job = Job(make_llama(work / "skewed", 8192), prompts, 128, stop_ids, DTYPES["fp32"])
    ours = Ours(job, slots=8, step=1)
    lengths = [len(g.tokens) for g in ours.run()]
    ratio = max(lengths) / (sum(lengths) / len(lengths))
    whole = [max(lengths[start : start + 8]) for start in range(0, 48, 8)]
    variants = {
        "continuous": timed(ours.run, arguments),
        "static": timed(lambda: ours.run_static(whole), arguments),
        "static, ended rows left out": timed(lambda: ours.run_static(), arguments),
    }
    times = alternate(variants, repeats=arguments.repeats)
    note = f"longest {max(lengths)}, longest / mean {ratio:.2f}"
    name = "skewed fp32, 48 requests, 8 slots"
    report.add(compare(name, times, "continuous", "static", target=round(0.7 * ratio, 2), note=note))
    report.add(compare(name, times, "continuous", "static, ended rows left out", note=note))


def smollm2(report: Report, arguments: Any, work: Path) -> None:
    """A real model, chat prompts of mixed length, responses that end when the model ends them."""
    if not (arguments.smollm2 / "config.json").exists():
        print(f"smollm2: no model in {arguments.smollm2}: python tools/make_smollm2.py --target {arguments.smollm2}")
        return
    from mrlhf.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(str(arguments.smollm2))
    prompts = [tokenizer.encode_messages(chat) for chat in chats(32)]
    job = Job(str(arguments.smollm2.resolve()), prompts, 64, sorted(tokenizer.eos_ids), DTYPES["fp32"])
    with peer_of(job, arguments, work) as peer:
        variants = {OURS: timed(Ours(job, slots=32).run, arguments), DYNAMIC: lambda: peer.ask()["seconds"]}
        times = alternate(variants, repeats=arguments.repeats)
    lengths = sorted(map(len, prompts))
    note = f"prompts of {lengths[0]} to {lengths[-1]} tokens, median {lengths[len(lengths) // 2]}"
    report.add(compare("SmolLM2-135M fp32, 32 chats", times, OURS, DYNAMIC, target=SMOLLM2_TARGET, note=note))


def timed(run: Callable[[], Any], arguments: Any) -> Callable[[], float]:
    """Seconds of a run by the clock that was asked for."""
    clock = CLOCKS[arguments.clock]

    def once() -> float:
        begin = clock()
        run()
        return clock() - begin

    return once


def chats(count: int) -> list[list[dict[str, str]]]:
    """Questions about one sentence, and now and then about a page."""
    sentences = [
        "The museum opened in 1902 and has three floors.",
        "Our train was late, and the last bus had left.",
        "She keeps bees behind the house and sells the honey in the village.",
        "The contract says that either side may end it with a month's notice.",
        "Water boils at a lower temperature on a mountain.",
        "Two of the five machines were repaired last week.",
    ]
    asks = ["Say this in one sentence:", "What is the main point of this?", "Continue this story:", "Reply kindly to:"]
    made = []
    for i in range(count):
        length = 24 if i % 8 == 7 else 1 + (i * 5) % 8
        text = " ".join(sentences[(i + k) % len(sentences)] for k in range(length))
        made.append([{"role": "user", "content": f"{asks[i % len(asks)]} {text}"}])
    return made


def make_llama(folder: Path, size: int) -> str:
    """A Llama-like model with random weights as a Hugging Face folder."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4,
        intermediate_size=688, max_position_embeddings=1024, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


class Ours:
    """Our side."""

    def __init__(self, job: Job, *, slots: int, step: int | None = None) -> None:
        from mrlhf.checkpoint.convert import load_weights
        from mrlhf.checkpoint.hf_config import read_model_config
        from mrlhf.megatron.device import seed_rng_tracker
        from mrlhf.megatron.groups import build_groups
        from mrlhf.megatron.model import build_model
        from mrlhf.planner import ParallelSizes
        from mrlhf.rollout.engine import GenerationRequest, RolloutEngine

        sizes = ParallelSizes()
        groups = build_groups(sizes)
        seed_rng_tracker(0, 0)
        config = read_model_config(Path(job.folder))
        chunks = build_model(config, sizes, groups, head="lm", trainable=False, dtype=getattr(torch, job.dtype))
        load_weights(chunks, config, Path(job.folder), groups=groups, head="lm")
        self.engine = RolloutEngine(
            chunks, groups, vocab_size=config.vocab_size, kv_heads=config.num_query_groups, head_dim=config.head_dim,
            max_length=config.max_position_embeddings, slots=slots,
        )  # fmt: skip
        self.requests = [GenerationRequest(i, prompt, job.limit) for i, prompt in enumerate(job.prompts)]
        self.stop_ids, self.fixed, self.step, self.slots = job.stop_ids, step, 0, slots

    def run(self) -> list[Any]:
        """One rollout."""
        self.step += 1
        return self._generate(self.requests, self.stop_ids)

    def run_static(self, lengths: Sequence[int] | None = None) -> None:
        """A batch of rows at a time; with ``lengths`` all rows of a batch go on to its length."""
        for number, start in enumerate(range(0, len(self.requests), self.slots)):
            batch = self.requests[start : start + self.slots]
            if lengths is None:
                self._generate(batch, self.stop_ids)
            else:
                self._generate([replace(request, max_new_tokens=lengths[number]) for request in batch], ())

    def _generate(self, requests: list[Any], stop_ids: Sequence[int]) -> list[Any]:
        from mrlhf.rollout.sampling import SamplingParams

        step = self.step if self.fixed is None else self.fixed
        return self.engine.generate(
            requests, SamplingParams(), stop_ids=stop_ids, seed=0, step=step, with_logprobs=True
        )


if __name__ == "__main__":
    main()
