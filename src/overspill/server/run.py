"""The server as a process: it listens at once, ends cleanly on SIGTERM and SIGINT, and says why it cannot start."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager

import uvicorn

from overspill.errors import UserError
from overspill.server.app import create_app
from overspill.server.host import DeviceLost, Host
from overspill.server.settings import ServerSettings

_PATIENCE_S = 5


def run_server(host: Host, settings: ServerSettings) -> None:
    """Serve until told to end. Raises what kept the model from loading, UserError for an address not to be had.

    Ends the process, with code 1, when a device was lost: to free what lies there may abort, or never return.
    """
    listener = listen(settings)
    config = uvicorn.Config(
        create_app(host, settings),
        log_level="warning",
        ws="none",
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=_PATIENCE_S,
    )
    server = Server(config, host)
    host.start(on_failure=server.end)
    asyncio.run(server.serve(sockets=[listener]))
    if isinstance(host.failure, DeviceLost):
        print(f"overspill: {host.failure}", file=sys.stderr, flush=True)
        os._exit(1)
    if host.failure is not None:
        raise host.failure


class Server(uvicorn.Server):
    """Ends what is being generated when it is told to end; a signal is then no cause to die of."""

    def __init__(self, config: uvicorn.Config, host: Host) -> None:
        super().__init__(config)
        self._host = host

    def end(self) -> None:
        """Stop soon; from any thread."""
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        if threading.current_thread() is not threading.main_thread():  # which alone may handle signals
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Says where it listens once signals are in good hands."""
        await super().startup(sockets=sockets)
        for listener in sockets or []:
            host, port = listener.getsockname()[:2]
            print(f"overspill: listening on http://{host}:{port}", file=sys.stderr, flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await asyncio.to_thread(self._host.close)
        await super().shutdown(sockets=sockets)


def listen(settings: ServerSettings) -> socket.socket:
    """A socket at the address; UserError if it cannot be had.

    It names its protocol: asyncio turns Nagle's algorithm off only for sockets that do, and with it on, every answer
    and every token waits for the client's delayed acknowledgement, 40 ms on Linux.
    """
    try:
        family = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0][0]
        return _bound(socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP), settings)
    except OSError as error:
        raise UserError(f"--host {settings.host} --port {settings.port}: {error}; choose another address") from None


def _bound(listener: socket.socket, settings: ServerSettings) -> socket.socket:
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host, settings.port))
        listener.listen(2048)
    except OSError:
        listener.close()
        raise
    return listener
