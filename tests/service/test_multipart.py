import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.errors import ServiceError
from service.multipart import split_form

HEAD = b'--xxy\r\nContent-Disposition: form-data; name="f"; filename="a"\r\n\r\n'


@given(st.lists(st.sampled_from([b"\r", b"\n", b"-", b"x", b"a", b"\r\n--x", b"\r\n--", b"\r\n--xx"]), max_size=30))
def test_a_part_may_hold_all_but_the_boundary(pieces: list[bytes]) -> None:
    data = b"".join(pieces)
    (part,) = split_form(HEAD + data + b"\r\n--xxy--\r\n", b"xxy", limit_parts=1)
    assert bytes(part.data) == data
    assert part.is_file


@given(st.lists(st.binary(max_size=20), min_size=1, max_size=5), st.data())
def test_a_form_cut_anywhere_is_refused(images: list[bytes], draw: st.DataObject) -> None:
    body = b"".join(HEAD + image + b"\r\n" for image in images) + b"--xxy--"
    cut = draw.draw(st.integers(0, len(body) - 1))
    with pytest.raises(ServiceError):
        split_form(body[:cut], b"xxy", limit_parts=5)


def test_parts_are_views_of_the_body() -> None:
    body = HEAD + b"image" + b"\r\n--xxy--\r\n"
    (part,) = split_form(body, b"xxy", limit_parts=1)
    assert part.data.obj is body


def test_a_header_of_one_part_does_not_reach_the_next() -> None:
    body = (
        HEAD
        + b'1\r\n--xxy\r\nContent-Disposition: form-data; name="t"\r\n\r\n\r\n--xxy\r\nX: y\r\n\r\n3\r\n--xxy--\r\n'
    )
    parts = split_form(body, b"xxy", limit_parts=3)
    assert [(part.name, part.is_file, bytes(part.data)) for part in parts] == [
        ("f", True, b"1"),
        ("t", False, b""),
        ("", False, b"3"),
    ]


def test_a_part_too_many_is_refused() -> None:
    with pytest.raises(ServiceError) as error_info:
        split_form(HEAD + b"1\r\n" + HEAD + b"2\r\n--xxy--\r\n", b"xxy", limit_parts=1)
    assert error_info.value.code == "too_many_images"
