"""Which addresses are on the public internet: all that may be dialled where nobody named a private one.

Rule: an address is judged after it is parsed, in its innermost form: IPv4 hidden in IPv6 (mapped, NAT64, 6to4, Teredo)
is judged as the IPv4 address it leads to. (Registries: RFC 6890 and its successors; NAT64: RFC 6052.)
"""

import ipaddress
from typing import Final

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

# RFC 8215 leaves it to each network where in 64:ff9b:1::/48 the IPv4 address stands (RFC 6052 §2.2). Only of its first
# /96 every reading but the last 32 bits is no address; whatever else of it is not judged, and so not public.
_NAT64: Final = (ipaddress.IPv6Network("64:ff9b::/96"), ipaddress.IPv6Network("64:ff9b:1::/96"))
_UNICAST: Final = ipaddress.IPv6Network("2000::/3")  # RFC 4291 §2.4: all that was ever given out of IPv6
_COMPATIBLE: Final = ipaddress.IPv6Network("::/96")
_TRANSLATED: Final = ipaddress.IPv6Network("::ffff:0:0:0/96")  # RFC 2765
_NEVER: Final = tuple(
    ipaddress.ip_network(network)
    for network in (
        "0.0.0.0/8",
        "100.64.0.0/10",  # carrier-grade NAT, where some clouds keep their metadata service
        "168.63.129.16/32",  # a public address that answers as one cloud's metadata service
        "192.0.0.0/24",
        "192.88.99.0/24",
        "198.18.0.0/15",
        "240.0.0.0/4",
        "fec0::/10",
        "fd00:ec2::/32",  # metadata over IPv6
        "5f00::/16",
        "3fff::/20",  # for documentation (RFC 9637)
    )
)


def is_public(text: str) -> bool:
    """Whether the address (as `getaddrinfo` gives it, zone id included) is on the public internet."""
    if "%" in text:  # a zone id: link-local by definition
        return False
    address = _innermost(ipaddress.ip_address(text))
    if any(address in network for network in _NEVER if network.version == address.version):
        return False
    if address.version == 6 and address not in _UNICAST:
        return False
    return address.is_global and not address.is_multicast


def _innermost(address: IPAddress) -> IPAddress:
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address.sixtofour is not None:
        return address.sixtofour
    if address.teredo is not None:
        return address.teredo[1]
    if address in _COMPATIBLE or address in _TRANSLATED or any(address in network for network in _NAT64):
        return ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
    return address
