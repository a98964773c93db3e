"""Bodies that no well-meaning client sends, each with the outcome it must have: status, code, and the image's index."""

import base64
import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from image_bytes import encode, scene
from tricky_images import CANARY, upright

IMAGE = base64.b64encode(upright()).decode()
DATA_URL = f"data:image/png;base64,{IMAGE}"
JSON = "application/json"
FORM = "multipart/form-data; boundary=xx"
JUNK = CANARY.decode()

OK = (200, None, None)
INVALID = (400, "invalid_request", None)
CODED = (415, "unsupported_encoding", None)
TOO_MANY = (413, "too_many_images", None)
NO_MEDIA_TYPE = (415, "unsupported_media_type", None)
Outcome = tuple[int, str | None, int | None]


@dataclass(frozen=True, slots=True)
class Body:
    """A body for /embed, as httpx takes it, and what must come of it."""

    name: str
    request: dict[str, Any]
    outcome: Outcome


def bodies() -> list[Body]:
    """All of them."""
    return [*_json_texts(), *_json_values(), *_image_strings(), *_forms(), *_raw()]


def invalid(index: int) -> Outcome:
    return 400, "invalid_request", index


def no_image(index: int) -> Outcome:
    return 415, "unsupported_format", index


def _of(content: bytes, content_type: str | None, **headers: str | bytes) -> dict[str, Any]:
    named = {} if content_type is None else {"content-type": content_type}
    return {"content": content, "headers": named | headers}


def _json_texts() -> Iterator[Body]:
    """JSON that is none, or that no parser agrees on."""
    image = json.dumps(IMAGE).encode()
    whole = b'{"images": [%s]}' % image
    depth = 50_000
    digits = b"1" * 5_000
    texts: dict[str, tuple[bytes, Outcome]] = {
        "nothing": (b"", INVALID),
        "spaces": (b" \n\t", INVALID),
        "null": (b"null", INVALID),
        "a string": (image, INVALID),
        "a number": (b"1", INVALID),
        "a list": (b"[%s]" % whole, INVALID),
        "cut short": (whole[:-1], INVALID),
        "and more behind": (whole + b" x", INVALID),
        "two of them": (whole + whole, INVALID),
        "lists, opened": (b"[" * depth, INVALID),
        "lists": (b"[" * depth + b"]" * depth, INVALID),
        "objects": (b'{"a":' * depth + b"1" + b"}" * depth, INVALID),
        "lists for images": (b'{"images": ' + b"[" * depth + b"]" * depth + b"}", invalid(0)),
        "lists for one image": (b'{"images": [' + b"[" * depth + b"]" * depth + b"]}", invalid(0)),
        "lists in an unknown field": (b'{"images": [%s], "x": ' % image + b"[" * depth + b"]" * depth + b"}", INVALID),
        "objects for the layout": (
            b'{"images": [%s], "layout": ' % image + b'{"a":' * depth + b"1" + b"}" * depth + b"}",
            INVALID,
        ),
        "5,000 digits for an image": (b'{"images": [%s]}' % digits, invalid(0)),
        "5,000 digits for the layout": (b'{"images": [%s], "layout": %s}' % (image, digits), INVALID),
        "5,000 digits for an exponent": (b'{"images": [%s], "layout": 1e%s}' % (image, digits), INVALID),
        "not a number": (b'{"images": [NaN]}', INVALID),
        "without an end": (b'{"images": [Infinity]}', INVALID),
        "a comma too many": (b'{"images": [%s,]}' % image, INVALID),
        "other quotes": (b"{'images': ['AA']}", INVALID),
        "a comment": (b'{"images": [%s]} // x' % image, INVALID),
        "a byte order mark": (b"\xef\xbb\xbf" + whole, INVALID),
        "UTF-16": (whole.decode().encode("utf-16"), INVALID),
        "UTF-16 without a mark": (whole.decode().encode("utf-16-be"), INVALID),
        "UTF-32": (whole.decode().encode("utf-32"), INVALID),
        "Latin-1": (b'{"images": ["\xe4"]}', INVALID),
        "overlong UTF-8": (b'{"images": ["\xc0\xaf"]}', INVALID),
        "half a pair": (b'{"images": ["\\ud800"]}', INVALID),
        "half a pair, not escaped": (b'{"images": ["\xed\xa0\x80"]}', INVALID),
        "half a pair for the id": (b'{"images": [{"image": %s, "id": "\\udfff"}]}' % image, INVALID),
        "half a pair for a name": (b'{"images": [%s], "\\ud800": 1}' % image, INVALID),
        "a control character": (b'{"images": ["A\x00A"]}', INVALID),
        "no such escape": (b'{"images": ["\\x41"]}', INVALID),
        "images twice, the last counts": (b'{"images": ["%s"], "images": [%s]}' % (CANARY, image), OK),
        "16 MB of lists": (b'{"images": [' + b"[]," * (2**24 // 3) + b"[]]}", invalid(0)),
        "16 MB of objects": (b'{"images": [' + b"{}," * (2**24 // 3) + b"{}]}", invalid(0)),
        "100,000 images": (b'{"images": [' + b'"",' * 99_999 + b'""]}', TOO_MANY),
        "65 images": (b'{"images": [' + b'"AA",' * 64 + b'"AA"]}', TOO_MANY),
    }
    for name, (text, outcome) in texts.items():
        yield Body(f"JSON, {name}", _of(text, JSON), outcome)


def _json_values() -> Iterator[Body]:
    """A wrong type at every place."""
    for value in (None, True, 0, IMAGE, {}, [], {"0": IMAGE}):
        yield Body(f"images: {str(value)[:20]}", {"json": {"images": value}}, INVALID)
    for value in (None, False, 1, 1.5, [], [IMAGE], {}, {"id": JUNK}, {"image": IMAGE, JUNK: 1}):
        yield Body(f"images[1]: {str(value)[:20]}", {"json": {"images": [IMAGE, value]}}, invalid(1))
    for value in (None, 1, [IMAGE], {}):
        yield Body(f"image: {str(value)[:20]}", {"json": {"images": [{"image": value}]}}, invalid(0))
    for value in (1, [], {}, "x" * 257):
        yield Body(f"id: {str(value)[:20]}", {"json": {"images": [{"image": IMAGE, "id": value}]}}, invalid(0))
    for value in (None, "", "\0\n\x1b[31m", "ä" * 256, "../../etc/passwd", "<script>"):
        yield Body(f"id: {str(value)[:20]!r}", {"json": {"images": [{"image": IMAGE, "id": value}]}}, OK)
    for field in ("layout", "dtype", "encoding_format"):
        for value in (None, 1, [], {}, "", "ROWS", JUNK):
            yield Body(f"{field}: {value}", {"json": {"images": [IMAGE], field: value}}, INVALID)
    yield Body("an unknown field", {"json": {"images": [IMAGE], JUNK: JUNK}}, INVALID)
    yield Body("no field", {"json": {}}, INVALID)


def _image_strings() -> Iterator[Body]:
    """The dialects of base64 and of data URLs, and what is neither."""
    data = upright()
    url_safe = base64.urlsafe_b64encode(data).decode()
    folded = base64.encodebytes(data).decode()
    head, tail = IMAGE[:40], IMAGE[40:]
    texts: dict[str, tuple[str, Outcome]] = {
        "bare": (IMAGE, OK),
        "URL-safe": (url_safe, OK),
        "unpadded": (IMAGE.rstrip("="), OK),
        "folded": (folded, OK),
        "folded by CR LF, indented": ("  " + folded.replace("\n", "\r\n\t"), OK),
        "a data URL": (DATA_URL, OK),
        "a data URL in capitals": (f"DATA:IMAGE/PNG;BASE64,{IMAGE}", OK),
        "a data URL of parameters": (f'data:image/png;name="a.png";charset=utf-8;base64,{IMAGE}', OK),
        "a data URL of no type": (f"data:;base64,{IMAGE}", OK),
        "a data URL of another type": (f"data:text/html;base64,{IMAGE}", OK),
        "a data URL, folded and URL-safe": (f"\n data:image/png;base64 ,\n{url_safe}\n", OK),
        "a data URL without a comma": (f"data:image/png;base64{IMAGE}", invalid(0)),
        "a data URL without data": ("data:image/png;base64,", invalid(0)),
        "a data URL of its scheme alone": ("data:", invalid(0)),
        "a data URL that is not base64": ("data:image/svg+xml,<svg/>", invalid(0)),
        "a data URL, base64 not at its end": (f"data:image/png;base64;x=y,{IMAGE}", invalid(0)),
        "a data URL, percent-encoded": (f"data:image/png;base64,{IMAGE.replace('=', '%3D')}%3D", invalid(0)),
        "a data URL in a data URL": (f"data:image/png;base64,{DATA_URL}", invalid(0)),
        "nothing": ("", no_image(0)),
        "spaces": (" \n", no_image(0)),
        "padding alone": ("====", invalid(0)),
        "padding in between": (f"{head}=={tail}", invalid(0)),
        "padding too long": (IMAGE.rstrip("=") + "=====", invalid(0)),
        "one letter": ("A", invalid(0)),
        "a letter too many": (IMAGE.rstrip("=")[: len(IMAGE) // 4 * 4 - 4] + "A", invalid(0)),
        "junk in between": (f"{head}!{tail}", invalid(0)),
        "a zero in between": (f"{head}\0{tail}", invalid(0)),
        "wide letters": (f"{head}\uff21{tail}", invalid(0)),
        "a space of no width": (f"{head}\u200b{tail}", invalid(0)),
        "a space of another kind": (f"{head}\u00a0{tail}", invalid(0)),
        "an emoji": ("\U0001f600", invalid(0)),
        "words": ("\N{LATIN SMALL LETTER A WITH DIAERESIS} " + JUNK, invalid(0)),
        "text in base64": (base64.b64encode(CANARY).decode(), no_image(0)),
        "base64 of base64": (base64.b64encode(IMAGE.encode()).decode(), no_image(0)),
        "hexadecimal": (data.hex(), no_image(0)),
        "a file": ("file:///etc/passwd", invalid(0)),
        "a path": ("/etc/hostname.", invalid(0)),
        "a path in base64's letters": ("/etc/hosts00", no_image(0)),
        "a path upwards": ("../../../../etc/passwd", invalid(0)),
        "a share": ("\\\\127.0.0.1\\c$\\x.png", invalid(0)),
        "FTP": ("ftp://127.0.0.1/x.png", invalid(0)),
        "gopher": ("gopher://127.0.0.1:8100/_x", invalid(0)),
        "a script": ("javascript:alert(1)", invalid(0)),
        "HTTP": ("http://127.0.0.1/x.png", (400, "fetch_disabled", 0)),
        "HTTPS in capitals": (f" HTTPS://{JUNK}@[::1]/x.png", (400, "fetch_disabled", 0)),
    }
    for name, (text, outcome) in texts.items():
        yield Body(f"base64, {name}", {"json": {"images": [text]}}, outcome)


def _forms() -> Iterator[Body]:
    """multipart/form-data, by hand."""
    image = upright()
    file = _file(image, b'="a.png"')
    layout = b'Content-Disposition: form-data; name="layout"\r\n\r\n'
    rich = encode(scene(), "BMP") + b"\r\n--x\r\n--xy--\r\n--\r\n\r\n--xx-\r\n-\r\n" * 99
    named = partial(_file, image)
    empty = _file(b"", b'="a"')
    forms: dict[str, tuple[bytes, Outcome]] = {
        "a file": (_form(file), OK),
        "a file of all that looks like a boundary": (_form(file.replace(image, rich)), OK),
        "64 files of one name": (_form(*[file] * 64), OK),
        "text after it": (_form(file) + CANARY, OK),
        "text before it": (CANARY + b"\r\n" + _form(file), INVALID),
        "header names in capitals": (_form(file.replace(b"Content-D", b"CONTENT-D")), OK),
        "a content type that lies": (_form(b"Content-Type: text/html\r\n" + file), OK),
        "a file name in quotes": (_form(named(rb'="a \"b\" \\ .png"')), OK),
        "a file name of other letters": (_form(named('="ä\u202e.png"'.encode())), OK),
        "a file name of no letters": (_form(named(b'="\xff\xfe"')), OK),
        "a file name that is encoded": (_form(named(b"*=UTF-8''%C3%A4%00%0d%0a.png")), OK),
        "a file name that is encoded wrongly": (_form(named(b"*=utf-99'%%%")), OK),
        "an empty file name": (_form(named(b'=""')), OK),
        "a file name of two paths": (_form(named(b'="../a"; filename="/etc/b"')), OK),
        "a layout": (_form(file, layout + b"v4"), OK),
        "nothing": (b"", INVALID),
        "junk": (CANARY, INVALID),
        "no part": (_form(), INVALID),
        "no file": (_form(layout + b"v4"), INVALID),
        "another boundary": (_form(file).replace(b"--xx", b"--yy"), INVALID),
        "no last boundary": (_form(file, end=b""), INVALID),
        "half a last boundary": (_form(file, end=b"--xx-"), INVALID),
        "cut short in a file": (_form(file)[:-30], INVALID),
        "cut short in a header": (b"--xx\r\nContent-Disp", INVALID),
        "line ends of LF alone": (_form(file).replace(b"\r\n", b"\n"), INVALID),
        "a form in a form": (
            _form(b"Content-Type: multipart/mixed; boundary=yy\r\n\r\n" + _form(file, name=b"yy")),
            INVALID,
        ),
        "a header of no colon": (_form(CANARY + b"\r\n\r\nx"), INVALID),
        "a header of a zero": (_form(b"X-\0: y\r\n" + file), INVALID),
        "a header of 100 kB": (_form(b"X: " + CANARY * 8_000 + b"\r\n" + file), INVALID),
        "10,000 headers": (_form(b"X: y\r\n" * 10_000 + file), INVALID),
        "no header": (_form(b"\r\n" + image), INVALID),
        "a disposition of junk": (_form(b'Content-Disposition: \xff;;=;"\r\n\r\n' + image), INVALID),
        "an unknown field": (_form(file, b'Content-Disposition: form-data; name="%s"\r\n\r\nx' % CANARY), INVALID),
        "no such layout": (_form(file, layout + CANARY), INVALID),
        "a layout of no letters": (_form(file, layout + b"\xff\xfe"), INVALID),
        "a layout of 1 MB": (_form(file, layout + b"v4" * 2**19), INVALID),
        "two layouts": (_form(file, layout + b"v4", layout + b"v4"), INVALID),
        "an empty file": (_form(file, empty), no_image(1)),
        "base64 in a file": (
            _form(b"Content-Transfer-Encoding: base64\r\n" + file.replace(image, IMAGE.encode())),
            no_image(0),
        ),
        "65 files": (_form(*[file] * 65), TOO_MANY),
        "10,000 files": (_form(*[empty] * 10_000), TOO_MANY),
        "10,000 fields": (_form(file, *[layout] * 10_000), TOO_MANY),
    }
    for name, (content, outcome) in forms.items():
        yield Body(f"form, {name}", _of(content, FORM), outcome)
    for name, boundary in (
        ("no boundary", ""),
        ("an empty boundary", "; boundary="),
        ("an empty boundary in quotes", '; boundary=""'),
        ("a boundary of 999 letters", "; boundary=" + "x" * 999),
    ):
        yield Body(f"form, {name}", _of(_form(file), "multipart/form-data" + boundary), INVALID)
    for content_type in ('multipart/form-data; boundary="xx"', "Multipart/Form-Data; charset=utf-8; Boundary=xx"):
        yield Body(f"form, {content_type}", _of(_form(file), content_type), OK)
    odd = "a b'()+_,-./:=?"
    yield Body(
        "form, an odd boundary", _of(_form(file, name=odd.encode()), f'multipart/form-data; boundary="{odd}"'), OK
    )


def _raw() -> Iterator[Body]:
    """The image itself, or what is said to be one."""
    image = upright()
    for content_type in (
        None,
        "",
        "text/plain",
        "text/html",
        "application/xml",
        "application/x-www-form-urlencoded",
        "multipart/mixed; boundary=xx",
        "application/json-patch+json",
        "json",
        "image",
        "*/*",
        JUNK,
        "application/json, image/png",
        ";",
        "=;=",
    ):
        yield Body(f"raw, as {content_type!r}", _of(image, content_type), NO_MEDIA_TYPE)
    octets = "application/octet-stream"
    yield Body("raw, nothing", _of(b"", octets), no_image(0))
    yield Body("raw, JSON", _of(b'{"images": []}', octets), no_image(0))
    yield Body("raw, base64", _of(IMAGE.encode(), octets), no_image(0))
    yield Body("raw, JSON of an image's bytes", _of(image, JSON), INVALID)
    yield Body("raw, a form of an image's bytes", _of(image, FORM), INVALID)
    yield Body("raw, 33 MB", _of(b"\x89PNG\r\n\x1a\n" + bytes(33 * 2**20), octets), (413, "image_too_large", 0))
    yield Body("packed JSON", _of(gzip.compress(b'{"images": []}'), JSON, **{"content-encoding": "gzip"}), CODED)
    for query in ("layout=v5", "layout=", "layout=v4&layout=v4", f"{JUNK}=1", "dtype=%ff", "layout[]=v4", "=v4"):
        yield Body(f"raw, ?{query}", _of(image, octets) | {"params": query}, INVALID)
    yield Body("JSON and a query", {"json": {"images": [IMAGE]}, "params": "layout=v4"}, INVALID)
    yield Body("JSON and another query", {"json": {"images": [IMAGE]}, "params": JUNK}, OK)
    for name in ("0", "-1", "1.5", "1e3", "", "٣".encode(), "9" * 5000, JUNK):
        yield Body(f"x-timeout-ms: {name[:9]!r}", _of(image, octets, **{"x-timeout-ms": name}), INVALID)
    large = encode(scene(size=(1500, 1500)), "BMP")
    yield Body("x-timeout-ms: 1", _of(large, octets, **{"x-timeout-ms": "1"}), (504, "deadline_exceeded", None))
    for accept in ("", "text/html", f"{JUNK};q=1, */*", "application/json;q=nan", "," * 5000, ";q=;q=,"):
        yield Body(f"Accept: {accept[:20]}", _of(image, octets, accept=accept), OK)
    for request_id in ("a b", "<x>", "x" * 129, JUNK + "/"):
        yield Body(f"x-request-id: {request_id[:9]!r}", _of(image, octets, **{"x-request-id": request_id}), OK)


def _file(data: bytes, name: bytes) -> bytes:
    return b'Content-Disposition: form-data; name="f"; filename' + name + b"\r\n\r\n" + data


def _form(*parts: bytes, name: bytes = b"xx", end: bytes | None = None) -> bytes:
    last = b"--" + name + b"--\r\n" if end is None else end
    return b"".join(b"--%s\r\n%s\r\n" % (name, part) for part in parts) + last
