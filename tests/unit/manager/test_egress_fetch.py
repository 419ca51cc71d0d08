"""What is fetched for tenants, and what is never dialled. (S12, S13)"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from manager.egress import fetch as module
from manager.egress.fetch import Fetcher, FetchFailed, FetchLimits, FetchRefused, FetchTooLarge, check_url
from tests.support.tls_server import PUBLIC, Certificates, TestDialler, dialler_for, reply, tls_server

# Spellings of addresses that are not the internet's, and of what is no https URL at all.
INTERNAL = [
    "https://127.0.0.1/", "https://127.0.0.1:443/", "https://127.1/", "https://127.0.1/", "https://0/",
    "https://0.0.0.0/", "https://0.0.0.1/", "https://2130706433/", "https://0x7f000001/", "https://0x7f.0.0.1/",
    "https://0x7f.1/", "https://0177.0.0.1/", "https://017700000001/", "https://127.000.000.001/",
    "https://10.0.0.1/", "https://10.255.255.255/", "https://172.16.0.1/", "https://172.31.255.254/",
    "https://192.168.0.1/", "https://0xc0a80001/", "https://169.254.169.254/latest/meta-data/",
    "https://0xa9fea9fe/", "https://2852039166/", "https://169.254.43518/", "https://100.64.0.1/",
    "https://100.100.100.200/", "https://168.63.129.16/", "https://192.0.0.192/", "https://198.18.0.1/",
    "https://224.0.0.1/", "https://255.255.255.255/", "https://[::1]/", "https://[::]/",
    "https://[::ffff:127.0.0.1]/", "https://[::ffff:7f00:1]/", "https://[::127.0.0.1]/", "https://[fe80::1]/",
    "https://[fc00::1]/", "https://[fd00:ec2::254]/", "https://[fec0::1]/", "https://[ff02::1]/",
    "https://[64:ff9b::7f00:1]/", "https://[64:ff9b::a9fe:a9fe]/", "https://[2002:7f00:1::]/",
    "https://[2002:a9fe:a9fe::1]/", "https://[2001::7f00:1]/", "https://[2001:db8::1]/", "https://[::ffff:0:127.0.0.1]/",
    "https://localhost/", "https://localhost./", "https://LOCALHOST/", "https://metadata.google.internal/",
    "https://internal.test/", "https://internal.test./",
]  # fmt: skip
NO_URL = [
    "http://archives.test/", "ftp://archives.test/", "file:///etc/passwd", "gopher://archives.test/",
    "//archives.test/",
    "archives.test/x", "https:archives.test", "https:///x", "https://", "https://user@archives.test/",
    "https://user:pass@archives.test/", "https://archives.test@127.0.0.1/", "https://127.0.0.1@archives.test/",
    "https://archives.test\\@127.0.0.1/", "https://archives.test/\r\nHost: x", "https://archives.test/ x",
    "https://archives.test\t/", "https://①②⑦.⓪.⓪.①/", "https://127。0。0。1/", "https://ⓛocalhost/",
    "https://archives.test:0/", "https://archives.test:65536/", "https://archives.test:http/",
    "https://archives.test:-1/",
    "https://127.0.0.1%2f@archives.test/", "https://archives%2etest/", "https://archives.test%00.internal.test/",
    "https://[::1%25lo]/", "https://[fe80::1%eth0]/", "https://[::1", "https://[archives.test]/",
    "https://a" + "a" * 5000,
    "https://archives.test:22/", "https://archives.test:80/", "https://archives.test:6379/",
    "\x00https://archives.test/",
    "https://..archives.test/", "https://" + "a" * 64 + ".test/", "data:text/plain,x", "javascript:alert(1)", "",
]  # fmt: skip


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def dialler() -> Iterator[TestDialler]:
    with ThreadPoolExecutor(2) as threads:
        made = dialler_for(threads)
        for name in (
            "localhost",
            "localhost.",
            "LOCALHOST",
            "metadata.google.internal",
            "internal.test",
            "internal.test.",
        ):
            made.answers[name] = [["127.0.0.1", "::1", "169.254.169.254", "10.0.0.7"]]
        made.answers["archives.test"] = [["127.0.0.1"]]
        yield made


class Dialled:
    """Every address that any socket of this process was connected to, as the interpreter tells it."""

    def __init__(self) -> None:
        self.on = False
        self.addresses: list[Any] = []

    def hear(self, event: str, args: tuple[Any, ...]) -> None:
        if self.on and event == "socket.connect" and args[0].type & socket.SOCK_STREAM and len(args[1]) >= 2:
            self.addresses.append(args[1])


_DIALLED = Dialled()
sys.addaudithook(_DIALLED.hear)


@pytest.fixture
def dialled() -> Iterator[list[Any]]:
    _DIALLED.addresses, _DIALLED.on = [], True
    yield _DIALLED.addresses
    _DIALLED.on = False


async def fetched(fetcher: Fetcher, url: str) -> bytes:
    async with fetcher.get(url) as pieces:
        return b"".join([piece async for piece in pieces])


def fetcher_for(dialler: TestDialler, certificates: Certificates, port: int, **limits: Any) -> Fetcher:
    """One that may reach the test's server, and whatever is public."""
    dialler.opened.add(("127.0.0.1", port))
    dialler.rules = type(dialler.rules)(ports=frozenset({443, port}))
    return Fetcher(dialler, FetchLimits(**limits), tls=certificates.client)


# ── what is never dialled ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("url", [*INTERNAL, *NO_URL], ids=lambda url: ascii(url)[:60])
async def test_no_spelling_of_an_internal_address_is_ever_dialled(
    url: str, dialler: TestDialler, dialled: list[Any]
) -> None:
    with pytest.raises((FetchRefused, FetchFailed)):
        await fetched(Fetcher(dialler), url)
    assert dialled == []


@pytest.mark.parametrize("url", NO_URL, ids=lambda url: ascii(url)[:60])
async def test_what_is_no_https_url_is_refused_before_its_name_is_looked_up(url: str, dialler: TestDialler) -> None:
    with pytest.raises(FetchRefused):
        await fetched(Fetcher(dialler), url)
    assert dialler.looked_up == []


LEADS_BACK = ("https:///x", "https://", "//archives.test/", "archives.test/x", "https:archives.test")


@pytest.mark.parametrize(
    "location", [url for url in [*INTERNAL, *NO_URL] if url and url not in LEADS_BACK], ids=lambda url: ascii(url)[:60]
)
async def test_no_redirect_to_an_internal_address_is_followed(
    location: str, dialler: TestDialler, certificates: Certificates, dialled: list[Any]
) -> None:
    given = location.encode("utf-8", "backslashreplace").decode("latin-1").replace("\r", "").replace("\n", "")
    given = given.replace("\x00", "").replace("https://archives.test/", "http://archives.test/")
    async with tls_server(certificates, lambda path: reply(b"", "302 Found", {"Location": given})) as served:
        with pytest.raises((FetchRefused, FetchFailed)):
            await fetched(fetcher_for(dialler, certificates, served.port), f"{served.url}/x")
        assert {(address[0], address[1]) for address in dialled} <= {("127.0.0.1", served.port)}
        assert len(served.requests) == 1


@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "303 See Other", "307 Temporary", "308 Permanent"])
async def test_a_redirect_from_https_to_http_is_refused(
    status: str, dialler: TestDialler, certificates: Certificates, dialled: list[Any]
) -> None:
    async with tls_server(
        certificates, lambda path: reply(b"", status, {"Location": "http://archives.test/"})
    ) as served:
        with pytest.raises(FetchRefused, match="https"):
            await fetched(fetcher_for(dialler, certificates, served.port), f"{served.url}/x")
    assert len(dialled) == 1


async def test_a_name_that_is_public_when_asked_and_internal_when_dialled_is_not_dialled(
    dialler: TestDialler, certificates: Certificates, dialled: list[Any]
) -> None:
    """A rebinding name server answers each lookup otherwise; a redirect makes the second lookup."""
    dialler.answers["rebinding.test"] = [["127.0.0.1"], ["10.0.0.1"], ["127.0.0.1"]]
    dialler.answers["one.archives.test"] = [["127.0.0.1"], ["169.254.169.254"]]
    for url in ("https://rebinding.test/", "https://rebinding.test/", "https://rebinding.test/"):
        with pytest.raises(FetchFailed, match="no public address"):
            await fetched(Fetcher(dialler), url)
    assert dialled == []
    async with tls_server(certificates, lambda path: reply(b"", "302 Found", {"Location": "/again"})) as served:
        with pytest.raises(FetchFailed, match="no public address"):
            await fetched(
                fetcher_for(dialler, certificates, served.port), f"https://one.archives.test:{served.port}/first"
            )
        assert dialled == [("127.0.0.1", served.port)]
        assert len(served.requests) == 1


async def test_the_socket_itself_is_judged_whatever_was_said_before(
    dialler: TestDialler, dialled: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fooled(host: str, port: int) -> list[Any]:
        return [PUBLIC.__class__("127.0.0.1")]

    monkeypatch.setattr(dialler, "addresses", fooled)
    with pytest.raises(FetchRefused, match="not a public address"):
        await fetched(Fetcher(dialler), "https://archives.test/")
    assert dialled == []


async def test_of_a_name_with_public_and_internal_addresses_only_the_public_are_candidates(
    dialler: TestDialler,
) -> None:
    dialler.answers["both.test"] = [["10.0.0.1", str(PUBLIC), "127.0.0.1", "::1"]]
    assert await dialler.addresses("both.test", 443) == [PUBLIC]


async def test_an_address_of_this_machine_itself_is_not_dialled_though_it_be_public(dialler: TestDialler) -> None:
    assert not dialler.allowed(PUBLIC.__class__("127.0.0.1"), 443)
    assert dialler.allowed(PUBLIC, 443)
    assert not dialler.allowed(PUBLIC, 22)


# ── what is fetched ─────────────────────────────────────────────────────────────────────────────────────────────────


async def test_an_archive_is_fetched_as_it_lies_there_and_nothing_of_ours_goes_along(
    dialler: TestDialler, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    body = bytes(range(256)) * 5000

    def answer(path: str) -> bytes:
        if path == "/start?x=1":
            return reply(b"", "302 Found", {"Location": "/there", "Set-Cookie": "session=1; Path=/"})
        return reply(body, headers={"Content-Encoding": "gzip"})

    async with tls_server(certificates, answer) as served:
        assert await fetched(fetcher_for(dialler, certificates, served.port), f"{served.url}/start?x=1#part") == body
        first, second = served.requests
        assert b"part" not in first
        for head in (first, second):
            names = {line.split(b":")[0].lower() for line in head.splitlines()[1:] if line}
            assert names == {b"host", b"accept", b"accept-encoding", b"user-agent", b"connection"}
            assert b"identity" in head


async def test_a_certificate_that_nobody_vouches_for_is_refused(
    dialler: TestDialler, certificates: Certificates
) -> None:
    async with tls_server(certificates, lambda path: reply(b"x")) as served:
        dialler.opened.add(("127.0.0.1", served.port))
        dialler.rules = type(dialler.rules)(ports=frozenset({served.port}))
        with pytest.raises(FetchFailed, match=r"no connection|no proper"):
            await fetched(Fetcher(dialler), f"{served.url}/")  # the system's own authorities
        dialler.answers["other.test"] = [["127.0.0.1"]]
        with pytest.raises(FetchFailed):
            await fetched(Fetcher(dialler, tls=certificates.client), f"https://other.test:{served.port}/")
        assert served.requests == []


@pytest.mark.parametrize("status", ["404 Not Found", "500 Oops", "204 No Content", "206 Partial Content", "304 Same"])
async def test_an_answer_that_is_not_the_whole_is_refused_by_its_status(
    status: str, dialler: TestDialler, certificates: Certificates
) -> None:
    async with tls_server(certificates, lambda path: reply(b"", status)) as served:
        with pytest.raises(FetchFailed, match=status.split()[0]):
            await fetched(fetcher_for(dialler, certificates, served.port), f"{served.url}/")


async def test_redirects_end_somewhere(dialler: TestDialler, certificates: Certificates) -> None:
    async with tls_server(certificates, lambda path: reply(b"", "302 Found", {"Location": path + "x"})) as served:
        with pytest.raises(FetchFailed, match="more than 5 times"):
            await fetched(fetcher_for(dialler, certificates, served.port), f"{served.url}/")
        assert len(served.requests) == 6


async def test_a_body_over_the_limit_ends_at_the_limit_whatever_its_length_said(
    dialler: TestDialler, certificates: Certificates
) -> None:
    async def endless() -> AsyncIterator[bytes]:
        yield b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        while True:
            yield b"10000\r\n" + bytes(0x10000) + b"\r\n"

    async with tls_server(certificates, lambda path: endless() if path == "/e" else reply(bytes(2_000_000))) as served:
        fetcher = fetcher_for(dialler, certificates, served.port, total_bytes=1_000_000)
        for path in ("/e", "/said"):
            with pytest.raises(FetchTooLarge) as refusal:
                await fetched(fetcher, served.url + path)
            assert refusal.value.limit == 1_000_000


async def test_a_body_shorter_than_it_said_is_not_taken_for_whole(
    dialler: TestDialler, certificates: Certificates
) -> None:
    short = reply(b"x" * 100, headers={"Content-Length": "1000"})
    async with tls_server(certificates, lambda path: short) as served:
        with pytest.raises(FetchFailed, match="cut off after 100 bytes"):
            await fetched(fetcher_for(dialler, certificates, served.port), f"{served.url}/")


async def test_a_server_that_stalls_drips_or_takes_for_ever_is_given_up(
    dialler: TestDialler, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Limits of seconds, shortened here."""
    forever = asyncio.Event()

    async def stalls() -> AsyncIterator[bytes]:
        yield b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nx"
        await forever.wait()

    async def drips() -> AsyncIterator[bytes]:
        yield b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n"
        while True:
            yield b"x"
            await asyncio.sleep(0.05)

    async def silent() -> AsyncIterator[bytes]:
        await forever.wait()
        yield b""

    async with tls_server(
        certificates, lambda path: {"/stalls": stalls, "/drips": drips, "/silent": silent}[path]()
    ) as served:
        fetcher = fetcher_for(dialler, certificates, served.port)
        monkeypatch.setattr(module, "STALL_SEC", 5.0)
        with pytest.raises(FetchFailed, match="nothing for 5 s"):
            await fetched(fetcher, served.url + "/stalls")
        monkeypatch.setattr(module, "STALL_SEC", 60.0)
        monkeypatch.setattr(module, "RATE_AFTER_SEC", 1.0)
        with pytest.raises(FetchFailed, match="KiB a second"):
            await fetched(fetcher, served.url + "/drips")
        monkeypatch.setattr(module, "RATE_AFTER_SEC", 60.0)
        monkeypatch.setattr(module, "HEAD_SEC", 1.0)
        with pytest.raises(FetchFailed, match="did not answer in time"):
            await fetched(fetcher, served.url + "/silent")
        monkeypatch.setattr(module, "HEAD_SEC", 60.0)
        with pytest.raises(FetchFailed, match="within 1 s"):
            await fetched(fetcher_for(dialler, certificates, served.port, total_sec=1.0), served.url + "/stalls")


async def test_what_is_no_http_is_told_in_plain_words(dialler: TestDialler, certificates: Certificates) -> None:
    for words in (b"\x1b]52;evil\r\n\r\n", b"HTTP/1.1 200 OK\r\n" + b"A: " + b"x" * 100_000 + b"\r\n\r\n", b""):
        async with tls_server(certificates, lambda path, words=words: words) as served:  # type: ignore[misc]
            with pytest.raises(FetchFailed) as refusal:
                await fetched(fetcher_for(dialler, certificates, served.port), f"{served.url}/")
            assert str(refusal.value).isprintable()
            assert len(str(refusal.value)) < 400


@pytest.mark.parametrize("url", ["https://example.org", "https://example.org:443/a?b=%2e#c", "HTTPS://Example.org/x"])
def test_ordinary_urls_are_urls(url: str) -> None:
    assert check_url(url).host == "example.org"


def test_internal_spellings_are_some_fifty() -> None:
    assert len(set(INTERNAL)) >= 50
