"""Which hosts and addresses a fetch may reach: the guard against server-side request forgery (behaviour 3.6).

A fetch runs where the agent runs, inside somebody's network.  A URL that a model read somewhere must not
make it ask the cloud's metadata service or a neighbour's printer.  The guard looks at names first, then at
*every* address that a name resolves to, and returns the addresses that were looked at: the caller connects
to those and never resolves again, so no second answer of the name server can differ from the checked one.

Spellings are undone before anything is compared: full-width letters and dots (NFKC, IDNA), percent signs,
octal, hexadecimal and short IPv4 forms, and IPv4 addresses that travel inside IPv6 ones.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import unicodedata
from collections.abc import Awaitable, Callable, Collection, Sequence
from urllib.parse import unquote

from .base import HelperError
from .worker import in_thread

__all__ = ["Resolver", "allowed_addresses", "normalise_host", "resolve_host"]

Resolver = Callable[[str], Awaitable[Sequence[str]]]
"""From a host name to its addresses, A and AAAA; an :class:`OSError` or nothing means unresolvable."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

METADATA_HOST = "metadata.google.internal"
METADATA_ADDRESS = ipaddress.IPv4Address("169.254.169.254")

_PRIVATE_V4 = tuple(
    ipaddress.IPv4Network(network)
    for network in (
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",
        "127.0.0.0/8",
        "169.254.0.0/16",
        "172.16.0.0/12",
        "192.168.0.0/16",
        "198.18.0.0/15",
        "224.0.0.0/4",
        "240.0.0.0/4",
    )
)
_PRIVATE_V6 = tuple(
    ipaddress.IPv6Network(network)
    for network in (
        "::/128",
        "::1/128",
        "64:ff9b:1::/48",  # NAT64 for local use (RFC 8215): where it leads is the network's own matter
        "fc00::/7",
        "fe80::/10",
        "fec0::/10",
        "ff00::/8",
    )
)
_EMBEDDED = tuple(
    (ipaddress.IPv6Network(network), shift)
    for network, shift in (
        ("::/96", 0),  # IPv4-compatible, long deprecated
        ("::ffff:0:0/96", 0),  # IPv4-mapped
        ("::ffff:0:0:0/96", 0),  # IPv4-translated
        ("64:ff9b::/96", 0),  # NAT64
        ("2002::/16", 80),  # 6to4
    )
)
"""Networks whose addresses hold an IPv4 address, and how far left its 32 bits stand."""

_NUMBER = re.compile(r"0[xX][0-9a-fA-F]*|[0-9]+")
_NAME = re.compile(r"[a-z0-9_](?:[a-z0-9_.-]*[a-z0-9_])?")


def normalise_host(host: str) -> str | None:
    """Return the one spelling of `host` that is compared and connected to, or None if it is no host.

    Names come in lower case, in IDNA form, without trailing dots; addresses come canonical, IPv6 ones
    without brackets.
    """
    host = unicodedata.normalize("NFKC", unquote(host)).replace("。", ".").strip().lower()
    host = host.removeprefix("[").removesuffix("]").rstrip(".")
    if ":" in host:
        try:
            return str(ipaddress.IPv6Address(host))
        except ValueError:
            return None
    if not host.isascii():
        import idna

        try:
            host = idna.encode(host, uts46=True).decode("ascii").rstrip(".")
        except UnicodeError:  # idna's own errors are among them
            return None
    if _NAME.fullmatch(host) is None:
        return None
    if _NUMBER.fullmatch(host.rpartition(".")[2]):
        address = _ipv4(host)
        return None if address is None else str(address)
    return host


def _ipv4(host: str) -> ipaddress.IPv4Address | None:
    """Read an IPv4 address as ``inet_aton`` does: one to four parts, decimal, octal or hexadecimal."""
    parts = host.split(".")
    if len(parts) > 4:
        return None
    numbers: list[int] = []
    for part in parts:
        if _NUMBER.fullmatch(part) is None or len(part) > 40:
            return None
        try:
            if part[:2] in ("0x", "0X"):
                numbers.append(int(part[2:] or "0", 16))
            elif part.startswith("0"):
                numbers.append(int(part, 8))
            else:
                numbers.append(int(part))
        except ValueError:  # an 8 or 9 in an octal part
            return None
    *heads, last = numbers
    if any(head > 255 for head in heads) or last >= 256 ** (4 - len(heads)):
        return None
    value = last
    for place, head in enumerate(heads):
        value |= head << (24 - 8 * place)
    return ipaddress.IPv4Address(value)


def _forms(address: Address) -> list[Address]:
    """Return `address` and the IPv4 address it embeds, if any."""
    forms: list[Address] = [address]
    if isinstance(address, ipaddress.IPv6Address):
        for network, shift in _EMBEDDED:
            if address in network:
                forms.append(ipaddress.IPv4Address(int(address) >> shift & 0xFFFF_FFFF))
    return forms


def is_metadata(address: Address) -> bool:
    """Tell whether an address is that of a cloud's metadata service, also inside an IPv6 address."""
    return METADATA_ADDRESS in _forms(address)


def is_private(address: Address) -> bool:
    """Tell whether an address is on the list of behaviour 3.6 (``ipaddress.is_global`` is no substitute)."""
    for form in _forms(address):
        if isinstance(form, ipaddress.IPv4Address):
            if any(form in network for network in _PRIVATE_V4):
                return True
        elif any(form in network for network in _PRIVATE_V6):
            return True
    return False


async def resolve_host(host: str) -> Sequence[str]:
    """Return the addresses that the system's resolver knows for `host`; blocking work, done in a thread."""
    found = await in_thread(socket.getaddrinfo, host, None, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


async def allowed_addresses(
    host: str, resolver: Resolver, *, allow_private: bool, allowed_hosts: Collection[str]
) -> list[str]:
    """Return the addresses of the normalised `host` that may be connected to.

    Raises :class:`HelperError` if the name or any one of its addresses is blocked, or if it has none.
    """
    if host == METADATA_HOST:
        raise HelperError(f"Blocked hostname: {host}")
    trusted = allow_private or host in {normalise_host(one) for one in allowed_hosts}
    local = host == "localhost" or host.endswith((".localhost", ".local", ".internal"))
    if local and not trusted:
        raise HelperError(f"Blocked hostname: {host}")
    addresses: list[Address] = []
    for spelled in [host] if _is_address(host) else await _resolved(host, resolver):
        try:
            # A scope (fe80::1%eth0) names an interface of this machine; what counts is the address.
            address = ipaddress.ip_address(spelled.partition("%")[0])
        except ValueError:
            raise HelperError(f"Unable to resolve hostname: {host}") from None
        if address not in addresses:
            addresses.append(address)
    if not addresses:
        raise HelperError(f"Unable to resolve hostname: {host}")
    if any(is_metadata(address) for address in addresses):
        raise HelperError("Blocked: resolves to metadata IP address")
    if not trusted and any(is_private(address) for address in addresses):
        raise HelperError("Blocked: resolves to private/internal IP address")
    return [str(address) for address in addresses]


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


async def _resolved(host: str, resolver: Resolver) -> Sequence[str]:
    try:
        return await resolver(host)
    except (OSError, UnicodeError):
        raise HelperError(f"Unable to resolve hostname: {host}") from None
