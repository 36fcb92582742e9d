"""Scores from a server over HTTP."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import tenacity

from mrlhf.errors import ConfigError, MrlhfError
from mrlhf.roles.reward import checked_scores

SHOWN_ANSWER = 200
LONGEST_WAIT = 30.0
REQUESTS_AT_ONCE = 8


class BusyError(Exception):
    """An answer after which another try may help: 429 or 5xx."""


class RemoteReward:
    """A server that is asked ``POST {"prompts": [...], "responses": [...], "meta": {...}}`` for ``{"scores": [...]}``.

    ``meta`` has one list for each other field of the prompt file, as for reward functions.
    """

    name = "remote"

    def __init__(
        self,
        url: str,
        *,
        batch_size: int = 64,
        timeout_seconds: float = 60.0,
        retries: int = 3,
        headers: Mapping[str, str] | None = None,
        backoff_seconds: float = 0.5,
    ) -> None:
        """Keep the address; nothing is sent.

        Args:
            url: where to send requests.
            batch_size: responses of one request.
            timeout_seconds: for one answer, from sending the request to its last byte.
            retries: further tries after a connection error, no answer in time, or status 429 or 5xx.
            headers: sent with every request; ``$NAME`` and ``${NAME}`` stand for variables of the environment, so that
                no secret needs to be in a configuration.
            backoff_seconds: wait before the second try; it doubles up to half a minute.

        Raises:
            ConfigError: a header names a variable that is not set, or no request can be made of the address and the
                headers.
        """
        self.url = url
        self.batch_size = batch_size
        self.timeout_seconds = timeout_seconds
        self.retries = retries
        self.headers = {key: self._expanded(key, value) for key, value in (headers or {}).items()}
        self.backoff_seconds = backoff_seconds
        try:
            _check_header_characters(self.headers)
            port = httpx.Request("POST", url, headers=self.headers).url.port
            if not 0 < (1 if port is None else port) < 2**16:
                raise ValueError(f"there is no port {port}")
        except (httpx.InvalidURL, ValueError) as error:
            raise ConfigError(f"reward server {url}: no request can be made: {error}") from None
        self._client: httpx.Client | None = None

    def check_fields(self, fields: Set[str]) -> None:
        """Every field can be sent."""

    def scores(
        self, prompts: Sequence[str], responses: Sequence[str], meta: Mapping[str, Sequence[Any]]
    ) -> list[float]:
        """One finite number for each response.

        Raises:
            MrlhfError: no answer after all tries, a refusal, or an answer that is anything else; the message names the
                address and the last error.
        """

        def ask(start: int) -> list[float]:
            """The scores of the responses of one request."""
            part = slice(start, start + self.batch_size)
            request = {
                "prompts": list(prompts[part]),
                "responses": list(responses[part]),
                "meta": {key: list(values[part]) for key, values in meta.items()},
            }
            answer = self._ask(json.dumps(request, default=str).encode())
            return checked_scores(self._scores_of(answer), responses[part], f"reward server {self.url}")

        if self._client is None:
            self._client = httpx.Client(timeout=self.timeout_seconds)
        starts = range(0, len(responses), self.batch_size)
        # The other ranks wait meanwhile, under the limit of their collective.
        with ThreadPoolExecutor(max_workers=REQUESTS_AT_ONCE) as pool:
            return [score for scores in pool.map(ask, starts) for score in scores]

    def _ask(self, content: bytes) -> bytes:
        tries = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(self.retries + 1),
            wait=tenacity.wait_exponential(multiplier=self.backoff_seconds, max=LONGEST_WAIT)
            + tenacity.wait_random(0, self.backoff_seconds),
            retry=tenacity.retry_if_exception_type((httpx.TransportError, BusyError)),
            reraise=True,
        )
        try:
            return tries(self._post, content)
        except (httpx.HTTPError, httpx.InvalidURL, BusyError) as error:
            # Timeouts of httpx have no text of their own.
            what = str(error) or f"no answer within {self.timeout_seconds:g} s"
            count = tries.statistics.get("attempt_number", 1)
            raise MrlhfError(
                f"reward server {self.url} gave no scores in {count} tries; the last error: "
                f"{type(error).__name__}: {what}"
            ) from error

    def _post(self, content: bytes) -> bytes:
        assert self._client is not None
        deadline = time.monotonic() + self.timeout_seconds
        answer = b""
        headers = {"Content-Type": "application/json", **self.headers}
        with self._client.stream("POST", self.url, content=content, headers=headers) as response:
            for chunk in response.iter_bytes():
                answer += chunk
                # httpx limits the time between two chunks only.
                if time.monotonic() > deadline:
                    raise httpx.ReadTimeout(f"the answer is not complete after {self.timeout_seconds:g} s")
        if response.status_code == 429 or response.status_code >= 500:
            raise BusyError(f"status {response.status_code}: {_start(answer)}")
        if response.status_code != 200:
            raise MrlhfError(f"reward server {self.url} refused: status {response.status_code}: {_start(answer)}")
        return answer

    def _scores_of(self, answer: bytes) -> Any:
        try:
            content = json.loads(answer)
            return content["scores"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise MrlhfError(
                f'reward server {self.url} must answer {{"scores": [...]}}, it answered: {_start(answer)}'
            ) from None

    def _expanded(self, key: str, value: str) -> str:
        unset = [name for name in re.findall(r"\$\{?([A-Za-z_]\w*)", value) if name not in os.environ]
        if unset:
            raise ConfigError(f"reward server {self.url}: header {key} needs the environment variable {unset[0]}")
        return os.path.expandvars(value)


def _check_header_characters(headers: Mapping[str, str]) -> None:
    """Refuse what HTTP cannot carry. The message does not show values, which may be secret. Raises ValueError."""
    for key, value in headers.items():
        if not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", key):
            raise ValueError(f"{key!r} cannot be the name of a header")
        if not re.fullmatch(r"[\t\x20-\x7e]*", value):
            raise ValueError(f"the value of header {key} has characters that are not printable ASCII")


def _start(answer: bytes) -> str:
    return repr(answer[:SHOWN_ANSWER].decode(errors="replace"))
