"""transformers' side of `rollout`, run by the Python of `.venv-peers`: batched `generate`, padded on the left.

Log-probs of sampled tokens come with ``output_scores`` and ``compute_transition_scores``, which keeps the scores of
all steps. The peer here does what costs it least: it looks the log-probs up in a `LogitsProcessor` and keeps nothing
else.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers import AutoModelForCausalLM, LogitsProcessorList
from transformers.utils import logging

from benchmarks.measure import serve

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


class Peer:
    """A model, and what it continues."""

    def __init__(self, folder: str, prompts: list[list[int]], limit: int, stop_ids: list[int], dtype: str) -> None:
        logging.disable_progress_bar()
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        width = max(map(len, prompts))
        self.ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts])
        self.mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        self.limit, self.stop_ids = limit, stop_ids

    def run(self, cache: str = "dynamic", logprobs: bool = True) -> None:
        """One rollout."""
        keeper = Logprobs()
        with torch.no_grad():
            made: torch.Tensor = self.model.generate(
                self.ids, attention_mask=self.mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                max_new_tokens=self.limit, min_new_tokens=None if self.stop_ids else self.limit,
                eos_token_id=self.stop_ids or None, pad_token_id=0, cache_implementation=cache,
                logits_processor=LogitsProcessorList([keeper] if logprobs else []),
            )  # fmt: skip
        if logprobs:
            keeper.finish(made)


class Logprobs:
    """Log-probs of sampled tokens without the scores of all steps: those of a step are looked up in the next one."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []
        self.last: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """A step: ``input_ids`` end with the token that was drawn from the last scores."""
        self._look_up(input_ids)
        self.last = scores.float().log_softmax(-1)
        return scores

    def _look_up(self, ids: torch.Tensor) -> None:
        if self.last is not None:
            self.kept.append(self.last.gather(1, ids[:, -1:]))

    def finish(self, ids: torch.Tensor) -> torch.Tensor:
        """``[rows, new tokens]``."""
        self._look_up(ids)
        return torch.cat(self.kept, 1)


def main() -> None:
    """Load the model, and run a rollout for each request."""
    warnings.filterwarnings("ignore")
    options = argparse.ArgumentParser()
    options.add_argument("job", type=Path)
    options.add_argument("clock", choices=sorted(CLOCKS))
    arguments = options.parse_args()
    peer, clock = Peer(**json.loads(arguments.job.read_text())), CLOCKS[arguments.clock]

    def handle(**request: Any) -> dict[str, float]:
        begin = clock()
        peer.run(**request)
        return {"seconds": clock() - begin}

    serve(handle)


if __name__ == "__main__":
    main()
