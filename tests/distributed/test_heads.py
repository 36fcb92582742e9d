"""LogprobHead and ValueHead inside Megatron's regions, against an unsharded fp64 reference."""

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.model_parallel_config import ModelParallelConfig

from mrlhf.megatron.heads import LogprobHead, ValueHead

S, B, H, VOCAB, PADDED = 8, 2, 6, 21, 24


def config(sequence_parallel):
    return ModelParallelConfig(
        tensor_model_parallel_size=dist.get_world_size(), sequence_parallel=sequence_parallel,
        use_cpu_initialization=True, params_dtype=torch.float64, gradient_accumulation_fusion=False,
    )  # fmt: skip


def inputs():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(S, B, H, generator=generator, dtype=torch.float64)
    weight = torch.randn(PADDED, H, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, VOCAB, (S, B), generator=generator)
    upstream = torch.randn(2, S, B, generator=generator, dtype=torch.float64)
    return x, weight, labels, upstream


def part(full, sharded):
    if not sharded:
        return full.clone()
    return full.chunk(dist.get_world_size())[dist.get_rank()].clone()


def _logprob_head(sequence_parallel, tied, masked):
    x, weight, labels, upstream = inputs()
    head = LogprobHead(
        H, PADDED, config=config(sequence_parallel), init_method=torch.nn.init.normal_, tp_group=dist.group.WORLD,
        skip_weight_param_allocation=tied, true_vocab_size=VOCAB,
    )  # fmt: skip
    local = torch.nn.Parameter(part(weight, True))
    if not tied:
        with torch.no_grad():
            head.weight.copy_(local)
        local = head.weight
    hidden = part(x, sequence_parallel).requires_grad_()
    given = local if tied else None
    mask = (labels % 3 != 0) if masked else None
    logp, entropy = head(hidden, weight=given, labels=labels, mask=mask, temperature=0.9, with_entropy=True)
    grads = torch.autograd.grad((logp * upstream[0] + entropy * upstream[1]).sum(), (hidden, local))
    plain, _ = head(hidden, weight=given, runtime_gather_output=True)
    chosen, _ = head(hidden, weight=given, index=torch.tensor([1, 6]))
    logit_grads = torch.autograd.grad(plain.square().sum() + chosen.square().sum(), (hidden, local))
    return logp.detach(), entropy.detach(), *grads, plain.detach(), chosen.detach(), *logit_grads


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("tied", "masked"), [(False, False), (True, True)])
def test_logprob_head(run_ranks, sequence_parallel, tied, masked):
    x, weight, labels, upstream = inputs()
    x.requires_grad_()
    weight.requires_grad_()
    logits = x @ weight.t()
    table = torch.log_softmax(logits[..., :VOCAB] / 0.9, -1)
    entropy = -(table.exp() * table).sum(-1)
    logp = table.gather(2, labels[..., None])[..., 0]
    if masked:
        mask = labels % 3 != 0
        logp, entropy = torch.where(mask, logp, 0.0), torch.where(mask, entropy, 0.0)
    grads = torch.autograd.grad((logp * upstream[0] + entropy * upstream[1]).sum(), (x, weight), retain_graph=True)
    logit_grads = torch.autograd.grad(logits.square().sum() + logits[[1, 6]].square().sum(), (x, weight))

    results = run_ranks(_logprob_head, 2, sequence_parallel, tied, masked)

    def whole_hidden(place):
        parts = [r[place] for r in results]
        if sequence_parallel:
            return torch.cat(parts)
        assert torch.equal(parts[0], parts[1])
        return parts[0]

    for result in results:
        torch.testing.assert_close(result[0], logp.detach())
        torch.testing.assert_close(result[1], entropy.detach())
    torch.testing.assert_close(whole_hidden(2), grads[0])
    torch.testing.assert_close(torch.cat([r[3] for r in results]), grads[1])
    assert results[0][4].shape == (S, B, PADDED // 2)  # never gathered, even when Megatron asks
    torch.testing.assert_close(torch.cat([r[4] for r in results], 2), logits.detach())
    torch.testing.assert_close(torch.cat([r[5] for r in results], 2), logits.detach()[[1, 6]])
    torch.testing.assert_close(whole_hidden(6), logit_grads[0])
    torch.testing.assert_close(torch.cat([r[7] for r in results]), logit_grads[1])


def _refusals():
    head = LogprobHead(
        H, PADDED, config=config(False), init_method=torch.nn.init.normal_, tp_group=dist.group.WORLD,
        true_vocab_size=VOCAB,
    )  # fmt: skip
    x, _, labels, _ = inputs()
    with pytest.raises(ValueError, match="labels"):
        head(x, labels=labels.t())
    with pytest.raises(ValueError, match=r"need a weight \[12, 6\]"):
        head(x, weight=torch.zeros(3, 3), labels=labels)
    with pytest.raises(ValueError, match="tied"):
        ValueHead(H, config=config(False), tp_group=dist.group.WORLD)(x, weight=head.weight)
    with pytest.raises(ValueError, match="bias"):
        LogprobHead(H, PADDED, config=config(False), init_method=torch.nn.init.normal_, bias=True,
                    tp_group=dist.group.WORLD, true_vocab_size=VOCAB)  # fmt: skip
    return "weight" in head.sharded_state_dict(metadata={"dp_cp_group": dist.new_group([dist.get_rank()],
                                               use_local_synchronization=True)})  # fmt: skip


def test_heads_refuse_what_they_cannot_do(run_ranks):
    assert run_ranks(_refusals, 2) == [True, True]


def _value_head(sequence_parallel):
    x, weight, _, upstream = inputs()
    torch.manual_seed(dist.get_rank())  # ranks that drew different weights must still end with the same
    head = ValueHead(H, config=config(sequence_parallel), tp_group=dist.group.WORLD, bias=True)
    fresh = head.weight.detach().clone()
    with torch.no_grad():
        head.weight.copy_(weight[:1])
        head.bias.fill_(0.25)
    hidden = part(x, sequence_parallel).requires_grad_()
    values, none = head(hidden)
    assert none is None
    (values[..., 0] * upstream[0]).sum().backward()
    for parameter in head.parameters():  # what finalize_model_grads does
        assert parameter.sequence_parallel == sequence_parallel
        if parameter.sequence_parallel:
            dist.all_reduce(parameter.grad)
    return fresh, values.detach(), hidden.grad, head.weight.grad, head.bias.grad


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_value_head(run_ranks, sequence_parallel):
    x, weight, _, upstream = inputs()
    results = run_ranks(_value_head, 2, sequence_parallel)
    hidden_grads = [r[2] for r in results]
    expected_hidden = upstream[0][..., None] * weight[0]
    for result in results:
        assert torch.equal(result[0], results[0][0])
        torch.testing.assert_close(result[1], (x @ weight[0] + 0.25)[..., None])
        torch.testing.assert_close(result[3], (upstream[0][..., None] * x).sum((0, 1))[None])
        torch.testing.assert_close(result[4], upstream[0].sum()[None])
        if not sequence_parallel:
            torch.testing.assert_close(result[2], expected_hidden)
    if sequence_parallel:
        torch.testing.assert_close(torch.cat(hidden_grads), expected_hidden)


def _value_head_checkpoint(folder):
    own = None
    for rank in range(dist.get_world_size()):
        group = dist.new_group([rank])
        own = group if rank == dist.get_rank() else own
    torch.manual_seed(1)
    head = ValueHead(H, config=config(False), tp_group=dist.group.WORLD, bias=True)
    metadata = {"dp_cp_group": own}
    if dist.get_rank() == 0:
        folder.mkdir()
    dist.barrier()
    dist_checkpointing.save(head.sharded_state_dict("output_layer.", metadata=metadata), folder)
    other = ValueHead(H, config=config(False), tp_group=dist.group.WORLD, bias=True)
    assert not torch.equal(other.weight, head.weight)
    loaded = dist_checkpointing.load(other.sharded_state_dict("output_layer.", metadata=metadata), folder)
    other.load_state_dict({name.removeprefix("output_layer."): value for name, value in loaded.items()})
    return torch.equal(other.weight, head.weight) and torch.equal(other.bias, head.bias)


def test_b10_value_head_round_trips_through_a_checkpoint(run_ranks, tmp_path):
    assert run_ranks(_value_head_checkpoint, 2, tmp_path / "checkpoint") == [True, True]
