"""A PPO run whose scores come from the example server, on two ranks of one replica, with Parquet prompts."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from examples.reward_server import make_server
from tests.ranks import run_ranks
from tests.tiny_run import letters, make_config, make_inputs, read_lines, train


def _train(config: object) -> None:
    train(config)  # type: ignore[arg-type]


def test_a_server_scores_as_the_function_it_serves(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    inputs = make_inputs(tmp_path / "inputs")
    rows = [json.loads(line) for line in (inputs / "prompts.jsonl").read_text().splitlines()]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "prompts.parquet")
    asked: list[int] = []

    def score(prompts: list[str], responses: list[str], **meta: object) -> list[float]:
        asked.append(len(responses))
        return letters(prompts, responses, **meta)

    server = make_server(score)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    url = "http://{}:{}/".format(*server.server_address[:2])
    try:
        sources = (
            f"[{{kind: remote, url: '{url}', batch_size: 3, weight: 2.0}}, "
            "{kind: function, target: 'tests.tiny_run:letters', weight: -2.0}]"
        )
        config = make_config(
            inputs,
            tmp_path / "run",
            f"reward.sources={sources}",
            f"data.prompts={tmp_path / 'prompts.parquet'}",
            "parallel.tensor_model_parallel_size=2",
        )
        run_ranks(_train, 2, config)
    finally:
        server.shutdown()
        server.server_close()
    # 8 rows in each of 2 iterations, asked once for both ranks; the requests of an iteration go out together.
    assert [sorted(asked[:3]), sorted(asked[3:])] == [[2, 3, 3]] * 2
    for row in read_lines(config.metrics_path):
        assert row["score/remote"] == pytest.approx(row["score/letters"], rel=1e-6)
        assert row["score/remote"] > 0
        assert row["score_mean"] == pytest.approx(0, abs=1e-6)
