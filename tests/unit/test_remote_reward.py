"""Reward servers: batches, time limits, further tries, and every way in which an answer can be wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from examples.reward_server import make_server
from mrlhf.config import load_config
from mrlhf.errors import ConfigError, MrlhfError
from mrlhf.roles.remote_reward import RemoteReward
from mrlhf.trainer.inputs import reward_functions
from tests.unit.test_cli import CONFIG

ROOT = Path(__file__).parents[2]
Answers = list[tuple[int, bytes, float]]


@contextmanager
def serving(server: ThreadingHTTPServer) -> Iterator[str]:
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield "http://{}:{}/score".format(*server.server_address[:2])
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def scripted(*answers: tuple[int, bytes, float]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server that gives these answers in turn, the last one for ever: status, body, seconds before the last byte."""
    requests: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, body, delay = answers[min(len(requests), len(answers) - 1)]
            requests.append({"headers": self.headers, "path": self.path, **content})
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            steps = 10 if delay else 1
            try:
                for i in range(steps):  # bytes that drip in: no single wait is over the limit
                    self.wfile.write(body[len(body) * i // steps : len(body) * (i + 1) // steps])
                    self.wfile.flush()
                    time.sleep(delay / steps)
            except OSError:
                return

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as url:
        yield url, requests


def remote(url: str, **options: Any) -> RemoteReward:
    return RemoteReward(url, **{"timeout_seconds": 10, "retries": 3, "backoff_seconds": 0.01, **options})


def test_the_example_server_is_asked_in_batches() -> None:
    asked: list[list[str]] = []

    def score(prompts: list[str], responses: list[str], gold: list[int], note: list[Any]) -> list[float]:
        asked.append(responses)
        return [len(p) + len(r) / 10 + g for p, r, g in zip(prompts, responses, gold, strict=True)]

    meta = {"gold": [100, 200, 300], "note": [None, "\u20ac", {"a": 1}]}
    with serving(make_server(score)) as url:
        scores = remote(url, batch_size=2).scores(["p", "pp", "ppp"], ["r", "rr", ""], meta)
        assert scores == [101.1, 202.2, 303.0]
        assert sorted(asked) == [[""], ["r", "rr"]]  # they go out together
        assert remote(url).scores([], [], {"gold": [], "note": []}) == []
        with pytest.raises(MrlhfError, match="2 tries.*BusyError: status 500.*TypeError"):
            remote(url, retries=1).scores(["p"], ["r"], {"gold": [None], "note": [None]})


def test_what_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARD_TOKEN", "secret")
    with scripted((200, b'{"scores": [1, 2.5]}', 0)) as (url, requests):
        headers = {"Authorization": "Bearer $REWARD_TOKEN", "X-Run": "a b"}
        source = remote(url, headers=headers)
        assert source.scores(["p", "q"], ["r", "s"], {"gold": [1, None]}) == [1.0, 2.5]
    sent = requests[0]
    assert (sent["prompts"], sent["responses"], sent["meta"]) == (["p", "q"], ["r", "s"], {"gold": [1, None]})
    assert sent["path"] == "/score"
    assert (sent["headers"]["Authorization"], sent["headers"]["X-Run"]) == ("Bearer secret", "a b")
    assert sent["headers"]["Content-Type"] == "application/json"
    monkeypatch.delenv("REWARD_TOKEN")
    with pytest.raises(ConfigError, match="header Authorization needs the environment variable REWARD_TOKEN"):
        remote(url, headers=headers)


@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_busy_server_is_asked_again(status: int) -> None:
    busy, good = (status, b"wait", 0.0), (200, b'{"scores": [3]}', 0.0)
    with scripted(busy, busy, good) as (url, requests):
        assert remote(url).scores(["p"], ["r"], {}) == [3.0]
        assert len(requests) == 3
    with scripted(busy) as (url, requests):
        with pytest.raises(MrlhfError, match=f"{url} gave no scores in 3 tries; .* status {status}: 'wait'"):
            remote(url, retries=2).scores(["p"], ["r"], {})
        assert len(requests) == 3


def test_waits_grow() -> None:
    with scripted((500, b"", 0)) as (url, _):
        start = time.monotonic()
        with pytest.raises(MrlhfError):
            remote(url, retries=2, backoff_seconds=0.1).scores(["p"], ["r"], {})
        assert 0.3 <= time.monotonic() - start < 5  # 0.1 and 0.2, each with up to 0.1 more


def test_a_slow_answer_is_given_up() -> None:
    slow, good = (200, b'{"scores": [1.0000]}', 3.0), (200, b'{"scores": [3]}', 0.0)
    with scripted(slow, good) as (url, requests):
        start = time.monotonic()
        assert remote(url, timeout_seconds=0.5).scores(["p"], ["r"], {}) == [3.0]
        assert 0.5 <= time.monotonic() - start < 2.5
        assert len(requests) == 2
    message = "1 tries; the last error: ReadTimeout: the answer is not complete"
    with scripted(slow) as (url, _), pytest.raises(MrlhfError, match=message):
        remote(url, timeout_seconds=0.4, retries=0).scores(["p"], ["r"], {})


def test_no_answer_and_no_server() -> None:
    def score(prompts: list[str], responses: list[str]) -> list[float]:
        time.sleep(2)
        return [1.0]

    with serving(make_server(score)) as url, pytest.raises(MrlhfError, match=r"2 tries; the last error: ReadTimeout"):
        remote(url, timeout_seconds=0.2, retries=1).scores(["p"], ["r"], {})
    with pytest.raises(MrlhfError, match=r"127\.0\.0\.1:1/x gave no scores in 2 tries; the last error: ConnectError"):
        remote("http://127.0.0.1:1/x", retries=1).scores(["p"], ["r"], {})


def test_what_cannot_be_sent_is_refused_before_it_is_tried() -> None:
    for port in ("port", 99999, 0):
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}/: no request can be made: "):
            remote(f"http://127.0.0.1:{port}/")
    for headers in ({"A B": "c"}, {"A": "\u65e5"}, {"A": "b\nc"}):
        with pytest.raises(ConfigError, match="no request can be made: .*header") as caught:
            remote("http://127.0.0.1/", headers=headers)
        assert "\u65e5" not in str(caught.value)


@pytest.mark.parametrize("status", [400, 401, 404, 302])
def test_a_refusal_is_not_asked_again(status: int) -> None:
    with scripted((status, b"no such model", 0)) as (url, requests):
        with pytest.raises(MrlhfError, match=f"{url} refused: status {status}: 'no such model'"):
            remote(url).scores(["p"], ["r"], {})
        assert len(requests) == 1


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"scores: 1", r"must answer \{\"scores\": \[...\]\}, it answered: 'scores: 1'"),
        (b"[1.0]", r"must answer .* it answered: '\[1.0\]'"),
        (b'{"rewards": [1]}', "must answer .* it answered"),
        (b"\xff\xfe", "must answer"),
        (b'{"scores": [1, 2]}', "returned 2 scores for 1 responses"),
        (b'{"scores": []}', "returned 0 scores for 1 responses"),
        (b'{"scores": [NaN]}', "returned nan for the response 'r'"),
        (b'{"scores": [-Infinity]}', "returned -inf"),
        (b'{"scores": [1e300]}', r"returned 1e\+300"),
        (b'{"scores": [null]}', "must return a list of numbers"),
        (b'{"scores": ["1"]}', "must return a list of numbers"),
        (b'{"scores": "1"}', "must return a list of numbers, got str"),
        (b'{"scores": 1}', "must return a list of numbers, got int"),
        (b'{"scores": {"0": 1}}', "must return a list of numbers, got dict"),
    ],
)
def test_garbage(body: bytes, message: str) -> None:
    with scripted((200, body, 0)) as (url, requests):
        with pytest.raises(MrlhfError, match=f"reward server {url} {message}"):
            remote(url).scores(["p"], ["r"], {})
        assert len(requests) == 1


def test_the_configuration_makes_it(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(CONFIG)
    sources = (
        "reward.sources=[{kind: remote, url: 'http://h:1/s', batch_size: 7, timeout_seconds: 2, retries: 0, weight: 2, "
        "headers: {X-Key: abc}}, {kind: function, target: 'examples.rewards:letter_share'}]"
    )
    (source, weight), (function, _) = reward_functions(load_config(file, [sources]))
    assert isinstance(source, RemoteReward)
    assert (source.url, source.batch_size, source.timeout_seconds, source.retries) == ("http://h:1/s", 7, 2, 0)
    assert (source.headers, weight, function.name) == ({"X-Key": "abc"}, 2, "letter_share")
    with pytest.raises(ConfigError, match=r"reward\.sources\[0\]\.url: given 'h:1'"):
        load_config(file, ["reward.sources=[{kind: remote, url: 'h:1'}]"])


def test_the_example_as_a_program() -> None:
    with subprocess.Popen(
        [sys.executable, "examples/reward_server.py", "--port", "0"],
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("serving examples.rewards:letter_share on http://127.0.0.1:")
            assert remote(line.split()[-1]).scores(["p", "p"], ["eabc", "e"], {}) == [0.25, 1.0]
        finally:
            process.terminate()
