"""Whole PPO runs on tiny models: the same numbers under every layout, and everything a run leaves behind."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mrlhf.config_schema import PPOConfig
from mrlhf.data.prompts import Sample
from mrlhf.errors import ConfigError
from mrlhf.trainer.ppo import PPOTrainer, build_trainer, check_output
from tests.ranks import run_ranks as start_ranks
from tests.tiny_run import make_config, make_inputs, read_lines, steady, train

TP2, PP2 = "parallel.tensor_model_parallel_size=2", "parallel.pipeline_model_parallel_size=2"
NAMES = [
    *("score_mean", "score_std", "score_min", "score_max", "reward_mean", "kl_k1", "kl_k3", "kl_sequence"),
    *("policy_loss", "actor_loss", "value_loss", "clip_fraction", "value_clip_fraction", "approx_kl", "approx_kl_k1"),
    *("ratio_mean", "ratio_min", "ratio_max", "ratio_error_before_update", "explained_variance", "entropy"),
    *("actor_grad_norm", "critic_grad_norm", "skipped_updates", "value_mean"),
    *("value_error", "response_length_mean", "response_length_min", "response_length_max", "truncated_fraction"),
    *("rollout_tokens_per_second", "inference_tokens_per_second", "train_tokens_per_second", "tokens_per_second"),
    *("peak_memory_gib", "time_rollout", "time_inference", "time_train", "time_iteration"),
    *("actor_lr", "critic_lr", "epoch", "kl_coef", "score_clip_fraction", "actor_updates", "critic_updates"),
]

Run = dict[str, Any]


def _run(config: PPOConfig) -> Run:
    trainer = build_trainer(config)
    before = _hashes(trainer)
    trainer.train()
    if config.trainer.export:
        trainer.export()
    weights = _plain_weights(trainer.actor) if dist.get_world_size() == 1 else {}
    return {"before": before, "after": _hashes(trainer), "actor": weights}


def _hashes(trainer: PPOTrainer) -> dict[str, str]:
    models = [trainer.actor, trainer.critic, trainer.reference, *(model for model, _ in trainer.scorer.models)]
    return {model.name: model.weights_hash() for model in models if model is not None}


def _plain_weights(role: Any) -> dict[str, torch.Tensor]:
    return {k: v.detach().clone() for k, v in role.chunks[0].state_dict().items() if isinstance(v, torch.Tensor)}


class Runs:
    """Runs by name, each made once for all tests of this module."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.inputs = make_inputs(folder / "inputs")
        self._made: dict[str, tuple[Path, list[Run]]] = {}

    def __call__(self, name: str, world: int = 1, *overrides: str) -> Path:
        """Its output folder."""
        if name not in self._made:
            output = self.folder / name
            self._made[name] = output, start_ranks(_run, world, make_config(self.inputs, output, *overrides))
        return self._made[name][0]

    def results(self, name: str) -> list[Run]:
        """What the ranks of a run that was made returned."""
        return self._made[name][1]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    made = Runs(tmp_path_factory.mktemp("ppo"))
    made("tp1", 1, "trainer.export=true", "trainer.tensorboard=true")
    return made


def _assert_same_run(folder: Path, other: Path, *, tolerance: float = 2e-4) -> None:
    """The same text, and the same numbers within what a different order of additions does to Adam's steps."""
    theirs, ours = read_lines(other / "samples.jsonl"), read_lines(folder / "samples.jsonl")
    exact = ("iteration", "sample_id", "prompt", "response", "response_length", "truncated")
    assert [{k: row[k] for k in exact} for row in ours] == [{k: row[k] for k in exact} for row in theirs]
    ours, theirs = steady(read_lines(folder / "metrics.jsonl")), steady(read_lines(other / "metrics.jsonl"))
    assert [row.keys() for row in ours] == [row.keys() for row in theirs]
    for step, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        for name in a:
            # These come before the first update: only the order of additions differs.
            early = step == 0 and name.startswith(("score", "reward", "value_mean", "response", "explained"))
            if name == "ratio_error_before_update":
                assert max(a[name], b[name]) < 1e-5
                continue
            rel, absolute = (1e-5, 1e-6) if early else (tolerance, 2e-5)
            assert a[name] == pytest.approx(b[name], rel=rel, abs=absolute), (step, name)


LAYOUTS = {
    "tp2": (2, [TP2]),
    "pp2": (2, [PP2]),
    "dp2": (2, []),
    "critic-of-its-own": (2, [TP2, "critic.parallel={}", "optimizer.distributed=true"]),
    "micro-batch-tokens": (1, ["ppo.micro_batch_tokens=60", "inference.micro_batch_tokens=70"]),
    "packed": (1, ["ppo.packing=true", "inference.packing=true", "inference.micro_batch_tokens=70"]),
    "small-batches": (1, ["ppo.micro_batch_size=4", "inference.micro_batch_size=3", "rollout.batch_size=3"]),
}
SLOW_LAYOUTS = {
    "tp2-pp2": (4, [TP2, PP2]),
    "dp2-tp2-sp": (4, [TP2, "parallel.sequence_parallel=true", "optimizer.distributed=true"]),
    "dp2-pp2-distributed": (4, [PP2, "ppo.micro_batch_size=1", "optimizer.distributed=true"]),
    "dp4": (4, ["ppo.micro_batch_size=1"]),
    "packed-tp2-sp-pp2": (
        4,
        [TP2, PP2, "parallel.sequence_parallel=true", "ppo.packing=true", "ppo.micro_batch_tokens=60"],
    ),
    "cp2": (2, ["parallel.context_parallel_size=2"]),
}


@pytest.mark.parametrize("layout", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_LAYOUTS)])
def test_the_layout_changes_nothing(runs: Runs, layout: str) -> None:
    world, overrides = {**LAYOUTS, **SLOW_LAYOUTS}[layout]
    _assert_same_run(runs(layout, world, *overrides), runs("tp1"))


OPTIONS = [
    "rollout.samples_per_prompt=2",
    "rollout.prompts_per_iteration=4",
    "rollout.temperature=0.8",
    "reward.normalize=true",
    "reward.missing_eos_penalty=0.5",
    "ppo.whiten_advantages=true",
    "ppo.whiten_rewards=true",
    "ppo.bootstrap_truncated=true",
    "ppo.entropy_coef=0.01",
    "ppo.kl_loss_coef=0.05",
    "ppo.dual_clip=3.0",
]


def test_all_options_with_groups_over_data_parallel_ranks(runs: Runs) -> None:
    alone, shared = runs("options", 1, *OPTIONS), runs("options-dp2", 2, *OPTIONS)
    _assert_same_run(shared, alone, tolerance=5e-4)
    rows = read_lines(alone / "metrics.jsonl")
    assert {"kl_loss", "dual_clip_fraction", "entropy"} <= rows[0].keys()
    samples = [row for row in read_lines(alone / "samples.jsonl") if row["iteration"] == 0]
    # Two answers to each prompt, next to each other, not the same.
    assert [s["prompt"] for s in samples[::2]] == [s["prompt"] for s in samples[1::2]]
    assert any(a["response"] != b["response"] for a, b in zip(samples[::2], samples[1::2], strict=True))


def test_each_source_has_its_own_mean(runs: Runs) -> None:
    rows = read_lines(runs("tp1") / "metrics.jsonl")
    names = [name for name in rows[0] if name.startswith("score/")]
    assert len(names) == 2
    for row in rows:
        weighted = sum(weight * row[name] for name, weight in zip(names, (0.5, 2.0), strict=True))
        assert row["score_mean"] == pytest.approx(weighted, rel=1e-5, abs=1e-6)


def test_an_earlier_run_is_not_overwritten_unawares(runs: Runs) -> None:
    kept = (runs("tp1") / "metrics.jsonl").read_bytes()
    config = make_config(runs.inputs, runs("tp1"), "trainer.overwrite=false")
    with pytest.raises(ConfigError, match=r"holds a run already.*trainer\.overwrite=true"):
        check_output(config)
    check_output(make_config(runs.inputs, runs.folder / "new", "trainer.overwrite=false"))
    (runs.folder / "half" / "actor").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"holds a run already \(actor\)"):
        check_output(make_config(runs.inputs, runs.folder / "half", "trainer.overwrite=false"))
    assert (runs("tp1") / "metrics.jsonl").read_bytes() == kept


@pytest.mark.parametrize("name", ["actor", "actor-000007", "tensorboard/inside"])
def test_a_run_never_replaces_what_it_reads(runs: Runs, tmp_path: Path, name: str) -> None:
    source = tmp_path / "run" / name
    shutil.copytree(runs.inputs / "actor", source)
    config = make_config(runs.inputs, tmp_path / "run", f"actor.path={source}")
    with pytest.raises(ConfigError, match="would write .* but it reads"):
        check_output(config)
    assert (source / "model.safetensors").read_bytes() == (runs.inputs / "actor" / "model.safetensors").read_bytes()


def test_exports_between(runs: Runs) -> None:
    output = runs("interval", 1, "trainer.export_interval=1")
    assert {p.name for p in output.iterdir() if p.is_dir()} >= {"actor-000001", "critic-000001", "actor-000002"}


def test_deepspeed_chat_semantics_run_alike(runs: Runs) -> None:
    # The size of a group is left at its default, which is the same under every layout.
    chat = ["semantics=deepspeed_chat"]
    alone, shared = runs("ds", 1, *chat), runs("ds-dp2", 2, *chat)
    _assert_same_run(shared, alone)
    # The loss is another one from the same samples.
    first, standard = read_lines(alone / "metrics.jsonl")[0], read_lines(runs("tp1") / "metrics.jsonl")[0]
    assert first["score_mean"] == pytest.approx(standard["score_mean"], rel=1e-6)
    assert abs(first["policy_loss"] - standard["policy_loss"]) > 1e-4


def test_the_same_seed_repeats_every_bit_and_another_does_not(runs: Runs) -> None:
    again = runs("again", 2, TP2)
    assert steady(read_lines(again / "metrics.jsonl")) == steady(read_lines(runs("tp2", 2, TP2) / "metrics.jsonl"))
    assert (again / "samples.jsonl").read_bytes() == (runs("tp2", 2, TP2) / "samples.jsonl").read_bytes()
    other = runs("other-seed", 1, "seed=12")
    ours, theirs = read_lines(other / "samples.jsonl"), read_lines(runs("tp1") / "samples.jsonl")
    assert [row["response"] for row in ours] != [row["response"] for row in theirs]


def test_every_metric_is_there_and_finite(runs: Runs) -> None:
    rows = read_lines(runs("tp1") / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1]
    for row in rows:
        assert set(NAMES) <= row.keys()
        assert {name: row[name] for name in NAMES if not (row[name] is not None and math.isfinite(row[name]))} == {}
        assert row["response_length_min"] <= row["response_length_mean"] <= row["response_length_max"] <= 6
        assert 0 <= row["truncated_fraction"] <= 1
        assert row["score_min"] <= row["score_mean"] <= row["score_max"]
        assert row["ratio_min"] <= 1 <= row["ratio_max"]
        assert 0 < row["entropy"] < math.log(97)
        assert row["skipped_updates"] == 0
        assert row["actor_updates"] == row["critic_updates"] == 4
        assert row["kl_coef"] == 0.1
        assert row["peak_memory_gib"] > 0


def test_tensorboard_has_the_same_numbers(runs: Runs) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    rows = read_lines(runs("tp1") / "metrics.jsonl")
    events = EventAccumulator(str(runs("tp1") / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == set(rows[0]) - {"step"}
    for name in NAMES:
        scalars = events.Scalars(name)
        assert [s.step for s in scalars] == [0, 1]
        assert [s.value for s in scalars] == pytest.approx([row[name] for row in rows], rel=1e-6)


def test_a15_kl_is_zero_first_and_not_afterwards(runs: Runs) -> None:
    first, second = read_lines(runs("tp1") / "metrics.jsonl")
    assert abs(first["kl_k1"]) < 1e-6
    assert abs(first["kl_k3"]) < 1e-6
    assert abs(second["kl_k1"]) > 1e-4
    assert second["kl_k3"] > 1e-5
    for row in (first, second):
        assert row["ratio_error_before_update"] < 1e-5


def test_a15_only_actor_and_critic_change(runs: Runs) -> None:
    runs("tp2", 2, TP2)
    for name in ("tp1", "tp2"):
        for rank in runs.results(name):
            changed = {role for role, hash in rank["before"].items() if rank["after"][role] != hash}
            assert changed == {"actor", "critic"}


def test_the_sample_table(runs: Runs) -> None:
    rows = read_lines(runs("tp1") / "samples.jsonl")
    assert [row["iteration"] for row in rows] == [0] * 8 + [1] * 8
    assert [row["sample_id"] for row in rows] == list(range(16))
    prompts = {line["prompt"] for line in read_lines(runs.inputs / "prompts.jsonl")}
    for part in (rows[:8], rows[8:]):
        assert {row["prompt"] for row in part} == prompts
    metrics = read_lines(runs("tp1") / "metrics.jsonl")
    for part, row in zip((rows[:8], rows[8:]), metrics, strict=True):
        assert sum(r["score"] for r in part) / 8 == pytest.approx(row["score_mean"], abs=2e-6)
        assert sum(r["response_length"] for r in part) / 8 == row["response_length_mean"]
        assert sum(r["truncated"] for r in part) / 8 == row["truncated_fraction"]
        assert sum(r["kl"] for r in part) / 8 == pytest.approx(row["kl_sequence"], abs=2e-6)
    assert all(row["truncated"] == (row["response_length"] == 6) or row["response_length"] == 6 for row in rows)


def test_the_resolved_configuration_is_kept(runs: Runs) -> None:
    from mrlhf.config import load_config

    written = load_config(runs("tp1") / "config.yaml")
    assert written == make_config(runs.inputs, runs("tp1"), "trainer.export=true", "trainer.tensorboard=true")


def test_c8_the_exported_actor_is_the_trained_one(runs: Runs) -> None:
    from transformers import AutoTokenizer, GenerationConfig, LlamaForCausalLM

    folder = runs("tp1") / "actor"
    model, info = LlamaForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    start = LlamaForCausalLM.from_pretrained(runs.inputs / "actor")
    trained = runs.results("tp1")[0]["actor"]
    weights = model.state_dict()
    by_name = {
        "model.embed_tokens.weight": "embedding.word_embeddings.weight",
        "lm_head.weight": "output_layer.weight",
        "model.norm.weight": "decoder.final_layernorm.weight",
        "model.layers.1.self_attn.o_proj.weight": "decoder.layers.1.self_attention.linear_proj.weight",
        "model.layers.0.mlp.down_proj.weight": "decoder.layers.0.mlp.linear_fc2.weight",
    }
    for theirs, ours in by_name.items():
        assert torch.equal(weights[theirs], trained[ours][: weights[theirs].shape[0]]), theirs
    fused = torch.cat([weights["model.layers.0.mlp.gate_proj.weight"], weights["model.layers.0.mlp.up_proj.weight"]])
    assert torch.equal(fused, trained["decoder.layers.0.mlp.linear_fc1.weight"])
    assert all(not torch.equal(weights[name], tensor) for name, tensor in start.state_dict().items() if "proj" in name)
    assert GenerationConfig.from_pretrained(folder).eos_token_id == 2
    tokenizer = AutoTokenizer.from_pretrained(folder)
    original = AutoTokenizer.from_pretrained(runs.inputs / "actor")
    assert tokenizer("a small bird").input_ids == original("a small bird").input_ids
    assert tokenizer.chat_template == original.chat_template


def test_the_exported_critic_is_a_one_label_classifier(runs: Runs) -> None:
    from transformers import LlamaForSequenceClassification

    model, info = LlamaForSequenceClassification.from_pretrained(runs("tp1") / "critic", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.config.num_labels == 1
    start = LlamaForSequenceClassification.from_pretrained(runs.inputs / "reward")
    assert not torch.equal(model.score.weight, start.score.weight)


@pytest.mark.slow
def test_a_run_goes_on_from_its_export(runs: Runs) -> None:
    """The exported actor and critic start another run, in which the first KL is 0 again."""
    start = runs("tp1")
    output = runs("second", 2, TP2, f"actor.path={start / 'actor'}", f"critic.path={start / 'critic'}", "seed=5")
    assert abs(read_lines(output / "metrics.jsonl")[0]["kl_k1"]) < 1e-6


def _d4_samples(config: PPOConfig) -> tuple[int, list[int], list[int]]:
    """Every rank samples the same prompt under the ids that the stream gives to its data-parallel rank."""
    trainer = build_trainer(config)
    samples = next(trainer.stream)
    per_rank = len(samples) // trainer.job.dp_size
    prompt = samples[0].prompt
    mine = [Sample(s.sample_id, s.group_id, prompt) for s in samples][trainer.job.dp_rank * per_rank :][:per_rank]
    batch, _, _ = trainer.sampler.sample(mine, 0)
    again, _, _ = trainer.sampler.sample(mine, 0)
    assert torch.equal(batch.tokens, again.tokens)
    return trainer.job.dp_rank, batch.sample_ids.tolist(), [t for row in range(batch.size) for t in batch.response(row)]


def test_d4_data_parallel_ranks_sample_differently(runs: Runs, run_ranks: Callable[..., list[Any]]) -> None:
    config = make_config(runs.inputs, runs.folder / "d4")
    (_, ids0, text0), (_, ids1, text1) = run_ranks(_d4_samples, 2, config)
    assert not set(ids0) & set(ids1)
    assert text0 != text1


def _train(config: PPOConfig) -> None:
    train(config)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_learning_rates_follow_their_schedules(runs: Runs, schedule: str, tmp_path: Path) -> None:
    config = make_config(
        runs.inputs, tmp_path, f"optimizer.actor.lr_schedule={schedule}", "trainer.iterations=3",
        "optimizer.actor.warmup_iterations=1", "optimizer.critic.lr=0.001",
    )  # fmt: skip
    start_ranks(_train, 1, config)
    rows = read_lines(tmp_path / "metrics.jsonl")
    assert [row["critic_lr"] for row in rows] == [0.001] * 3
    assert max(row["actor_lr"] for row in rows) <= 2e-3
    assert rows[-1]["actor_lr"] < rows[1]["actor_lr"]
