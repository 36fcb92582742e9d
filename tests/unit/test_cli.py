"""The command line as a user meets it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from mrlhf.cli import app
from mrlhf.config import PPOConfig, load_config, option_table

ROOT = Path(__file__).parents[2]
CONFIG = """
actor: {path: models/actor}
data: {prompts: prompts.jsonl}
reward: {sources: [{kind: function, target: "package.module:score"}]}
rollout: {prompts_per_iteration: 8, max_response_length: 16}
ppo: {minibatch_size: 4}
trainer: {iterations: 3}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG)
    return path


def mrlhf(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mrlhf", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_help_lists_every_option_with_type_and_default() -> None:
    text = CliRunner().invoke(app, ["ppo", "--help"]).output
    for option in option_table(PPOConfig):
        assert f"{option.name}: {option.type} = {option.default}\n" in text
        assert option.description in text


@pytest.mark.parametrize("command", ["ppo", "generate", "parity"])
def test_commands_exist(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.output


@pytest.mark.parametrize("direction", ["import", "export"])
def test_convert_commands_exist(direction: str) -> None:
    result = CliRunner().invoke(app, ["convert", direction, "--help"])
    assert result.exit_code == 0
    assert "overwrite" in result.output


def test_print_config_is_the_resolved_configuration(file: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["ppo", str(file), "ppo.epochs=3", "--print-config"])
    assert result.exit_code == 0
    printed = tmp_path / "printed.yaml"
    printed.write_text(result.output)
    assert load_config(printed) == load_config(file, ["ppo.epochs=3"])
    assert "path: models/actor" in result.output


def test_configuration_from_overrides_alone() -> None:
    overrides = ["actor.path=a", "data.prompts=b", "reward.sources=[{kind: function, target: 'c.d:e'}]"]
    overrides += ["rollout.prompts_per_iteration=2", "rollout.max_response_length=3", "ppo.minibatch_size=2"]
    result = CliRunner().invoke(app, ["ppo", *overrides, "trainer.iterations=1", "--print-config"])
    assert result.exit_code == 0, result.output
    assert "iterations: 1" in result.output


def test_resume_and_weights_only_are_options(file: Path) -> None:
    def printed(*options: str) -> dict[str, object]:
        result = CliRunner().invoke(app, ["ppo", str(file), *options, "--print-config"])
        assert result.exit_code == 0, result.output
        trainer: dict[str, object] = yaml.safe_load(result.output)["trainer"]
        return trainer

    assert printed("--resume", "auto")["resume"] == "auto"
    assert printed("trainer.resume=never", "--resume", "runs/a", "--weights-only")["resume"] == "runs/a"
    assert printed("--resume", "runs/a", "--weights-only")["weights_only"] is True
    assert printed()["weights_only"] is False
    done = mrlhf("ppo", str(file), "--weights-only")
    assert done.returncode == 2
    assert "weights_only needs the checkpoint whose weights are taken" in done.stderr


def test_our_errors_are_one_message_without_traceback(file: Path) -> None:
    done = mrlhf("ppo", str(file), "ppo.epoch=3")
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {file}: the configuration is not valid:")
    assert "did you mean ppo.epochs?" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_missing_files_are_refused_before_torch_is_loaded(file: Path) -> None:
    code = (
        "import sys; from mrlhf.cli import app\n"
        "try: app(sys.argv[1:])\n"
        "except SystemExit as end: status = end.code\n"
        "print(status, 'torch' in sys.modules)"
    )
    for arguments, expected in ((["ppo", str(file)], "2 False"), (["ppo", "--help"], "0 False")):
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60
        )
        assert done.stdout.splitlines()[-1] == expected
    done = mrlhf("ppo", str(file))
    assert "data.prompts: prompts.jsonl is not a file" in done.stderr
    assert "actor.path: models/actor is not a folder" in done.stderr


def test_only_the_first_rank_prints_the_configuration(file: Path) -> None:
    job = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    outputs = [mrlhf("ppo", str(file), "--print-config", RANK=r, LOCAL_RANK=r, **job) for r in ("0", "1")]
    assert [done.returncode for done in outputs] == [0, 0]
    assert outputs[0].stdout.startswith("seed: 0\n")
    assert outputs[1].stdout == ""


def test_a_broken_launch_environment_is_one_message(file: Path) -> None:
    done = mrlhf("ppo", str(file), RANK="0", WORLD_SIZE="2")
    assert done.returncode == 2
    assert done.stderr.startswith("error: RANK is set, so torchrun's variables are expected")
    assert "Traceback" not in done.stderr


def test_unknown_semantics_are_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["parity", str(tmp_path), "--semantics", "trl"])
    assert result.exit_code == 2


def test_version() -> None:
    from mrlhf import __version__

    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout.strip()) == (0, __version__)
