"""What a person may set about the server itself; the model's options are `Options`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from overspill.errors import UserError


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """host, port: where to listen; port 0 takes a free one. api_keys: any of them opens; none: open to all.

    name: what the model is called in answers. api_prefix: put before every path. ping_s: longest silence of a stream.
    has_page: whether there is one at /. max_body_bytes: of a request. defaults: fields that requests have unless they
    say otherwise. Raises UserError naming the flag.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    api_keys: frozenset[str] = frozenset()
    name: str = ""
    api_prefix: str = ""
    ping_s: float = 10.0
    has_page: bool = True
    max_body_bytes: int = 64 << 20
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise UserError(f"--port {self.port}: give a number from 0 to 65535")
        if self.api_prefix and (not self.api_prefix.startswith("/") or self.api_prefix.endswith("/")):
            raise UserError(f"--api-prefix {self.api_prefix}: begin with '/' and end without it")
        if not self.ping_s > 0:
            raise UserError(f"--sse-ping-interval {self.ping_s}: give seconds, more than 0")
        if "" in self.api_keys:
            raise UserError("--api-key: a key is empty; give keys separated by ','")
