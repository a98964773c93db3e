"""Bodies, headers, methods and paths that no well-meaning client sends: each is refused, or read, as the table says."""

import pytest
from attack import Target
from hostile_bodies import Body, bodies
from tricky_images import CANARY, upright

pytestmark = pytest.mark.usefixtures("unharmed")

JUNK = CANARY.decode()


@pytest.mark.parametrize("body", bodies(), ids=lambda body: body.name)
def test_a_body_has_its_outcome(target: Target, body: Body) -> None:
    answer = target.ask(**body.request)
    assert answer.outcome == body.outcome, answer.document
    if answer.status == 200:
        expected = target.known(upright()).document["data"][0]
        for entry in answer.document["data"]:
            assert entry["image_size"] == expected["image_size"]


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "[[1, 2]]",
        '{"sizes": []}',
        '{"sizes": [[0, 1]]}',
        '{"sizes": [[-1, 1]]}',
        '{"sizes": [[1.5, 1]]}',
        '{"sizes": [["1", 1]]}',
        '{"sizes": [[1]]}',
        '{"sizes": [[1, 2, 3]]}',
        '{"sizes": [[2147483648, 1]]}',
        '{"sizes": [[1, %s]]}' % ("9" * 5000),
        '{"sizes": [[1, 1]], "' + JUNK + '": 1}',
        '{"sizes": ' + "[" * 50_000 + "]" * 50_000 + "}",
        '{"sizes": [' + "[1,1]," * 10_000 + "[1,1]]}",
    ],
    ids=lambda text: text[:40],
)
def test_a_plan_of_impossible_sizes_is_refused(target: Target, text: str) -> None:
    answer = target.ask(path="/plan", content=text, headers={"content-type": "application/json"})
    assert answer.outcome == (400, "invalid_request", None)


@pytest.mark.parametrize("side", [1, 2, 13, 14, 2**31 - 1])
def test_a_plan_of_extreme_sizes_is_made(target: Target, side: int) -> None:
    sizes = [[side, 1], [1, side], [side, side]]
    answer = target.ask(path="/plan", json={"sizes": sizes})
    assert [entry["size"] for entry in answer.document["data"]] == sizes


@pytest.mark.parametrize("method", ["GET", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND", "PURGE"])
@pytest.mark.parametrize("path", ["/embed", "/plan"])
def test_only_posts_are_taken(target: Target, method: str, path: str) -> None:
    assert target.ask(method, path, content=upright()).outcome == (405, "method_not_allowed", None)


@pytest.mark.parametrize(
    "path",
    [
        "/embed/",
        "/EMBED",
        "//embed",
        "/embed%00",
        "/embed%2f",
        "/embed;x",
        "/./embed/..",
        "/docs/../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/static/..%5c..%5cx",
        f"/{JUNK}",
        "/%ff%fe",
        "/" + "x" * 8000,
        "/.git/config",
        "/redoc",
        "/health/",
        "/metrics/",
        "/openapi.json/",
    ],
    ids=lambda path: path[:40],
)
def test_there_is_nothing_at_other_paths(target: Target, path: str) -> None:
    for method in ("GET", "POST"):
        answer = target.ask(method, path, headers={"host": f"{JUNK}:1"}, follow_redirects=False)
        assert answer.outcome == (404, "not_found", None)


def test_what_a_client_says_of_itself_is_neither_told_nor_logged(target: Target) -> None:
    headers = dict.fromkeys(
        ("host", "user-agent", "referer", "cookie", "authorization", "x-api-key", "x-forwarded-for", "origin", JUNK),
        JUNK,
    )
    assert target.ask(content=upright(), headers={"content-type": "image/png"} | headers).status == 200
    assert target.ask("GET", f"/health?{JUNK}={JUNK}", headers=headers).status == 200
    target.check_log()
