"""Programs nobody here wrote, through both modes of the proxy.

Rule: judged at two places. The upstream's raw log shows the real key and, in no head, a placeholder or any of our
markers, encoded or not. What came back to the client, its files included, does not show the key; the upstreams here do
their worst to send it back.
"""

import base64
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.clients import (
    CLIENTS,
    Client,
    ClientFailedError,
    MissingClientError,
    Mode,
    Ran,
    Situation,
    demand,
)
from tests.support.git_server import create_repository, serve_git
from tests.support.package_index import PIP_USER, serve_npm_registry, serve_pip_index
from tests.support.processes import Workspace
from tests.support.provider import serve_provider
from tests.support.session_listener import session_listener
from tests.support.upstream import Upstream, echo, plain

GIT_USER = "x-access-token"
MARKER = re.compile(rb"coat(chk|prx)1", re.IGNORECASE)
BASIC = re.compile(rb"[Bb]asic ([A-Za-z0-9+/=]+)")
STICKY = [("Strict-Transport-Security", "max-age=31536000"), ("Alt-Svc", 'h3=":443"; ma=86400')]
"""What would make a browser go another way next time."""
PAGE = b"""<!DOCTYPE html><body><pre id="got"></pre><script>
const request = new XMLHttpRequest();
request.open("GET", "/echo", false);
request.setRequestHeader("Authorization", "Bearer " + location.hash.slice(1));
request.send();
document.getElementById("got").textContent =
  request.status + " " + request.getAllResponseHeaders() + request.responseText;
</script></body>"""


def cells() -> list[Any]:
    """The table: every client in each of its modes."""
    return [
        pytest.param(client, mode, id=f"{client.name}-{mode}", marks=[pytest.mark.long] if client.long else [])
        for client in CLIENTS
        for mode in client.modes
    ]


@pytest.mark.parametrize("client, mode", cells())
def test_a_real_client_uses_a_placeholder_as_if_it_were_the_key(
    client: Client,
    mode: Mode,
    workspace: Workspace,
    upstream: Upstream,
    secret: str,
    home: Path,
    record_property: Any,
) -> None:
    record_property("client", client.name)
    record_property("mode", mode.value)
    prepare(client, upstream, secret=secret, folder=home.parent)

    with granted(workspace, client, mode, upstream, secret=secret, home=home) as situation:
        ran = started(client, situation)

    assert_the_upstream_saw_only_the_key(upstream, secret)
    assert not ran.holds(secret), "the real key came back to the client"
    if client.speaks == "provider":
        assert "Coats |are |checked.|" in ran.output, "the stream did not arrive as it was sent"
    if client.speaks == "git":
        assert_the_push_arrived(home.parent, ran)
    if client.speaks == "page":
        assert "GET /echo HTTP/1.1" in ran.output, "the page was not answered"
        assert not re.search("strict-transport-security|alt-svc", ran.output, re.IGNORECASE)


@pytest.mark.parametrize("client, mode", cells())
def test_a_real_client_with_a_wrong_placeholder_is_told_so_in_its_own_words(
    client: Client, mode: Mode, workspace: Workspace, upstream: Upstream, secret: str, home: Path
) -> None:
    prepare(client, upstream, secret=secret, folder=home.parent)

    with granted(workspace, client, mode, upstream, secret=secret, home=home, altered=True) as situation:
        said = refused(client, situation)

    assert client.shows in said
    assert not Ran(said).holds(secret)
    for text in upstream.heads() + decoded_basic(upstream):
        assert not MARKER.search(text), "the wrong placeholder left"
        assert secret.encode() not in text, "a wrong placeholder was swapped"


def started(client: Client, situation: Situation) -> Ran:
    try:
        return client.start(situation)
    except MissingClientError as missing:
        demand(missing)
        raise


def refused(client: Client, situation: Situation) -> str:
    """All that its user reads. A browser does not fail, it shows."""
    try:
        return started(client, situation).output
    except ClientFailedError as failed:
        return str(failed)


def prepare(client: Client, upstream: Upstream, *, secret: str, folder: Path) -> None:
    """Make the upstream what the client talks to."""
    match client.speaks:
        case "git":
            (folder / "repositories").mkdir()
            create_repository(folder / "repositories")
            serve_git(upstream, folder / "repositories", user=GIT_USER, token=secret)
        case "provider":
            serve_provider(upstream, key=secret)
        case "pip":
            serve_pip_index(upstream, token=secret)
        case "npm":
            serve_npm_registry(upstream, token=secret)
        case "page":
            upstream.on("/page", plain(PAGE, headers=[("Content-Type", "text/html"), *STICKY]))
            upstream.on("/echo", echo(headers=STICKY))
        case _:
            upstream.on("/echo", echo())


@contextmanager
def granted(
    workspace: Workspace,
    client: Client,
    mode: Mode,
    upstream: Upstream,
    *,
    secret: str,
    home: Path,
    altered: bool = False,
) -> Iterator[Situation]:
    """A credential for this upstream, a placeholder of it (or one with a wrong end), and the way there."""
    bearer = {"kind": "header", "name": "authorization", "format": "Bearer {secret}"}
    api_key = {"kind": "header", "name": "x-api-key", "format": "{secret}"}
    basic = {"git": {"kind": "basic", "username": GIT_USER}, "pip": {"kind": "basic", "username": PIP_USER}}
    placements = [basic[client.speaks]] if client.speaks in basic else [bearer, api_key]
    workspace.credential("real", url=upstream.url, secret=secret, placements=placements)
    ticket = workspace.ticket("real")
    key = (
        ticket.placeholder[:-1] + ("B" if ticket.placeholder.endswith("A") else "A") if altered else ticket.placeholder
    )
    proxy, ca_file = workspace.deployment.proxy, workspace.deployment.ca_file
    match mode:
        case Mode.REVERSE:
            yield Situation(proxy.reverse_url(ticket, "real"), key, home)
        case Mode.FORWARD:
            yield Situation(upstream.url, key, home, proxy_url=proxy.forward_url(ticket), ca_file=ca_file)
        case Mode.SESSION:
            with session_listener(proxy_port=proxy.forward_port, proxy_credential=ticket.proxy_credential) as url:
                yield Situation(upstream.url, key, home, proxy_url=url, ca_file=ca_file)


def decoded_basic(upstream: Upstream) -> list[bytes]:
    return [base64.b64decode(token) for head in upstream.heads() for token in BASIC.findall(head)]


def assert_the_upstream_saw_only_the_key(upstream: Upstream, secret: str) -> None:
    heads, decoded = upstream.heads(), decoded_basic(upstream)
    assert any(secret.encode() in text for text in heads + decoded), "the real key never arrived"
    for text in heads + decoded:
        assert not MARKER.search(text), "one of our markers left in a head"
        assert b"coatcheck" not in text.lower(), "a header of ours left"
        assert b"proxy-authorization" not in text.lower()


def assert_the_push_arrived(folder: Path, ran: Ran) -> None:
    pushed = (folder / "repositories" / "coats.git" / "refs" / "heads" / "main").read_text()
    assert (folder / "home" / "work" / ".git" / "refs" / "heads" / "main").read_text() == pushed, ran.output
