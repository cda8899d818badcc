"""A decision carried out again: only where deciding anew would give the same answer."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.contract.grant import GrantScope
from control_plane.contract.placeholder import has_marker
from control_plane.contract.secret import Secret
from egress_proxy.core.decision import Forward
from egress_proxy.core.http1 import RequestHead, parse_request_head
from egress_proxy.core.plan import PLAN_SECONDS, Plan
from egress_proxy.core.view import Resolved
from tests.egress_proxy.core.world import ALICE, NOW, SECRET, World, ask, head_of, tunnel_to

PLAN = "egress_proxy/core/plan.py"
URL = "https://api.test"


def plan_of(world: World, *lines: str, line: str = "POST /v1 HTTP/1.1") -> Plan:
    raw = head_of(line, *lines)
    decision = ask(raw, tunnel_to(URL, world.proxy_credential(ALICE)), world)
    assert isinstance(decision, Forward)
    return Plan(raw, parse_request_head(raw), decision, revision=7, now=NOW)


def fits(plan: Plan, *lines: str, line: str = "POST /v1 HTTP/1.1", revision: int = 7, now: float = NOW) -> bool:
    return plan.fits(parse_request_head(head_of(line, *lines)), revision=revision, now=now)


@pytest.fixture
def world() -> World:
    return World()


def test_a_head_that_differs_in_plain_fields_and_length_alone_fits(world: World) -> None:
    bearer = f"Authorization: Bearer {world.credential(ALICE, URL)}"
    plan = plan_of(world, bearer, "Content-Length: 1", "X-Plain: 1")

    assert fits(plan, bearer, "Content-Length: 22", "X-Plain: 2", "X-More: 3")


@pytest.mark.guards(PLAN, "return head.line == self._line and", "return")
def test_another_request_line_does_not_fit(world: World) -> None:
    bearer = f"Authorization: Bearer {world.credential(ALICE, URL)}"
    plan = plan_of(world, bearer)

    assert not fits(plan, bearer, line="DELETE /v1 HTTP/1.1")
    assert not fits(plan, bearer, line="POST /v2 HTTP/1.1")


@pytest.mark.guards(PLAN, "head.line == self._line and _decisive(head) == self._special", "head.line == self._line")
def test_another_special_field_does_not_fit(world: World) -> None:
    first, second = world.credential(ALICE, URL), world.credential(ALICE, URL, name="b")
    bearer = f"Authorization: Bearer {first}"
    plan = plan_of(world, bearer)

    assert fits(plan, bearer)
    for lines in (
        [f"Authorization: Bearer {second}"],
        [],
        [bearer, f"X-Other: {second}"],
        [bearer, "Connection: close"],
        [bearer, "X_Underscore: 1"],
        [bearer, "Transfer-Encoding: chunked"],
        [bearer, bearer],
    ):
        assert not fits(plan, *lines)


@pytest.mark.guards(PLAN, "            revision == self._revision\n", "            True\n")
def test_nothing_fits_once_the_view_has_changed(world: World) -> None:
    bearer = f"Authorization: Bearer {world.credential(ALICE, URL)}"
    plan = plan_of(world, bearer)

    assert not fits(plan, bearer, revision=8)


@pytest.mark.parametrize("ends", ["placeholder", "grant", "plan"])
@pytest.mark.guards(PLAN, "            and now < self._until\n", "")
@pytest.mark.guards(PLAN, "min(forward.until, now + PLAN_SECONDS)", "now + PLAN_SECONDS")
def test_a_plan_ends_with_the_first_thing_it_rests_on(world: World, ends: str) -> None:
    soon = NOW + 0.1
    expires_at = soon if ends == "placeholder" else NOW + 900
    scopes = (GrantScope(until=soon if ends == "grant" else None),)
    bearer = f"Authorization: Bearer {world.credential(ALICE, URL, expires_at=expires_at, scopes=scopes)}"
    plan = plan_of(world, bearer)
    end = NOW + PLAN_SECONDS if ends == "plan" else soon

    assert fits(plan, bearer, now=end - 0.05)
    assert not fits(plan, bearer, now=end)


Asked = tuple[bytes, RequestHead, Forward]
"""A head as it came, parsed, and what was decided on it."""


class Again:
    """One caller's connection, on which the same is asked twice."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.placeholder = world.credential(ALICE, URL)
        self.connection = tunnel_to(URL, world.proxy_credential(ALICE))
        self.plan = Plan(*self.asked(), revision=7, now=NOW)

    def asked(self, *lines: str, line: str = "POST /v1 HTTP/1.1") -> Asked:
        raw = head_of(line, f"Authorization: Bearer {self.placeholder}", *lines)
        decision = ask(raw, self.connection, self.world)
        assert isinstance(decision, Forward)
        return raw, parse_request_head(raw), decision

    def fits(self, *, now: float) -> bool:
        return fits(self.plan, f"Authorization: Bearer {self.placeholder}", revision=8, now=now)

    def resolving(self, **changed: Any) -> Asked:
        """Asked once more, with what the placeholder stands for changed."""
        (key, resolved), *_ = self.world.placeholders.items()
        self.world.placeholders[key] = replace(resolved, **changed)
        return self.asked()

    def bound(self, **changed: Any) -> Asked:
        (resolved,) = self.world.placeholders.values()
        assert isinstance(resolved, Resolved)
        return self.resolving(binding=replace(resolved.binding, **changed))

    def by_another_credential(self) -> Asked:
        self.connection = tunnel_to(URL, self.world.proxy_credential(ALICE))
        return self.asked()


def test_the_same_decision_again_renews_a_plan(world: World) -> None:
    again = Again(world)

    assert not again.fits(now=NOW + 2)
    assert again.plan.renewed_by(*again.asked("X-Plain: 1", "Content-Length: 5"), revision=8, now=NOW + 2)
    assert b"X-Plain: 1\r\n" in again.plan.render()
    assert again.fits(now=NOW + 2.5)
    assert not again.fits(now=NOW + 2 + PLAN_SECONDS)


OTHERWISE: dict[str, Callable[[Again], Asked]] = {
    "another secret": lambda again: again.resolving(secret=Secret("another")),
    "another version": lambda again: again.bound(version=9),
    "another end": lambda again: again.bound(expires_at=NOW + 9),
    "another place": lambda again: again.asked(line="POST /v2 HTTP/1.1"),
    "another field that decides": lambda again: again.asked("Connection: close"),
    "another proof of the caller": Again.by_another_credential,
}


@pytest.mark.guards(PLAN, "replace(anew, head=self.forward.head) == self.forward", "True")
@pytest.mark.guards(PLAN, "== self.forward and self._is_asked_alike(head)", "== self.forward")
@pytest.mark.parametrize("otherwise", OTHERWISE.values(), ids=OTHERWISE.keys())
def test_another_decision_renews_nothing(world: World, otherwise: Callable[[Again], Asked]) -> None:
    again = Again(world)

    assert not again.plan.renewed_by(*otherwise(again), revision=8, now=NOW)


def test_a_plan_ends_with_its_callers_credential(world: World) -> None:
    bearer = f"Authorization: Bearer {world.credential(ALICE, URL)}"
    raw = head_of("POST /v1 HTTP/1.1", bearer)
    decision = ask(raw, tunnel_to(URL, world.proxy_credential(ALICE, expires_at=NOW + 0.1)), world)

    assert isinstance(decision, Forward)
    assert decision.until == NOW + 0.1


@given(
    st.lists(st.sampled_from(["X-A: 1", "x-b: 2", "Accept: */*", "X-Mine: secret-ish"]), max_size=6),
    st.integers(0, 999),
)
@pytest.mark.guards(PLAN, " and field.name not in removed", "")
def test_a_repeated_head_is_rendered_as_if_it_were_decided_anew(plain: list[str], length: int) -> None:
    world = World()
    bearer, nominating = f"Authorization: Bearer {world.credential(ALICE, URL)}", "Connection: keep-alive, X-Mine"
    plan = plan_of(world, bearer, nominating, "Content-Length: 5")
    raw = head_of("POST /v1 HTTP/1.1", *plain, bearer, nominating, f"Content-Length: {length}")

    head = parse_request_head(raw)

    assert plan.fits(head, revision=7, now=NOW)
    anew = ask(raw, tunnel_to(URL, world.proxy_credential(ALICE)), world)
    assert isinstance(anew, Forward)
    plan.adopt(raw, head)
    rendered = plan.render()
    assert rendered == Plan(raw, head, anew, revision=7, now=NOW).render()
    assert b"X-Mine" not in rendered
    assert f"Content-Length: {length}".encode() in rendered
    assert not has_marker(rendered)


def repeated(plan: Plan, raw: bytes, *, revision: int = 7, now: float = NOW) -> bool:
    return plan.repeated_by(raw, revision=revision, now=now) == len(raw)


def test_the_same_head_with_another_length_is_repeated(world: World) -> None:
    bearer = f"Authorization: Bearer {world.credential(ALICE, URL)}"
    plan = plan_of(world, "X-A: 5", bearer, "content-length:5", "X-B: 5")

    assert repeated(plan, head_of("POST /v1 HTTP/1.1", "X-A: 5", bearer, "content-length:1234", "X-B: 5"))

    assert plan.head.content_length == 1234
    assert b"\r\ncontent-length:1234\r\n" in plan.render()
    assert plan.render().count(b"1234") == 1
    assert SECRET.encode() in plan.render()


@pytest.mark.guards(PLAN, "if end < 0 or not digits.isdigit() or", "if end < 0 or")
def test_any_other_difference_is_no_repetition(world: World) -> None:
    bearer = f"Authorization: Bearer {world.credential(ALICE, URL)}"
    plan = plan_of(world, bearer, "Content-Length: 5")
    same = head_of("POST /v1 HTTP/1.1", bearer, "Content-Length: 7")
    assert repeated(plan, same)

    for at in range(len(same)):
        if not same[at : at + 1].isdigit() or at < same.index(b"Length"):
            changed = same[:at] + bytes([same[at] ^ 1]) + same[at + 1 :]
            assert not repeated(plan, changed), changed
            assert not repeated(plan, same[:at] + same[at + 1 :])
    for length in ("", "-1", "+5", "5 ", "0x5", "5\r\nX: 1", "5, 5", "1" * 19, "\u0665", "0"):
        assert not repeated(
            plan, head_of("POST /v1 HTTP/1.1", bearer, f"Content-Length: {length}".encode().decode("latin-1"))
        )
    assert not repeated(plan, same, revision=8)
    assert not repeated(plan, same, now=NOW + PLAN_SECONDS)


def test_a_head_without_a_length_is_repeated_by_itself_alone(world: World) -> None:
    bearer = f"Authorization: Bearer {world.credential(ALICE, URL)}"
    plan = plan_of(world, bearer, line="GET /v1 HTTP/1.1")
    same = head_of("GET /v1 HTTP/1.1", bearer)

    assert repeated(plan, same)
    assert not repeated(plan, same + same)
    assert not repeated(plan, same[:-2] + b"X: 1\r\n\r\n")


def test_a_plan_does_not_show_the_secret(world: World) -> None:
    plan = plan_of(world, f"Authorization: Bearer {world.credential(ALICE, URL)}")

    assert SECRET not in repr(plan)
