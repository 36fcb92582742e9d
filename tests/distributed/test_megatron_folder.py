"""Megatron weights folders, the conversion command, and the memory that loading and export take."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.hf_tools import (
    DATA,
    assert_same_tensors,
    build_stages,
    edit_copy,
    last_rank,
    load_message,
    model_outputs,
    model_values,
    transformers_logits,
    world_of,
    write_models,
)
from tests.ranks import run_ranks


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def expected(models: dict[str, str]) -> dict[str, torch.Tensor]:
    return {name: transformers_logits(path) for name, path in models.items()}


def _convert(source: str, target: str, tp: int, pp: int, options: dict[str, Any]) -> None:
    from mrlhf.checkpoint.convert import import_hf

    import_hf(source, target, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, **options)


def _convert_back(source: str, target: str, tp: int, pp: int) -> None:
    from mrlhf.checkpoint.convert import export_megatron

    export_megatron(source, target, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)


@pytest.mark.parametrize("name", ["tied", "biases"])
def test_megatron_folder_under_other_layouts(models: dict[str, str], expected: Any, tmp_path: Path, name: str) -> None:
    folder = str(tmp_path / "megatron")
    run_ranks(_convert, 2, models[name], folder, 2, 1, {})
    for layout in ((1, 1, None), (1, 4, None), (1, 2, 2)):
        found = last_rank(run_ranks(model_outputs, world_of(layout), {name: folder}, layout))[name]
        assert (found - expected[name]).abs().max() < 3e-5
    for tp, pp in ((1, 1), (2, 2)):
        out = tmp_path / f"hf{tp}{pp}"
        run_ranks(_convert_back, tp * pp, folder, str(out), tp, pp)
        assert_same_tensors(models[name], out)
    critic = last_rank(run_ranks(model_values, 2, folder, (1, 2, None), {"seed": 3}))
    assert torch.equal(critic, last_rank(run_ranks(model_values, 2, models[name], (1, 2, None), {"seed": 3})))


def test_megatron_folder_of_a_classifier(tmp_path: Path) -> None:
    reward = str(DATA / "ds_chat_trajectory" / "reward")
    path = edit_copy(reward, tmp_path / "bias", lambda t: t.update({"score.bias": torch.tensor([0.75])}))
    folder = str(tmp_path / "megatron")
    run_ranks(_convert, 1, path, folder, 1, 1, {"dtype": torch.bfloat16})
    run_ranks(_convert_back, 2, folder, str(tmp_path / "hf"), 2, 1)
    assert_same_tensors(path, tmp_path / "hf", dtype=torch.bfloat16)
    assert "no language-model head" in run_ranks(load_message, 1, folder)[0]


def _tool(arguments: list[str]) -> int:
    from tools.convert_hf import main

    return main(arguments)


def test_command_line_both_ways(models: dict[str, str], tmp_path: Path) -> None:
    megatron, back = str(tmp_path / "megatron"), str(tmp_path / "back")
    arguments = ["import", "--source", models["tied"], "--target", megatron, "--tp", "2"]
    assert run_ranks(_tool, 2, arguments) == [0, 0]
    assert run_ranks(_tool, 1, arguments) == [2], "wrong number of processes"
    assert run_ranks(_tool, 1, ["export", "--source", megatron, "--target", back, "--max-shard-size", "1e-4"]) == [0]
    assert_same_tensors(models["tied"], back)
    assert len(list(Path(back).glob("*.safetensors"))) > 1
    assert (Path(back) / "chat_template.jinja").exists()


def _peak_anonymous_growth(run: Any) -> int:
    """Largest growth of this process's anonymous (not file-backed) memory while ``run`` runs, in bytes."""

    def anonymous() -> int:
        fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(fields["RssAnon"].split()[0]) * 1024

    before, peak, stop = anonymous(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not stop.wait(0.0005):
            peak = max(peak, anonymous())

    thread = threading.Thread(target=watch)
    thread.start()
    run()
    stop.set()
    thread.join()
    return max(peak, anonymous()) - before


def _memory(path: str, out: str) -> tuple[int, int, int]:
    from mrlhf.checkpoint.hf import export_hf, load_hf_weights
    from mrlhf.checkpoint.transforms import TensorRanks

    torch.set_num_threads(1)
    config, groups, chunks = build_stages(path, 1, 2, None)
    for chunk in chunks:
        for param in chunk.parameters():
            param.data.zero_()  # pages of the parameters exist before the measurement
    size = sum(param.numel() * 4 for chunk in chunks for param in chunk.parameters())
    load = _peak_anonymous_growth(lambda: load_hf_weights(chunks, config, path, ranks=TensorRanks(0, 1, 0, 1)))
    export = _peak_anonymous_growth(
        lambda: export_hf(chunks, config, out, source_folder=path, groups=groups, max_shard_size=64 * 2**20)
    )
    return size, load, export


def test_f9_loading_and_export_need_a_few_tensors_of_memory(tmp_path: Path) -> None:
    from tools.make_tiny_model import make_tiny_model

    path = make_tiny_model(
        tmp_path / "model", hidden_size=768, ffn_hidden_size=2048, num_layers=16, num_heads=12, num_kv_heads=4,
        max_shard_size="250MB", tokenizer=False,
    )  # fmt: skip
    whole = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    largest = 2 * 2048 * 768 * 4
    assert whole > 380e6
    assert len(list(path.glob("*.safetensors"))) == 2
    for size, load, export in run_ranks(_memory, 2, str(path), str(tmp_path / "out")):
        assert size > 0.45 * whole
        # The tensors of one entry, their fused form and a copy on the way, and what the allocator holds back of earlier
        # ones; half of the stage, let alone the model.
        assert load < 8 * largest, f"{load / 1e6:.0f} MB"
        assert export < 6 * largest, f"{export / 1e6:.0f} MB"
    assert_same_tensors(path, tmp_path / "out")
