"""Where etcd is, from the value of ``--etcd-endpoints``.

A list separated by commas, with spaces and quotes stripped that shells and unit files leave in it. An endpoint is
``http://host:port``, ``https://host:port`` or ``host:port``, which means http as it does for etcdctl.

A user and password have options of their own. In an endpoint they are refused before anything else is looked at, since what
is said about an endpoint quotes it, and goes to logs.
"""

import re
from dataclasses import dataclass
from ipaddress import IPv6Address

_FORM = "http://HOST:PORT, https://HOST:PORT or HOST:PORT"
_SCHEMES = ("http", "https")
_JUNK = " \t\r\n'\"“”‘’"
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?\.?")


@dataclass(frozen=True)
class Endpoint:
    """One server; `host` is a name or an address, an IPv6 address without brackets."""

    host: str
    port: int
    is_tls: bool = False

    @property
    def target(self) -> str:
        """As gRPC wants it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"{'https' if self.is_tls else 'http'}://{self.target}"


def parse_endpoints(text: str) -> tuple[Endpoint, ...]:
    """The endpoints in `text`, each once. Raises ValueError saying which part is off."""
    _refuse_secrets(text)  # the whole of it: a password may have a comma in it
    parts = [part.strip(_JUNK) for part in text.strip(_JUNK).split(",")]
    found = dict.fromkeys(parse_endpoint(part) for part in parts if part)
    if not found:
        raise ValueError(f"{text!r} names no endpoint of etcd: give {_FORM}, several with commas between them")
    return tuple(found)


def parse_endpoint(text: str) -> Endpoint:
    """One endpoint. Raises ValueError."""
    _refuse_secrets(text)
    scheme, separator, rest = text.rpartition("://")
    if separator and scheme.lower() not in _SCHEMES:
        raise ValueError(f"{text!r}: etcd is reached by http or https, not {scheme!r}; give {_FORM}")
    host, colon, port_text = rest.removesuffix("/").rpartition(":")
    if not colon or not (port_text.isascii() and port_text.isdigit()) or not 0 < int(port_text) < 65536:
        raise ValueError(f"{text!r} has no port (etcd's is 2379): give {_FORM}")
    return Endpoint(_host(host, text), int(port_text), scheme.lower() == "https")


def _refuse_secrets(text: str) -> None:
    """Raises ValueError, which does not quote `text`, if there is a user in it: no host's name has an @."""
    if "@" in text:
        raise ValueError(
            f"a user and password do not go into an endpoint, but into --etcd-username and --etcd-password; give {_FORM}"
        )


def _host(text: str, whole: str) -> str:
    if text.startswith("[") and text.endswith("]"):
        try:
            return str(IPv6Address(text[1:-1]))
        except ValueError:
            raise ValueError(f"{whole!r}: {text} is not an IPv6 address in brackets") from None
    if ":" in text:
        raise ValueError(f"{whole!r}: an IPv6 address stands in brackets, like [2001:db8::1]:2379")
    if not _HOST.fullmatch(text):
        raise ValueError(f"{whole!r}: {text!r} is neither a host name nor an address; give {_FORM}")
    return text
