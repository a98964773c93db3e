"""Images that a request names by URL, fetched from hosts on a list and from public addresses only.

Invariant: the address that is dialled is the one that was checked, on the first hop and on every other; nothing of the
environment, such as a proxy, has a say. What is told to a client holds neither an address nor a library's words.
"""

import asyncio
import contextlib
import importlib.metadata
import logging
import ssl
from collections.abc import Callable, Sequence

from service.errors import ServiceError
from service.fetch_response import BodyTooLargeError, Response, ResponseError
from service.fetch_rules import IPAddress, WebUrl, is_public_address, parse_hosts, parse_url
from service.patience import all_or_nothing
from service.resolver import Resolve, Resolver, look_up
from service.settings import Settings

log = logging.getLogger(__name__)

_MAX_REDIRECTS = 3
_MAX_CONNECTIONS = 64
_MAX_CONNECTIONS_PER_REQUEST = 8
_READ_BYTES = 2**16
_REDIRECTS = (301, 302, 303, 307, 308)
_USER_AGENT = f"patchgrid/{importlib.metadata.version('patchgrid')}"

_OF_ONE_IMAGE = ("fetch_forbidden", "fetch_failed", "image_too_large")

Claim = Callable[[int], None]


class _Allowance:
    """What the images of one request may hold together."""

    def __init__(self, limit_bytes: int, claim: Claim) -> None:
        self._limit_bytes = limit_bytes
        self._left_bytes = limit_bytes
        self._claim = claim

    def take(self, num_bytes: int) -> None:
        self._left_bytes -= num_bytes
        if self._left_bytes < 0:
            raise ServiceError(
                "body_too_large", f"the fetched images are larger than {self._limit_bytes} bytes together"
            )
        self._claim(num_bytes)


class Fetcher:
    """Fetches for one front end. It holds nothing open between requests, and needs no closing.

    Args:
        settings: fetch_hosts, which must name at least one, and the limits.
        is_allowed_address: whether an address may be dialled.
        resolve: all addresses of a host name; it may block.
        tls: what to trust; None is what the system trusts.

    Raises:
        ValueError: fetch_hosts cannot be used; the message names the flag.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        is_allowed_address: Callable[[IPAddress], bool] = is_public_address,
        resolve: Resolve = look_up,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._rules = parse_hosts(settings.fetch_hosts)
        for rule in self._rules:
            if rule.address is not None and not is_allowed_address(rule.address):
                raise ValueError(f"--fetch-hosts: {rule.host} is not a public address")
        self._timeout_s = settings.fetch_timeout_s
        self._limit_image_bytes = settings.limit_image_bytes
        self._limit_request_bytes = settings.limit_body_bytes
        self._is_allowed_address = is_allowed_address
        self._resolver = Resolver(resolve)
        self._tls = tls or ssl.create_default_context()
        self._slots = asyncio.Semaphore(_MAX_CONNECTIONS)

    async def fetch_all(self, images: Sequence[bytes | str], claim: Claim) -> Sequence[bytes]:
        """Replace what is a URL by the bytes there, several at once; one that stands twice is fetched once.

        Args:
            images: of one request, in its order.
            claim: told of bytes as they arrive; what it raises ends it all.

        Raises:
            ServiceError: fetch_forbidden, fetch_failed or image_too_large, with the image's index; or body_too_large if
                all that is fetched is more than a body may be.
        """
        allowance = _Allowance(self._limit_request_bytes, claim)
        slots = asyncio.Semaphore(_MAX_CONNECTIONS_PER_REQUEST)

        async def fetch(url: str) -> bytes:
            try:
                async with slots, self._slots:
                    return await self._fetch(url, allowance)
            except ServiceError as error:
                raise error.at(images.index(url)) if error.code in _OF_ONE_IMAGE else error from None

        urls = list(dict.fromkeys(image for image in images if isinstance(image, str)))
        if not urls:
            return [image for image in images if isinstance(image, bytes)]
        bodies = dict(zip(urls, await all_or_nothing([fetch(url) for url in urls]), strict=True))
        return [bodies[image] if isinstance(image, str) else image for image in images]

    async def _fetch(self, text: str, allowance: _Allowance) -> bytes:
        deadline_s = asyncio.get_running_loop().time() + self._timeout_s
        try:
            async with asyncio.timeout_at(deadline_s):
                url = _parse(text)
                for _ in range(_MAX_REDIRECTS + 1):
                    addresses = await self._allowed_addresses(url)
                    reader, writer = await self._connect(url, addresses, deadline_s)
                    try:
                        writer.write(_request(url))
                        found = await self._read(reader, allowance)
                    finally:
                        writer.transport.abort()
                    if isinstance(found, bytes):
                        return found
                    url = _parse(found, url)
        except TimeoutError:
            raise _failed(f"the image took longer than {self._timeout_s:g} s to fetch") from None
        except OSError:
            raise _failed("the connection to the host broke") from None
        raise _failed(f"the host redirects more than {_MAX_REDIRECTS} times")

    async def _allowed_addresses(self, url: WebUrl) -> Sequence[IPAddress]:
        rule = next((rule for rule in self._rules if rule.allows(url)), None)
        if rule is None:
            raise _forbidden()
        addresses = await self._resolver.resolve(url.host) if url.address is None else (url.address,)
        if not addresses:
            raise _failed("the host has no address")
        if not all(map(self._is_allowed_address, addresses)):
            log.warning("--fetch-hosts: a host under %s has an address that is not public: not fetched", rule.host)
            raise _forbidden()
        return addresses

    async def _connect(
        self, url: WebUrl, addresses: Sequence[IPAddress], deadline_s: float
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Dial one address after the other, each for its share of the time that is left."""
        is_https = url.scheme == "https"
        for num_left, address in zip(range(len(addresses), 0, -1), addresses, strict=True):
            left_s = deadline_s - asyncio.get_running_loop().time()
            with contextlib.suppress(OSError):  # among them time-outs and certificates
                async with asyncio.timeout(left_s / num_left if num_left > 1 else None):
                    return await asyncio.open_connection(
                        str(address),
                        url.port,
                        ssl=self._tls if is_https else None,
                        server_hostname=url.host if is_https else None,
                    )
        raise _failed("the host could not be reached" + (", or its certificate not be verified" if is_https else ""))

    async def _read(self, reader: asyncio.StreamReader, allowance: _Allowance) -> bytes | str:
        """The image or, if the host redirects, where to."""
        with Response(self._limit_image_bytes) as response:
            try:
                while not response.is_whole:
                    num_before = response.num_body_bytes
                    response.feed(await reader.read(_READ_BYTES))
                    if response.head_is_whole and response.status in _REDIRECTS:
                        if response.location is None:
                            raise _failed("the host redirects to nowhere")
                        return response.location.decode(errors="replace")
                    if response.head_is_whole and response.status != 200:
                        raise _failed(f"the host answered {response.status}")
                    allowance.take(response.num_body_bytes - num_before)
            except ResponseError as error:
                raise _failed(str(error)) from None
            except BodyTooLargeError:
                limit = self._limit_image_bytes
                raise ServiceError("image_too_large", f"the image is larger than {limit} bytes") from None
            return response.body


def _parse(text: str, base: WebUrl | None = None) -> WebUrl:
    try:
        return parse_url(text) if base is None else base.join(text)
    except ValueError:
        raise ServiceError("fetch_forbidden", "only plain http and https URLs are fetched") from None


def _request(url: WebUrl) -> bytes:
    lines = (
        f"GET {url.target} HTTP/1.1",
        f"Host: {url.place}",
        f"User-Agent: {_USER_AGENT}",
        "Accept: */*",
        "Accept-Encoding: identity",
        "Connection: close",
    )
    return "\r\n".join((*lines, "", "")).encode("ascii")


def _forbidden() -> ServiceError:
    # One text for hosts and addresses, so that nobody learns here where a name leads.
    return ServiceError("fetch_forbidden", "this service does not fetch from that host")


def _failed(message: str) -> ServiceError:
    return ServiceError("fetch_failed", message)
