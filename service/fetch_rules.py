"""What may be fetched: which URLs, from which hosts, at which addresses. Pure functions; service.fetch obeys them.

Invariant: a URL is read once, by one strict grammar, and what was read is what is checked and dialled. Nothing is taken
for public that is not certainly so.
"""

import ipaddress
import re
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from typing import Literal
from urllib.parse import quote, urljoin

IPAddress = IPv4Address | IPv6Address

_MAX_URL_CHARS = 8192
_MAX_HOST_CHARS = 253
_PORTS = {"http": 80, "https": 443}

_URL = re.compile(r"(?P<scheme>https?)://(?P<place>[^/?#]*)(?P<target>[^#]*)(?:#.*)?", re.IGNORECASE)
_PLACE = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<name>[^\[\]:@%]+))(?::(?P<port>[0-9]{1,5}))?")
_NOT_IN_URLS = re.compile(r"[\x00-\x20\x7f\\]")
_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_AS_THEY_ARE = "!#$%&'()*+,/:;=?@[]~"

# What ipaddress calls global, in one release or another, and is not to be asked for an image all the same.
_CLOSED_IPV4 = tuple(
    map(
        ipaddress.IPv4Network,
        (
            "100.64.0.0/10",  # carrier-grade NAT; Alibaba's metadata
            "168.63.129.16/32",  # Azure's host
            "192.0.0.0/24",  # protocol assignments; Oracle's metadata
            "192.31.196.0/24",  # AS112
            "192.52.193.0/24",  # multicast tunnels
            "192.88.99.0/24",  # 6to4 relays
            "192.175.48.0/24",  # AS112
            "198.18.0.0/15",  # benchmarks
        ),
    )
)
_UNICAST_IPV6 = ipaddress.IPv6Network("2000::/3")  # all that has been given out; NAT64, mapped and local lie outside
_CLOSED_IPV6 = tuple(
    map(
        ipaddress.IPv6Network,
        (
            "2001::/23",  # protocol assignments: Teredo, ORCHID, benchmarks
            "2001:db8::/32",  # documentation
            "2002::/16",  # 6to4
            "2620:4f:8000::/48",  # AS112
            "3fff::/20",  # documentation
        ),
    )
)
_ISATAP = (0x00005EFE, 0x02005EFE)  # bits 32 to 63 of an address that carries an IPv4 address


def is_public_address(address: IPAddress) -> bool:
    """Whether an address is one host on the public internet: nothing private, local, shared, reserved, tunnelled,
    translated, for many hosts, or known as a cloud's metadata service. By IANA's special-purpose registries.
    """
    if not address.is_global or address.is_multicast or address.is_reserved:
        return False
    if isinstance(address, IPv4Address):
        return not any(address in network for network in _CLOSED_IPV4)
    if address.scope_id is not None or address not in _UNICAST_IPV6:
        return False
    return (int(address) >> 32) & 0xFFFFFFFF not in _ISATAP and not any(address in each for each in _CLOSED_IPV6)


@dataclass(frozen=True, slots=True)
class WebUrl:
    """A URL taken apart.

    Args:
        host: a name in lower case and ASCII without a final dot, or an address in its usual form without brackets.
        port: the scheme's own where the URL gives none.
        target: path and query as they go into a request, ASCII.
    """

    scheme: Literal["http", "https"]
    host: str
    port: int
    target: str

    @property
    def address(self) -> IPAddress | None:
        """The host, if it is an address."""
        return _address(self.host)

    @property
    def place(self) -> str:
        """Host and port as they go into a Host header: the port only where it is not the scheme's own."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"

    def join(self, location: str) -> "WebUrl":
        """Where a redirect from here leads. Raises as parse_url does."""
        if _NOT_IN_URLS.search(location):
            raise ValueError("a redirect to something that is no URL")
        return parse_url(urljoin(f"{self.scheme}://{self.place}{self.target}", location))


def parse_url(text: str) -> WebUrl:
    """Take an http or https URL apart.

    Raises:
        ValueError: it is another kind of URL, holds a user name, or is not written as a URL should be.
    """
    found = None if len(text) > _MAX_URL_CHARS or _NOT_IN_URLS.search(text) else _URL.fullmatch(text)
    if found is None:
        raise ValueError("not an http or https URL")
    host, port = _parse_place(found["place"])
    scheme: Literal["http", "https"] = "https" if found["scheme"].lower() == "https" else "http"
    target = quote(found["target"], _AS_THEY_ARE)
    return WebUrl(scheme, host, port or _PORTS[scheme], target if target.startswith("/") else f"/{target}")


@dataclass(frozen=True, slots=True)
class HostRule:
    """One entry of the list of hosts: this host or, if is_suffix, all whose names end in `.host`; at this port, or at
    the two usual ones if it is None.
    """

    host: str
    is_suffix: bool
    port: int | None

    @property
    def address(self) -> IPAddress | None:
        """The host, if it is an address."""
        return _address(self.host)

    def allows(self, url: WebUrl) -> bool:
        """Whether the URL's host and port are these. What the host's addresses are is another question."""
        is_host = url.host.endswith(f".{self.host}") if self.is_suffix else url.host == self.host
        return is_host and url.port in (_PORTS.values() if self.port is None else (self.port,))


def parse_hosts(text: str) -> tuple[HostRule, ...]:
    """Read a list of hosts: names, `*.name` or addresses, each perhaps with `:port`, separated by commas.

    Raises:
        ValueError: an entry is none of these, or there is no entry; the message names --fetch-hosts.
    """
    rules = []
    for entry in filter(None, map(str.strip, text.split(","))):
        is_suffix = entry.startswith("*.")
        try:
            host, port = _parse_place(entry.removeprefix("*."))
            if port == 0 or (is_suffix and _address(host) is not None):
                raise ValueError("neither a port nor a name")
        except ValueError:
            raise ValueError(
                f"--fetch-hosts: {entry!r} is not a host: a name, *.name or an address, perhaps with :port"
            ) from None
        rules.append(HostRule(host, is_suffix, port))
    if not rules:
        raise ValueError("--fetch-hosts names no host")
    return tuple(rules)


def _parse_place(text: str) -> tuple[str, int | None]:
    found = _PLACE.fullmatch(text)
    if found is None:
        raise ValueError("not host or host:port")
    host = str(IPv6Address(found["six"])) if found["six"] else _plain_host(found["name"])
    port = int(found["port"]) if found["port"] else None
    if port is not None and port > 65535:
        raise ValueError("not a port")
    return host, port


def _plain_host(name: str) -> str:
    """A name as it goes over the wire. Names that some read as numbers are none, but for addresses in usual form."""
    if len(name) > _MAX_HOST_CHARS:
        raise ValueError("too long for a name")
    name = name.encode("idna").decode("ascii").lower().removesuffix(".")
    labels = name.split(".")
    if not all(map(_LABEL.fullmatch, labels)):
        raise ValueError("not a name")
    if _NUMBER.fullmatch(labels[-1]):
        return str(IPv4Address(name))
    return name


def _address(host: str) -> IPAddress | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
