"""A reward server for `{kind: remote, url: "http://HOST:8000"}`, with nothing but the standard library.

    python examples/reward_server.py --port 8000 --target examples.rewards:vader_sentiment

It takes ``POST {"prompts": [...], "responses": [...], "meta": {...}}`` and answers ``{"scores": [...]}``, whatever the
path. Any other server that does this will do.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import sys
import traceback
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


def make_server(score: Callable[..., list[float]], host: str = "127.0.0.1", port: int = 0) -> ThreadingHTTPServer:
    """A server that answers with ``score(prompts, responses, **meta)``; start it with ``serve_forever``.

    Args:
        score: as a reward function of a configuration. Requests run in threads, several at once.
        host: address to listen on.
        port: 0 takes a free one, see ``server_address``.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            try:
                request = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
                prompts, responses, meta = request["prompts"], request["responses"], request.get("meta", {})
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                self.answer(400, {"error": f"expected prompts, responses and meta: {error!r}"})
                return
            try:
                scores = list(score(prompts, responses, **meta))
            except Exception as error:
                traceback.print_exc()
                self.answer(500, {"error": f"{type(error).__name__}: {error}"})
                return
            self.answer(200, {"scores": scores})

        def answer(self, status: int, content: dict[str, Any]) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            # A client whose time limit is over has hung up.
            with contextlib.suppress(ConnectionError):
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """One line a request would drown everything else."""

    return ThreadingHTTPServer((host, port), Handler)


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--target", default="examples.rewards:letter_share", help="package.module:callable")
    arguments = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[1]))
    module, _, name = arguments.target.partition(":")
    server = make_server(getattr(importlib.import_module(module), name), arguments.host, arguments.port)
    print("serving {} on http://{}:{}".format(arguments.target, *server.server_address[:2]), flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.server_close()


if __name__ == "__main__":
    main()
