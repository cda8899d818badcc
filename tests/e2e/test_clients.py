"""Programs nobody here wrote, through both modes of the proxy.

Rule: judged at two places. The upstream's raw log shows the real key and, in no head, a placeholder or any of our
markers, encoded or not. What came back to the client, its files included, does not show the key; the upstreams here do
their worst to send it back.
"""

import base64
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.clients import CLIENTS, Client, MissingClientError, Mode, Ran, Situation, demand
from tests.support.git_server import create_repository, serve_git
from tests.support.processes import Workspace
from tests.support.provider import serve_provider
from tests.support.upstream import Upstream, echo

GIT_USER = "x-access-token"
MARKER = re.compile(rb"coat(chk|prx)1", re.IGNORECASE)
BASIC = re.compile(rb"[Bb]asic ([A-Za-z0-9+/=]+)")


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
    situation = grant(workspace, client, mode, upstream, secret=secret, home=home)

    try:
        ran = client.start(situation)
    except MissingClientError as missing:
        demand(missing)
        raise

    assert_the_upstream_saw_only_the_key(upstream, secret)
    assert not ran.holds(secret), "the real key came back to the client"
    if client.speaks == "provider":
        assert "Coats |are |checked.|" in ran.output, "the stream did not arrive as it was sent"
    if client.speaks == "git":
        assert_the_push_arrived(home.parent, ran)


def prepare(client: Client, upstream: Upstream, *, secret: str, folder: Path) -> None:
    """Make the upstream what the client talks to."""
    match client.speaks:
        case "git":
            (folder / "repositories").mkdir()
            create_repository(folder / "repositories")
            serve_git(upstream, folder / "repositories", user=GIT_USER, token=secret)
        case "provider":
            serve_provider(upstream, key=secret)
        case _:
            upstream.on("/echo", echo())


def grant(
    workspace: Workspace, client: Client, mode: Mode, upstream: Upstream, *, secret: str, home: Path
) -> Situation:
    """A credential for this upstream, a placeholder of it, and the way there."""
    bearer = {"kind": "header", "name": "authorization", "format": "Bearer {secret}"}
    api_key = {"kind": "header", "name": "x-api-key", "format": "{secret}"}
    basic = {"kind": "basic", "username": GIT_USER}
    placements = [basic] if client.speaks == "git" else [bearer, api_key]
    workspace.credential("real", url=upstream.url, secret=secret, placements=placements)
    ticket = workspace.ticket("real")
    proxy = workspace.deployment.proxy
    if mode is Mode.REVERSE:
        return Situation(proxy.reverse_url(ticket, "real"), ticket.placeholder, home)
    return Situation(
        upstream.url,
        ticket.placeholder,
        home,
        proxy_url=proxy.forward_url(ticket),
        ca_file=workspace.deployment.ca_file,
    )


def assert_the_upstream_saw_only_the_key(upstream: Upstream, secret: str) -> None:
    heads = upstream.heads()
    decoded = [base64.b64decode(token) for head in heads for token in BASIC.findall(head)]
    assert any(secret.encode() in text for text in heads + decoded), "the real key never arrived"
    for text in heads + decoded:
        assert not MARKER.search(text), "one of our markers left in a head"
        assert b"coatcheck" not in text.lower(), "a header of ours left"
        assert b"proxy-authorization" not in text.lower()


def assert_the_push_arrived(folder: Path, ran: Ran) -> None:
    pushed = (folder / "repositories" / "coats.git" / "refs" / "heads" / "main").read_text()
    assert (folder / "home" / "work" / ".git" / "refs" / "heads" / "main").read_text() == pushed, ran.output
