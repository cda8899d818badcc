"""How long an answer is believed, and what takes it away: the cache alone, with clocks that the test turns."""

from dataclasses import dataclass, replace
from typing import Any

import pytest

from control_plane.contract.caller import Caller, ClientId, CredentialId, GrantId, PlaceholderId, SessionId
from control_plane.contract.caller import SubjectId as Subject
from control_plane.contract.caller import TenantId as Tenant
from control_plane.contract.destination import Endpoint, parse_destination
from control_plane.contract.placement import BEARER
from control_plane.contract.refusal import RefusalCode
from control_plane.contract.wire import (
    Answer,
    Ask,
    AskCaller,
    AskPlaceholder,
    AskPolicy,
    Binding,
    CallerFacts,
    Event,
    Policy,
    Refused,
    ResolveAnswer,
    ResolvedPlaceholder,
)
from egress_proxy.cache import Cache, UnexpectedAnswerError
from egress_proxy.core.plan import PLAN_SECONDS
from egress_proxy.core.view import Resolved

CALLER = Caller(ClientId("r"), Tenant("acme"), Subject("alice"), SessionId("s1"))
STRANGER = replace(CALLER, subject=Subject("bob"))
ENDPOINT = Endpoint("https", "api.test", 443)
BINDING = Binding(
    placeholder_id=PlaceholderId("p1"),
    caller=CALLER,
    credential_id=CredentialId("c1"),
    credential_name="api",
    version=1,
    grant_ids=(GrantId("g1"),),
    destinations=(parse_destination("https://api.test"),),
    placements=(BEARER,),
    scopes=(),
    expires_at=9e9,
)
ASK = AskPlaceholder("f1", CALLER, ENDPOINT)
UNKNOWN = Refused(RefusalCode.UNKNOWN_PLACEHOLDER, "No such placeholder.")


@dataclass
class Clocked:
    """A cache that has heard its stream, at a time that the test sets."""

    cache: Cache
    now: list[float]

    def take(self, ask: Ask, answer: Answer, *, epoch: str = "e", as_of: int = 10) -> bool:
        return self.cache.take(ask, ResolveAnswer(answer, epoch, as_of))

    def fill(self, *, max_stale_seconds: float = 0.0) -> None:
        self.take(AskCaller("pc1"), CallerFacts(CALLER, 9e9))
        self.take(AskPolicy(CALLER), Policy(CALLER, (), ()))
        binding = replace(BINDING, max_stale_seconds=max_stale_seconds)
        self.take(ASK, ResolvedPlaceholder(binding, "real"))

    def hear(self, kind: Any, *, id: str = "", tenant: str = "acme", sequence: int = 11, epoch: str = "e") -> bool:
        return self.cache.hear(Event(sequence, epoch, kind, tenant, id))

    def heartbeat(self, *, sequence: int = 10) -> bool:
        return self.hear("heartbeat", sequence=sequence)

    @property
    def known(self) -> tuple[bool, bool, bool]:
        cache = self.cache
        return (
            cache.caller("pc1") is not None,
            cache.policy(CALLER) is not None,
            cache.placeholder("f1", CALLER, ENDPOINT) is not None,
        )


ALL = (True, True, True)
NOTHING = (False, False, False)


@pytest.fixture
def clocked() -> Clocked:
    now = [1000.0]
    cache = Cache(limit=100, monotonic=lambda: now[0], clock=lambda: now[0])
    cache.set_tag_keys((b"k",), epoch="e", as_of=10)
    clocked = Clocked(cache, now)
    clocked.heartbeat()
    return clocked


@pytest.mark.guards("egress_proxy/cache.py", "return now - taken_at <= limit - PLAN_SECONDS", "return True")
def test_an_answer_is_believed_for_a_minute_while_the_stream_is_heard(clocked: Clocked) -> None:
    clocked.fill()
    for _ in range(12):
        clocked.now[0] += 4.9
        clocked.heartbeat()

    assert clocked.known == ALL
    clocked.now[0] += 1
    assert clocked.known == NOTHING


@pytest.mark.guards("egress_proxy/cache.py", "limit = min(limit, max(SILENT_AGE_SECONDS, max_stale_seconds))", "pass")
def test_a_silent_stream_shortens_every_answer(clocked: Clocked) -> None:
    clocked.fill()
    clocked.now[0] += 10

    assert clocked.known == ALL
    clocked.now[0] += 0.5
    assert clocked.known == NOTHING


def test_a_credential_that_may_be_stale_outlives_the_silence_with_its_caller(clocked: Clocked) -> None:
    clocked.fill(max_stale_seconds=30)
    clocked.now[0] += 30 - PLAN_SECONDS

    assert clocked.known == ALL
    clocked.now[0] += 0.5
    assert clocked.known == NOTHING


def test_no_answer_outlives_a_minute_whatever_its_credential_allows(clocked: Clocked) -> None:
    clocked.fill(max_stale_seconds=3600)
    clocked.now[0] += 60.5

    assert clocked.known == NOTHING


def test_before_the_stream_was_ever_heard_answers_are_short(clocked: Clocked) -> None:
    now = [0.0]
    deaf = Clocked(Cache(limit=10, monotonic=lambda: now[0], clock=lambda: now[0]), now)
    deaf.cache.set_tag_keys((b"k",), epoch="e", as_of=10)
    deaf.fill()
    now[0] += 5.5

    assert deaf.known == NOTHING


@pytest.mark.guards("egress_proxy/cache.py", "self._monotonic() - found[1] > NO_AGE_SECONDS", "False")
def test_a_no_is_believed_for_a_second(clocked: Clocked) -> None:
    clocked.take(ASK, UNKNOWN)
    clocked.now[0] += 0.9

    assert clocked.cache.placeholder("f1", CALLER, ENDPOINT) == UNKNOWN
    clocked.now[0] += 0.2
    assert clocked.cache.placeholder("f1", CALLER, ENDPOINT) is None


def test_a_no_is_for_the_one_who_asked(clocked: Clocked) -> None:
    clocked.fill()
    clocked.take(AskPlaceholder("f1", STRANGER, ENDPOINT), UNKNOWN)
    clocked.take(AskPlaceholder("f2", STRANGER, ENDPOINT), UNKNOWN)

    assert isinstance(clocked.cache.placeholder("f1", CALLER, ENDPOINT), Resolved)
    assert clocked.cache.placeholder("f2", CALLER, ENDPOINT) is None


@pytest.mark.guards("egress_proxy/cache.py", "                self._forget(ask)\n", "                pass\n")
def test_a_no_takes_the_place_of_what_was_known(clocked: Clocked) -> None:
    clocked.fill()
    clocked.take(ASK, UNKNOWN)

    assert clocked.cache.placeholder("f1", CALLER, ENDPOINT) == UNKNOWN
    clocked.now[0] += 1.5
    assert clocked.cache.placeholder("f1", CALLER, ENDPOINT) is None


@pytest.mark.guards("egress_proxy/cache.py", "                shelf.remove_tagged(tag)\n", "                pass\n")
@pytest.mark.parametrize(
    ("kind", "id", "left"),
    [
        ("placeholder", "p1", (True, True, False)),
        ("placeholder", "p2", ALL),
        ("proxy_credential", "pc1", (False, True, True)),
        ("session", "s1", NOTHING),
        ("session", "s2", ALL),
        ("grant", "g1", (True, False, False)),
        ("grant", "g2", (True, False, True)),
        ("credential", "c1", (True, False, False)),
        ("policy", "", (True, False, True)),
        ("tenant", "acme", NOTHING),
        ("tag_keys", "", ALL),
    ],
)
def test_an_event_takes_away_what_it_touches_and_no_more(
    clocked: Clocked, kind: str, id: str, left: tuple[bool, bool, bool]
) -> None:
    clocked.fill()

    assert clocked.hear(kind, id=id)
    assert clocked.known == left


def test_an_event_of_another_tenant_takes_nothing(clocked: Clocked) -> None:
    clocked.fill()
    clocked.hear("policy", tenant="other")
    clocked.hear("tenant", tenant="other", id="other", sequence=12)

    assert clocked.known == ALL


def test_any_event_takes_away_every_no(clocked: Clocked) -> None:
    clocked.take(ASK, UNKNOWN)
    clocked.hear("policy", tenant="other")

    assert clocked.cache.placeholder("f1", CALLER, ENDPOINT) is None


@pytest.mark.guards("egress_proxy/cache.py", "if self._is_outdated(message.as_of, answer, tags):", "if False:")
@pytest.mark.parametrize(
    ("kind", "id"), [("placeholder", "p1"), ("session", "s1"), ("grant", "g1"), ("credential", "c1")]
)
def test_an_answer_older_than_an_event_that_touches_it_comes_too_late(clocked: Clocked, kind: str, id: str) -> None:
    clocked.hear(kind, id=id)

    assert not clocked.take(ASK, ResolvedPlaceholder(BINDING, "real"), as_of=10)
    assert clocked.cache.placeholder("f1", CALLER, ENDPOINT) is None
    assert clocked.take(ASK, ResolvedPlaceholder(BINDING, "real"), as_of=11)


def test_an_answer_older_than_an_event_that_does_not_touch_it_is_taken(clocked: Clocked) -> None:
    clocked.hear("placeholder", id="p2")

    assert clocked.take(ASK, ResolvedPlaceholder(BINDING, "real"), as_of=10)


def test_an_answer_older_than_what_is_remembered_comes_too_late(clocked: Clocked) -> None:
    for sequence in range(11, 11 + 1500):
        clocked.hear("placeholder", id="p2", sequence=sequence)

    assert not clocked.take(ASK, ResolvedPlaceholder(BINDING, "real"), as_of=10)
    assert clocked.take(ASK, ResolvedPlaceholder(BINDING, "real"), as_of=1000)


@pytest.mark.guards("egress_proxy/cache.py", "event.epoch != self.epoch or event.sequence != expected", "False")
@pytest.mark.parametrize(
    ("kind", "sequence", "epoch"),
    [
        *(("placeholder", 12, "e"), ("placeholder", 10, "e"), ("placeholder", 3, "e"), ("placeholder", 11, "other")),
        *(("heartbeat", 11, "e"), ("heartbeat", 9, "e"), ("heartbeat", 10, "other")),
    ],
)
def test_a_gap_a_step_back_or_another_epoch_drops_everything(
    clocked: Clocked, kind: str, sequence: int, epoch: str
) -> None:
    clocked.fill()

    assert not clocked.hear(kind, id="p2", sequence=sequence, epoch=epoch)
    assert clocked.known == NOTHING


def test_an_answer_of_another_epoch_is_not_taken_and_drops_everything(clocked: Clocked) -> None:
    clocked.fill()

    assert not clocked.take(ASK, ResolvedPlaceholder(BINDING, "real"), epoch="restored", as_of=3)
    assert clocked.known == NOTHING


def test_tag_keys_of_a_restored_outbox_drop_everything(clocked: Clocked) -> None:
    clocked.fill()
    clocked.cache.set_tag_keys((b"k",), epoch="e", as_of=5)

    assert clocked.known == NOTHING
    assert clocked.cache.sequence == 5


def test_tag_keys_fetched_again_do_not_skip_events_that_are_still_to_come(clocked: Clocked) -> None:
    clocked.cache.set_tag_keys((b"k2", b"k"), epoch="e", as_of=20)

    assert clocked.cache.sequence == 10
    assert clocked.cache.tag_keys == (b"k2", b"k")


@pytest.mark.parametrize("wrong", [CallerFacts(CALLER, 9e9), Policy(CALLER, (), ())])
def test_an_answer_to_another_question_is_an_error(clocked: Clocked, wrong: Answer) -> None:
    with pytest.raises(UnexpectedAnswerError):
        clocked.take(ASK, wrong)

    assert clocked.known == NOTHING


def test_the_least_used_answers_go_first(clocked: Clocked) -> None:
    clocked.fill()
    for number in range(99):
        clocked.cache.placeholder("f1", CALLER, ENDPOINT)
        binding = replace(BINDING, placeholder_id=PlaceholderId(f"q{number}"))
        clocked.take(AskPlaceholder(f"q{number}", CALLER, ENDPOINT), ResolvedPlaceholder(binding, "x"))
    clocked.take(AskPlaceholder("last", CALLER, ENDPOINT), ResolvedPlaceholder(BINDING, "x"))

    assert clocked.cache.placeholder("q0", CALLER, ENDPOINT) is None
    assert clocked.cache.placeholder("f1", CALLER, ENDPOINT) is not None


def test_a_secret_does_not_show_itself(clocked: Clocked) -> None:
    clocked.fill()

    assert "real" not in repr(clocked.cache.placeholder("f1", CALLER, ENDPOINT))
