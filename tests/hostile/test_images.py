"""Every kind of image that people or attackers send, over HTTP: what is right is embedded as what it shows, and what
is not is refused by its own code.
"""

import base64

import pytest
from attack import Target
from broken_images import Broken, broken_images
from image_bytes import encode, scene
from tricky_images import CANARY, Picture, pictures, upright

from service.errors import ERRORS

pytestmark = pytest.mark.usefixtures("unharmed")


@pytest.mark.parametrize("picture", pictures(), ids=lambda picture: picture.name)
def test_an_image_is_embedded_as_what_it_shows(target: Target, picture: Picture) -> None:
    rows = target.known(picture.data()).rows
    if picture.same is not None:
        assert rows == target.known(picture.same()).rows
    if picture.unlike is not None:
        assert rows != target.known(picture.unlike()).rows


@pytest.mark.parametrize("broken", broken_images(), ids=lambda broken: broken.name)
def test_what_is_no_image_is_refused_by_its_code(target: Target, broken: Broken) -> None:
    assert target.embed(broken.data()).outcome == (ERRORS[broken.code].status, broken.code, 0)


def test_the_refused_one_of_many_is_named(target: Target) -> None:
    for broken in broken_images()[::10]:
        images = [base64.b64encode(data).decode() for data in (upright(), broken.data(), upright())]
        answer = target.ask(json={"images": images})
        assert answer.outcome == (ERRORS[broken.code].status, broken.code, 1)


@pytest.mark.parametrize(
    "content_type", ["image/png", "image/svg+xml", "image/x-eps", "image/*", "IMAGE/GIF", "application/octet-stream"]
)
def test_neither_type_nor_name_are_believed(target: Target, content_type: str) -> None:
    jpeg = encode(scene(), "JPEG")
    expected = target.known(jpeg).rows
    assert target.embed(jpeg, content_type).rows == expected
    for name in ("a.eps", "../../etc/passwd", "a.png\\", "CON", f"{CANARY.decode()}.svg", ""):
        assert target.ask(files={"file": (name or "x", jpeg, content_type)}).rows == expected
    as_url = f"data:{content_type};base64," + base64.b64encode(jpeg).decode()
    assert target.ask(json={"images": [as_url]}).rows == expected


def test_the_same_image_many_times_in_one_request_is_answered_as_often(target: Target) -> None:
    text = base64.b64encode(upright()).decode()
    entries = target.ask(json={"images": [text] * 64, "dtype": "float16"}).document["data"]
    assert [entry["index"] for entry in entries] == list(range(64))
    assert len({entry["id"] for entry in entries}) == len({entry["embedding"] for entry in entries}) == 1
