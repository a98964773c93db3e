"""Host names to addresses without blocking the event loop, by the system's resolver.

Invariant: threads are bounded, whatever names hang, and none of them keeps the process from ending.
"""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Sequence
from ipaddress import ip_address

from service.fetch_rules import IPAddress

Resolve = Callable[[str], Sequence[IPAddress]]

_FAMILIES = (socket.AF_INET, socket.AF_INET6)
_MAX_LOOKUPS = 16


def look_up(host: str) -> Sequence[IPAddress]:
    """All addresses of a host; none if it has none or is not to be found. Blocks, at times for half a minute."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(dict.fromkeys(ip_address(place[0]) for family, *_, place in found if family in _FAMILIES))


class Resolver:
    """Look-ups in daemon threads: a bounded number, and one for a name however many wait for it.

    A look-up cannot be ended, only left. It keeps its thread until the system gives up on it; names that hang cost
    others their turn at worst.

    Args:
        resolve: all addresses of a name; it may block.
    """

    def __init__(self, resolve: Resolve = look_up) -> None:
        self._resolve = resolve
        self._slots = asyncio.Semaphore(_MAX_LOOKUPS)
        self._running: dict[str, asyncio.Future[Sequence[IPAddress]]] = {}

    async def resolve(self, host: str) -> Sequence[IPAddress]:
        """All addresses of a host, none if it has none. Waits for as long as it takes: bound it."""
        if host not in self._running:
            await self._slots.acquire()  # given up by whoever gives up waiting: no thread starts for nobody
            if host in self._running:
                self._slots.release()
            else:
                self._start(host)
        return await asyncio.shield(self._running[host])

    def _start(self, host: str) -> None:
        loop = asyncio.get_running_loop()
        answer = self._running[host] = loop.create_future()

        def end(addresses: Sequence[IPAddress]) -> None:
            del self._running[host]
            self._slots.release()
            answer.set_result(addresses)

        def work() -> None:
            addresses: Sequence[IPAddress] = ()
            try:
                addresses = self._resolve(host)
            finally:
                with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                    loop.call_soon_threadsafe(end, addresses)

        threading.Thread(target=work, name="lookup", daemon=True).start()
