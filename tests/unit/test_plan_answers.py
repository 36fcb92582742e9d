"""What `mrlhf plan` answers about whole configurations: what fits, what mends, which layouts are fastest."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mrlhf.config import load_config
from mrlhf.errors import ConfigError
from mrlhf.planning.from_config import MeanLengths, make_job, role_paths
from mrlhf.planning.hardware import (
    HARDWARE,
    find_hardware,
    parse_bytes,
    parse_flops,
    parse_rate,
    with_own_numbers,
)
from mrlhf.planning.memory import kv_cache_bytes, phases
from mrlhf.planning.mend import RECOMPUTE, _chains, mends
from mrlhf.planning.plan import peak, plan
from mrlhf.planning.question import Question
from mrlhf.planning.search import search
from tests.unit.test_planning import LLAMA_8B, LLAMA_70B, llama

ROOT = Path(__file__).parents[2]


def test_units() -> None:
    assert [parse_bytes(text, "--x") for text in ("80GB", "80 GiB", "1.5e9", "81559MiB")] == [
        80e9, 80 * 2**30, 1.5e9, 81559 * 2**20,
    ]  # fmt: skip
    assert [parse_rate(text, "--x") for text in ("3.35TB/s", "450GBps", "5e10")] == [3.35e12, 450e9, 5e10]
    assert [parse_flops(text, "--x") for text in ("989TFLOPS", "2.25PFLOP/s", "1e15")] == [989e12, 2.25e15, 1e15]
    for text in ("", "GB", "-80GB", "0GB", "nan", "inf", "80 furlongs", "80GB80", "1e999GB", "80Gb/s/s"):
        with pytest.raises(ConfigError, match="--gpu-memory"):
            parse_bytes(text, "--gpu-memory")
    for parse, text in ((parse_rate, "400Gbit/s"), (parse_flops, "989TB"), (parse_flops, "fast")):
        with pytest.raises(ConfigError, match="--own"):
            parse(text, "--own")


def test_hardware_table() -> None:
    assert {name: h.peak("bf16") for name, h in HARDWARE.items()} == {
        "a100": 312e12, "h100": 989.4e12, "h200": 989.4e12, "b200": 2250e12,
    }  # fmt: skip
    assert HARDWARE["a100"].peak("bf16", fp8=True) == 312e12
    assert HARDWARE["b200"].peak("bf16", fp8=True) == 4500e12
    assert all("NVIDIA" in hardware.source for hardware in HARDWARE.values())
    own = with_own_numbers(HARDWARE["h100"], "bf16", memory="64GB", flops="500TFLOPS", link="1TB/s", gpus_per_node=4)
    assert (own.memory, own.peak("bf16"), own.link, own.gpus_per_node) == (64e9, 500e12, 1e12, 4)
    assert own.bandwidth == HARDWARE["h100"].bandwidth
    assert "--flops, --gpu-memory, --link, --gpus-per-node" in own.source
    with pytest.raises(ConfigError, match="a100, b200, h100, h200"):
        find_hardware("tpu")


def question(*overrides: str, world: int = 32, memory: float = 80e9, **options: object) -> Question:
    config = load_config(ROOT / "examples/configs/ppo_70b.yaml", overrides)
    models = {role: LLAMA_70B if role in ("actor", "reference") else LLAMA_8B for role in role_paths(config)}
    return Question(config, models, world, replace(HARDWARE["h100"], memory=memory), reserve=2**31, **options)  # type: ignore[arg-type]


def test_the_70b_example_fits_32_gpus_of_80_gb() -> None:
    asked = question()
    answer = plan(asked.job(), asked.hardware, asked.efficiency, asked.reserve)
    assert answer["memory"]["fits"]
    assert answer["layout"]["data_parallel_size"] == 1
    kept = [ranks["persistent"] / 2**30 for ranks in answer["ranks"]]
    copies = [sum(model["fp8"] for model in ranks["models"].values()) / 2**30 for ranks in answer["ranks"]]
    # About 46 GiB before activations and cache: 18 bytes of 2.27 G parameters of the actor, 2 of the reference; then
    # the FP8 copies of 20 and 8 layers, 2 bytes of trained and 1 of frozen matrices.
    assert [round(a - b, 1) for a, b in zip(kept, copies, strict=True)] == [47.6, 43.9, 43.9, 46.4]
    assert [round(each, 1) for each in copies] == [6.6] * 4
    first = answer["ranks"][0]["models"]["actor"]
    # A stage: 20 layers of an eighth each, and an eighth of 129,024 embeddings.
    layer = (2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672) // 8 + 2 * 8192
    assert first["parameters"] == 20 * layer + 129024 // 8 * 8192
    assert first["fp8"] == 20 * (2 * (layer - 2 * 8192) + 16)
    assert first["total"] == 18 * first["parameters"] + first["fp8"]
    tokens = 256 * 2048
    # 2 N a token: actor and reference forward, actor forward and backward, generation.
    assert answer["flops"]["train"]["all_ranks"] == pytest.approx(6 * (70.55e9 + 7.5e9) * tokens, rel=0.05)
    assert answer["flops"]["inference"]["all_ranks"] == pytest.approx(2 * 2 * (70.55e9 + 7.5e9) * tokens, rel=0.05)
    assert answer["flops"]["rollout"]["all_ranks"] == pytest.approx(2 * 70.55e9 * 256 * 2048, rel=0.05)


def test_every_phase_is_the_sum_of_its_parts() -> None:
    made = question().job()
    for _, stages in made.rank_classes():
        for part in phases(made, stages).values():
            values = part.as_dict()
            assert values.pop("total") == sum(values.values())


def test_what_does_not_fit_is_mended_by_what_was_tried() -> None:
    asked = question(memory=66e9)
    assert peak(asked.job()).bytes > asked.limit
    found = mends(asked)
    assert found
    for mend in found:
        changed = asked.changed(mend.change.values, mend.change.world_size)
        assert peak(changed.job()).bytes == mend.peak <= asked.limit
    words = [mend.change.words() for mend in found]
    assert ["optimizer.distributed=false"] in words
    assert ["precision.fp8=null"] in words
    assert mends(question()) == []


def test_more_gpus_are_not_the_only_answer_where_several_changes_do_on_the_same() -> None:
    asked = question(memory=60e9)
    words = [mend.change.words() for mend in mends(asked)]
    assert ["--gpus 64"] in words
    assert any(not any("--gpus" in word for word in each) and len(each) > 1 for each in words), words


def test_a_large_micro_batch_is_named_and_halved_no_more_than_needed() -> None:
    asked = question("ppo.micro_batch_size=16", "optimizer.distributed=false")
    assert peak(asked.job()).phase == "train"
    words = [mend.change.words() for mend in mends(asked)]
    assert ["ppo.micro_batch_size=2"] in words
    assert not any("inference" in " ".join(each) for each in words)


def test_several_changes_together_where_one_does_not_do() -> None:
    asked = question("ppo.micro_batch_size=32", "rollout.batch_size=4096", "rollout.prompts_per_iteration=4096",
                     "optimizer.distributed=false", memory=64e9)  # fmt: skip
    # More GPUs of the same kind would do too; a smaller micro-batch or a smaller rollout alone does not.
    for single in ({"ppo.micro_batch_size": 1}, {"rollout.batch_size": 1}):
        assert peak(asked.changed(single).job()).bytes > asked.limit
    found = mends(asked)
    assert found
    assert all(mend.peak <= asked.limit for mend in found)


def test_recomputation_is_tried_where_the_recipe_of_fp8_allows_it() -> None:
    def tried(*overrides: str) -> list[str]:
        changes = [change for chain in _chains(question(*overrides)) for change in chain]
        return [change.values[RECOMPUTE] for change in changes if RECOMPUTE in change.values]

    delayed = "precision.fp8_recipe=delayed"
    assert tried() == tried(delayed, "precision.fp8_emulation=true") == ["selective", "full"]
    assert tried(delayed) == ["full"]
    assert tried(delayed, "parallel.recompute_modules=[mlp,moe]") == ["selective", "full"]
    assert tried("parallel.recompute=selective") == ["full"]


def test_layers_are_compiled_no_more_where_a_change_forbids_it() -> None:
    from mrlhf.trainer.compiling import _model_reasons

    small = ("precision.compile=true", "precision.fp8=null", "parallel.tensor_model_parallel_size=1")
    small += ("parallel.pipeline_model_parallel_size=1", "parallel.sequence_parallel=false", "ppo.micro_batch_size=4")
    asked = replace(question(*small), models=dict.fromkeys(question().models, llama(1024, 8, 8, 4096)))
    peak_bytes = asked.peak_bytes()
    assert peak_bytes is not None
    asked = replace(asked, hardware=replace(asked.hardware, memory=peak_bytes + asked.reserve - 2**20))
    found = mends(asked)
    words = [mend.change.words() for mend in found]
    assert ["parallel.recompute=selective", "precision.compile=false"] in words
    assert ["ppo.micro_batch_size=2"] in words
    assert any("parallel.tensor_model_parallel_size=2" in each for each in words)
    for mend in found:
        changed = asked.changed(mend.change.values).config
        reasons = [_model_reasons(changed, role, asked.models[role]) for role in ("actor", "critic")]
        assert not changed.precision.compile or reasons == [[], []], mend.change


def test_nothing_helps_a_model_that_is_far_too_large() -> None:
    assert mends(question(memory=2.2e9)) == []


def test_search_ranks_valid_layouts_that_fit() -> None:
    found = search(question(world=64), top=5)
    assert found["tried"] > found["valid"] >= found["fitting"] >= 5 == len(found["layouts"])
    times = [layout["iteration_seconds"] for layout in found["layouts"]]
    assert times == sorted(times)
    for layout in found["layouts"]:
        # Each is what the configuration with these overrides gives.
        again = question(*layout["overrides"], world=64)
        made = again.job()
        assert made.sizes.data_parallel_size == layout["data_parallel_size"]
        assert peak(made).bytes == layout["peak"] <= again.limit
        assert again.seconds(made) == pytest.approx(layout["iteration_seconds"])
    assert all(layout["tensor_model_parallel_size"] <= 8 for layout in found["layouts"])


def test_search_without_any_valid_layout_is_refused() -> None:
    with pytest.raises(ConfigError):
        search(question("rollout.prompts_per_iteration=7", "ppo.minibatch_size=7", world=49))


def test_lengths() -> None:
    asked = question()
    models = asked.models
    short = make_job(asked.config, models, 32, MeanLengths(100, 200))
    assert (short.train_mean.width, short.train.width) == (384, 2048)  # 301 and 2048, as multiples of TP 8 x 16
    assert peak(short).bytes == peak(asked.job()).bytes
    assert asked.seconds(short) < asked.seconds(asked.job())
    for means in (MeanLengths(2000, 200), MeanLengths(100, 0)):
        with pytest.raises(ConfigError, match="longest"):
            make_job(asked.config, models, 32, means)


def test_a_limit_of_the_cache_is_a_limit_of_rows() -> None:
    whole = question().job()
    assert whole.rollout is not None
    actor = whole.roles[0]
    cache = kv_cache_bytes(whole, actor, whole.rollout, max(stage.layers for stage in actor.stages))
    part = question(f"rollout.kv_cache_memory={cache / 2**31}").job()
    assert part.rollout is not None
    assert part.rollout.slots < whole.rollout.slots
    assert cache / 2.1 < kv_cache_bytes(part, actor, part.rollout, actor.stages[0].layers) <= cache / 2


def test_a_budget_of_tokens_makes_rows() -> None:
    made = question("ppo.micro_batch_tokens=9000").job()
    assert (made.train.count, made.train.width) == (4, 2048)
