"""Taking tokens back: in the store, and in the outbox that tells every proxy, in one transaction."""

from collections.abc import Sequence

from control_plane.core.records import Change, ChangeKind, Token, TokenKind
from control_plane.ports import Records


async def revoke_tokens(records: Records, tokens: Sequence[Token], *, at: float) -> None:
    await records.tokens.revoke(tokens, at)
    await records.outbox.append([_change(token) for token in tokens], at)


def _change(token: Token) -> Change:
    match token.kind:
        case TokenKind.PLACEHOLDER:
            return Change(ChangeKind.PLACEHOLDER, token.tenant, token.id, revoked=True)
        case TokenKind.PROXY_CREDENTIAL:
            # A proxy knows a cached caller by the fingerprint of its proxy credential.
            return Change(ChangeKind.PROXY_CREDENTIAL, token.tenant, token.sha256, revoked=True)
