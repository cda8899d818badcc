"""Taking tokens back: in the store, and in the outbox that tells every proxy, in one transaction.

Rule: one event says it for everything that hangs on it. A proxy knows what it holds by its session, its grants and its
credential, so that a session with thousands of placeholders ends in one event, and as fast.
"""

from collections.abc import Sequence

from control_plane.core.records import Change, ChangeKind, Session, Token, TokenKind
from control_plane.faults import reach
from control_plane.ports import Records


async def revoke_tokens(records: Records, tokens: Sequence[Token], *, at: float) -> None:
    """Tokens by themselves, and an event for each."""
    await records.tokens.revoke(tokens, at)
    reach("token.revoked")
    await records.outbox.append([_change(token) for token in tokens], at)


async def end_sessions(records: Records, sessions: Sequence[Session], *, at: float) -> None:
    """The tombstones, and with them everything that hangs on the sessions; an event for each session."""
    await records.sessions.end(sessions, at)
    reach("session.tombstoned")
    await records.outbox.append(
        [Change(ChangeKind.SESSION, session.tenant, session.id, revoked=True) for session in sessions], at
    )
    await records.tokens.revoke_of_sessions(sessions, at)
    reach("session.tokens_revoked")
    await records.rules.remove_of_sessions(sessions)
    reach("session.rules_removed")


def _change(token: Token) -> Change:
    match token.kind:
        case TokenKind.PLACEHOLDER | TokenKind.DIRECT:
            return Change(ChangeKind.PLACEHOLDER, token.tenant, token.id, revoked=True)
        case TokenKind.PROXY_CREDENTIAL:
            # A proxy knows a cached caller by the fingerprint of its proxy credential.
            return Change(ChangeKind.PROXY_CREDENTIAL, token.tenant, token.sha256, revoked=True)
