"""Who acts for whom: the `act` and `may_act` claims (RFC 8693 §4.1, §4.4).

Rules:
- A chain is only ever lengthened, by the one who acts now, at its front; nothing that is exchanged again loses the
  actors before.
- Who an actor is, its issuer says together with its subject: what another issuer says of actors is about its own, or
  about others', and never about a client or subject of ours.
- Somebody may act for a subject only where the subject's token says so (`may_act`); a `may_act` that says nothing, or
  something that we do not know, names nobody.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

MAX_ACTORS: Final = 8
_MEMBERS: Final = ("sub", "iss", "client_id")


class InvalidDelegationError(ValueError):
    """Not a chain of actors, or one that is too long."""


@dataclass(frozen=True, slots=True)
class Party:
    """Somebody who acts: a client of ours (`client` is set), or a subject of an issuer."""

    subject: str
    issuer: str | None = None
    client: str | None = None

    def to_claim(self) -> dict[str, str]:
        facts = {"sub": self.subject, "iss": self.issuer, "client_id": self.client}
        return {name: value for name, value in facts.items() if value is not None}

    @classmethod
    def from_claim(cls, claim: object) -> "Party":
        """Raises `InvalidDelegationError`."""
        if not isinstance(claim, Mapping) or not all(isinstance(claim.get(name, ""), str) for name in _MEMBERS):
            raise InvalidDelegationError("an actor is an object of texts")
        if not claim.get("sub"):
            raise InvalidDelegationError("an actor has a subject")
        return cls(claim["sub"], claim.get("iss"), claim.get("client_id"))


Chain = tuple[Party, ...]
"""Who acts, the one who acts now first. Empty: the subject itself."""


def to_act(chain: Chain) -> dict[str, Any] | None:
    """The `act` claim: each actor holds the one before it."""
    act: dict[str, Any] | None = None
    for party in reversed(chain):
        act = {**party.to_claim(), **({"act": act} if act is not None else {})}
    return act


def from_act(claim: object) -> Chain:
    """The chain of an `act` claim; None is no chain. Raises `InvalidDelegationError`."""
    chain: list[Party] = []
    while claim is not None:
        chain.append(Party.from_claim(claim))
        if len(chain) > MAX_ACTORS:
            raise InvalidDelegationError(f"at most {MAX_ACTORS} actors act one for another")
        assert isinstance(claim, Mapping)
        claim = claim.get("act")
    return tuple(chain)


def from_foreign_act(claim: object, *, issuer: str, own_issuer: str) -> Chain:
    """The chain that another issuer's token tells of, each actor with whose it is. Raises `InvalidDelegationError`.

    RFC 8693 §4.1: an actor is identified by "the combination of the two claims iss and sub". One without `iss` is the
    issuer's own. A `client_id` would be read as a client's of ours, and is not taken over.
    """
    chain = from_act(claim)
    if any(party.issuer == own_issuer for party in chain):
        raise InvalidDelegationError("an issuer names no actor of ours")
    return tuple(Party(party.subject, party.issuer or issuer) for party in chain)


def lengthened(chain: Chain, actor: Party) -> Chain:
    """Raises `InvalidDelegationError` where it would be too long."""
    if len(chain) >= MAX_ACTORS:
        raise InvalidDelegationError(f"at most {MAX_ACTORS} actors act one for another")
    return (actor, *chain)


def may_act(claim: Mapping[str, Any] | None, actor: Party) -> bool:
    """Whether a subject's `may_act` names this actor: in every member that it has, and it has a subject."""
    if not claim or not claim.get("sub") or not set(claim) <= set(_MEMBERS):
        return False
    return all(actor.to_claim().get(name) == value for name, value in claim.items())


def in_words(chain: Chain) -> str:
    """For the audit trail: who acts now, then for whom that one acts. A client of ours stands there by its id alone."""
    return " < ".join(party.client or f"{party.subject} ({party.issuer})" for party in chain)
