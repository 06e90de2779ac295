"""The dashboard's server: a port of 127.0.0.1, until Ctrl-C."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import uvicorn

from tuner.errors import InputError, MachineError
from tuner.review.dashboard import Dashboard

__all__ = ["serve"]

DEFAULT_PORT = 8899
TRIED_PORTS = 20  # from the default one on, where it is taken
GRACE_S = 2  # for requests in flight, at the end


def serve(
    runs_dir: Path,
    *,
    configs: Path | None = None,
    port: int | None = None,
    on_ready: Callable[[str], None] = lambda address: None,
) -> int:
    """Serve the dashboard on 127.0.0.1 until Ctrl-C.

    Args:
        runs_dir: the folder of runs; it need not exist yet.
        configs: the folder whose configs may be started from the page.
        port: to listen on; 0 for any; None for the default one or the next that is free.
        on_ready: is given the address to open, token and all.

    Returns:
        How many runs that were started from the page were asked to stop at the end.

    Raises:
        InputError: `configs` is no folder.
        MachineError: the port is taken.
    """
    if configs is not None and not configs.is_dir():
        raise InputError(f"--configs {configs}: no such folder\n  next: name one with .yaml files")
    dashboard = Dashboard(runs_dir, configs)
    with _listening(port) as listener:
        number: int = listener.getsockname()[1]
        server = uvicorn.Server(
            uvicorn.Config(
                dashboard.app(number),
                log_level="warning",
                access_log=False,  # the first address holds the token
                server_header=False,
                timeout_graceful_shutdown=GRACE_S,
                lifespan="on",
                ws="none",
            )
        )
        dashboard.is_closing = lambda: server.should_exit
        on_ready(f"http://127.0.0.1:{number}/?token={dashboard.token}")
        with suppress(KeyboardInterrupt):  # raised when all is closed: it is how a server ends
            server.run(sockets=[listener])
    return dashboard.num_stopped


def _listening(port: int | None) -> socket.socket:
    wanted = range(DEFAULT_PORT, DEFAULT_PORT + TRIED_PORTS) if port is None else [port]
    for number in wanted:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", number))
            listener.listen()
        except OSError:
            listener.close()
            continue
        return listener
    raise MachineError(f"port {wanted[0]} is taken\n  next: --port 0 takes any that is free")
