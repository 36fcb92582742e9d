"""Times of rollouts with continuous batching, and what offloading moves: formulas, and the scheduler itself."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from mrlhf.errors import ConfigError
from mrlhf.planner import ParallelSizes
from mrlhf.planning.batching import Batching, batching
from mrlhf.planning.hardware import HARDWARE, Efficiency, Hardware
from mrlhf.planning.job import Job, Role, Rollout, Rows
from mrlhf.planning.memory import persistent, phases
from mrlhf.planning.mend import Change
from mrlhf.planning.offload import host_bytes_of, host_bytes_of_machine, host_bytes_of_rank, transfers
from mrlhf.planning.plan import plan
from mrlhf.planning.timing import Clock
from mrlhf.rollout.scheduler import Row, Scheduler
from tests.unit.test_plan_answers import question
from tests.unit.test_planning import ALONE, TINY, job

IDEAL = Efficiency(flops=1.0, bandwidth=1.0, link=1.0, link_seconds=0.0, network_seconds=0.0, layer_seconds=0.0)
READING = Hardware("x", 1e9, {"bf16": 1e30, "fp32": 1e30}, bandwidth=1e3, link=1e30, network=1e30, pcie=1e4)
"""All that takes time is reading memory, and what goes to the host."""


def batched(rows: int, slots: int, longest: int, mean: int) -> Batching:
    rollout = Rollout(slots, 10, longest, 10, mean)
    made = job(rows=rows, rollout=rollout)
    return batching(made, made.roles[0], rollout)


def scheduled(lengths: Sequence[int], slots: int) -> int:
    """Passes of the engine's scheduler in which a row with its prompt behind it gets a token."""
    rows = [Row(i, (7, i), length) for i, length in enumerate(lengths)]
    scheduler = Scheduler(rows, groups=1, slots=slots, prefill_tokens=10**6, ends=lambda response: False)
    passes = 0
    while (made := scheduler.plan(0)) is not None:
        scheduler.tell(made, [1] * len(made.drawn))
        passes += made.steps > 0
    assert sum(len(row.response) for row in rows) == sum(lengths)
    return passes


def test_rows_of_one_length_take_as_many_steps_as_the_scheduler() -> None:
    for rows, slots in ((8, 8), (8, 4), (7, 3), (3, 8), (9, 1)):
        made = batched(rows, slots, 6, 6)
        # A row's first token is drawn in the pass that computes its prompt.
        assert made.steps == scheduled([6] * rows, slots)
        assert (made.rows, made.slots, made.groups) == (rows, min(slots, rows), 1)
        assert made.steps == 5 * -(-rows // min(slots, rows))
        assert made.active == pytest.approx(rows * 5 / made.steps)


@pytest.mark.parametrize(("rows", "slots"), [(64, 8), (128, 16), (40, 32), (24, 24)])
def test_rows_of_many_lengths_take_about_their_tokens_over_the_slots(rows: int, slots: int) -> None:
    """Not the longest of every batch: the schedule of the engine on random lengths, an eighth of them long."""
    found = []
    for seed in range(20):
        draw = random.Random(seed)
        lengths = [100 if index % 8 == 0 else draw.randint(10, 40) for index in range(rows)]
        draw.shuffle(lengths)
        made = batched(rows, slots, max(lengths), round(sum(lengths) / rows))
        found.append(made.steps / scheduled(lengths, slots))
        if rows > slots:
            assert made.steps < 0.7 * 99 * -(-rows // slots)
    assert sum(found) / len(found) == pytest.approx(1, abs=0.2)


def test_groups_of_slots_keep_every_stage_at_work() -> None:
    """Stages read their weights once for each group; the slowest decides, unless there are too few groups."""
    model = replace(TINY, num_layers=4)
    two = ParallelSizes(2, pipeline_model_parallel_size=2)
    for slots in (4, 1):
        rollout = Rollout(slots, 5, 4, 5, 4)
        made = job(two, model, rows=slots, rollout=rollout)
        schedule = batching(made, made.roles[0], rollout)
        assert (schedule.groups, schedule.steps) == (min(slots, 2), 3)
        keys = 2 * 2 * 2 * 2 * 2 * (slots / schedule.groups) * (5 + 1.5)
        reads = [(2 * stage.layer.total + stage.output) * 2 + keys for stage in made.roles[0].stages]
        assert reads[1] > reads[0]
        expected = 3 * (2 * reads[1] if slots == 4 else sum(reads)) / 1e3
        assert Clock(made, READING, IDEAL).phases()["rollout"].compute == pytest.approx(expected, rel=1e-9)


def test_more_rows_than_slots_cost_their_tokens() -> None:
    """Twice the rows of half the length are as many steps as one row of the length in each slot, less the tail."""
    rollout = Rollout(4, 5, 101, 5, 51)
    made = job(rows=16, rollout=rollout)
    schedule = batching(made, made.roles[0], rollout)
    assert schedule.steps == 3 * 50 + 100
    assert schedule.active == pytest.approx(16 * 50 / 250)
    stage = made.roles[0].stages[0]
    read = (4 * stage.layer.total + stage.output) * 2 + 2 * 4 * 2 * 2 * 2 * schedule.active * (5 + 25)
    assert Clock(made, READING, IDEAL).phases()["rollout"].compute == pytest.approx(250 * read / 1e3, rel=1e-9)


def offloaded(*names: str, dtype: str = "bf16", sizes: ParallelSizes = ALONE, **options: object) -> Job:
    """PPO's four models, of which the named are offloaded."""
    heads = {"actor": "lm", "critic": "value", "reference": "lm", "reward0": "value"}
    roles = tuple(
        Role(name, TINY, sizes, head, trained=name in ("actor", "critic"), offloaded=name in names)  # type: ignore[arg-type]
        for name, head in heads.items()
    )
    rows = Rows(2, 10, 4)
    values = {"inference": rows, "inference_mean": rows, "rollout": Rollout(2, 5, 4, 5, 4), **options}
    return replace(job(dtype=dtype, sizes=sizes, **values), roles=roles)


STAGES = dict.fromkeys(("actor", "critic", "reference", "reward0"), 0)
ALL = tuple(STAGES)
KINDS = ("weights", "gradients", "optimizer")


def test_what_is_on_the_device_in_which_phase() -> None:
    made = offloaded(*ALL)
    kept = {role.name: persistent(made, role, 0) for role in made.roles}
    trained = sum(kept[name].weights for name in ("actor", "critic"))
    frozen = sum(kept[name].weights for name in ("reference", "reward0"))
    states = {kind: sum(getattr(kept[name], kind) for name in ("actor", "critic")) for kind in KINDS[1:]}
    assert states["gradients"] == 2 * trained
    assert states["optimizer"] == 6 * trained
    found = phases(made, STAGES)
    assert set(found) == {"rollout", "inference", "train", "optimizer", "save"}
    expected = {"rollout": (trained, 0, 0), "inference": (trained + frozen, 0, 0)}
    expected |= dict.fromkeys(("train", "optimizer", "save"), (trained, *states.values()))
    assert {name: tuple(getattr(part, kind) for kind in KINDS) for name, part in found.items()} == expected
    # All else is as without.
    plain = phases(offloaded(), STAGES)
    for name, part in found.items():
        others = part.total - sum(expected[name])
        assert others == plain[name].total - trained - frozen - sum(states.values())


def test_each_kind_moves_alone_and_evaluations_keep_frozen_models() -> None:
    many = Rollout(8, 5, 4, 5, 4)
    plain, reference = (phases(offloaded(*names, rollout=many), STAGES) for names in ((), ("reference",)))
    weights = persistent(offloaded(), offloaded().roles[2], 0).weights
    assert {name: plain[name].total - part.total for name, part in reference.items()} == {
        "rollout": weights, "inference": 0, "train": weights, "optimizer": weights, "save": weights,
    }  # fmt: skip
    evaluated = phases(offloaded("reference", "actor", evaluates=True, rollout=many), STAGES)
    assert evaluated["evaluation"].weights == plain["rollout"].weights
    assert evaluated["evaluation"].optimizer == evaluated["rollout"].optimizer < plain["rollout"].optimizer
    assert evaluated["evaluation"].kv_cache == plain["rollout"].kv_cache
    assert evaluated["save"].weights == plain["save"].weights
    assert evaluated["train"].weights == plain["train"].weights - weights
    # Nothing to tell apart where frozen models stay.
    assert set(phases(offloaded("actor", evaluates=True), STAGES)) == set(plain)


def test_evaluations_take_log_probs_that_inference_leaves_out() -> None:
    idle, large = {"idle_in_inference": ("actor", "reference")}, Rows(64, 10, 4)
    assert "evaluation" not in phases(offloaded(inference=large, **idle), STAGES)
    whole = phases(offloaded(inference=large, evaluates=True), STAGES)
    found = phases(offloaded(inference=large, evaluates=True, **idle), STAGES)
    assert "evaluation" not in whole, "inference has the same passes"
    passes, evaluation = whole["inference"], found["evaluation"]
    assert found["inference"].head < passes.head
    assert (evaluation.activations, evaluation.head) == (passes.activations, passes.head)
    assert (evaluation.kv_cache, evaluation.weights) == (0, passes.weights)
    # Generation, where that takes more.
    found = phases(offloaded(rollout=Rollout(8, 5, 4, 5, 4), evaluates=True, **idle), STAGES)
    assert found["evaluation"] == found["rollout"]


def test_a_reference_for_evaluations_alone_stays_on_the_host_in_inference() -> None:
    idle = {"idle_in_inference": ("actor", "reference"), "evaluates": True}
    made = offloaded("reference", "reward0", **idle)
    weights = persistent(made, made.roles[2], 0).weights
    found = phases(made, STAGES)
    assert found["evaluation"].weights - found["inference"].weights == weights
    assert found["inference"].weights - found["rollout"].weights == persistent(made, made.roles[3], 0).weights
    assert found["save"].weights == found["evaluation"].weights
    # Nobody waits for it, and it still has its place on the host.
    reward = host_bytes_of(made, made.roles[3], 0) / 1e3
    waits = transfers(made, 1e3, {"critic": 1.0, "reward0": 1.0}, {})[0]
    assert waits.link == pytest.approx(reward)
    assert waits.inference == pytest.approx(max(reward - 1.0, 0.0))
    assert host_bytes_of(made, made.roles[2], 0) == weights


def test_a_link_without_a_rate_is_named_where_something_is_offloaded() -> None:
    unknown = replace(READING, pcie=0.0)
    assert Clock(offloaded(), unknown, IDEAL).phases()["rollout"].host == 0
    with pytest.raises(ConfigError, match="--pcie: 0 bytes per second"):
        Clock(offloaded("reward0"), unknown, IDEAL).phases()


@pytest.mark.parametrize(("dtype", "dp", "each"), [("bf16", 1, 12), ("fp32", 1, 8), ("bf16", 4, 3)])
def test_host_memory_of_a_rank(dtype: str, dp: int, each: int) -> None:
    made = offloaded(*ALL, dtype=dtype, sizes=ParallelSizes(dp))
    made = replace(made, distributed_optimizer=True)
    actor, critic, reference, reward = made.roles
    for role in (actor, critic):
        assert host_bytes_of(made, role, 0) == each * role.stages[0].total
    for role in (reference, reward):
        assert host_bytes_of(made, role, 0) == (4 if dtype == "fp32" else 2) * role.stages[0].total
    assert host_bytes_of_rank(made, STAGES) == sum(host_bytes_of(made, role, 0) for role in made.roles)
    assert host_bytes_of_rank(made, {"critic": 0}) == host_bytes_of(made, critic, 0)
    assert host_bytes_of_rank(offloaded(), STAGES) == 0


def test_host_memory_of_a_machine() -> None:
    """Two stages of eight ranks: on a machine each, on two each, and together on one."""
    made = offloaded("reference", sizes=ParallelSizes(16, pipeline_model_parallel_size=2))
    first, last = (2 * stage.total for stage in made.roles[2].stages)
    assert last > first
    assert host_bytes_of_machine(made, 8) == 8 * last
    assert host_bytes_of_machine(made, 4) == 4 * last
    assert host_bytes_of_machine(made, 16) == 8 * (first + last)
    assert host_bytes_of_machine(made, 12) == 8 * first + 4 * last
    # Critic and reward models on ranks of their own.
    alone = ParallelSizes(2)
    own = [replace(role, sizes=alone, first=16, offloaded=True) for role in made.roles if role.head == "value"]
    split = replace(made, roles=(made.roles[0], made.roles[2], *own))
    theirs = 12 * own[0].stages[0].total + 2 * own[1].stages[0].total
    assert host_bytes_of_machine(split, 8) == max(8 * last, 2 * theirs)


def test_waiting_for_the_host() -> None:
    made = offloaded(*ALL)
    actor, critic, reference, reward = (host_bytes_of(made, role, 0) / 1e3 for role in made.roles)
    states = actor + critic
    slow = {"actor": 1.0, "reference": 2.0, "critic": 3.0, "reward0": 4.0}
    found = transfers(made, 1e3, slow, {"actor": 0.5, "critic": 0.25})[0]
    assert found.rollout == pytest.approx(states)
    # The reference comes beside the actor's pass, the reward model behind it, beside three passes.
    arrived = max(1.0, reference) + 2.0 + 3.0
    assert reference + reward > arrived > 1
    assert found.inference == pytest.approx(max(arrived, reference + reward) + 4.0 - 10.0)
    assert found.train == pytest.approx(states - 0.75)
    assert found.link == pytest.approx(2 * states + reference + reward)
    # A long pass hides what comes beside it, and long gradients all states; the way out is always waited for.
    long = transfers(made, 1e3, {**slow, "actor": 1e3}, {"actor": 1e3})[0]
    assert (long.inference, long.train) == (0, 0)
    assert long.rollout == found.rollout
    # Nothing hides the reference where the actor makes no pass.
    skipped = transfers(made, 1e3, {"reference": 2.0}, {})[0]
    assert skipped.inference == pytest.approx(reference)


def test_waiting_is_part_of_the_phases() -> None:
    hardware = replace(READING, bandwidth=1e30)
    made, plain = (offloaded(*names, minibatch=8) for names in (ALL, ()))
    seconds, without = (Clock(each, hardware, IDEAL).phases() for each in (made, plain))
    assert all(part.host == 0 for part in without.values())
    states = sum(host_bytes_of(made, role, 0) for role in made.roles[:2]) / 1e4
    weights = sum(host_bytes_of(made, role, 0) for role in made.roles[2:]) / 1e4
    # Passes take next to nothing here.
    assert seconds["rollout"].host == pytest.approx(states)
    assert seconds["inference"].host == pytest.approx(weights)
    assert seconds["train"].host == pytest.approx(states)
    for name in seconds:
        assert seconds[name].total - seconds[name].host == pytest.approx(without[name].total, rel=1e-9, abs=1e-20)
    halved = Clock(made, hardware, replace(IDEAL, link=0.5)).phases()
    assert halved["rollout"].host == pytest.approx(2 * states)


def test_the_configuration_says_what_is_offloaded() -> None:
    roles = {
        "offload.reference=true": {"reference"},
        "offload.reward=true": {"reward0"},
        "offload.optimizer=true": {"actor", "critic"},
    }
    for override, names in roles.items():
        assert {role.name for role in question(override).job().roles if role.offloaded} == names
    assert not any(role.offloaded for role in question().job().roles)
    assert not question().job().evaluates
    asked = question(*roles)
    answer = plan(asked.job(), HARDWARE["h100"], asked.efficiency, asked.reserve)
    found = answer["offload"]
    assert set(found["roles"]) == {"actor", "critic", "reference", "reward0"}
    assert found["rank_bytes"] == max(ranks["host_bytes_of_offload"] for ranks in answer["ranks"])
    # A machine of eight holds a stage of TP 8.
    assert found["machine_bytes"] == 8 * found["rank_bytes"]
    assert 0 < found["waiting_seconds"] < found["link_seconds"]
    plain = plan(question().job(), HARDWARE["h100"], asked.efficiency, asked.reserve)
    assert plain["offload"] is None
    freed = plain["ranks"][0]["phases"]["rollout"]["total"] - answer["ranks"][0]["phases"]["rollout"]["total"]
    first = plain["ranks"][0]["models"]
    frozen = sum(first[name]["weights"] for name in ("reference", "reward0"))
    states = sum(first[name]["gradients"] + first[name]["optimizer"] for name in ("actor", "critic"))
    assert freed == frozen + states


def test_offloading_is_tried_where_a_job_does_not_fit() -> None:
    """Of what peaks in updates frozen weights can leave; the words are those of the command line."""
    from mrlhf.planning.mend import _chains

    changes = [change for chain in _chains(question()) for change in chain]
    for key in ("offload.reference", "offload.reward", "offload.optimizer"):
        assert Change({key: True}) in changes
        assert Change({key: True}) not in [c for chain in _chains(question(f"{key}=true")) for c in chain]
    short = replace(question().hardware, memory=question().peak_bytes() + 2**31 - 2**30)  # type: ignore[operator]
    asked = replace(question(), hardware=short)
    mended = asked.changed({"offload.reference": True})
    assert asked.peak_bytes() > asked.limit >= mended.peak_bytes()  # type: ignore[operator]
