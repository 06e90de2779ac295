"""A handshake with a cluster's scheduler, before anything is built on it."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

from tuner.errors import DeviceError, InputError

__all__ = ["CONNECT_S", "knock", "not_there"]

CONNECT_S = 20.0


def knock(address: str, certificate: Path) -> None:
    """Shake hands with a scheduler once, so that a refusal is known at once, with its reason.

    Raises:
        InputError: the address is none.
        DeviceError: nobody is there, or one of both does not take the other's certificate.
    """
    if not address.startswith("tls://"):
        raise InputError(
            f"{address}: not an address of a cluster\n"
            "  expected: tls://HOST:PORT, as `tune cluster start` prints it"
        )
    host, _, port = address.removeprefix("tls://").rpartition(":")
    try:
        context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=certificate)
        context.check_hostname = False  # an authority of one cluster signs for that one alone
        context.load_cert_chain(certificate)
        with socket.create_connection((host.strip("[]"), int(port)), CONNECT_S) as connection:
            with context.wrap_socket(connection) as encrypted:
                if not encrypted.recv(1):  # it speaks first
                    raise ConnectionError("it closed the connection")
    except (OSError, ValueError) as error:
        raise DeviceError(not_there(address, certificate, error)) from error


def not_there(address: str, certificate: Path, error: BaseException) -> str:
    """Say that no scheduler answers, and why."""
    return (
        f"{address}: no scheduler answers there that takes {certificate}\n"
        f"  {type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no answer'}\n"
        "  next: take address and certificate from the cluster's last start"
    )
