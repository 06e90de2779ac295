"""Certificates of a cluster, made for one start of its scheduler: who has none is refused.

An authority signs one for each role, and its key is forgotten. A file holds a role's key, its
certificate and the authority's, so that one file is all that a host needs.
"""

from __future__ import annotations

import datetime
import os
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tuner.errors import DeviceError, InputError, ToolchainError
from tuner.machine.host import cache_folder
from tuner.storage import storage_errors

__all__ = [
    "AGENTS", "CONNECT_S", "SCHEDULER", "TUNER", "checked_certificate", "cluster_folder",
    "cluster_packages", "knock", "make", "not_there",
]  # fmt: skip

AUTHORITY = "tuner cluster"
SCHEDULER, AGENTS, TUNER = "scheduler.pem", "agents.pem", "tuner.pem"
VALID = datetime.timedelta(days=365)
CLOCKS_DIFFER = datetime.timedelta(days=1)  # between the hosts of a cluster


@contextmanager
def cluster_packages() -> Iterator[None]:
    """Turn a package that cannot be imported within the block into a `ToolchainError`."""
    try:
        yield
    except ImportError as error:
        raise ToolchainError(
            f"a cluster needs packages that are not installed: {error}\n"
            "  next: pip install 'tuner[cluster]'"
        ) from error


def cluster_folder() -> Path:
    """Return where a cluster's certificates are, if nothing else is said."""
    return cache_folder() / "cluster"


def make(folder: Path) -> None:
    """Write new certificates for the scheduler, the agents and the tuner, readable by us alone.

    Raises:
        ToolchainError: the package that makes them is not installed.
        StorageError: they cannot be written.
    """
    with cluster_packages():
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    now = datetime.datetime.now(datetime.UTC)

    def certificate(
        name: str, key: ec.EllipticCurvePrivateKey, authority: ec.EllipticCurvePrivateKey
    ) -> bytes:
        subject, issuer = (
            x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])
            for text in (name, AUTHORITY)
        )
        constraints = x509.BasicConstraints(ca=key is authority, path_length=None)
        identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
        signed = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - CLOCKS_DIFFER)
            .not_valid_after(now + VALID)
            .add_extension(constraints, critical=True)
            .add_extension(identifier, critical=False)
            .add_extension(signer, critical=False)
            .sign(authority, hashes.SHA256())
        )
        text: bytes = signed.public_bytes(serialization.Encoding.PEM)
        return text

    authority = ec.generate_private_key(ec.SECP256R1())
    of_authority = certificate(AUTHORITY, authority, authority)
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name in (SCHEDULER, AGENTS, TUNER):
            key = ec.generate_private_key(ec.SECP256R1())
            text = key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
            written = os.open(folder / f"{name}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with open(written, "wb") as file:
                file.write(text + certificate(name, key, authority) + of_authority)
            os.replace(folder / f"{name}.new", folder / name)


def checked_certificate(path: Path | None, name: str) -> Path:
    """Return the file of a role's certificate: the one that is named, or where it usually is.

    Raises:
        InputError: there is none.
    """
    found = path or cluster_folder() / name
    if not found.is_file():
        raise InputError(
            f"--certificate: no file {found}\n  expected: {name} of the folder that "
            "`tune cluster start` named on its host\n  next: copy it here, readable by you alone"
        )
    return found


# ---- before anything is built on a scheduler ------------------------------------------------


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
