"""One request to a server, timed from outside: llama-server's /completion as a stream, on a connection of its own.

Only the standard library, so that it measures any server that speaks llama-server's format from any machine. Times are
those of the client: from the moment the request is sent to the arrival of each event.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

from overspill.errors import UserError

_PATIENCE_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One answered request. start_s, first_s, end_s: on the clock of the machine; gaps_s: between tokens.

    n_prompt, n_cached, n_generated, prompt_per_second: as the server counts.
    """

    start_s: float
    first_s: float
    end_s: float
    gaps_s: tuple[float, ...]
    n_prompt: int
    n_cached: int
    n_generated: int
    prompt_per_second: float

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.first_s - self.start_s


class ServerUnderTest:
    """A server by its URL. Every failure is a UserError that names it."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"--server {url}: give a URL such as http://127.0.0.1:8080")
        self.url = url
        self._host, self._prefix = parts.netloc.rpartition("@")[2], parts.path.rstrip("/")
        self._connection = HTTPConnection if parts.scheme == "http" else HTTPSConnection
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def model(self) -> str:
        """The name of the model it serves."""
        return str(self._whole("GET", "/v1/models", None)["data"][0]["id"])

    def tokenize(self, text: str) -> list[int]:
        """Ids of a text."""
        return list(self._whole("POST", "/tokenize", {"content": text})["tokens"])

    def complete(self, ids: Sequence[int], n_predict: int) -> Sample:
        """Time one greedy answer of exactly `n_predict` tokens; nothing is reused from earlier prompts."""
        body = {
            "prompt": list(ids),
            "n_predict": n_predict,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "cache_prompt": False,
        }
        payload = json.dumps(body)
        connection = self._connection(self._host, timeout=_PATIENCE_S)
        start_s = time.perf_counter()
        try:
            response = self._ask(connection, "POST", "/completion", payload)
            return self._timed(response, start_s)
        except (OSError, HTTPException) as error:
            raise UserError(f"--server {self.url}: the connection broke ({_told(error)})") from None
        finally:
            connection.close()

    def _timed(self, response: HTTPResponse, start_s: float) -> Sample:
        arrivals: list[float] = []
        for event in _events(response):
            if "error" in event:
                raise UserError(f"--server {self.url}: {event['error'].get('message', event['error'])}")
            if event.get("stop"):
                return _sample(event, start_s, arrivals, time.perf_counter())
            if event.get("tokens") or event.get("content"):
                arrivals.append(time.perf_counter())
        raise UserError(f"--server {self.url}: a stream ended in the middle of an answer")

    def _whole(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        connection = self._connection(self._host, timeout=_PATIENCE_S)
        try:
            response = self._ask(connection, method, path, None if body is None else json.dumps(body))
            return json.loads(response.read())
        except (OSError, HTTPException) as error:
            raise UserError(f"--server {self.url}: cannot be reached ({_told(error)})") from None
        except ValueError:
            raise UserError(f"--server {self.url}: {path} answered no JSON; is it llama-server or overspill?") from None
        finally:
            connection.close()

    def _ask(self, connection: HTTPConnection, method: str, path: str, payload: str | None) -> HTTPResponse:
        connection.request(method, self._prefix + path, payload, self._headers)
        response = connection.getresponse()
        if response.status != 200:
            message = _message(response.read().decode("utf-8", "replace"))
            raise UserError(f"--server {self.url}: {path} answered {response.status}: {message}")
        return response


def _events(response: HTTPResponse) -> Iterator[dict[str, Any]]:
    """The data of a stream of events."""
    for line in response:
        if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
            yield json.loads(line.removeprefix(b"data: "))


def _sample(last: dict[str, Any], start_s: float, arrivals: list[float], end_s: float) -> Sample:
    timings = last.get("timings", {})
    return Sample(
        start_s=start_s,
        first_s=arrivals[0] if arrivals else end_s,
        end_s=end_s,
        gaps_s=tuple(after - before for before, after in pairwise(arrivals)),
        n_prompt=int(timings.get("prompt_n", 0)),
        n_cached=int(timings.get("cache_n", 0)),
        n_generated=int(timings.get("predicted_n", len(arrivals))),
        prompt_per_second=float(timings.get("prompt_per_second", 0.0)),
    )


def _message(body: str) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return " ".join(body.split())[:200]


def _told(error: Exception) -> str:
    return str(error) or type(error).__name__
