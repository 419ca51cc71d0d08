"""Names and rules of pods' networks, and what the kernel says of a removed table: pure."""

from __future__ import annotations

import struct
from ipaddress import IPv4Network

import pytest

from manager.egress.addresses import REFUSED_V4
from manager.errors import CapacityExhausted
from manager.providers.local import routed, ruleset
from manager.providers.local.network import network_for, proxy_environment
from manager.providers.local.nftwatch import removed_tables


def test_every_name_comes_from_the_pods_and_fits_its_place() -> None:
    one = network_for("routed", "p" * 63 + "-01234567", bytes_per_sec=1, connections=1)
    assert one == network_for("routed", "p" * 63 + "-01234567", bytes_per_sec=1, connections=1)
    assert one.link.startswith("sj-")
    assert len(one.link) == 15, "the kernel takes no longer ones"
    assert len(one.netns) <= 255
    assert one.netns_path == f"/run/netns/{one.netns}"
    links = {network_for("routed", f"p{n}-01234567", bytes_per_sec=1, connections=1).link for n in range(1000)}
    assert len(links) == 1000
    assert network_for("proxy", "p1", bytes_per_sec=1, connections=1).netns_path == ""


def test_commands_are_told_of_the_proxy_in_every_way_that_programs_look_for() -> None:
    env = proxy_environment()
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        assert env[name] == "http://127.0.0.1:3128"
    assert "127.0.0.1" in env["NO_PROXY"]


def test_the_filter_refuses_all_that_is_not_public() -> None:
    text = ruleset.table([])
    for network in REFUSED_V4:
        assert str(network) in text
    assert "add element inet sojourn guarded" not in text
    assert 'guarded { "eth0", "wlan0" }' in ruleset.table(["eth0", "wlan0"])


def test_an_address_is_free_where_no_route_leads_into_it() -> None:
    taken = [
        routed._Route(IPv4Network("0.0.0.0/0"), "eth0"),
        routed._Route(IPv4Network("10.9.0.0/30"), "sj-one"),
        routed._Route(IPv4Network("10.9.0.8/29"), "tun0"),
    ]
    state = routed._State(next=0)
    range_ = IPv4Network("10.9.0.0/27")
    given = []
    for _ in range(5):
        host, pod = routed._free_addresses(state, range_, taken)
        assert int(pod.ip) == int(host.ip) + 1
        given.append(str(host))
        taken.append(routed._Route(host.network, "sj-more"))
    assert given == ["10.9.0.5/30", "10.9.0.17/30", "10.9.0.21/30", "10.9.0.25/30", "10.9.0.29/30"]
    with pytest.raises(CapacityExhausted):
        routed._free_addresses(state, range_, taken)


def test_an_address_that_was_just_left_comes_last() -> None:
    state = routed._State(next=6)
    range_ = IPv4Network("10.9.0.0/27")
    seen = [str(routed._free_addresses(state, range_, [])[0].ip) for _ in range(8)]
    assert seen[:3] == ["10.9.0.25", "10.9.0.29", "10.9.0.1"]
    assert len(set(seen)) == 8


def message(kind: int, *attributes: tuple[int, bytes]) -> bytes:
    body = b"\x01\x00\x00\x00"
    for number, value in attributes:
        body += struct.pack("=HH", 4 + len(value), number) + value + bytes(-len(value) % 4)
    return struct.pack("=IHHII", 16 + len(body), kind, 0, 0, 0) + body


def test_a_removed_table_is_told_from_every_other_change() -> None:
    removed, made, chain = 0x0A02, 0x0A00, 0x0A05
    datagram = message(made, (1, b"sojourn\0")) + message(chain, (1, b"sojourn\0")) + message(removed, (1, b"other\0"))
    assert list(removed_tables(datagram)) == ["other"]
    assert list(removed_tables(datagram + message(removed, (2, b"\0\0\0\1"), (1, b"sojourn\0")))) == [
        "other",
        "sojourn",
    ]


@pytest.mark.parametrize("datagram", [b"", b"\0" * 15, b"\0" * 64, message(0x0A02)[:18], b"\xff" * 80])
def test_what_is_no_message_is_passed_over(datagram: bytes) -> None:
    assert list(removed_tables(datagram)) == []
