"""Bytes that hypothesis makes up, into the two places that read foreign ones: a result comes out, or our error."""

import re
import warnings

import pytest
from broken_images import broken_images
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tricky_images import pictures

from encoder.config import DEEPSEEK_V4, DEEPSEEK_V41, VisionConfig
from encoder.image import ImageError, ImageProfile, read_canvas
from service.errors import ServiceError
from service.multipart import split_form

FILES = [picture.data() for picture in pictures()[::3]] + [broken.data() for broken in broken_images()[::3]]
FILES = [file for file in FILES if len(file) < 100_000]
HEADS = sorted({file[:12] for file in FILES if len(file) >= 12})
LIMIT_PIXELS = 50_000

EDIT = st.tuples(st.sampled_from(["set", "cut", "insert", "drop", "copy"]), st.floats(0, 1), st.binary(max_size=8))
BOUNDARIES = st.from_regex(re.compile(rb"[0-9A-Za-z'()+_,./:=?-]{1,40}"), fullmatch=True)
NAMES = st.text(st.characters(codec="utf-8", exclude_characters='"\\\r\n\0', exclude_categories=["Cs"]), max_size=20)


@st.composite
def mutated(draw: st.DrawFn, originals: st.SearchStrategy[bytes]) -> bytes:
    data = bytearray(draw(originals))
    for kind, share, new in draw(st.lists(EDIT, min_size=1, max_size=8)):
        place = int(share * len(data))
        match kind:
            case "set":
                data[place : place + len(new)] = new
            case "cut":
                del data[place:]
            case "insert":
                data[place:place] = new
            case "drop":
                del data[place : place + len(new)]
            case "copy":
                data[place:place] = data[place : place + 64]
    return bytes(data)


@settings(max_examples=300)
@given(
    data=st.one_of(
        st.binary(max_size=400),
        st.builds(bytes.__add__, st.sampled_from(HEADS), st.binary(max_size=400)),
        mutated(st.sampled_from(FILES)),
    ),
    config=st.sampled_from([DEEPSEEK_V4, DEEPSEEK_V41]),
    profile=st.sampled_from(["vllm", "plain"]),
)
def test_any_bytes_are_a_canvas_or_an_image_error(data: bytes, config: VisionConfig, profile: ImageProfile) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # as in the process that decodes
            canvas = read_canvas(data, config, profile, limit_pixels=LIMIT_PIXELS)
    except ImageError as refusal:
        told = f"{refusal.code}: {refusal}"
    else:
        told = "invalid_image: none"
        assert canvas.pixels.shape == (*reversed(canvas.plan.resized), 3)
        assert canvas.plan.image_size[0] * canvas.plan.image_size[1] <= LIMIT_PIXELS
    assert re.fullmatch(r"(unsupported_format|invalid_image|image_too_large|degenerate_image): [A-Za-z0-9 ,]+", told)


@st.composite
def form_parts(draw: st.DrawFn, boundary: bytes) -> list[tuple[str, bool, bytes]]:
    """Name, whether it is a file, and data that may hold all but the delimiter."""
    pieces = st.sampled_from(
        [b"\r", b"\n", b"-", b"--", b"\r\n", b"\r\n--", b"\r\n--" + boundary[:-1], boundary, b"\0"]
    )
    data = st.lists(st.one_of(st.binary(max_size=20), pieces), max_size=10).map(b"".join)
    data = data.filter(lambda each: b"\r\n--" + boundary not in b"\r\n" + each)
    return draw(st.lists(st.tuples(NAMES, st.booleans(), data), min_size=1, max_size=6))


def written(parts: list[tuple[str, bool, bytes]], boundary: bytes) -> bytes:
    body = b""
    for name, is_file, data in parts:
        filename = b'; filename="x"' if is_file else b""
        head = b'Content-Disposition: form-data; name="' + name.encode() + b'"' + filename
        body += b"--" + boundary + b"\r\n" + head + b"\r\n\r\n" + data + b"\r\n"
    return body + b"--" + boundary + b"--\r\n"


@settings(max_examples=200)
@given(draw=st.data(), boundary=BOUNDARIES)
def test_a_form_s_parts_come_back_to_the_byte(draw: st.DataObject, boundary: bytes) -> None:
    parts = draw.draw(form_parts(boundary))
    found = split_form(written(parts, boundary), boundary, limit_parts=len(parts))
    assert [(part.name, part.is_file, bytes(part.data)) for part in found] == parts


@settings(max_examples=300)
@given(
    body=st.one_of(
        st.binary(max_size=200),
        mutated(st.builds(written, form_parts(b"xx"), st.just(b"xx"))),
    ),
    boundary=st.one_of(st.just(b"xx"), st.binary(max_size=300)),
    limit_parts=st.integers(0, 5),
)
@example(body=b"", boundary=b"", limit_parts=0)
@example(body=b"----\r\n\r\n\r\n------\r\n", boundary=b"", limit_parts=1)
@pytest.mark.parametrize("prefix", [b"", b"--xx\r\n", b"--xx\r\nContent-Disposition:"])
def test_any_bytes_are_a_form_or_a_service_error(prefix: bytes, body: bytes, boundary: bytes, limit_parts: int) -> None:
    try:
        num_parts, code = len(split_form(prefix + body, boundary, limit_parts=limit_parts)), "invalid_request"
    except ServiceError as refusal:
        num_parts, code = 0, refusal.code
    assert num_parts <= limit_parts
    assert code in ("invalid_request", "too_many_images")
