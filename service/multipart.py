"""A multipart/form-data body to its parts.

Invariant: no part is copied or dropped, and a body that is cut short is refused rather than read as a shorter one.
"""

import logging
from dataclasses import dataclass

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from service.errors import ServiceError

_nowhere = logging.Logger(__name__, level=logging.CRITICAL + 1)


@dataclass(frozen=True, slots=True)
class Part:
    """A file, or the value of a text field; data is a view of the body."""

    name: str
    is_file: bool
    data: memoryview


def split_form(body: bytes, boundary: bytes, *, limit_parts: int) -> list[Part]:
    """The parts of a form in order. A part is a file if it has a filename, whatever the name.

    Raises:
        ServiceError: the form is malformed or incomplete, or has too many parts.
    """
    parts: list[Part] = []
    header = disposition = b""
    data = memoryview(body)[:0]
    is_whole = False

    def on_part_begin() -> None:
        nonlocal disposition, data
        if len(parts) == limit_parts:
            raise ServiceError("too_many_images", f"the form has more than {limit_parts} parts")
        disposition, data = b"", memoryview(body)[:0]

    # The body is parsed in one go, so that each of these is called once, with the whole value.
    def on_header_field(buffer: bytes, start: int, end: int) -> None:
        nonlocal header
        header = buffer[start:end].lower()

    def on_header_value(buffer: bytes, start: int, end: int) -> None:
        nonlocal disposition
        if header == b"content-disposition":
            disposition = buffer[start:end]

    def on_part_data(buffer: bytes, start: int, end: int) -> None:
        nonlocal data
        data = memoryview(buffer)[start:end]

    def on_part_end() -> None:
        options = parse_options_header(disposition)[1]
        name = options.get(b"name", b"").decode(errors="replace")
        is_file = b"filename" in options or b"filename*=" in disposition  # the latter is how some clients write umlauts
        parts.append(Part(name, is_file, data))

    def on_end() -> None:
        nonlocal is_whole
        is_whole = True

    try:
        parser = MultipartParser(
            boundary,
            {
                "on_part_begin": on_part_begin,
                "on_header_field": on_header_field,
                "on_header_value": on_header_value,
                "on_part_data": on_part_data,
                "on_part_end": on_part_end,
                "on_end": on_end,
            },
        )
        parser.logger = _nowhere  # its own tells bytes of the body
        parser.write(body)
    except FormParserError:
        is_whole = False
    if not is_whole:
        raise ServiceError("invalid_request", "the body is not a whole multipart form")
    return parts
