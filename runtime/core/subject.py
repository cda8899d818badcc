"""Who acts? The subject rules, one function.

    1  A session token names the subject. A different `X-SH-Subject` is a conflict; the same, or none, is fine.
    2  Without one, only a client with the scope `subject:assert` may name a subject, inside its own tenant.
    3  Nothing that names a subject: 401, before any session is made. There is no ambient mode.
    4  A token that is there and bad is 401, never "no token". The token's session is the session that is addressed.
    5  A session of another subject or tenant is not found; it is never "forbidden".

Rule: what a workload says of itself counts for nothing. Claims come from a verified token, owners from our own record.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from control_plane.contract.caller import ClientId, SessionId, SubjectId, TenantId
from control_plane.contract.headers import SUBJECT_HEADER
from control_plane.contract.refusal import Refusal, RefusalCode, RefusedError

ASSERT_SCOPE: Final = "subject:assert"


@dataclass(frozen=True, slots=True)
class SessionClaims:
    """What a verified session token says."""

    tenant: TenantId
    subject: SubjectId
    session: SessionId
    session_expires_at: float
    """Unix seconds."""


@dataclass(frozen=True, slots=True)
class ClientClaims:
    """What a verified token of a client says: an operator or a job, never a runtime."""

    client: ClientId
    tenant: TenantId
    scopes: frozenset[str]


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose a session is."""

    tenant: TenantId
    subject: SubjectId


@dataclass(frozen=True, slots=True)
class Acting:
    """Who acts, and in which session; None where the exchange has yet to open one."""

    owner: Owner
    session: SessionId | None


def acting_subject(
    verified: SessionClaims | ClientClaims | None,
    *,
    named_subjects: Sequence[str],
    addressed_session: str | None,
    recorded_owner: Owner | None,
) -> Acting:
    """Who acts in a request. Raises `RefusedError`.

    `verified` is None only when there was no token at all: a bad one never gets here (4). `named_subjects` are the
    values of `X-SH-Subject`, one for each line. `recorded_owner` is whose the addressed session is, as far as we know.
    """
    match verified:
        case SessionClaims():
            acting = _of_session(verified, named_subjects, addressed_session)
        case ClientClaims():
            acting = _of_client(verified, named_subjects, addressed_session, recorded_owner)
        case None:  # (3)
            raise token_required()
    if recorded_owner is not None and recorded_owner != acting.owner:  # (5)
        raise _no_such_session()
    return acting


def token_required() -> RefusedError:
    """Nothing says who acts."""
    return _refused(RefusalCode.TOKEN_REQUIRED, "a turn needs a session token", "send it as Authorization: Bearer")


def _of_session(claims: SessionClaims, named_subjects: Sequence[str], addressed_session: str | None) -> Acting:
    if any(named != claims.subject for named in named_subjects):  # (1)
        raise _refused(
            RefusalCode.SUBJECT_CONFLICT,
            f"{SUBJECT_HEADER} names another subject than the session token",
            f"leave {SUBJECT_HEADER} out: the token says who acts",
        )
    if addressed_session is not None and addressed_session != claims.session:  # (4)
        raise _refused(
            RefusalCode.SESSION_MISMATCH,
            "session_id is another session than the token's",
            "leave session_id out, or send that session's own token",
        )
    return Acting(Owner(claims.tenant, claims.subject), claims.session)


def _of_client(
    claims: ClientClaims, named_subjects: Sequence[str], addressed_session: str | None, recorded_owner: Owner | None
) -> Acting:
    if ASSERT_SCOPE not in claims.scopes:  # (2)
        raise _refused(
            RefusalCode.FORBIDDEN, "this client may not name a subject", f"it needs the scope {ASSERT_SCOPE}"
        )
    subjects = set(named_subjects)
    if not subjects or "" in subjects:  # (3)
        raise _refused(RefusalCode.TOKEN_REQUIRED, "nothing names a subject", f"name it in {SUBJECT_HEADER}")
    if len(subjects) > 1:
        raise _refused(RefusalCode.SUBJECT_CONFLICT, f"{SUBJECT_HEADER} names several subjects", "name one")
    if addressed_session is not None and recorded_owner is None:  # (5)
        raise _no_such_session()
    owner = Owner(claims.tenant, SubjectId(subjects.pop()))
    return Acting(owner, SessionId(addressed_session) if addressed_session is not None else None)


def _no_such_session() -> RefusedError:
    return _refused(RefusalCode.SESSION_NOT_FOUND, "there is no such session", "open one at the control plane")


def _refused(code: RefusalCode, detail: str, hint: str) -> RefusedError:
    return RefusedError(Refusal(code, detail=detail, hint=hint))
