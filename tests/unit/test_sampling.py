"""Sampling and its random numbers, unsharded."""

import pytest
import torch
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

from mrlhf.errors import MrlhfError
from mrlhf.rollout import sampling, uniforms
from mrlhf.rollout.sampling import SamplingParams, sample_tokens, sample_with_logprobs
from mrlhf.rollout.uniforms import uniform_for


def chi_square_tail(statistic, freedom):
    """Probability that a chi-square variable exceeds ``statistic``."""
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return torch.special.gammaincc(half[0], half[1]).item()


def chi_square_p(observed, expected=None):
    observed = torch.as_tensor(observed, dtype=torch.float64)
    expected = observed.mean() if expected is None else torch.as_tensor(expected, dtype=torch.float64)
    return chi_square_tail(((observed - expected) ** 2 / expected).sum().item(), observed.numel() - 1)


def grid(n):
    return (torch.arange(n, dtype=torch.float64) + 0.5) / n


def counts_of(logits, params, draws=20_000, vocab_size=None):
    vocab_size = vocab_size or logits.numel()
    uniforms = uniform_for(1, 2, torch.arange(draws), torch.zeros(draws, dtype=torch.int64))
    tokens = sample_tokens(logits.expand(draws, -1), uniforms, params, group=None, vocab_size=vocab_size)
    return torch.bincount(tokens, minlength=logits.numel())


def kept_set(logits, params, vocab_size=None):
    """The kept set: every token of it here owns more than one of 2,000 evenly spaced uniform numbers."""
    n = 2000
    tokens = sample_tokens(logits.expand(n, -1), grid(n), params, group=None, vocab_size=vocab_size or logits.numel())
    return set(tokens.tolist())


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0.6), SamplingParams(top_k=7),
                                    SamplingParams(top_p=0.7), SamplingParams(1.5, top_k=20, top_p=0.8)])  # fmt: skip
def test_distribution(params):
    logits = torch.randn(50, generator=torch.Generator().manual_seed(0)) * 1.5
    scores = logits[None] / params.temperature
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(None, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(None, scores)
    expected = scores.double().softmax(-1)[0] * 20_000
    counts = counts_of(logits, params)
    kept = expected > 0
    assert counts[~kept].sum() == 0
    common = expected >= 5
    rest = (counts[kept & ~common].sum().item(), expected[kept & ~common].sum().item())
    observed, wanted = counts[common].double().tolist(), expected[common].tolist()
    if rest[1] > 0:
        observed.append(rest[0])
        wanted.append(rest[1])
    # Fixed random numbers: a right sampler fails once in 1,000 choices of the seed.
    assert chi_square_p(observed, wanted) > 1e-3


@pytest.mark.parametrize("seed", range(4))
def test_kept_sets_are_those_of_transformers(seed, monkeypatch):
    logits = torch.randn(300, generator=torch.Generator().manual_seed(seed))
    for top_k, top_p in ((0, 0.1), (0, 0.5), (0, 0.9), (5, 1.0), (64, 1.0), (64, 0.6), (1, 0.3)):
        scores = TopKLogitsWarper(top_k)(None, logits[None]) if top_k else logits[None]
        scores = TopPLogitsWarper(top_p)(None, scores) if top_p < 1 else scores
        expected = set(scores[0].isfinite().nonzero()[:, 0].tolist())
        assert kept_set(logits, SamplingParams(top_k=top_k, top_p=top_p)) == expected
        with monkeypatch.context() as patch:
            patch.setattr(sampling, "_MAX_CANDIDATES", 0)
            patch.setattr(sampling, "_NUCLEUS_CANDIDATES", 2)
            assert kept_set(logits, SamplingParams(top_k=top_k, top_p=top_p)) == expected


@pytest.mark.parametrize("few", [False, True])
def test_ties_go_to_the_lower_id(few, monkeypatch):
    if few:  # the kept sets come from bisection instead of candidates
        monkeypatch.setattr(sampling, "_MAX_CANDIDATES", 0)
        monkeypatch.setattr(sampling, "_NUCLEUS_CANDIDATES", 1)
    flat = torch.zeros(10)
    assert kept_set(flat, SamplingParams(top_k=3)) == {0, 1, 2}
    assert kept_set(flat, SamplingParams(top_p=0.35)) == {0, 1, 2, 3}
    assert kept_set(flat, SamplingParams(top_k=5, top_p=0.5)) == {0, 1, 2}
    mixed = torch.tensor([0.0, 1.0, -0.0, 2.0, 0.0])
    assert kept_set(mixed, SamplingParams(top_k=4)) == {3, 1, 0, 2}
    flat[4] = 3
    assert sample_tokens(flat[None], torch.zeros(1), SamplingParams(greedy=True), group=None, vocab_size=10) == 4
    zeros = torch.zeros(1, 10)
    assert sample_tokens(zeros, torch.tensor([0.99]), SamplingParams(temperature=0), group=None, vocab_size=10) == 0


def test_d9_nucleus_holds_the_token_that_reaches_top_p():
    logits = torch.tensor([0.5, 0.3, 0.2]).log()
    params = SamplingParams(top_p=0.8)
    assert kept_set(logits, params) == {0, 1}
    counts = counts_of(logits, params, 4000)
    # log(.5 / .8) = -.4700
    assert counts[0].item() / 4000 == pytest.approx(0.625, abs=0.03)


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_k=4), SamplingParams(top_p=0.99),
                                    SamplingParams(greedy=True), SamplingParams(5.0, top_k=3, top_p=0.9)])  # fmt: skip
def test_d6_padded_id_is_never_drawn(params):
    logits = torch.tensor([0.0, 0.0, 0.0, 5.0])
    assert counts_of(logits, params, 1000, vocab_size=3)[3] == 0


def test_boundary_uniforms_and_dead_tokens():
    logits = torch.full((3, 300), float("-inf"))
    logits[:, 140:143] = torch.tensor([0.0, 1.0, 0.5])
    uniforms = torch.tensor([0.0, 0.5, 1 - 2.0**-53], dtype=torch.float64)
    tokens = sample_tokens(logits, uniforms, SamplingParams(), group=None, vocab_size=300)
    assert tokens.tolist() == [140, 141, 142]
    for params in (SamplingParams(top_k=2), SamplingParams(top_p=0.6)):
        tokens = sample_tokens(logits, uniforms, params, group=None, vocab_size=300)
        assert set(tokens.tolist()) <= {141, 142}


def test_inverse_cdf_is_exact_on_a_large_vocabulary():
    logits = torch.randn(1, 5000, generator=torch.Generator().manual_seed(1))
    uniforms = grid(997)
    tokens = sample_tokens(logits.expand(997, -1), uniforms, SamplingParams(), group=None, vocab_size=5000)
    edges = logits[0].double().softmax(0).cumsum(0)
    low = torch.where(tokens > 0, edges[(tokens - 1).clamp(min=0)], 0.0)
    assert ((low - 1e-6 <= uniforms) & (uniforms <= edges[tokens] + 1e-6)).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("greedy", [False, True])
def test_bad_logits_are_refused(value, greedy):
    logits = torch.zeros(3, 4)
    logits[1, 2] = value
    with pytest.raises(MrlhfError, match=r"row\(s\) \[1\].*lower optimizer\.actor\.lr"):
        sample_tokens(logits, torch.zeros(3), SamplingParams(greedy=greedy), group=None, vocab_size=4)


def test_parameters_are_checked():
    for bad in ({"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}, {"temperature": float("nan")}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            SamplingParams(**bad)


def test_uniform_is_splitmix64():
    # First output of SplitMix64 from state 0 is 0xE220A8397B1DCDAF.
    state = torch.tensor(uniforms._signed(uniforms._GOLDEN), dtype=torch.int64)
    assert uniforms._mix(state).item() & (2**64 - 1) == 0xE220A8397B1DCDAF


def test_uniform_depends_on_its_four_numbers_alone():
    ids, positions = torch.arange(64), torch.arange(64) * 3
    whole = uniform_for(7, 1, ids, positions)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(uniform_for(7, 1, ids[order], positions[order]), whole[order])
    assert torch.equal(uniform_for(7, 1, ids[5:6], positions[5:6]), whole[5:6])
    # d4: other samples of one prompt (other ids), steps and seeds differ; a rerun does not.
    for other in (uniform_for(8, 1, ids, positions), uniform_for(7, 2, ids, positions),
                  uniform_for(7, 1, ids + 64, positions), uniform_for(7, 1, ids, positions + 1)):  # fmt: skip
        assert (other != whole).all()
    assert uniform_for(-3, 2**40, ids, positions).min() >= 0


@pytest.mark.parametrize("along", ["seed", "step", "sample", "position"])
def test_uniform_is_equidistributed_and_independent(along):
    n = 20_000
    steady, moving = torch.full((n,), 5), torch.arange(n)
    if along == "sample":
        u = uniform_for(1, 2, moving, steady)
    elif along == "position":
        u = uniform_for(1, 2, steady, moving)
    elif along == "step":
        u = torch.cat([uniform_for(1, i, steady[:1], steady[:1]) for i in range(4000)])
    else:
        u = torch.cat([uniform_for(i, 2, steady[:1], steady[:1]) for i in range(4000)])
    assert u.min() >= 0
    assert u.max() < 1
    assert chi_square_p(torch.bincount((u * 100).long(), minlength=100)) > 1e-3
    # Neighbours fill a 10 x 10 grid evenly: no serial correlation.
    cells = (u[:-1] * 10).long() * 10 + (u[1:] * 10).long()
    assert chi_square_p(torch.bincount(cells[::2], minlength=100)) > 1e-3


def test_uniform_two_way_table_is_independent():
    ids = torch.arange(200).repeat_interleave(200)
    positions = torch.arange(200).repeat(200)
    u = uniform_for(0, 0, ids, positions).view(200, 200)
    for means in (u.mean(0), u.mean(1)):  # 200 means of 200 uniforms: sum of squares is chi-square
        z = (means - 0.5) / (1 / 12 / 200) ** 0.5
        assert 1e-3 < chi_square_tail((z**2).sum().item(), 200) < 1 - 1e-3
    assert u.unique().numel() == 40_000


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(0.6),
        SamplingParams(0.6, top_k=5),
        SamplingParams(top_p=0.5),
        SamplingParams(top_k=2000),
        SamplingParams(temperature=0.0),
    ],
    ids=str,
)
def test_logprobs_are_of_the_whole_distribution(params: SamplingParams) -> None:
    logits = torch.randn(50, 3000, generator=torch.Generator().manual_seed(0)) * 3
    tokens, logprobs = sample_with_logprobs(logits, grid(50), params, group=None, vocab_size=2900)
    assert torch.equal(tokens, sample_tokens(logits, grid(50), params, group=None, vocab_size=2900))
    table = (logits[:, :2900].double() / (params.temperature or 1.0)).log_softmax(1)
    torch.testing.assert_close(logprobs, table.gather(1, tokens[:, None])[:, 0].float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("rows", "columns"), [(1, 128), (1, 49_152), (3, 1000), (16, 8192), (64, 32_768), (2, 300)])
def test_the_sum_of_a_block_depends_on_nothing_but_its_numbers(threads: int, rows: int, columns: int) -> None:
    """Else a token would depend on how the vocabulary is sharded, on the rows beside it, or on the threads."""
    weights = torch.rand(rows, columns, generator=torch.Generator().manual_seed(columns)).pow(8)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        sums = sampling._block_sums(weights)
        for row in range(0, rows, max(rows // 5, 1)):
            alone = [sampling._block_sums(block[None]) for block in weights[row].split(128)]
            assert torch.equal(torch.cat(alone, 1).squeeze(0), sums[row])
        shards = [sampling._block_sums(part) for part in weights.split(max(columns // 256 * 128, 128), 1)]
    finally:
        torch.set_num_threads(before)
    assert torch.equal(torch.cat(shards, 1), sums)
    expected = weights.double().sum(1) * 2.0**34
    torch.testing.assert_close(sums.sum(1), expected, rtol=1e-6, atol=0)
