"""Which addresses are public, in every spelling that leads somewhere else."""

import pytest

from control_plane.contract.address import is_public

ADDRESS = "control_plane/contract/address.py"


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "127.255.255.254", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1"),
        *("100.100.100.200", "0.0.0.0", "0.1.2.3", "192.0.0.192", "198.18.0.1", "224.0.0.1", "240.0.0.1"),
        *("255.255.255.255", "192.0.2.1", "203.0.113.7", "192.88.99.1", "::", "::1", "fe80::1", "fe80::1%eth0"),
        *("fd00::1", "fd00:ec2::254", "fec0::1", "ff02::1", "2001:db8::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1"),
        *("::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::a00:1", "2002:7f00:1::"),
        *(
            "2002:a9fe:a9fe::1",
            "168.63.129.16",
            "::ffff:0:a9fe:a9fe",
            "::ffff:0:7f00:1",
            "2001:0:4136:e378:8000:63bf:3fff:fdd2",
            "100::1",
            "5f00::1",
            "3fff::1",
        ),
    ],
)
@pytest.mark.guards(
    ADDRESS, "    address = _innermost(ipaddress.ip_address(text))\n", "    address = ipaddress.ip_address(text)\n"
)
def test_a_private_address_is_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        # 10.0.0.1 and 169.254.169.254 where a network's own NAT64 has a prefix of /48, /56 and /64 (RFC 6052 §2.2); the
        # last 32 bits, which it does not read, are somebody's public address.
        *("64:ff9b:1:a00:0:100:808:808", "64:ff9b:1:a9fe:a9:fe00:808:808"),
        *("64:ff9b:1:a:0:1:808:808", "64:ff9b:1:a9:fe:a9fe:808:808", "64:ff9b:1:0:a:0:108:808"),
        *("1::1", "4000::1", "::ffff:1:808:808", "100:0:0:1::1"),
    ],
)
@pytest.mark.guards(ADDRESS, "if address.version == 6 and address not in _UNICAST:", "if False:")
def test_what_is_no_unicast_address_of_the_internet_is_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        "1.1.1.1",
        "8.8.8.8",
        "142.250.1.1",
        "2606:4700::1111",
        "::ffff:8.8.8.8",
        "64:ff9b::808:808",
        "64:ff9b:1::808:808",
    ],
)
def test_a_public_address_is_public(address: str) -> None:
    assert is_public(address)
