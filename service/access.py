"""Who may enter: ASGI middleware that asks for an API key.

Invariant: with keys configured every HTTP path is closed but those named here, so a new route is closed until someone
opens it. A key is compared by its digest, in a time that tells nothing, and is neither kept, logged nor echoed.
"""

import hashlib
import hmac
import re
from collections.abc import Iterable
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from service.errors import ServiceError, error_response
from service.settings import Settings

OPEN_PATHS = frozenset(
    (
        "/health",
        "/health/live",
        "/health/ready",
        "/metrics",
        "/info",
        "/docs",
        "/docs/oauth2-redirect",
        "/openapi.json",
    )
)

# What survives a header unharmed and cannot be mistaken for a separator.
_KEY = re.compile(r"[!-+\--~]+")


class RequireKey:
    """Answers 401 for whoever shows no key that is known, before anything of the body is read.

    A key comes as `Authorization: Bearer KEY` or `x-api-key: KEY`. Leaves the outcome in `scope["state"]`, as
    service.errors does. Without keys it lets nobody in: leave it out where everyone may enter.

    Args:
        keys: what load_keys gave.
    """

    def __init__(self, app: ASGIApp, keys: tuple[bytes, ...]) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._shows_key(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        error = ServiceError("unauthorized", "an API key is needed: Authorization: Bearer KEY, or x-api-key: KEY")
        scope.setdefault("state", {})["outcome"] = error.code
        await error_response(error, {"WWW-Authenticate": "Bearer"})(scope, receive, send)

    def _shows_key(self, headers: Headers) -> bool:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        shown = [headers.get("x-api-key", "")]
        if scheme.lower() == "bearer":
            shown.append(token.strip(" "))
        # Every pair is compared, whatever the ones before said.
        return sum([hmac.compare_digest(_digest(key), known) for key in shown for known in self._keys]) > 0


def load_keys(settings: Settings) -> tuple[bytes, ...]:
    """The digests of the keys that settings name, from both places, each once; none if they name none.

    Raises:
        ValueError: the file cannot be read, what should be a key is none, or a place that is named holds no key. The
            message names the flag and holds no key.
    """
    keys: list[str] = []
    if settings.api_keys is not None:
        keys += _checked("--api-keys", "entry", settings.api_keys.get_secret_value().split(","))
    if settings.api_keys_file is not None:
        lines = _read(settings.api_keys_file).split("\n")
        keys += _checked("--api-keys-file", "line", ["" if line.lstrip().startswith("#") else line for line in lines])
    return tuple(dict.fromkeys(_digest(key) for key in keys))


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8-sig")  # some editors begin a file with a mark
    except OSError as error:
        raise ValueError(f"--api-keys-file: {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"--api-keys-file: {path} is not text") from None


def _checked(flag: str, unit: str, texts: Iterable[str]) -> list[str]:
    keys = []
    for number, key in enumerate(map(str.strip, texts), 1):
        if key and not _KEY.fullmatch(key):
            raise ValueError(f"{flag}: {unit} {number} is no key: a key is visible ASCII without spaces and commas")
        if key:
            keys.append(key)
    if not keys:
        raise ValueError(f"{flag} holds no key")
    return keys


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("latin-1")).digest()
