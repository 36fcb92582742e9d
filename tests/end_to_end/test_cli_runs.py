"""Every command as a user runs it, in processes of its own, with tiny models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from mrlhf.config import PPOConfig, option_table
from tests.distributed.hf_tools import assert_same_tensors
from tests.end_to_end.jobs import ROOT, TinyJob, function_reward, rank_lines, run_command
from tools.make_tiny_model import make_tiny_model

RECORDING = ROOT / "tests" / "data" / "standard_trajectory"
TP2 = "parallel.tensor_model_parallel_size=2"


def _lines(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def _assert_outputs_are_complete(out: Path) -> None:
    assert len(_lines(out / "metrics.jsonl")) == 2
    assert len(_lines(out / "samples.jsonl")) == 16
    assert yaml.safe_load((out / "config.yaml").read_text())["trainer"]["output_dir"] == str(out)
    assert len(list(out.rglob("events.out.tfevents.*"))) == 1
    for folder in ("actor", "critic"):
        assert (out / folder / "model.safetensors").exists()
        assert (out / folder / "tokenizer.json").exists()


def test_b13_ppo_logs_samples_and_saves_on_one_and_on_two_replicas(tiny_job: TinyJob, tmp_path: Path) -> None:
    """DP 2 waits for nobody, and its numbers are those of one process: nothing is done twice or by one rank only."""
    common = [function_reward("tinyrewards:vowels"), "trainer.tensorboard=true"]
    outputs = {}
    for ranks in (1, 2):
        outputs[ranks] = tmp_path / f"out{ranks}"
        arguments = (tiny_job.config, *common, f"trainer.output_dir={outputs[ranks]}")
        done = run_command("ppo", *arguments, ranks=ranks, cwd=tiny_job.folder)
        assert done.status == 0, done.stderr
        assert done.stdout == ""
        assert "iteration" in done.stderr
        assert "Warning" not in done.stderr
        _assert_outputs_are_complete(outputs[ranks])
    one, two = (_lines(outputs[ranks] / "metrics.jsonl") for ranks in (1, 2))
    for first, second in zip(one, two, strict=True):
        for name in ("score_mean", "kl_k1", "policy_loss", "value_loss", "actor_grad_norm", "response_length_mean"):
            assert second[name] == pytest.approx(first[name], rel=1e-4, abs=1e-6), name
    texts = [[row["response"] for row in _lines(outputs[ranks] / "samples.jsonl")] for ranks in (1, 2)]
    assert texts[0] == texts[1]


def test_generate(tiny_job: TinyJob, tmp_path: Path) -> None:
    """Under DP 2 and on one process: the same text, prompts in the order of the file."""
    files = {}
    for ranks in (2, 1):
        files[ranks] = tmp_path / f"responses{ranks}.jsonl"
        done = run_command(
            "generate", tiny_job.config, "rollout.samples_per_prompt=2", "--output", files[ranks], ranks=ranks
        )
        assert done.status == 0, done.stderr
        assert f"16 responses in {files[ranks]}" in done.stdout
    rows = _lines(files[1])
    assert rows == _lines(files[2])
    assert [row["meta"]["topic"] for row in rows] == [f"t{i // 2}" for i in range(16)]  # type: ignore[index]
    assert rows[0]["prompt"] == "user: a question about number 0\nassistant: "
    assert rows[2]["prompt"] == "a question about number 1"
    assert len({row["response"] for row in rows}) > 8
    assert not list(tmp_path.glob("*.tmp"))


def test_eval_needs_no_training_keys(tiny_job: TinyJob, tmp_path: Path) -> None:
    """A trained actor beside its reference; here they are two different models."""
    config = tmp_path / "eval.yaml"
    values = {
        "actor": {"path": str(tiny_job.actor)},
        "reward": {"sources": [{"kind": "model", "path": str(tiny_job.reward)}]},
        "data": {"prompts": str(tiny_job.prompts)},
        "rollout": {"max_response_length": 8},
    }
    config.write_text(yaml.safe_dump(values))
    other = make_tiny_model(tmp_path / "other", seed=9, hidden_size=32, num_layers=2, ffn_hidden_size=64)
    done = run_command("eval", config, f"reference.path={other}", "--output", tmp_path / "out")
    assert done.status == 0, done.stderr
    numbers = json.loads((tmp_path / "out" / "eval.json").read_text())
    assert numbers["prompts"] == 8
    assert numbers["kl_sequence"] > 0
    assert numbers["difference"] == pytest.approx(numbers["score_mean"] - numbers["reference_score_mean"])
    rows = _lines(tmp_path / "out" / "eval_samples.jsonl")
    assert numbers["score_mean"] == pytest.approx(sum(row["score"] for row in rows) / 8, abs=1e-5)  # type: ignore[misc]
    assert f"mean score {numbers['score_mean']:.3f}" in done.stdout
    assert "before (reference)" in done.stderr


def test_parity_holds(tmp_path: Path) -> None:
    done = run_command("parity", RECORDING, "tensor_model_parallel_size=2", ranks=2)
    assert done.status == 0, done.stdout + done.stderr
    assert "TP 2 x PP 1 x DP 1" in " ".join(done.stdout.split())  # a long path may wrap the title
    assert done.stdout.count(" ok") == 29
    assert "DIFFERS" not in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_parity_finds_one_changed_number(tmp_path: Path, ranks: int) -> None:
    folder = tmp_path / "standard_copy"
    shutil.copytree(RECORDING, folder)
    recorded = json.loads((folder / "expected.json").read_text())
    recorded["rollouts"][2]["updates"][1]["critic_grad_norm"] *= 1.01
    (folder / "expected.json").write_text(json.dumps(recorded))
    done = run_command("parity", folder, ranks=ranks)
    assert done.status == 1
    wrong = [line for line in done.stdout.splitlines() if "DIFFERS" in line]
    assert len(wrong) == 1
    assert "critic grad norm" in wrong[0]
    assert done.stdout.count(" ok") == 28


@pytest.mark.slow
def test_convert_there_and_back_and_train_from_what_it_wrote(tiny_job: TinyJob, tmp_path: Path) -> None:
    """The command under TP 2 one way, the script on one process the other."""
    done = run_command("convert", "import", tiny_job.actor, tmp_path / "megatron", "--tp", "2", ranks=2)
    assert done.status == 0, done.stderr
    script = ROOT / "tools" / "convert_hf.py"
    arguments = ("export", "--source", tmp_path / "megatron", "--target", tmp_path / "hf")
    done = run_command(*arguments, module=script)
    assert done.status == 0, done.stderr
    assert_same_tensors(str(tiny_job.actor), tmp_path / "hf")
    out = tmp_path / "out"
    frozen = ("trainer.iterations=1", "optimizer.actor.lr=0", f"trainer.output_dir={out}")
    done = run_command("ppo", tiny_job.config, f"actor.path={tmp_path}/megatron", *frozen)
    assert done.status == 0, done.stderr
    assert_same_tensors(str(tiny_job.actor), out / "actor")
    again = run_command("convert", "export", tmp_path / "megatron", tmp_path / "hf")
    assert again.status == 2
    assert again.stderr.startswith("error: ")
    assert str(tmp_path / "hf") in again.stderr
    assert "Traceback" not in again.stderr


def test_help_and_print_config_of_the_real_command(tiny_job: TinyJob) -> None:
    done = run_command("ppo", "--help")
    assert done.status == 0
    for option in option_table(PPOConfig):
        assert f"{option.name}: {option.type} = {option.default}\n" in done.stdout
    done = run_command("ppo", tiny_job.config, "ppo.epochs=4", "--print-config")
    assert done.status == 0
    assert yaml.safe_load(done.stdout)["ppo"]["epochs"] == 4
    assert yaml.safe_load(done.stdout)["critic"]["path"] == str(tiny_job.reward)


def _failing(tiny_job: TinyJob, tmp_path: Path, target: str, *more: str) -> tuple[int, list[str], str]:
    # The limit of every collective is an hour here: whoever waits for a lost peer would be seen.
    done = run_command(
        "ppo", tiny_job.config, function_reward(target), f"trainer.output_dir={tmp_path}/out",
        "launch.timeout_minutes=60", *more, ranks=2, cwd=tiny_job.folder, timeout=120,
    )  # fmt: skip
    return done.status, rank_lines(done.stderr), done.stderr


@pytest.mark.slow
def test_a_reward_function_that_raises_on_one_replica_ends_the_job(tiny_job: TinyJob, tmp_path: Path) -> None:
    status, lines, text = _failing(tiny_job, tmp_path, "tinyrewards:fails_on_one_replica")
    assert status != 0
    message = "reward function tinyrewards:fails_on_one_replica raised RuntimeError: the scoring server said no to rank"
    # The message, then the place in the function: nothing else comes after it.
    assert message in lines[-3]
    assert "tinyrewards.py" in lines[-2]
    assert lines[-1].lstrip().startswith("raise RuntimeError")
    # Once by the rank, once in the launcher's summary.
    assert 1 <= text.count(message) <= 2


@pytest.mark.slow
def test_an_unexpected_exception_is_the_last_thing_a_rank_says(tiny_job: TinyJob, tmp_path: Path) -> None:
    status, lines, _ = _failing(tiny_job, tmp_path, "tinyrewards:unexpected")
    assert status != 0
    assert lines[-1] == "[rank 1] GeneratorExit: unexpected end of the scorer"
    assert any(line.startswith("[rank 1]   File") and "tinyrewards.py" in line for line in lines)


def test_a_rank_that_vanishes_ends_the_job(tiny_job: TinyJob, tmp_path: Path) -> None:
    status, lines, text = _failing(tiny_job, tmp_path, "tinyrewards:vanishes")
    assert status != 0
    assert "exitcode  : 7" in text
    assert not any("Traceback" in line for line in lines)


@pytest.mark.slow
def test_a_rank_of_the_critic_that_vanishes_ends_the_job(tiny_job: TinyJob, tmp_path: Path) -> None:
    """Rank 1 calls the function, while rank 0 computes log-probs and then waits for the scores."""
    status, lines, text = _failing(tiny_job, tmp_path, "tinyrewards:vanishes", "placement=split")
    assert status != 0
    assert "exitcode  : 7" in text
    assert not any("Traceback" in line for line in lines)
    layout = "actor, reference on ranks 0-0: world 1 = TP 1 x PP 1 x DP 1; critic on ranks 1-1: world 1"
    assert any(layout in line for line in lines)
    status, lines, _ = _failing(tiny_job, tmp_path / "unexpected", "tinyrewards:unexpected", "placement=split")
    assert status != 0
    assert lines[-1] == "[rank 1] GeneratorExit: unexpected end of the scorer"


@pytest.mark.slow
def test_a_tensor_rank_that_fails_ends_the_job(tiny_job: TinyJob, tmp_path: Path) -> None:
    """Under TP 2 the other rank of the replica waits inside a broadcast of the scores."""
    status, lines, _ = _failing(tiny_job, tmp_path, "tinyrewards:fails_everywhere", TP2)
    assert status != 0
    assert "error: reward function tinyrewards:fails_everywhere raised ValueError: no score today" in lines[-3]
    assert lines[-1].lstrip().startswith("raise ValueError")
