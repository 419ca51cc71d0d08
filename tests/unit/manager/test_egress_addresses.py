"""Which addresses a tenant may have dialled: one rule, every spelling (S12)."""

from __future__ import annotations

import socket
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

import pytest

from manager.egress.addresses import REFUSED_V4, Address, is_public, unmapped

PUBLIC = (
    "1.1.1.1", "8.8.8.8", "9.255.255.255", "11.0.0.0", "100.63.255.255", "100.128.0.0", "126.255.255.255", "128.0.0.0",
    "168.63.129.15", "169.253.255.255", "169.255.0.0", "172.15.255.255", "172.32.0.0", "192.0.1.0", "192.167.255.255",
    "192.169.0.0", "198.17.255.255", "198.20.0.0", "223.255.255.255",
    "2606:4700:4700::1111", "2001:4860:4860::8888", "2a00:1450::1", "2400::", "2001:200::1",
    "::ffff:8.8.8.8", "64:ff9b::8.8.8.8", "2002:808:808::1",
)  # fmt: skip
REFUSED = (
    "0.0.0.0", "0.1.2.3", "10.0.0.0", "10.255.255.255", "100.64.0.0", "100.100.100.200", "100.127.255.255",
    "127.0.0.1", "127.255.255.254", "168.63.129.16", "169.254.169.254", "169.254.170.2", "169.254.0.1",
    "172.16.0.1", "172.17.0.1", "172.31.255.255", "192.0.0.1", "192.0.0.170", "192.0.0.192", "192.0.2.1",
    "192.88.99.1", "192.168.0.1", "192.168.255.255", "198.18.0.1", "198.19.255.255", "198.51.100.7", "203.0.113.9",
    "224.0.0.1", "239.255.255.250", "240.0.0.1", "255.255.255.255",
    "::", "::1", "::7f00:1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254", "::ffff:0:0",
    "::ffff:0:127.0.0.1", "64:ff9b::127.0.0.1", "64:ff9b::a9fe:a9fe", "64:ff9b::10.1.2.3", "64:ff9b:1::1",
    "64:ff9b:1:fffe::a9fe:a9fe", "2002:7f00:1::1", "2002:a9fe:a9fe::", "2002:c0a8:101::1", "2002:a00:1::1",
    "100::1", "2001::1", "2001:0:7f00:1::1", "2001:2::1", "2001:10::1", "2001:20::1", "2001:db8::1", "3fff::1",
    "5f00::1", "fc00::1", "fd00::1", "fd00:ec2::254", "fe80::1", "fe80::1%eth0", "fec0::1", "ff02::1", "ff0e::1",
    "2606:4700:4700::1111%eth0", "4000::1", "fd20:ce::254",
)  # fmt: skip
# What inet_aton and getaddrinfo take for an address. Whoever checks the text is fooled by some of them.
SPELLINGS = (
    "127.0.0.1", "127.1", "127.0.1", "2130706433", "0x7f000001", "0x7f.1", "0x7f.0x0.0x0.0x1", "0177.0.0.1",
    "017700000001", "0177.1", "00000177.0.0.1", "0x7F.0.0.1", "127.0.0.01", "0", "0x0", "0.0.0.0", "00.00.00.00",
    "169.254.169.254", "2852039166", "0xa9fea9fe", "0xa9.0xfe.0xa9.0xfe", "0251.0376.0251.0376", "0251.254.169.254",
    "169.254.43518", "169.16689662", "0xA9FEA9FE", "10.1", "0xa.1", "012.0.0.1", "167772161", "192.168.257",
    "3232235777", "0xc0.0xa8.0x1.0x1", "172.1048577", "1681915906", "0x64.0x40.1", "100.4194305", "4294967295",
    "::1", "0:0:0:0:0:0:0:1", "::", "::ffff:7f00:1", "::FFFF:127.0.0.1", "0:0:0:0:0:ffff:127.0.0.1",
    "::ffff:169.254.169.254", "::ffff:a9fe:a9fe", "64:ff9b::127.0.0.1", "64:ff9b:0:0:0:0:a9fe:a9fe",
    "2002:7f00:0001::", "fd00:ec2::254", "FD00:EC2:0:0:0:0:0:254", "fe80::1", "::127.0.0.1",
)  # fmt: skip


@pytest.mark.parametrize("text", PUBLIC)
def test_an_address_of_the_internet_is_public(text: str) -> None:
    assert is_public(ip_address(text))


@pytest.mark.parametrize("text", REFUSED)
def test_an_address_that_is_anybodys_own_is_not(text: str) -> None:
    assert not is_public(ip_address(text))


@pytest.mark.parametrize("text", SPELLINGS)
def test_no_spelling_of_such_an_address_comes_through_once_it_is_resolved(text: str) -> None:
    found = socket.getaddrinfo(text, 80, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    assert found
    for *_, where in found:
        assert not is_public(ip_address(where[0]))


@pytest.mark.parametrize(
    ("text", "stands_for"),
    [
        ("::ffff:1.2.3.4", "1.2.3.4"), ("64:ff9b::1.2.3.4", "1.2.3.4"), ("2002:102:304::9", "1.2.3.4"),
        ("2606::1", "2606::1"), ("1.2.3.4", "1.2.3.4"), ("64:ff9b:1::1", "64:ff9b:1::1"),
    ],
)  # fmt: skip
def test_an_address_that_stands_for_another_is_judged_as_that_one(text: str, stands_for: str) -> None:
    assert unmapped(ip_address(text)) == ip_address(stands_for)


@pytest.mark.parametrize("text", ["11.1.2.3", "::ffff:11.1.2.3", "64:ff9b::11.1.2.3", "2002:b01:203::", "2606:1::5"])
def test_an_operator_can_refuse_more(text: str) -> None:
    assert is_public(ip_address(text))
    assert not is_public(ip_address(text), [ip_network("11.1.0.0/16"), ip_network("2606:1::/32")])


def test_nothing_that_python_itself_calls_private_is_public() -> None:
    """Sampled all over both address spaces, with what stands for another address left out."""
    step = 0x0101_0101 * 3
    addresses: list[Address] = [IPv4Address(number) for number in range(0, 1 << 32, step)]
    addresses += [IPv6Address((number << 112) | 0x5) for number in range(0, 1 << 16, 7)]
    addresses += [network[0] for network in REFUSED_V4] + [network[-1] for network in REFUSED_V4]
    for address in addresses:
        if unmapped(address) is address and is_public(address):
            assert address.is_global
            assert not address.is_multicast
