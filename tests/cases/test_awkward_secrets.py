"""Secrets with line breaks, NULs, odd lengths and characters: refused when they are written, or sent exactly."""

import base64
from typing import Any
from urllib.parse import unquote

import pytest

from tests.support.api import ApiError
from tests.support.processes import Workspace
from tests.support.upstream import Upstream, plain
from tests.support.ways import Kind, way

PLACEMENTS: dict[str, dict[str, Any]] = {
    "header": {"kind": "header", "name": "x-api-key", "format": "{secret}"},
    "basic": {"kind": "basic", "username": "user"},
    "query": {"kind": "query", "parameter": "key"},
}
NEVER = {
    "CRLF and a header": "good\r\nX-Evil: 1",
    "LF inside": "good\nX-Evil: 1",
    "CR inside": "good\rX-Evil: 1",
    "two trailing LFs": "good\n\n",
    "NUL": "go\0od",
    "leading space": " good",
    "trailing space": "good ",
    "tab": "go\tod",
    "empty": "",
    "only a line feed": "\n",
    "over 16 KiB": "x" * 16_385,
}
EXACTLY = ["a&b=c#d/%2e", "with space inside", "100%", "+plus+", "a:b:c", '"quoted" \\ back', "k" * 16_384]


def store(workspace: Workspace, upstream: Upstream, placement: str, secret: str) -> None:
    workspace.credential("api", url=upstream.url, secret=secret, placements=[PLACEMENTS[placement]])


def sent(workspace: Workspace, upstream: Upstream, placement: str, kind: Kind) -> str:
    """The secret, as the upstream decodes it from where it was put."""
    through = way(workspace, upstream, workspace.ticket("api"), kind)
    placeholder = through.ticket.placeholder
    path, headers = "/x", []
    if placement == "header":
        headers = [("X-Api-Key", placeholder)]
    elif placement == "basic":
        headers = [("Authorization", "Basic " + base64.b64encode(f"user:{placeholder}".encode()).decode())]
    else:
        path = f"/x?a=1&key={placeholder}&b=2"
    assert through.ask("GET", path, headers, bearer=False).status == 200
    (seen,) = upstream.requests
    assert b"x-evil" not in seen.head.lower()
    if placement == "header":
        return seen.header("x-api-key")
    if placement == "basic":
        return base64.b64decode(seen.header("authorization").removeprefix("Basic ")).decode().partition(":")[2]
    assert seen.query.startswith("a=1&key=")
    assert seen.query.endswith("&b=2")
    return unquote(seen.query.removeprefix("a=1&key=").removesuffix("&b=2"), errors="strict")


@pytest.mark.guards("control_plane/contract/secret.py", "if any(ord(char) < _FIRST_PRINTABLE or", "if any(False and")
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("secret", NEVER.values(), ids=NEVER)
def test_a_secret_that_would_break_a_request_is_refused_when_it_is_written(
    workspace: Workspace, upstream: Upstream, placement: str, secret: str
) -> None:
    with pytest.raises(ApiError) as refused:
        store(workspace, upstream, placement, secret)

    assert (refused.value.response.status_code, refused.value.code) == (422, "invalid_field")
    assert "X-Evil" not in refused.value.response.text
    assert "good" not in refused.value.response.text


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_one_trailing_line_feed_is_dropped_because_files_end_with_one(
    workspace: Workspace, upstream: Upstream, placement: str, kind: Kind
) -> None:
    store(workspace, upstream, placement, "from-a-file-0123456789\n")

    assert sent(workspace, upstream, placement, kind) == "from-a-file-0123456789"


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("secret", EXACTLY, ids=lambda secret: secret[:20])
def test_a_secret_arrives_exactly(
    workspace: Workspace, upstream: Upstream, placement: str, secret: str, kind: Kind
) -> None:
    upstream.default = plain(b"ok")
    store(workspace, upstream, placement, secret)

    assert sent(workspace, upstream, placement, kind) == secret


@pytest.mark.parametrize("placement", ["basic", "query"])
def test_a_secret_of_other_letters_arrives_where_text_can_be_carried(
    workspace: Workspace, upstream: Upstream, placement: str, kind: Kind
) -> None:
    upstream.default = plain(b"ok")
    store(workspace, upstream, placement, "clé-ключ-鍵-0123456789")

    assert sent(workspace, upstream, placement, kind) == "clé-ключ-鍵-0123456789"


@pytest.mark.parametrize("secret", ["clé", "ключ"])
def test_a_secret_of_other_letters_is_refused_for_a_header(
    workspace: Workspace, upstream: Upstream, secret: str
) -> None:
    with pytest.raises(ApiError) as refused:
        store(workspace, upstream, "header", secret)

    assert refused.value.response.status_code == 422
    assert secret not in refused.value.response.text


def test_a_rotation_is_held_to_the_same_rule(workspace: Workspace, upstream: Upstream) -> None:
    store(workspace, upstream, "header", "good-0123456789")

    with pytest.raises(ApiError) as refused:
        workspace.api.rotate(workspace.tenant, "api", secret="good\r\nX-Evil: 1")

    assert refused.value.response.status_code == 422
