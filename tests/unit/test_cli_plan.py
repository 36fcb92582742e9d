"""`mrlhf plan` as a user meets it."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mrlhf.cli import app
from mrlhf.planning.report import duration

ROOT = Path(__file__).parents[2]
EXAMPLE = "examples/configs/ppo_70b.yaml"


@pytest.fixture(autouse=True)
def in_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for name in [name for name in os.environ if name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]:
        monkeypatch.delenv(name)


def plan(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["plan", *arguments])


def answer(*arguments: str, status: int = 0) -> dict[str, Any]:
    result = plan(*arguments, "--json")
    assert result.exit_code == status, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_the_example_fits_and_says_so() -> None:
    result = plan(EXAMPLE, "--gpus", "32", "--gpu-memory", "80GB")
    assert result.exit_code == 0, result.output
    for text in (
        "TP 8 x PP 4 x DP 1, sequence parallel, bf16, FP8",
        "70,553,706,496",
        "54.19 GiB",
        "FITS.",
        "NVIDIA H100",
    ):
        assert text in result.output


def numbers(value: Any) -> set[float]:
    if isinstance(value, dict):
        return set().union(*(numbers(each) for each in value.values())) if value else set()
    if isinstance(value, list):
        return set().union(*(numbers(each) for each in value)) if value else set()
    return {float(value)} if isinstance(value, int | float) and not isinstance(value, bool) else set()


def test_json_holds_every_number_of_the_text() -> None:
    arguments = (EXAMPLE, "ppo.micro_batch_size=2", "--gpus", "32", "--gpu-memory", "66GB", "--search", "--top", "3")
    text = plan(*arguments).output
    known = numbers(answer(*arguments))
    units = {"TiB": 2**40, "GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "P": 1e15, "T": 1e12, "G": 1e9}
    shown = re.findall(r"(\d+\.\d+) (TiB|GiB|MiB|KiB|P|T|G|s)\b", text)
    assert len(shown) > 150
    for number, unit in shown:
        value, scale = float(number), units.get(unit, 1)
        step = 10 ** -len(number.partition(".")[2])
        assert any(abs(each / scale - value) <= 0.51 * step for each in known), f"{number} {unit}"
    for number in re.findall(r"\d{1,3}(?:,\d{3})+", text):
        if number not in ("2,039", "1,978"):
            assert any(round(each) == int(number.replace(",", "")) for each in known), number


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0"), (57.62, "57.6 s"), (0.0999, "100 ms"), (0.0123, "12 ms"), (0.00996, "10 ms"), (0.0012, "1.2 ms"),
     (0.0000997, "0.1 ms"), (0.000012, "12 us")],
)  # fmt: skip
def test_durations_are_written_without_exponents(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_what_does_not_fit_exits_with_3_and_names_changes() -> None:
    result = plan(EXAMPLE, "--gpus", "32", "--gpu-memory", "60GB")
    assert result.exit_code == 3
    assert "DOES NOT FIT. The largest peak is 62.6" in result.output
    assert "--gpus 64" in result.output
    # What is named is what the command then confirms.
    found = answer(EXAMPLE, "--gpus", "32", "--gpu-memory", "60GB", status=3)
    words = " ".join(found["mends"][0]["change"])
    gpus = [] if "--gpus" in words else ["--gpus", "32"]
    again = answer(EXAMPLE, *words.split(), *gpus, "--gpu-memory", "60GB")
    assert again["memory"]["peak"] == found["mends"][0]["peak"]


def test_without_gpus_one_replica_is_planned() -> None:
    assert answer(EXAMPLE)["layout"]["world_size"] == 32


def test_own_numbers_change_the_time_and_nothing_else() -> None:
    numbers = ("--flops", "500TFLOPS", "--fp8-flops", "500TFLOPS", "--bandwidth", "1TB/s")
    one, two = answer(EXAMPLE), answer(EXAMPLE, *numbers)
    assert two["iteration_seconds"] > 1.5 * one["iteration_seconds"]
    assert two["ranks"] == one["ranks"]
    faster = answer(EXAMPLE, "--hardware", "b200")
    assert faster["iteration_seconds"] < one["iteration_seconds"]
    assert faster["memory"]["gpu"] == 180e9


@pytest.mark.parametrize("reserve", ["0", "0GB", "0.0"])
def test_nothing_may_be_held_back(reserve: str) -> None:
    assert answer(EXAMPLE, "--reserve", reserve)["memory"]["limit"] == 80e9


def test_own_mean_lengths() -> None:
    short = answer(EXAMPLE, "--prompt-length", "256", "--response-length", "128")
    assert short["batches"]["rollout"]["mean_response"] == 128
    assert short["iteration_seconds"] < answer(EXAMPLE)["iteration_seconds"]


def test_search() -> None:
    result = plan(EXAMPLE, "--gpus", "32", "--search", "--top", "2")
    assert result.exit_code == 0
    assert "The fastest that fit" in result.output
    assert result.output.count("parallel.tensor_model_parallel_size=") == 2


def test_critic_and_reward_model_on_ranks_of_their_own() -> None:
    """What a rank holds, and what happens at the same time: as two jobs, each of them alone."""
    layout = "{tensor_model_parallel_size: 8, sequence_parallel: true}"
    model = f"{{kind: model, path: examples/configs/models/llama-3-8b-reward, parallel: {layout}}}"
    own = ("placement=split", "critic_ranks=16", f"critic.parallel={layout}", f"reward.sources=[{model}]")
    split = answer(EXAMPLE, "--gpus", "48", *own)
    together = answer(EXAMPLE, "--gpus", "32")
    assert (split["layout"]["world_size"], split["layout"]["critic_ranks"]) == (48, 16)
    *actors, critics = split["ranks"]
    assert [(part["first"], part["last"], list(part["models"])) for part in actors] == [
        (first, first + 7, ["actor", "reference"]) for first in (0, 8, 16, 24)
    ]
    assert (critics["first"], critics["last"], list(critics["models"])) == (32, 47, ["critic", "reward0"])
    assert set(critics["phases"]) == {"inference", "train", "optimizer", "save"}
    for alone, shared in zip(actors, together["ranks"], strict=True):
        for role in ("actor", "reference"):
            assert alone["models"][role] == shared["models"][role]
        less = sum(shared["models"][role]["total"] for role in ("critic", "reward0"))
        assert alone["phases"]["rollout"]["total"] == shared["phases"]["rollout"]["total"] - less
    # Actor and reference take longer than critic and reward model, whose passes cost nothing any more.
    assert split["seconds"]["rollout"] == together["seconds"]["rollout"]
    for phase in ("inference", "train"):
        assert split["seconds"][phase]["total"] < together["seconds"][phase]["total"]
        assert split["flops"][phase]["all_ranks"] == pytest.approx(together["flops"][phase]["all_ranks"])
        assert split["flops"][phase]["rank"] < together["flops"][phase]["rank"]
    shown = plan(EXAMPLE, "--gpus", "48", *own).output
    assert "critic and reward models on 16 ranks of their own" in " ".join(shown.split())
    assert "ranks 32-47" in shown


def test_search_answers_though_the_configurations_layout_does_not_work() -> None:
    result = plan(EXAMPLE, "parallel.pipeline_model_parallel_size=3", "--gpus", "32", "--search", "--top", "1")
    assert result.exit_code == 0, result.output
    assert "own layout does not work" in result.output
    assert "world size 32 is not a multiple of TP 8 x PP 3" in result.output
    assert "The fastest that fit" in result.output


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--gpu-memory", "80"], "--gpu-memory 80: 80 bytes; give a unit, such as 80GB"),
        (["--gpu-memory", "0"], "--gpu-memory: given '0'"),
        (["--gpu-memory", "80G"], "--gpu-memory: '80G' has the unit 'g'"),
        (["--gpu-memory", "1GB"], "--reserve 2GiB leaves nothing of 1.00 GB"),
        (["--reserve", "-1"], "--reserve: given '-1'"),
        (["placement=split", "--gpus", "31"], "placement split: one replica of critic and reward models: 32 of 31"),
        (["--gpu-memory", "eighty"], "--gpu-memory: given 'eighty'"),
        (["--gpu-memory", "-1GB"], "--gpu-memory: given '-1GB'"),
        (["--gpu-memory", "80Gb/s"], "--gpu-memory"),
        (["--reserve", "90GB"], "--reserve 90GB leaves nothing"),
        (["--hardware", "tpu"], "a100, b200, h100, h200"),
        (["--hardware", "a100"], "the A100 SXM 80GB has no FP8 products"),
        (["precision.fp8_recipe=mxfp8"], "mxfp8 needs a Blackwell GPU"),
        (["precision.fp8_first_last_layers_bf16=40"], "actor: precision.fp8_first_last_layers_bf16 40 leaves none"),
        (["--bandwidth", "fast"], "--bandwidth: given 'fast'"),
        (["--flops", "0"], "--flops: given '0'"),
        (["--efficiency", "1.5"], "--efficiency: given 1.5"),
        (["--efficiency", "nan"], "--efficiency: given nan"),
        (["--gpus", "31"], "world size 31 is not a multiple of TP 8 x PP 4"),
        (["--gpus", "16"], "start 32 ranks"),
        (["--gpus", "1000000000000"], "prompts_per_iteration 256 is not a multiple of DP 31250000000"),
        (["--bandwidth", "1e-300"], "--bandwidth: given '1e-300'"),
        (["parallel.tensor_model_parallel_size=3", "--gpus", "12"], "cannot be divided over TP 3"),
        (["ppo.minibatch_size=100"], "256 rows per iteration are not a multiple of minibatch_size 100"),
        (["actor.path=no/such/folder"], "actor: no/such/folder has no config.json"),
        (["actor.path=examples/configs/models/llama-3-8b-reward"], "a language model is needed"),
        (["reward.sources=[{kind: model, path: examples/configs/models/llama-3-70b}]"], "reward0"),
        (["ppo.micro_batch=2"], "did you mean ppo.micro_batch_size"),
        (["--prompt-length", "9999"], "--prompt-length 9999 must be from 1 to the longest, 1024"),
    ],
)
def test_hostile_input_is_refused_by_name(arguments: list[str], expected: str) -> None:
    overrides = [a for a in arguments if "=" in a and not a.startswith("--")]
    options = [a for a in arguments if a not in overrides]
    result = plan(EXAMPLE, *overrides, *options)
    assert result.exit_code == 2, result.output
    assert expected in result.stderr
    assert "Traceback" not in result.stderr


def test_a_config_json_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(ROOT / "examples/configs/models/llama-3-70b", folder)
    values = json.loads((folder / "config.json").read_text())
    for change, expected in (({"num_hidden_layers": None}, "num_hidden_layers"), ({"architectures": ["Bert"]}, "Bert")):
        (folder / "config.json").write_text(json.dumps(values | change))
        result = plan(EXAMPLE, f"actor.path={folder}")
        assert result.exit_code == 2
        assert expected in result.stderr
    (folder / "config.json").write_text("{")
    assert "cannot be read as JSON" in plan(EXAMPLE, f"actor.path={folder}").stderr


def test_other_runs() -> None:
    model = "model.path=examples/configs/models/llama-3-70b"
    layout = [
        "parallel.tensor_model_parallel_size=8",
        "parallel.pipeline_model_parallel_size=4",
        "parallel.sequence_parallel=true",
        "precision.dtype=bf16",
    ]
    batches = ["train.batch_size=64", "data.train=x.jsonl", "data.max_length=4096", *layout]
    sft = answer("--kind", "sft", model, *batches)
    assert [each["role"] for each in sft["models"]] == ["model"]
    assert set(sft["seconds"]) == {"train", "optimizer", "save"}
    dpo = answer("--kind", "dpo", model, *batches)
    assert [each["role"] for each in dpo["models"]] == ["model", "reference"]
    # A pair is two rows, and the reference reads them too.
    assert dpo["batches"]["rows"] == 2 * sft["batches"]["rows"]
    assert dpo["flops"]["inference"]["all_ranks"] == pytest.approx(dpo["flops"]["train"]["all_ranks"] / 3, rel=0.02)
    reward = answer("--kind", "reward", "model.path=examples/configs/models/llama-3-8b-reward", *batches)
    assert reward["models"][0]["head"] == "value"


def test_advantages_without_a_critic_leave_it_out() -> None:
    without = answer(EXAMPLE, "ppo.advantage=rloo", "rollout.samples_per_prompt=4")
    assert [each["role"] for each in without["models"]] == ["actor", "reference", "reward0"]
    assert without["memory"]["peak"] < answer(EXAMPLE)["memory"]["peak"]


def test_fp8_keeps_copies_of_weights_and_computes_faster() -> None:
    plain, fp8 = answer(EXAMPLE, "precision.fp8=null"), answer(EXAMPLE)
    assert fp8["ranks"][0]["models"]["actor"]["fp8"] > plain["ranks"][0]["models"]["actor"]["fp8"] == 0
    assert fp8["ranks"][0]["models"]["actor"]["weights"] == plain["ranks"][0]["models"]["actor"]["weights"]
    assert fp8["seconds"]["train"]["compute"] < plain["seconds"]["train"]["compute"]
