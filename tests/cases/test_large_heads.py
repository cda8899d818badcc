"""Long tokens, many cookies, long lines: passed unchanged, or refused by name. Never a hang, a 500, or a log line
that holds the value.
"""

import contextlib

import pytest

from tests.support.processes import Workspace
from tests.support.raw_client import Line, Response, dial
from tests.support.upstream import Upstream, plain, sends
from tests.support.ways import Way

KIB = 1024
TOO_LARGE = {431: "headers_too_large", 414: "uri_too_long"}
NEEDLE = "n33dle"
"""Stands in every large value; no log line may hold it."""


def large(size: int) -> str:
    return NEEDLE + "x" * (size - len(NEEDLE))


LARGE_HEADERS = {
    "authorization of 9 KiB": [("Authorization", f"Bearer {large(9 * KIB)}")],
    "authorization of 17 KiB": [("Authorization", f"Bearer {large(17 * KIB)}")],
    "authorization of 40 KiB": [("Authorization", f"Bearer {large(40 * KIB)}")],
    "authorization of 100 KiB": [("Authorization", f"Bearer {large(100 * KIB)}")],
    "200 small cookies": [("Cookie", "; ".join(f"c{n}={NEEDLE}" for n in range(200)))],
    "150 lines": [(f"X-Line-{n}", NEEDLE) for n in range(150)],
    "1000 lines": [(f"X-Line-{n}", NEEDLE) for n in range(1000)],
}


def assert_no_log_holds_it(workspace: Workspace) -> None:
    assert NEEDLE not in workspace.deployment.logs()


@pytest.mark.parametrize("bearer", [False, True], ids=["bare", "swapped"])
@pytest.mark.parametrize("what", LARGE_HEADERS)
def test_large_header_fields_pass_unchanged_or_are_refused_by_name(
    workspace: Workspace, through: Way, upstream: Upstream, what: str, bearer: bool
) -> None:
    headers = LARGE_HEADERS[what]
    if bearer and what.startswith("authorization"):
        headers = [("X-Token", headers[0][1])]
    upstream.default = plain()

    response = through.ask("GET", "/large", headers, bearer=bearer)

    if response.status == 200:
        (seen,) = upstream.requests
        assert [value for name, value in seen.headers if NEEDLE in value] == [value for _, value in headers]
    else:
        assert response.refusal == TOO_LARGE[response.status]
        assert upstream.requests == []
    assert_no_log_holds_it(workspace)


@pytest.mark.parametrize("size", [9 * KIB, 20 * KIB, 100 * KIB])
def test_a_long_request_line_passes_unchanged_or_is_refused_by_name(
    workspace: Workspace, through: Way, upstream: Upstream, size: int
) -> None:
    upstream.default = plain()
    path = f"/long?q={large(size)}"

    response = through.ask("GET", path)

    if response.status == 200:
        assert upstream.requests[0].target == path
    else:
        assert response.refusal == TOO_LARGE[response.status]
        assert upstream.requests == []
    assert_no_log_holds_it(workspace)


@pytest.mark.parametrize("size", [20 * KIB, 300 * KIB])
def test_a_large_reply_head_passes_unchanged_or_is_a_502_of_ours(
    workspace: Workspace, through: Way, upstream: Upstream, size: int
) -> None:
    upstream.on("/reply", sends(f"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-Big: {large(size)}\r\n\r\nok".encode()))

    response = through.ask("GET", "/reply")

    if response.status == 200:
        assert response.header("x-big") == large(size)
        assert response.body == b"ok"
    else:
        assert (response.status, response.refusal) == (502, "upstream_protocol_error")
    assert_no_log_holds_it(workspace)


@pytest.mark.parametrize("what", LARGE_HEADERS)
def test_the_control_plane_answers_large_heads_without_failing(workspace: Workspace, what: str) -> None:
    host, _, port = workspace.api.url.removeprefix("http://").partition(":")
    lines = [f"{name}: {value}" for name, value in LARGE_HEADERS[what]]

    response = _asked(dial(int(port)), ["GET /v1/tenants HTTP/1.1", f"Host: {host}:{port}", *lines])

    assert response.status in (400, 401, 431), response
    assert NEEDLE.encode() not in response.head + response.body
    assert_no_log_holds_it(workspace)


@pytest.mark.parametrize("size", [9 * KIB, 20 * KIB, 100 * KIB])
def test_the_control_plane_answers_long_request_lines_without_failing(workspace: Workspace, size: int) -> None:
    port = int(workspace.api.url.rpartition(":")[2])

    response = _asked(dial(port), [f"GET /v1/tenants?q={large(size)} HTTP/1.1", f"Host: 127.0.0.1:{port}"])

    assert response.status in (400, 401, 404, 414, 431), response
    assert_no_log_holds_it(workspace)


def _asked(line: Line, lines: list[str]) -> Response:
    with line:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # answered before all of it was sent
            line.send("\r\n".join([*lines, "", ""]).encode())
        return line.read_response()
