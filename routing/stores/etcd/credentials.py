"""Who we are to etcd: certificates and password.

Files are read whenever a connection is made, never kept: certificates that are replaced while the node runs are used from
the next connection on.
"""

from dataclasses import dataclass
from pathlib import Path

from routing.stores import StoreError


@dataclass(frozen=True)
class Certificates:
    """What TLS needs, PEM: `authorities` may sign the server's certificate; `key` and `chain` are the client's."""

    authorities: bytes | None
    key: bytes | None
    chain: bytes | None


@dataclass(frozen=True)
class Credentials:
    """The options ``--etcd-cafile``, ``--etcd-certfile``, ``--etcd-keyfile``, ``--etcd-username``, ``--etcd-password``.

    A CA file alone is enough for TLS; without one the system's authorities count. Raises ValueError where one of a pair is
    missing.
    """

    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    username: str | None = None
    password: str | None = None

    def __post_init__(self) -> None:
        for name, other, one, two in (
            ("--etcd-certfile", "--etcd-keyfile", self.cert_file, self.key_file),
            ("--etcd-username", "--etcd-password", self.username, self.password),
        ):
            if (one is None) != (two is None):
                given, missing = (name, other) if two is None else (other, name)
                raise ValueError(f"{given} is given without {missing}")

    def read_certificates(self) -> Certificates:
        """The files as they are now. Raises StoreError naming the file and the option."""
        return Certificates(
            _read("--etcd-cafile", self.ca_file or _system_authorities()),
            _read("--etcd-keyfile", self.key_file),
            _read("--etcd-certfile", self.cert_file),
        )

    def __repr__(self) -> str:
        return f"Credentials(username={self.username!r}, ca_file={self.ca_file}, cert_file={self.cert_file})"


def _system_authorities() -> Path | None:
    """Where the system keeps whom it trusts; None leaves it to gRPC, which brings a list of its own."""
    import ssl  # noqa: PLC0415 - two mebibytes that only https without a CA file needs

    path = ssl.get_default_verify_paths().cafile
    return Path(path) if path else None


def _read(option: str, path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        content = path.read_bytes()
    except OSError as error:
        raise StoreError(f"{option}: {path} cannot be read: {error.strerror or error}") from None
    if b"-----BEGIN " not in content:
        raise StoreError(f"{option}: {path} is not a PEM file")
    return content
