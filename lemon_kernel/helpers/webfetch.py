"""`webfetch`: the main content of a public web page, as a JSON string (behaviour 3.6).

The problem.  A URL comes from a model, the page from anybody.  Both may be hostile: addresses inside our
network, redirects to them, name servers that change their answer between check and connection, bodies that
unpack to gigabytes, servers that send a byte a minute, text that gives orders.

What does not work.  Checking the URL and letting an HTTP client resolve, redirect and decode by itself:
each of these steps happens after the check.

What we do.  Every hop is our own step: the host is checked by :mod:`.ssrf`, the connection goes to the
checked address with the host's name in the Host header, in SNI and in the certificate check, redirects are
followed by hand, compressed bodies are unpacked piece by piece with a limit, proxies and ``.netrc`` from
the environment are not looked at, and one clock bounds the whole.  What comes out is wrapped as external.

What can still fail.  Extraction runs in a thread and cannot be killed: over the time it is abandoned.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
import zlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urljoin, urlsplit, urlunsplit

from .base import HelperContext, HelperError, Params
from .external import wrap_external
from .paths import check_aborted
from .ssrf import Resolver, allowed_addresses, normalise_host, resolve_host
from .worker import in_thread

if TYPE_CHECKING:
    import ssl

    import httpx

    from ..config import WebFetchConfig

__all__ = ["WebFetch"]

T = TypeVar("T")

MAX_REDIRECTS = 3
MIN_CHARACTERS = 100
MAX_TITLE_CHARACTERS = 500
MAX_ERROR_BYTES = 400
ERROR_BODY_BYTES = 65_536
"""How much of an error page is read to find the few bytes that are shown."""
CACHE_S = 15 * 60
CACHE_ENTRIES = 100
UNPACK_BYTES = 65_536
"""Compressed bodies are unpacked in pieces of this size at most, so that none can swell unseen."""

INVALID_URL = "Invalid URL: must be http or https"
MODES = ("text", "markdown")
FORMATS = ("text", "markdown", "html")
REDIRECTS = frozenset({301, 302, 303, 307, 308})
HEADERS = {
    "User-Agent": "lemon-kernel webfetch",
    "Accept": "text/html, application/xhtml+xml, application/json;q=0.9, text/plain;q=0.9, */*;q=0.5",
    "Accept-Encoding": "gzip, deflate",
}


@dataclass(frozen=True)
class _Page:
    """A successful answer: where it came from and its decoded body."""

    url: str
    status: int
    content_type: str
    charset: str | None
    body: bytes


class WebFetch:
    """The helper ``webfetch``: ``await WebFetch()(params, context)``.

    `config` is a :class:`~lemon_kernel.config.WebFetchConfig`; without one the configuration of the call's
    folder is read at each call.  The other arguments are for tests: `resolver` maps a host to its
    addresses, `transport` carries the requests, whose URLs name checked addresses, `clock` gives seconds.
    """

    def __init__(
        self,
        *,
        resolver: Resolver | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        config: WebFetchConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._resolver = resolver or resolve_host
        self._transport = transport
        self._config = config
        self._clock = clock
        self._cache: OrderedDict[tuple[object, ...], tuple[float, dict[str, object]]] = OrderedDict()
        self._tls: ssl.SSLContext | None = None

    async def __call__(self, params: Params, context: HelperContext) -> str:
        """Return the JSON string of behaviour 3.6; raise :class:`HelperError` for everything that fails."""
        config = self._config
        if config is None:
            config = await in_thread(_configured, context.cwd)
        if not config.enabled:
            raise HelperError("webfetch is disabled by configuration")
        url = params.get("url")
        if url is None or url == "":
            raise HelperError("url is required")
        if not isinstance(url, str):
            raise HelperError(f"url must be a string, got: {url!r}")
        mode = _mode(params)
        max_characters = _max_characters(params.get("maxChars"), config.max_chars)
        _split(url)  # a bad URL is refused before anything else happens

        key = (url, mode, max_characters)
        now = self._clock()
        cached = self._cache.get(key)
        if cached is not None:
            if now - cached[0] < CACHE_S:
                return _dump({**cached[1], "cached": True})
            del self._cache[key]
        answer = await _bounded(
            self._answer(url, mode, max_characters, config, context), config.timeout_ms, context
        )
        self._cache[key] = now, answer
        while len(self._cache) > CACHE_ENTRIES:
            self._cache.popitem(last=False)
        return _dump(answer)

    async def _answer(
        self, url: str, mode: str, max_characters: int, config: WebFetchConfig, context: HelperContext
    ) -> dict[str, object]:
        started = time.monotonic()
        page = await self._fetch(url, config, context)
        content, title, extractor = await in_thread(_extract, page, mode)
        text, raw_length, truncated, warned = _wrap(content, max_characters)
        wrapped_title = None if title is None else wrap_external(title, warning=False)
        return {
            "url": url,
            "finalUrl": page.url,
            "status": page.status,
            "contentType": page.content_type,
            "title": wrapped_title,
            "extractMode": mode,
            "extractor": extractor,
            "truncated": truncated,
            "length": len(text),
            "rawLength": raw_length,
            "wrappedLength": len(text),
            "fetchedAt": datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "tookMs": round((time.monotonic() - started) * 1000),
            "text": text,
            "trustMetadata": {
                "untrusted": True,
                "source": "web_fetch",
                "sourceLabel": "Web Fetch",
                "wrappingApplied": True,
                "wrappedFields": ["text"] if title is None else ["title", "text"],
                "warningIncluded": warned,
            },
        }

    async def _fetch(self, url: str, config: WebFetchConfig, context: HelperContext) -> _Page:
        """Follow `url` and its redirects to a page; each hop is checked and pinned anew."""
        import httpx

        seen = {url}
        for _ in range(MAX_REDIRECTS + 1):
            try:
                outcome = await self._hop(url, config, context)
            except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, OSError) as error:
                raise HelperError(f"Web fetch failed: {str(error) or type(error).__name__}") from None
            if isinstance(outcome, _Page):
                return outcome
            url = outcome
            if url in seen:
                raise HelperError("Redirect loop detected")
            seen.add(url)
        raise HelperError(f"Too many redirects (limit: {MAX_REDIRECTS})")

    async def _hop(self, url: str, config: WebFetchConfig, context: HelperContext) -> _Page | str:
        """Return the page at `url`, or the URL that it redirects to."""
        import httpx

        scheme, host, port, target = _split(url)
        addresses = await allowed_addresses(
            host,
            self._resolver,
            allow_private=config.allow_private_network,
            allowed_hosts=config.allowed_hostnames,
        )
        for address in addresses:
            check_aborted(context)
            transport = self._transport or httpx.AsyncHTTPTransport(
                verify=await self._tls_context(),
                trust_env=False,
                limits=httpx.Limits(max_keepalive_connections=0),
            )
            request = httpx.Request(
                "GET",
                urlunsplit((scheme, _netloc(address, port), target, "", "")),
                headers={"Host": _netloc(host, port), **HEADERS},
                extensions={
                    "sni_hostname": host,
                    "timeout": httpx.Timeout(config.timeout_ms / 1000).as_dict(),
                },
            )
            try:
                try:
                    response = await transport.handle_async_request(request)
                except (httpx.ConnectError, httpx.ConnectTimeout):
                    if address == addresses[-1]:
                        raise
                    continue
                try:
                    return await _take(response, url, config.max_bytes, context)
                finally:
                    await response.aclose()
            finally:
                if transport is not self._transport:
                    await transport.aclose()
        raise AssertionError("unreachable")  # a host without addresses does not get here

    async def _tls_context(self) -> ssl.SSLContext:
        if self._tls is None:
            import httpx

            self._tls = await in_thread(httpx.create_ssl_context, trust_env=False)
        return self._tls


def _configured(cwd: str) -> WebFetchConfig:
    from ..config import WebFetchConfig

    return WebFetchConfig.load(cwd)


async def _bounded(work: Awaitable[T], timeout_ms: int, context: HelperContext) -> T:
    """Return what `work` gives, unless the time is over or the run is aborted first."""
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    aborted = asyncio.Event()

    def wake() -> None:
        try:
            loop.call_soon_threadsafe(aborted.set)
        except RuntimeError:
            pass  # the loop is closed

    forget = context.abort.on_abort(wake)
    watcher = asyncio.ensure_future(aborted.wait())
    try:
        await asyncio.wait({task, watcher}, timeout=timeout_ms / 1000, return_when=asyncio.FIRST_COMPLETED)
        check_aborted(context)
        if not task.done():
            raise HelperError(f"Web fetch failed: timed out after {timeout_ms}ms")
        return task.result()
    finally:
        forget()
        watcher.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=1)
        elif not task.cancelled():
            task.exception()  # looked at: nobody needs to be told that it was not


def _mode(params: Params) -> str:
    mode = params.get("extractMode")
    if mode is not None:
        if mode not in MODES:
            raise HelperError(f"extractMode must be one of: {', '.join(MODES)}")
        return str(mode)
    mode = params.get("format")
    if mode is None:
        return "markdown"
    if mode not in FORMATS:
        raise HelperError(f"format must be one of: {', '.join(FORMATS)}")
    return str(mode)


def _max_characters(value: object, default: int) -> int:
    if value is None:
        value = default
    elif isinstance(value, str) and re.fullmatch(r"\s*[+-]?[0-9]{1,18}\s*", value):
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise HelperError(f"maxChars must be an integer, got: {value!r}")
    return max(value, MIN_CHARACTERS)


def _split(url: str) -> tuple[str, str, int | None, str]:
    """Return scheme, normalised host, port (None: the scheme's own) and path with query of a URL."""
    try:
        parts = urlsplit(url.strip())
        host = normalise_host(parts.hostname or "")
        port = parts.port
    except ValueError:
        raise HelperError(INVALID_URL) from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise HelperError(INVALID_URL)
    if host is None:
        raise HelperError(f"Unable to resolve hostname: {parts.hostname}")
    if port == {"http": 80, "https": 443}[parts.scheme]:
        port = None
    target = parts.path or "/"
    return parts.scheme, host, port, f"{target}?{parts.query}" if parts.query else target


def _netloc(host: str, port: int | None) -> str:
    shown = f"[{host}]" if ":" in host else host
    return shown if port is None else f"{shown}:{port}"


async def _take(response: httpx.Response, url: str, max_bytes: int, context: HelperContext) -> _Page | str:
    """Return the page that a response is, or the URL that it redirects to."""
    status = response.status_code
    if status in REDIRECTS:
        location = response.headers.get("location", "").strip()
        if not location:
            raise HelperError(f"Redirect missing location header ({status})")
        return str(urljoin(url, location))
    kind, _, parameters = response.headers.get("content-type", "").partition(";")
    if not 200 <= status < 300:
        body = await _body(response, ERROR_BODY_BYTES, context, whole=False)
        raise HelperError(f"Web fetch failed: HTTP {status}: {_error_text(body, response.reason_phrase)}")
    charset = re.search(r"charset\s*=\s*[\"']?([^\s\"';]+)", parameters, re.IGNORECASE)
    return _Page(
        url=url,
        status=status,
        content_type=kind.strip().lower()[:100] or "application/octet-stream",
        charset=charset[1] if charset else None,
        body=await _body(response, max_bytes, context, whole=True),
    )


async def _body(response: httpx.Response, max_bytes: int, context: HelperContext, *, whole: bool) -> bytes:
    """Return the decoded body, at most `max_bytes` of it; a longer one is an error if `whole`."""
    if response.is_stream_consumed:
        # The transport hands bodies over whole and decoded, as httpx.MockTransport does.
        body = response.content
        if whole and len(body) > max_bytes:
            raise HelperError(_body_too_large(max_bytes))
        return body[:max_bytes]
    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity", "gzip", "x-gzip", "deflate"):
        raise HelperError(f"Web fetch failed: unsupported content encoding {encoding!r}")
    unpack = _unpacker(encoding)
    unpacked = bytearray()
    async for chunk in response.aiter_raw():
        check_aborted(context)
        try:
            for piece in unpack(chunk):
                unpacked += piece
                if len(unpacked) > max_bytes:
                    if whole:
                        raise HelperError(_body_too_large(max_bytes))
                    return bytes(unpacked[:max_bytes])
        except zlib.error as error:
            raise HelperError(f"Web fetch failed: bad {encoding} body: {error}") from None
        await asyncio.sleep(0)  # a body that is always there must not starve the loop
    return bytes(unpacked)


def _body_too_large(max_bytes: int) -> str:
    return f"Web fetch failed: response body exceeds {max_bytes} bytes"


def _unpacker(encoding: str) -> Callable[[bytes], Iterator[bytes]]:
    """Return what turns the chunks of a body into decoded pieces of bounded size."""
    if encoding in ("", "identity"):
        return lambda chunk: iter((chunk,))
    window_bits = zlib.MAX_WBITS | 32  # gzip or zlib, as the header says
    engine = zlib.decompressobj(window_bits)
    first = True  # nothing has been unpacked yet

    def unpack(chunk: bytes) -> Iterator[bytes]:
        nonlocal engine, window_bits, first
        while chunk:
            another = engine.eof
            if another:
                engine = zlib.decompressobj(window_bits)
            try:
                piece = engine.decompress(chunk, UNPACK_BYTES)
            except zlib.error:
                if another:
                    return  # what follows a complete body is no further member of it: ignored, as browsers do
                if not first or encoding != "deflate":
                    raise
                window_bits = -zlib.MAX_WBITS  # some servers send "deflate" without its header
                engine = zlib.decompressobj(window_bits)
                piece = engine.decompress(chunk, UNPACK_BYTES)
            first = False
            yield piece
            chunk = engine.unused_data if engine.eof else engine.unconsumed_tail

    return unpack


def _error_text(body: bytes, reason: str) -> str:
    """Return a few words of an error page without its tags."""
    text = body.decode("utf-8", "replace")
    text = re.sub(r"(?is)<(script|style)\b.*?(?:</\1\s*>|$)|<!--.*?(?:-->|$)|<[^>]*(?:>|$)", " ", text)
    text = " ".join(text.split()) or reason
    raw = text.encode()
    return text if len(raw) <= MAX_ERROR_BYTES else f"{raw[:MAX_ERROR_BYTES].decode('utf-8', 'ignore')}..."


def _extract(page: _Page, mode: str) -> tuple[str, str | None, str]:
    """Return content, title and the name of the extractor; blocking work."""
    html = page.content_type in ("text/html", "application/xhtml+xml")
    if page.content_type == "application/json" and mode != "html":
        text = _decode(page)
        try:
            return json.dumps(json.loads(text), ensure_ascii=False, separators=(",", ":")), None, "json"
        except (ValueError, RecursionError):
            return text, None, "raw"
    if not html:
        return _decode(page), None, "raw"
    if mode == "html":
        return _decode(page), None, "raw_html"

    import trafilatura

    source = page.body if page.charset is None else _decode(page)  # bytes: the page's own meta tags decide
    tree = trafilatura.load_html(source)
    title = None if tree is None else tree.findtext(".//title")
    title = " ".join(title.split())[:MAX_TITLE_CHARACTERS] if title else None
    markdown = mode == "markdown"
    content = trafilatura.extract(
        source,
        url=page.url,
        output_format="markdown" if markdown else "txt",
        include_links=markdown,
        include_comments=False,
    )
    extractor = "trafilatura"
    if not content:
        content, extractor = trafilatura.html2txt(source), "text"
    if not content:
        raise HelperError("Readability extraction returned no content")
    return content, title or None, extractor


def _decode(page: _Page) -> str:
    if page.charset is not None:
        try:
            return page.body.decode(page.charset, "replace")
        except (LookupError, ValueError):
            pass  # an encoding that nobody knows: UTF-8 is the best guess
    return page.body.decode("utf-8", "replace")


def _wrap(content: str, max_characters: int) -> tuple[str, int, bool, bool]:
    """Return the wrapped content, the length of what it holds, whether it was cut, and has the warning."""
    warned = len(wrap_external("")) <= max_characters
    room = max(max_characters - len(wrap_external("", warning=warned)), 0)
    kept = content[:room]
    return wrap_external(kept, warning=warned), len(kept), len(kept) < len(content), warned


def _dump(answer: dict[str, object]) -> str:
    return json.dumps(answer, ensure_ascii=False, separators=(",", ":"))
