"""A training state saved and loaded: bit for bit under the same layout, resharded under another one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mrlhf.errors import CheckpointError
from tests.distributed.megatron_tools import PP2, SP, TP2, VPP2, accumulate, build, count, make_rows, total_loss, whole
from tests.distributed.test_optimizer import SETTINGS
from tests.ranks import run_ranks
from tools.make_tiny_model import make_tiny_model

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Run:
    """A tiny model that is trained, with an average of its weights."""

    def __init__(
        self, path: Path, sizes: dict[str, Any], dtype: str = "fp32", distributed: bool = False, **options: Any
    ) -> None:
        from mrlhf.checkpoint.training_state import SavedModel
        from mrlhf.megatron.optimizer import Trainable

        self.path, self.sizes = path, {"world": dist.get_world_size(), **sizes}
        self.config, self.groups, chunks = build(path, sizes, dtype=DTYPES[dtype], **options)
        self.trainable = Trainable(chunks, self.groups, SETTINGS, distributed_optimizer=distributed)
        self.models = {"actor": SavedModel(self.trainable, self.config)}
        self.average = {
            f"{index}.{name}": 2 * parameter.detach().float()
            for index, chunk in enumerate(self.trainable.modules)
            for name, parameter in chunk.named_parameters()
        }
        self.rows = make_rows()

    def step(self, steps: int) -> list[float]:
        """The losses of some updates."""
        losses = []
        for _ in range(steps):
            part = accumulate(self.trainable, self.rows, 2, count(self.rows))
            losses.append(total_loss(part, self.groups))
            self.trainable.step()
            self.trainable.advance_schedule()
        return losses

    def save(self, folder: Path, **options: Any) -> None:
        from mrlhf.checkpoint.training_state import Average, save_state

        if dist.get_rank() == 0:
            folder.mkdir(parents=True)
        dist.barrier()
        save_state(
            folder,
            self.models,
            averages={"ema": Average("actor", self.average)},
            common={"iteration": 3, "x": 0.1},
            per_rank=f"rank {dist.get_rank()}",
            layout=self.sizes,
            **options,
        )

    def expected_bytes(self) -> int:
        from mrlhf.checkpoint.plan import state_bytes
        from mrlhf.checkpoint.training_state import Average

        return state_bytes(self.models, {"ema": Average("actor", self.average)})

    def load(self, folder: Path, **options: Any) -> Any:
        from mrlhf.checkpoint.training_state import Average, load_state

        averages = {"ema": Average("actor", self.average)}
        return load_state(folder, self.models, averages=averages, layout=self.sizes, **options)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything that the next update depends on, on this rank."""
        found = {
            f"{index}.{name}": parameter.detach().clone()
            for index, chunk in enumerate(self.trainable.modules)
            for name, parameter in chunk.named_parameters()
        }
        for number, optimizer in enumerate(self.trainable.optimizer.chained_optimizers):
            for group in optimizer.optimizer.param_groups:
                for place, parameter in enumerate(group["params"]):
                    key = f"{number} {group['wd_mult']} {place}"
                    found[f"{key} main"] = parameter.detach().clone()
                    for kind, tensor in optimizer.optimizer.state[parameter].items():
                        found[f"{key} {kind}"] = tensor.clone()
        found["lr"] = torch.tensor(self.trainable.learning_rate)
        found["scale"] = torch.tensor(self.trainable.loss_scale)
        return found | {f"average {name}": tensor.clone() for name, tensor in self.average.items()}


def differing(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> list[str]:
    assert ours.keys() == theirs.keys()
    return [name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(
        tmp_path_factory.mktemp("state") / "model", attention_bias=True, mlp_bias=True, tokenizer=False, seed=6
    )


def same_layout(model: Path, folder: Path, cases: list[tuple[dict[str, Any], str, bool]]) -> None:
    for number, (sizes, dtype, distributed) in enumerate(cases):
        first, target = Run(model, sizes, dtype, distributed), folder / f"{number}"
        first.step(2)
        if dtype == "fp16":
            first.trainable.optimizer.chained_optimizers[0].grad_scaler._growth_tracker = 7
        saved = first.tensors()
        first.save(target)
        torch.manual_seed(dist.get_rank())  # is put back below
        drawn = torch.get_rng_state()
        assert not differing(saved, first.tensors()), "a save changes nothing"
        written = sum(path.stat().st_size for path in (target / "tensors").rglob("*.distcp"))
        # Beside the tensors there are headers, of about a kilobyte each, and states of random number generators.
        assert written / 1.5 < first.expected_bytes() < written
        losses, after = first.step(2), first.tensors()

        second = Run(model, sizes, dtype, distributed)
        second.average = {name: torch.zeros_like(tensor) for name, tensor in second.average.items()}
        state = second.load(target)
        assert state.same_layout
        assert state.common == {"iteration": 3, "x": 0.1}
        assert state.per_rank == f"rank {dist.get_rank()}"
        assert not torch.equal(torch.get_rng_state(), drawn)
        assert not differing(saved, second.tensors()), (sizes, dtype, distributed)
        assert second.step(2) == losses
        assert not differing(after, second.tensors()), (sizes, dtype, distributed)
        if dtype == "fp16":
            assert second.trainable.optimizer.chained_optimizers[0].grad_scaler._growth_tracker == 9


def test_one_rank_goes_on_bit_for_bit(model: Path, tmp_path: Path) -> None:
    cases = [({}, dtype, distributed) for dtype in DTYPES for distributed in (False, True)]
    run_ranks(same_layout, 1, model, tmp_path, cases)


def test_two_ranks_go_on_bit_for_bit(model: Path, tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str, bool]] = [
        ({}, "fp32", True),
        ({}, "bf16", True),
        ({}, "bf16", False),
        (TP2 | SP, "fp32", False),
        (PP2, "fp32", True),
        (PP2 | VPP2, "bf16", False),
    ]
    run_ranks(same_layout, 2, model, tmp_path, cases)


def save_in_parts(model: Path, folder: Path, sizes: dict[str, Any], dtype: str, distributed: bool) -> Any:
    run = Run(model, sizes, dtype, distributed)
    run.step(2)
    run.save(folder / "state")
    weights = whole(run.trainable.modules, run.config, model, run.groups, folder / "before")
    return weights, run.step(2)


def load_elsewhere(
    model: Path, folder: Path, layouts: list[tuple[dict[str, Any], bool]], dtype: str
) -> list[tuple[Any, list[float], Any]]:
    found = []
    for sizes, distributed in layouts:
        run = Run(model, sizes, dtype, distributed)
        average = run.average  # of the weights before training, as the saved one is
        run.average = {name: torch.zeros_like(tensor) for name, tensor in average.items()}
        assert not run.load(folder / "state").same_layout
        assert not differing(average, run.average)
        weights = whole(run.trainable.modules, run.config, model, run.groups, folder / "after")
        found.append((weights, run.step(2), run.trainable.learning_rate))
    return found


@pytest.mark.parametrize(
    ("distributed", "tied"),
    [
        pytest.param(False, True, id="plain-tied"),
        pytest.param(True, False, id="distributed-untied"),
        pytest.param(False, False, id="plain-untied", marks=pytest.mark.slow),
        pytest.param(True, True, id="distributed-tied", marks=pytest.mark.slow),
    ],
)
def test_other_layouts_reshard(tmp_path: Path, distributed: bool, tied: bool) -> None:
    model = make_tiny_model(tmp_path / "model", tied=tied, tokenizer=False, seed=6)
    before = run_ranks(save_in_parts, 2, model, tmp_path, TP2, "fp32", distributed)
    weights, losses = before[0]
    layouts: list[tuple[dict[str, Any], bool]] = [(PP2, distributed), ({}, distributed), ({}, not distributed)]
    for there, after, rate in run_ranks(load_elsewhere, 2, model, tmp_path, layouts, "fp32")[0]:
        assert not differing(weights, there)
        assert after == pytest.approx(losses, rel=2e-6)
        assert rate == pytest.approx(1e-3)  # the schedule has come to its end
    shutil.rmtree(tmp_path / "state")


def pass_on(
    model: Path, folder: Path, number: int, sizes: dict[str, Any], distributed: bool
) -> tuple[Any, list[float], Any]:
    """Load what the layout before has saved, train a step, save; the weights at both ends and the loss."""
    run = Run(model, sizes, "fp32", distributed)
    if number:
        assert not run.load(folder / f"{number - 1}").same_layout
    ends = [whole(run.trainable.modules, run.config, model, run.groups, folder / "weights")]
    losses = run.step(1)
    run.save(folder / f"{number}")
    ends.append(whole(run.trainable.modules, run.config, model, run.groups, folder / "weights"))
    return ends[0], losses, ends[1]


@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed"])
def test_c13_a_chain_of_layouts(model: Path, tmp_path: Path, distributed: bool) -> None:
    """TP2 x PP1, then TP1 x PP2, then TP2 x PP2: every hand-over keeps every bit, the losses are those of one run."""
    straight = run_ranks(straight_on, 1, model, distributed)[0]
    weights: Any = None
    for number, (world, sizes) in enumerate([(2, TP2), (2, PP2), (4, TP2 | PP2)]):
        before, losses, after = run_ranks(pass_on, world, model, tmp_path, number, sizes, distributed)[0]
        assert weights is None or not differing(weights, before)
        assert losses == pytest.approx(straight[number : number + 1], rel=2e-6)
        weights = after


def straight_on(model: Path, distributed: bool) -> list[float]:
    return Run(model, {}, "fp32", distributed).step(3)


def test_bf16_reshards_with_its_fp32_copies(model: Path, tmp_path: Path) -> None:
    weights, losses = run_ranks(save_in_parts, 2, model, tmp_path, {}, "bf16", True)[0]
    there, after, _ = run_ranks(load_elsewhere, 2, model, tmp_path, [(TP2, False)], "bf16")[0][0]
    assert not differing(weights, there)
    # bf16 activations round at other places under TP.
    assert after == pytest.approx(losses, rel=2e-3)


def save_while_training(model: Path, folder: Path) -> None:
    from mrlhf.checkpoint.training_state import AsyncCallsQueue, finish

    run, queue = Run(model, {}, "fp32", True), AsyncCallsQueue(persistent=False)
    run.step(1)
    saved = run.tensors()
    run.save(folder / "state", queue=queue)
    losses, after = run.step(2), run.tensors()
    assert differing(saved, after)
    assert finish(queue, blocking=True)
    again = Run(model, {}, "fp32", True)
    again.load(folder / "state")
    assert not differing(saved, again.tensors())
    assert again.step(2) == losses
    assert not differing(after, again.tensors())


def test_an_asynchronous_save_holds_the_state_of_its_call(model: Path, tmp_path: Path) -> None:
    run_ranks(save_while_training, 2, model, tmp_path)


def refuse(model: Path, other: Path, folder: Path) -> dict[str, str]:
    from mrlhf.checkpoint.training_state import load_state

    run = Run(model, {})
    run.step(1)
    run.save(folder / "light", optimizer=False)
    run.save(folder / "whole")
    messages = {}

    def attempt(name: str, call: Any) -> None:
        with pytest.raises(CheckpointError) as caught:
            call()
        messages[name] = str(caught.value)

    attempt("no optimizer", lambda: Run(model, {}).load(folder / "light"))
    attempt("dtype", lambda: Run(model, {}, "bf16").load(folder / "whole"))
    attempt("architecture", lambda: Run(other, {}).load(folder / "whole"))
    attempt("role", lambda: load_state(folder / "whole", {"critic": run.models["actor"]}, averages={}, layout={}))
    attempt("nothing", lambda: run.load(folder))
    fresh = Run(model, {})
    state = fresh.load(folder / "light", weights_only=True)
    assert not state.same_layout
    ours, theirs = fresh.tensors(), run.tensors()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items() if name[:2] == "0." or "main" in name)
    assert not [name for name in ours if "exp_avg" in name], "a fresh optimizer has made no step"
    averages = [(value, ours[name.removeprefix("average ")]) for name, value in ours.items() if "average" in name]
    assert averages
    assert all(torch.equal(average, weight) for average, weight in averages), "an average begins as the weights"
    half = Run(model, {}, "bf16")
    half.load(folder / "whole", weights_only=True)
    mains = [value for name, value in half.tensors().items() if name.endswith("main")]
    assert all(torch.equal(value, value.bfloat16().float()) for value in mains)
    return messages


def test_c13_what_does_not_fit_is_named(model: Path, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path / "other", hidden_size=32, num_heads=4, tokenizer=False)
    messages = run_ranks(refuse, 1, model, other, tmp_path)[0]
    assert "checkpoint.optimizer=false" in messages["no optimizer"]
    assert "trainer.weights_only=true" in messages["no optimizer"]
    assert "torch.float32" in messages["dtype"]
    assert "torch.bfloat16" in messages["dtype"]
    assert "actor.hidden_size was 64, now it is 32" in messages["architecture"]
    assert "it holds actor, but no critic" in messages["role"]
    assert "state.json" in messages["nothing"]
