"""Who acts: every rule, and every pair of rules that could be taken for one another."""

from dataclasses import dataclass, field

import pytest

from control_plane.contract.caller import ClientId, SessionId, SubjectId, TenantId
from control_plane.contract.refusal import RefusalCode, RefusedError
from runtime.core.subject import Acting, ClientClaims, Owner, SessionClaims, acting_subject

FILE = "runtime/core/subject.py"

C = RefusalCode
ALICE = Owner(TenantId("acme"), SubjectId("alice"))
BOB = Owner(TenantId("acme"), SubjectId("bob"))
OTHER_ALICE = Owner(TenantId("globex"), SubjectId("alice"))

SESSION_TOKEN = SessionClaims(TenantId("acme"), SubjectId("alice"), SessionId("ses_1"), 1e12)
OPERATOR = ClientClaims(ClientId("job"), TenantId("acme"), frozenset({"subject:assert"}))
RUNTIME = ClientClaims(ClientId("rt"), TenantId("acme"), frozenset({"turn:write"}))


@dataclass(frozen=True)
class Case:
    """One request, and who acts in it or why nobody does."""

    name: str
    verified: SessionClaims | ClientClaims | None
    right: Acting | RefusalCode
    named: tuple[str, ...] = ()
    addressed: str | None = None
    recorded: Owner | None = field(default=None)


CASES = [
    # 1: the session token names the subject
    Case("a session token alone", SESSION_TOKEN, Acting(ALICE, SessionId("ses_1"))),
    Case("the same subject named too", SESSION_TOKEN, Acting(ALICE, SessionId("ses_1")), named=("alice",)),
    Case("another subject named", SESSION_TOKEN, C.SUBJECT_CONFLICT, named=("bob",)),
    Case("the subject in another case", SESSION_TOKEN, C.SUBJECT_CONFLICT, named=("Alice",)),
    Case("nobody named", SESSION_TOKEN, C.SUBJECT_CONFLICT, named=("",)),
    Case("the same and then another", SESSION_TOKEN, C.SUBJECT_CONFLICT, named=("alice", "bob")),
    Case("both in one line", SESSION_TOKEN, C.SUBJECT_CONFLICT, named=("alice, bob",)),
    # 2: a client that may name a subject
    Case("a client names a subject", OPERATOR, Acting(BOB, None), named=("bob",)),
    Case("a client names one subject twice", OPERATOR, Acting(BOB, None), named=("bob", "bob")),
    Case("a client names two subjects", OPERATOR, C.SUBJECT_CONFLICT, named=("bob", "alice")),
    Case("a client names nobody", OPERATOR, C.TOKEN_REQUIRED),
    Case("a client names the empty subject", OPERATOR, C.TOKEN_REQUIRED, named=("",)),
    Case("a client without the scope", RUNTIME, C.FORBIDDEN, named=("bob",)),
    Case("a client without the scope or a name", RUNTIME, C.FORBIDDEN),
    Case("a client in a known session", OPERATOR, Acting(BOB, SessionId("s")), ("bob",), "s", BOB),
    Case("a client in an unknown session", OPERATOR, C.SESSION_NOT_FOUND, ("bob",), "s"),
    Case("a client in another's session", OPERATOR, C.SESSION_NOT_FOUND, ("bob",), "s", ALICE),
    Case("a client in another tenant's session", OPERATOR, C.SESSION_NOT_FOUND, ("alice",), "s", OTHER_ALICE),
    # 3: nothing
    Case("no token", None, C.TOKEN_REQUIRED),
    Case("no token, but a subject named", None, C.TOKEN_REQUIRED, named=("alice",)),
    Case("no token, but a known session", None, C.TOKEN_REQUIRED, (), "ses_1", ALICE),
    # 4: the token's session is the one addressed
    Case("its own session addressed", SESSION_TOKEN, Acting(ALICE, SessionId("ses_1")), addressed="ses_1"),
    Case("another session addressed", SESSION_TOKEN, C.SESSION_MISMATCH, addressed="ses_2"),
    Case("the empty session addressed", SESSION_TOKEN, C.SESSION_MISMATCH, addressed=""),
    Case("another's session addressed", SESSION_TOKEN, C.SESSION_MISMATCH, addressed="ses_2", recorded=BOB),
    # 5: a session of somebody else is not there
    Case("a session recorded as its own", SESSION_TOKEN, Acting(ALICE, SessionId("ses_1")), recorded=ALICE),
    Case("a session recorded as another's", SESSION_TOKEN, C.SESSION_NOT_FOUND, recorded=BOB),
    Case("a session recorded in another tenant", SESSION_TOKEN, C.SESSION_NOT_FOUND, recorded=OTHER_ALICE),
]


def _who(case: Case) -> Acting | RefusalCode:
    try:
        return acting_subject(
            case.verified,
            named_subjects=case.named,
            addressed_session=case.addressed,
            recorded_owner=case.recorded,
        )
    except RefusedError as refused:
        return refused.refusal.code


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
@pytest.mark.guards(FILE, "if any(named != claims.subject for named in named_subjects):", "if False:")
def test_who_acts(case: Case) -> None:
    assert _who(case) == case.right


@pytest.mark.guards(FILE, "if addressed_session is not None and addressed_session != claims.session:", "if False:")
def test_a_token_of_one_session_does_not_reach_another() -> None:
    assert _who(Case("", SESSION_TOKEN, C.SESSION_MISMATCH, addressed="ses_2")) is C.SESSION_MISMATCH


@pytest.mark.guards(FILE, "if recorded_owner is not None and recorded_owner != acting.owner:", "if False:")
def test_a_session_of_another_tenant_is_not_there() -> None:
    case = Case("", SESSION_TOKEN, C.SESSION_NOT_FOUND, recorded=OTHER_ALICE)

    assert _who(case) is C.SESSION_NOT_FOUND


@pytest.mark.guards(FILE, "if ASSERT_SCOPE not in claims.scopes:", "if False:")
def test_a_runtime_never_names_a_subject() -> None:
    assert _who(Case("", RUNTIME, C.FORBIDDEN, named=("alice",))) is C.FORBIDDEN


@pytest.mark.guards(
    FILE,
    "owner = Owner(claims.tenant, SubjectId(subjects.pop()))",
    'owner = Owner(TenantId(addressed_session or ""), SubjectId(subjects.pop()))',
)
def test_a_client_names_subjects_of_its_own_tenant_only() -> None:
    who = _who(Case("", OPERATOR, C.FORBIDDEN, named=("bob",)))

    assert isinstance(who, Acting)
    assert who.owner.tenant == OPERATOR.tenant
