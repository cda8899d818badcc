"""How upstreams answer the versions of a credential under rotation: counted by status, told without anything else."""

from pathlib import Path

import pytest
import trustme

from control_plane.contract.wire import AuditEvent
from tests.egress_proxy.world import World, get, reverse_path
from tests.support.control_plane_simulator import ControlPlaneSimulator, Ticket
from tests.support.upstream import Upstream, plain

STATUSES = {"/ok": "200 OK", "/no": "401 Unauthorized", "/never": "403 Forbidden"}


@pytest.fixture
def answering(upstream: Upstream) -> Upstream:
    for path, status in STATUSES.items():
        upstream.on(path, plain(status=status))
    return upstream


def ask(world: World, ticket: Ticket, path: str, *, times: int) -> None:
    with world.reverse() as line:
        for _ in range(times):
            line.ask(get(reverse_path(ticket, path), headers={"Authorization": ticket.bearer}))


def reports(control_plane: ControlPlaneSimulator, ticket: Ticket) -> list[AuditEvent]:
    return [
        event
        for event in control_plane.audited
        if event.action == "replies" and event.extra["credential_id"] == ticket.binding.credential_id
    ]


def total(events: list[AuditEvent], status: int) -> int:
    return sum(int(event.extra.get(str(status), "0")) for event in events)


def watched(world: World, upstream: Upstream) -> Ticket:
    ticket = world.ticket(upstream.url)
    world.control_plane.change(ticket, version=7, reports_replies=True)
    return ticket


def test_the_replies_to_a_version_are_counted_by_status_and_told(world: World, answering: Upstream) -> None:
    ticket = watched(world, answering)

    ask(world, ticket, "/ok", times=5)
    ask(world, ticket, "/no", times=3)
    ask(world, ticket, "/never", times=2)

    world.control_plane.wait_for(lambda plane: total(reports(plane, ticket), 403) == 2)
    told = reports(world.control_plane, ticket)
    assert {status: total(told, status) for status in (200, 401, 403)} == {200: 5, 401: 3, 403: 2}
    assert {(event.tenant, event.subject, event.version, event.credential) for event in told} == {
        (ticket.caller.tenant, ticket.caller.subject, 7, "api")
    }
    assert not [event for event in told if ticket.secret in str(event) or ticket.placeholder in str(event)]


@pytest.mark.guards("egress_proxy/client.py", "if binding.reports_replies and", "if True and")
def test_replies_of_a_credential_that_is_not_rotated_are_not_told(world: World, answering: Upstream) -> None:
    ticket, other = world.ticket(answering.url), watched(world, answering)

    ask(world, ticket, "/no", times=3)
    ask(world, other, "/no", times=1)

    world.control_plane.wait_for(lambda plane: reports(plane, other))
    assert reports(world.control_plane, ticket) == []


def test_what_was_counted_is_told_before_a_proxy_ends(
    tmp_path: Path, control_plane: ControlPlaneSimulator, answering: Upstream, upstream_ca: trustme.CA
) -> None:
    with World.start(tmp_path / "world", control_plane, upstream_ca) as world:
        ticket = watched(world, answering)
        ask(world, ticket, "/no", times=1)

    assert total(reports(control_plane, ticket), 401) == 1
