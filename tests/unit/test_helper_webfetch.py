"""`webfetch`: the guard, pinning, redirects, bounds, extraction, wrapping and the cache.

The web is a real server on loopback.  The injected resolver gives names public-looking addresses, and the
injected transport carries connections to those addresses to the server; every connection is recorded.
"""

from __future__ import annotations

import asyncio
import gzip
import ipaddress
import json
import random
import ssl
import threading
import time
import tracemalloc
import zlib
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
import trustme

from lemon_kernel.config import WebFetchConfig
from lemon_kernel.helpers import HelperContext, HelperError, WebFetch
from lemon_kernel.helpers.external import END_MARKER, START_MARKER, wrap_external
from lemon_kernel.helpers.ssrf import normalise_host
from lemon_kernel.scope import AbortSignal

PUBLIC = "93.184.216.34"
PAGE = """<html><head><title>A  page</title></head><body><article><h1>Heading</h1>
<p>The first paragraph has <a href="/other">a link</a> and enough words to count as the main content.</p>
<p>The second paragraph has enough words to count as the main content of this page as well.</p>
</article></body></html>"""

KEYS = (
    "url finalUrl status contentType title extractMode extractor truncated length rawLength wrappedLength"
    " fetchedAt tookMs text trustMetadata"
)
PRIVATE_HOSTS = (
    "127.0.0.1 10.0.0.1 172.16.0.1 192.168.1.1 169.254.1.1 100.64.0.1 0.0.0.0 [::1] [::] [fc00::1] [fe80::1]"
    " [fe80::1%25eth0] [fec0::1] [ff02::1] [::ffff:10.0.0.1] [64:ff9b::a00:1] [2002:a00:1::] [::10.0.0.1]"
    " [::ffff:0:10.0.0.1] [64:ff9b:1::1] 198.18.0.1 240.0.0.1 224.0.0.1 255.255.255.255 0177.0.0.1 0x7f.0.0.1"
    " 2130706433 127.1 0x7f000001 017700000001 10.1 192.168.257 127.0.0.1. １２７.０.０.１ 127。0。0。1"
    " 127%2e0.0.1 user@127.0.0.1 a.com%40@127.0.0.1 ⑩.0.0.1"
)

Answer = tuple[int, dict[str, str], bytes]


class Web:
    """A server on loopback that answers from a table of paths, and records what it was asked."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        web = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                web.requests.append((self.path, dict(self.headers)))
                answer = web.pages.get(self.path)
                if callable(answer):
                    answer(self)
                    return
                status, headers, body = answer or (404, {}, b"nothing here")
                self.send_response(status)
                for name, value in {"Content-Length": str(len(body)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                try:
                    self.wfile.write(body)
                except OSError:
                    pass  # the client had enough

            def log_message(self, *args: object) -> None:
                pass

        self.requests: list[tuple[str, dict[str, str]]] = []
        self.pages: dict[str, Answer | Callable[[BaseHTTPRequestHandler], None]] = {}
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        if tls is not None:
            self.server.socket = tls.wrap_socket(self.server.socket, server_side=True)
        self.port: int = self.server.server_address[1]
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()

    def html(self, path: str, body: str, **headers: str) -> None:
        self.pages[path] = (200, {"Content-Type": "text/html; charset=utf-8", **headers}, body.encode())

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


class Loopback(httpx.AsyncBaseTransport):
    """Carries a connection to any address to the server, and records the addresses that were asked for."""

    def __init__(self, port: int, verify: ssl.SSLContext | bool = False) -> None:
        self.port = port
        self.verify = verify
        self.connections: list[str] = []
        self.refused: set[str] = set()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.connections.append(request.url.host)
        if request.url.host in self.refused:
            raise httpx.ConnectError("refused")
        request.url = request.url.copy_with(host="127.0.0.1", port=self.port)
        inner = httpx.AsyncHTTPTransport(verify=self.verify, trust_env=False)
        response = await inner.handle_async_request(request)
        return httpx.Response(
            response.status_code,
            headers=response.headers,
            stream=_Closing(response, inner),
            extensions=response.extensions,
        )


class _Closing(httpx.AsyncByteStream):
    def __init__(self, response: httpx.Response, inner: httpx.AsyncHTTPTransport) -> None:
        self._response = response
        self._inner = inner

    async def __aiter__(self):  # type: ignore[no-untyped-def]
        async for chunk in self._response.stream:  # type: ignore[union-attr]
            yield chunk

    async def aclose(self) -> None:
        await self._response.aclose()
        await self._inner.aclose()


class Names:
    """A resolver that knows what it is told, everything else is public; it records what it was asked."""

    def __init__(self, **addresses: Sequence[str]) -> None:
        self.addresses = {name.replace("_", "."): found for name, found in addresses.items()}
        self.asked: list[str] = []

    async def __call__(self, host: str) -> Sequence[str]:
        self.asked.append(host)
        return self.addresses.get(host, [PUBLIC])


@pytest.fixture
def web() -> Iterator[Web]:
    web = Web()
    yield web
    web.close()


def call(fetch: WebFetch, url: object, *, abort: AbortSignal | None = None, **params: object) -> str:
    context = HelperContext(abort or AbortSignal(), "/")
    return asyncio.run(fetch({"url": url, **params}, context))


def fetcher(web: Web, names: Names | None = None, **settings: object) -> tuple[WebFetch, Loopback]:
    transport = Loopback(web.port)
    config = WebFetchConfig(**settings)
    return WebFetch(resolver=names or Names(), transport=transport, config=config), transport


def failure(fetch: WebFetch, url: object, **params: object) -> str:
    with pytest.raises(HelperError) as caught:
        call(fetch, url, **params)
    return str(caught.value)


@pytest.mark.case(105)
def test_the_payload(web: Web) -> None:
    """A fetch gives a compact JSON string with the keys of behaviour 3.6, text and title wrapped."""
    web.html("/a?q=1", PAGE)
    fetch, transport = fetcher(web)

    raw = call(fetch, "http://Example.com/a?q=1")
    answer = json.loads(raw)

    assert raw == json.dumps(answer, ensure_ascii=False, separators=(",", ":"))
    assert sorted(answer) == sorted(KEYS.split())
    assert answer["url"] == answer["finalUrl"] == "http://Example.com/a?q=1"
    assert (answer["status"], answer["contentType"]) == (200, "text/html")
    assert answer["title"] == wrap_external("A page", warning=False)
    assert (answer["extractMode"], answer["extractor"]) == ("markdown", "trafilatura")
    assert answer["truncated"] is False
    assert answer["length"] == answer["wrappedLength"] == len(answer["text"])
    inner = answer["text"].split("---\n", 1)[1].removesuffix("\n" + END_MARKER)
    assert answer["text"] == wrap_external(inner)
    assert answer["rawLength"] == len(inner)
    assert answer["trustMetadata"] == {
        "untrusted": True,
        "source": "web_fetch",
        "sourceLabel": "Web Fetch",
        "wrappingApplied": True,
        "wrappedFields": ["title", "text"],
        "warningIncluded": True,
    }
    assert transport.connections == [PUBLIC]
    assert web.requests[0][1]["Host"] == "example.com"


@pytest.mark.case(110)
def test_bad_urls(web: Web) -> None:
    """What is no http or https URL with a host is refused; nothing is resolved or connected."""
    names = Names()
    fetch, transport = fetcher(web, names)

    for url in (
        "file:///etc/passwd",
        "http://",
        "https:///x",
        "ftp://a/",
        "a.com",
        "http://[::1",
        "http://a:b/",
    ):
        assert failure(fetch, url) == "Invalid URL: must be http or https", url
    assert failure(fetch, None) == failure(fetch, "") == "url is required"
    assert failure(fetch, 5) == "url must be a string, got: 5"
    assert (names.asked, transport.connections) == ([], [])


@pytest.mark.case(111)
def test_local_names(web: Web) -> None:
    """Local names are blocked before the resolver is asked, however they are written."""
    names = Names()
    fetch, transport = fetcher(web, names)

    for host in (
        "localhost",
        "a.localhost",
        "x.local",
        "y.internal",
        "LOCALHOST.",
        "ｌｏｃａｌhost",
        "local%68ost",
    ):
        assert failure(fetch, f"http://{host}/").startswith("Blocked hostname: "), host
    assert (names.asked, transport.connections) == ([], [])


@pytest.mark.case(112)
@pytest.mark.parametrize(
    "host",
    PRIVATE_HOSTS.split(),
)
def test_private_addresses(web: Web, host: str) -> None:
    """Private addresses in any spelling are blocked before any connection."""
    fetch, transport = fetcher(web)

    assert failure(fetch, f"http://{host}/") == "Blocked: resolves to private/internal IP address"
    assert transport.connections == []


def test_thousand_spellings_of_private_addresses_open_no_connection(web: Web) -> None:
    """No spelling of a private address, at random, leads to a connection; public ones do."""
    random_numbers = random.Random(20261130)
    networks = [
        ipaddress.ip_network(one)
        for one in ("0.0.0.0/8", "10.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12",
                    "192.168.0.0/16", "100.64.0.0/10", "198.18.0.0/15", "240.0.0.0/4", "224.0.0.0/4")
    ]  # fmt: skip
    fetch, transport = fetcher(web)
    context = HelperContext(AbortSignal(), "/")

    async def main() -> None:
        for _ in range(1000):
            network = random_numbers.choice(networks)
            host = spelling(random_numbers, int(network[random_numbers.randrange(network.num_addresses)]))
            with pytest.raises(HelperError, match=r"^Blocked: resolves to ") as caught:
                await fetch({"url": f"http://{host}/"}, context)
            assert caught.type is HelperError, host

    asyncio.run(main())
    assert transport.connections == []

    public = int(ipaddress.ip_address("8.8.4.4"))
    for _ in range(50):
        host = spelling(random_numbers, public, plain=True)
        assert normalise_host(host) == "8.8.4.4", host


def spelling(random_numbers: random.Random, value: int, *, plain: bool = False) -> str:
    """Write an IPv4 address in one of the many ways in which it can be written."""
    high, low = value >> 16, value & 0xFFFF
    if not plain and random_numbers.random() < 0.4:
        return random_numbers.choice(
            [
                f"[::ffff:{high:x}:{low:x}]",
                f"[::ffff:{ipaddress.ip_address(value)}]",
                f"[64:ff9b::{high:x}:{low:x}]",
                f"[0064:FF9B:0:0:0:0:{high:X}:{low:04X}]",
                f"[2002:{high:x}:{low:x}::{random_numbers.randrange(65536):x}]",
            ]
        )
    count = random_numbers.randint(1, 4)
    parts = [value >> (24 - 8 * place) & 255 for place in range(count - 1)]
    parts.append(value & (1 << (8 * (5 - count))) - 1)
    forms: tuple[Callable[[int], str], ...] = (
        str,
        lambda n: f"0x{n:x}",
        lambda n: f"0X{n:08X}",
        lambda n: f"0{n:o}",
        lambda n: f"000{n:o}",
    )
    host = ".".join(random_numbers.choice(forms)(part) for part in parts)
    tricks: tuple[Callable[[str], str], ...] = (
        str,
        lambda text: text + ".",
        lambda text: text.replace(".", "。"),
        lambda text: text.replace(".", "%2E"),
        lambda text: "".join(chr(ord(c) + 0xFEE0) if c.isdigit() else c for c in text),
        lambda text: "".join(f"%{ord(c):02x}" for c in text),
    )
    return random_numbers.choice(tricks)(host)


@pytest.mark.case(114)
def test_metadata_is_always_blocked(web: Web) -> None:
    """The cloud's metadata service stays blocked whatever is allowed."""
    fetch, transport = fetcher(
        web,
        Names(sneaky_com=["169.254.169.254"]),
        allow_private_network=True,
        allowed_hostnames=["metadata.google.internal", "169.254.169.254", "sneaky.com"],
    )

    assert failure(fetch, "http://metadata.google.internal./") == "Blocked hostname: metadata.google.internal"
    for host in (
        "169.254.169.254",
        "[::ffff:169.254.169.254]",
        "[64:ff9b::a9fe:a9fe]",
        "0xa9fea9fe",
        "sneaky.com",
    ):
        assert failure(fetch, f"http://{host}/") == "Blocked: resolves to metadata IP address", host
    assert transport.connections == []


def test_private_network_may_be_allowed(web: Web) -> None:
    """`allow_private_network` opens everything but the metadata service, `allowed_hostnames` single hosts."""
    web.html("/", PAGE)
    names = Names(box_local=["10.0.0.5"], other_local=["10.0.0.6"])
    everything, _ = fetcher(web, names, allow_private_network=True)
    one, transport = fetcher(web, names, allowed_hostnames=["BOX.local."])

    assert json.loads(call(everything, "http://other.local/"))["status"] == 200
    assert json.loads(call(one, "http://box.local/"))["status"] == 200
    assert transport.connections == ["10.0.0.5"]
    assert failure(one, "http://other.local/") == "Blocked hostname: other.local"


@pytest.mark.case(115)
def test_any_private_answer_blocks(web: Web) -> None:
    """One private address among the answers of a name is enough."""
    fetch, transport = fetcher(web, Names(mixed_com=[PUBLIC, "10.0.0.1"], six_com=[PUBLIC, "fd00::1%1"]))

    for url in ("http://mixed.com/", "http://six.com/"):
        assert failure(fetch, url) == "Blocked: resolves to private/internal IP address"
    assert transport.connections == []


def test_unresolvable(web: Web) -> None:
    """A name without an address is said to be one, whatever the resolver does."""

    async def fails(host: str) -> Sequence[str]:
        raise OSError("no such name")

    empty, _ = fetcher(web, Names(gone_com=[]))
    raising = WebFetch(resolver=fails, transport=Loopback(web.port), config=WebFetchConfig())

    assert failure(empty, "http://gone.com/") == "Unable to resolve hostname: gone.com"
    assert failure(raising, "http://gone.com/") == "Unable to resolve hostname: gone.com"
    for host in ("1.2.3.4.5", "256.1.1.1", "1.2.3.09", "a b", "a..%00", "0x1ffffffff"):
        assert failure(empty, f"http://{host}/").startswith("Unable to resolve hostname: "), host


@pytest.mark.case(116)
def test_redirects_are_checked_again(web: Web) -> None:
    """A redirect to a private address, or to a name that has one, is never followed."""
    web.pages["/a"] = (302, {"Location": "http://127.0.0.1/secret"}, b"")
    web.pages["/b"] = (307, {"Location": "//inner.com/secret"}, b"")
    web.pages["/c"] = (301, {"Location": "file:///etc/passwd"}, b"")
    fetch, transport = fetcher(web, Names(inner_com=["192.168.0.1"]))

    for path in ("a", "b"):
        assert failure(fetch, f"http://x.com/{path}") == "Blocked: resolves to private/internal IP address"
    assert failure(fetch, "http://x.com/c") == "Invalid URL: must be http or https"
    assert [path for path, _ in web.requests] == ["/a", "/b", "/c"]
    assert transport.connections == [PUBLIC] * 3


@pytest.mark.case(117)
def test_redirect_limits(web: Web) -> None:
    """Three redirects are followed, each pinned anew; a fourth, a loop and a missing target are not."""
    web.pages["/0"] = (302, {"Location": "1"}, b"")
    web.pages["/1"] = (303, {"Location": "http://two.com/2"}, b"")
    web.pages["/2"] = (308, {"Location": "/3"}, b"")
    web.html("/3", PAGE)
    web.pages["/more"] = (302, {"Location": "/0"}, b"")
    web.pages["/loop"] = (302, {"Location": "/pool"}, b"")
    web.pages["/pool"] = (302, {"Location": "/loop"}, b"")
    web.pages["/lost"] = (302, {}, b"")
    fetch, transport = fetcher(web, Names(two_com=["1.1.1.1"]))

    assert json.loads(call(fetch, "http://one.com/0"))["finalUrl"] == "http://two.com/3"
    assert transport.connections == [PUBLIC, PUBLIC, "1.1.1.1", "1.1.1.1"]
    assert [headers["Host"] for _, headers in web.requests] == ["one.com", "one.com", "two.com", "two.com"]
    assert failure(fetch, "http://one.com/more") == "Too many redirects (limit: 3)"
    assert failure(fetch, "http://one.com/loop") == "Redirect loop detected"
    assert failure(fetch, "http://one.com/lost") == "Redirect missing location header (302)"


@pytest.mark.case(120)
def test_max_chars_bounds_the_wrapped_text(web: Web) -> None:
    """`maxChars` bounds the wrapped text; below the warning's size the warning goes; 100 is the floor."""
    web.pages["/"] = (200, {"Content-Type": "text/plain"}, (START_MARKER + "x" * 5000).encode())
    fetch, _ = fetcher(web, max_chars=600)

    for given, most, warned in ((500, 500, True), ("300", 300, False), (50, 100, False), (None, 600, True)):
        answer = json.loads(call(fetch, "http://a.com/", maxChars=given))
        assert len(answer["text"]) <= most
        assert answer["truncated"] is True
        assert answer["trustMetadata"]["warningIncluded"] is warned
        assert answer["text"].count(START_MARKER) == answer["text"].count(END_MARKER) == 1
    exact = json.loads(call(fetch, "http://a.com/", maxChars=6000))
    assert exact["truncated"] is False
    for wrong in (True, 1.5, "many"):
        assert "maxChars must be an integer" in failure(fetch, "http://a.com/", maxChars=wrong)


@pytest.mark.case(121)
def test_modes(web: Web) -> None:
    """Markdown keeps links, text does not; the legacy format gives the raw page; others are refused."""
    web.html("/", PAGE)
    fetch, _ = fetcher(web)

    assert "[a link](http://a.com/other)" in json.loads(call(fetch, "http://a.com/"))["text"]
    text = json.loads(call(fetch, "http://a.com/", extractMode="text"))["text"]
    assert "a link" in text
    assert "[a link]" not in text
    assert "# Heading" not in text
    raw = json.loads(call(fetch, "http://a.com/", format="html"))
    assert (raw["extractMode"], raw["extractor"]) == ("html", "raw_html")
    assert '<a href="/other">' in raw["text"]
    assert failure(fetch, "http://a.com/", extractMode="x") == "extractMode must be one of: text, markdown"
    assert failure(fetch, "http://a.com/", extractMode="html") == "extractMode must be one of: text, markdown"
    assert failure(fetch, "http://a.com/", format="x") == "format must be one of: text, markdown, html"


def test_other_content(web: Web) -> None:
    """JSON comes compact, other text raw in its charset, an empty page is a failure."""
    web.pages["/j"] = (200, {"Content-Type": "application/json"}, b'{"a":  [1, "\\u00e9"]}')
    web.pages["/bad"] = (200, {"Content-Type": "application/json"}, b"{")
    web.pages["/t"] = (200, {"Content-Type": "text/plain; charset=latin-1"}, b"caf\xe9")
    web.pages["/u"] = (200, {"Content-Type": "text/plain; charset=zlib"}, b"x")
    web.html("/empty", "<html><body></body></html>")
    fetch, _ = fetcher(web)

    for path, content, extractor in (
        ("j", '{"a":[1,"é"]}', "json"),
        ("bad", "{", "raw"),
        ("t", "café", "raw"),
        ("u", "x", "raw"),
    ):
        answer = json.loads(call(fetch, f"http://a.com/{path}"))
        assert answer["text"] == wrap_external(content)
        assert answer["extractor"] == extractor
        assert answer["title"] is None
        assert answer["trustMetadata"]["wrappedFields"] == ["text"]
    assert failure(fetch, "http://a.com/empty") == "Readability extraction returned no content"


@pytest.mark.case(122)
def test_failed_requests(web: Web) -> None:
    """Another status than 2xx is a failure with a few words of the page, without its tags."""
    web.pages["/500"] = (
        500,
        {"Content-Type": "text/html"},
        b"<html><script>var x = '<b>';</script><h1>Broken</h1>" + b"<p>word</p>" * 1000 + b"<unclosed",
    )
    web.pages["/503"] = (503, {}, b"")
    fetch, _ = fetcher(web)

    text = failure(fetch, "http://a.com/500")
    assert text.startswith("Web fetch failed: HTTP 500: Broken word word")
    assert text.endswith("...")
    assert "<" not in text
    assert len(text) < 440
    assert failure(fetch, "http://a.com/404") == "Web fetch failed: HTTP 404: nothing here"
    assert failure(fetch, "http://a.com/503") == "Web fetch failed: HTTP 503: Service Unavailable"


@pytest.mark.parametrize(("name", "kind"), [("gzip", 31), ("deflate", 15), ("deflate", -15)])
def test_compressed_bodies(web: Web, name: str, kind: int) -> None:
    """Compressed bodies are unpacked, and one that swells beyond the cap is cut off while it does."""

    def pack(data: bytes) -> bytes:
        engine = zlib.compressobj(wbits=kind)
        return engine.compress(data) + engine.flush()

    headers = {"Content-Type": "text/plain", "Content-Encoding": name}
    web.pages["/ok"] = (200, headers, pack(b"hello"))
    web.pages["/bomb"] = (200, headers, pack(bytes(50_000_000)))
    web.pages["/bad"] = (200, headers, b"\xff\xff\xff not packed")
    fetch, _ = fetcher(web, max_bytes=1_000_000)

    assert json.loads(call(fetch, "http://a.com/ok"))["text"] == wrap_external("hello")
    tracemalloc.start()
    assert failure(fetch, "http://a.com/bomb") == "Web fetch failed: response body exceeds 1000000 bytes"
    assert tracemalloc.get_traced_memory()[1] < 8_000_000
    tracemalloc.stop()
    assert failure(fetch, "http://a.com/bad").startswith(f"Web fetch failed: bad {name} body")


def test_several_members_and_unknown_encodings(web: Web) -> None:
    """Members of a gzip body are joined, junk behind it is ignored, other encodings are refused."""
    headers = {"Content-Type": "text/plain", "Content-Encoding": "gzip"}
    web.pages["/two"] = (200, headers, gzip.compress(b"one ") + gzip.compress(b"two") + b"\0\0junk")
    web.pages["/br"] = (200, {**headers, "Content-Encoding": "br"}, b"x")
    fetch, _ = fetcher(web)

    assert json.loads(call(fetch, "http://a.com/two"))["text"] == wrap_external("one two")
    assert failure(fetch, "http://a.com/br") == "Web fetch failed: unsupported content encoding 'br'"


def test_body_cap(web: Web) -> None:
    """A body as large as the cap is taken, one byte more is a failure that names the cap."""
    web.pages["/fits"] = (200, {"Content-Type": "text/plain"}, b"x" * 1000)
    web.pages["/over"] = (200, {"Content-Type": "text/plain"}, b"x" * 1001)
    fetch, _ = fetcher(web, max_bytes=1000)

    assert json.loads(call(fetch, "http://a.com/fits"))["rawLength"] == 1000
    assert failure(fetch, "http://a.com/over") == "Web fetch failed: response body exceeds 1000 bytes"


def test_a_transport_that_hands_bodies_over_whole() -> None:
    """httpx's own MockTransport can stand in for the network: its bodies are read and decoded already."""
    pages = {
        "/page": httpx.Response(200, html=PAGE),
        "/packed": httpx.Response(
            200,
            content=gzip.compress(b"one two"),
            headers={"Content-Type": "text/plain", "Content-Encoding": "gzip"},
        ),
        "/fits": httpx.Response(200, text="x" * 1000),
        "/over": httpx.Response(200, text="x" * 1001),
        "/gone": httpx.Response(410, text="gone " * 20_000),
    }
    transport = httpx.MockTransport(lambda request: pages[request.url.path])
    config = WebFetchConfig(max_bytes=1000)
    fetch = WebFetch(resolver=Names(), transport=transport, config=config)

    assert json.loads(call(fetch, "http://a.com/page"))["title"] == wrap_external("A page", warning=False)
    assert json.loads(call(fetch, "http://a.com/packed"))["text"] == wrap_external("one two")
    assert json.loads(call(fetch, "http://a.com/fits"))["rawLength"] == 1000
    assert failure(fetch, "http://a.com/over") == "Web fetch failed: response body exceeds 1000 bytes"
    assert failure(fetch, "http://a.com/gone").startswith("Web fetch failed: HTTP 410: gone gone")


def test_the_whole_fetch_is_bounded(web: Web) -> None:
    """A server that drips and a resolver that hangs both end at the time limit."""
    stop = threading.Event()

    def drip(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        try:
            while not stop.wait(0.02):
                handler.wfile.write(b"x")
        except OSError:
            pass

    async def hang(host: str) -> Sequence[str]:
        await asyncio.Event().wait()
        return []

    web.pages["/drip"] = drip
    dripping, _ = fetcher(web, timeout_ms=400)
    hanging = WebFetch(resolver=hang, config=WebFetchConfig(timeout_ms=400))

    for fetch in (dripping, hanging):
        started = time.monotonic()
        assert failure(fetch, "http://a.com/drip") == "Web fetch failed: timed out after 400ms"
        assert time.monotonic() - started < 5
    stop.set()


def test_abort_ends_a_fetch(web: Web) -> None:
    """An abort ends a fetch at once, whatever it waits for."""
    abort = AbortSignal()
    stop = threading.Event()

    def wait(handler: BaseHTTPRequestHandler) -> None:
        abort.abort()
        stop.wait(10)

    web.pages["/"] = wait
    fetch, _ = fetcher(web)

    assert failure(fetch, "http://a.com/", abort=abort) == "Operation aborted"
    stop.set()


def test_the_next_address_is_tried(web: Web) -> None:
    """When one of the checked addresses refuses the connection the next one is tried."""
    web.html("/", PAGE)
    fetch, transport = fetcher(web, Names(a_com=["2606:4700::1111", PUBLIC]))
    transport.refused = {"2606:4700::1111"}

    assert json.loads(call(fetch, "http://a.com:8080/"))["status"] == 200
    assert transport.connections == ["2606:4700::1111", PUBLIC]
    assert web.requests[0][1]["Host"] == "a.com:8080"
    transport.refused.add(PUBLIC)
    assert failure(fetch, "http://a.com/x") == "Web fetch failed: refused"


def test_cache(web: Web) -> None:
    """Successes are kept for 15 minutes by url, mode and size, at most 100; failures are not."""
    now = 0.0
    transport = Loopback(web.port)
    fetch = WebFetch(resolver=Names(), transport=transport, config=WebFetchConfig(), clock=lambda: now)
    web.pages["/"] = (200, {"Content-Type": "text/plain"}, b"x")

    first = json.loads(call(fetch, "http://a.com/"))
    assert "cached" not in first
    assert json.loads(call(fetch, "http://a.com/")) == {**first, "cached": True}
    assert len(transport.connections) == 1
    call(fetch, "http://A.com/")
    call(fetch, "http://a.com/", extractMode="text")
    call(fetch, "http://a.com/", maxChars=200)
    assert len(transport.connections) == 4
    now = 15 * 60
    assert "cached" not in json.loads(call(fetch, "http://a.com/"))
    for n in range(100):
        web.pages[f"/{n}"] = (200, {"Content-Type": "text/plain"}, b"x")
        call(fetch, f"http://a.com/{n}")
    before = len(transport.connections)
    call(fetch, "http://a.com/")
    assert len(transport.connections) == before + 1
    failure(fetch, "http://a.com/none")
    failure(fetch, "http://a.com/none")
    assert len(transport.connections) == before + 3


def test_disabled(web: Web) -> None:
    """Switched off, nothing is fetched, not even from the cache."""
    fetch, transport = fetcher(web, enabled=False)

    assert failure(fetch, "http://a.com/") == "webfetch is disabled by configuration"
    assert transport.connections == []


def test_configuration_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a configuration of its own the helper reads that of the call's folder at each call."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / ".lemon").mkdir()
    (tmp_path / ".lemon/config.toml").write_text("[runtime.tools.web.fetch]\nenabled = false\n")

    with pytest.raises(HelperError, match=r"^webfetch is disabled by configuration$"):
        asyncio.run(WebFetch()({"url": "http://a.com/"}, HelperContext(AbortSignal(), str(tmp_path))))


def test_the_certificate_is_that_of_the_name() -> None:
    """Over https the pinned connection asks for the name: its certificate passes, another's does not."""
    authority = trustme.CA()
    server_tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("good.example").configure_cert(server_tls)
    asked: list[str] = []
    server_tls.sni_callback = lambda sock, name, context: asked.append(name)  # type: ignore[assignment,misc]
    client_tls = ssl.create_default_context()
    authority.configure_trust(client_tls)
    web = Web(server_tls)
    try:
        web.html("/", PAGE)
        transport = Loopback(web.port, client_tls)
        fetch = WebFetch(resolver=Names(), transport=transport, config=WebFetchConfig())

        assert json.loads(call(fetch, "https://good.example/"))["status"] == 200
        assert web.requests[0][1]["Host"] == "good.example"
        assert "certificate" in failure(fetch, "https://bad.example/").lower()
        assert asked == ["good.example", "bad.example"]
        assert len(web.requests) == 1
    finally:
        web.close()


def test_the_environment_has_no_say(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy in the environment is not used: our own connections go where they were checked to go."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    web.html("/", PAGE)
    fetch = WebFetch(config=WebFetchConfig(allow_private_network=True))

    assert json.loads(call(fetch, f"http://127.0.0.1:{web.port}/"))["status"] == 200
    assert json.loads(call(fetch, f"http://localhost:{web.port}/"))["status"] == 200
