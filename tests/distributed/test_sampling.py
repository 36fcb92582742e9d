"""The sampled token is the same under every sharding, and logits are never gathered."""

import torch
import torch.distributed as dist

from mrlhf.rollout import sampling
from mrlhf.rollout.sampling import SamplingParams, sample_tokens
from mrlhf.rollout.uniforms import uniform_for
from tests.distributed.test_vocab import CountCollectives, shard

VOCAB = 1400  # of 1536 = 12 blocks of 128: shards of whole blocks at TP 1, 2, 3 and 4; the last shard is half padding
PARAMS = (
    SamplingParams(),
    SamplingParams(temperature=0.7),
    SamplingParams(greedy=True),
    SamplingParams(top_k=1),
    SamplingParams(top_k=40),
    SamplingParams(top_k=1100),
    SamplingParams(top_p=0.3),
    SamplingParams(top_p=0.98),
    SamplingParams(1.3, top_k=100, top_p=0.9),
    SamplingParams(1.3, top_k=1200, top_p=0.95),
)


def draw(kind):
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(64, 1536, generator=generator) * 2
    if kind == "ties":  # bf16 values on a coarse grid: every kept set ends inside a tie, ties span shards
        logits = (logits * 2).round().div(2).bfloat16()
    logits[:, VOCAB:] = 50.0
    return logits


CASES = (("plain", VOCAB), ("ties", VOCAB), ("plain", 500))  # 500: the last shards hold padding only


def _sample(sharded):
    uniforms = uniform_for(3, 0, torch.arange(64), torch.full((64,), 9))
    group = dist.group.WORLD if sharded else None
    return torch.stack(
        [
            sample_tokens(shard(full) if sharded else full, uniforms, params, group=group, vocab_size=vocab_size)
            for kind, vocab_size in CASES
            for full in [draw(kind)]
            for params in PARAMS
        ]
    )


def test_same_token_under_every_sharding(run_ranks):
    expected = _sample(False)
    for i, (kind, vocab_size) in enumerate(CASES):
        tokens = expected[i * len(PARAMS) : (i + 1) * len(PARAMS)]
        assert tokens.max() < vocab_size
        assert torch.equal(tokens[2], draw(kind)[:, :vocab_size].float().argmax(1))
        assert tokens.unique().numel() > 100
    for tp in (2, 3, 4):
        for tokens in run_ranks(_sample, tp, True):
            assert torch.equal(tokens, expected), (tp, (tokens != expected).sum(1))


def _largest_message():
    logits = torch.randn(4, 32768, generator=torch.Generator().manual_seed(4)) * 2
    local = shard(logits)
    sizes = []
    for params in PARAMS:
        if params.top_k > 1000:  # candidates up to 1,024 per shard may travel
            params = SamplingParams(params.temperature, 20_000, params.top_p)
        with CountCollectives() as counter:
            sample_tokens(local, torch.full((4,), 0.9), params, group=dist.group.WORLD, vocab_size=32000)
        sizes.append(max(elements for _, elements in counter.calls))
    return sizes


def test_logits_are_never_gathered(run_ranks):
    # The largest message is the 256 nucleus candidates of both shards, in and out.
    for sizes in run_ranks(_largest_message, 2):
        assert max(sizes) == 4 * 256 * 3
        assert sizes[0] <= 4 * 3


def _rows_do_not_matter():
    logits = draw("plain")
    uniforms = uniform_for(3, 0, torch.arange(64), torch.full((64,), 9))
    local = shard(logits)
    same = True
    for params in PARAMS:
        whole = sample_tokens(local, uniforms, params, group=dist.group.WORLD, vocab_size=VOCAB)
        part = sample_tokens(local[10:13], uniforms[10:13], params, group=dist.group.WORLD, vocab_size=VOCAB)
        same = same and torch.equal(whole[10:13], part)
    return same


def test_batch_does_not_matter(run_ranks):
    assert run_ranks(_rows_do_not_matter, 2) == [True, True]


def test_candidates_and_bisection_keep_the_same_set(monkeypatch):
    """Both ways to find a kept set; drawn with uniforms on a grid, so that each of its tokens shows up."""
    logits = draw("ties")[:1].expand(1500, -1)
    uniforms = (torch.arange(1500, dtype=torch.float64) + 0.5) / 1500
    for params in (SamplingParams(top_k=40), SamplingParams(top_p=0.4)):
        small = set(sample_tokens(logits, uniforms, params, group=None, vocab_size=VOCAB).tolist())
        with monkeypatch.context() as patch:
            patch.setattr(sampling, "_MAX_CANDIDATES", 0)
            patch.setattr(sampling, "_NUCLEUS_CANDIDATES", 1)
            assert set(sample_tokens(logits, uniforms, params, group=None, vocab_size=VOCAB).tolist()) == small
