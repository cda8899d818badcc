"""When a minted value is used, when a fresh one is fetched, and when neither is possible.

Rule: a value is never used past the end that its provider named. Where the provider named none we set one, and beyond
that a value is used only while the provider does not answer, and no longer than `max_stale_seconds`. A "no" ends the
use of what was minted before; silence does not.
"""

from dataclasses import replace
from enum import StrEnum
from typing import Final

from control_plane.core.records import MintedValue, MintingState

ASSUMED_SECONDS: Final = 300.0
"""The life of a value whose provider does not say (RFC 6749 §5.1: `expires_in` is recommended, not required)."""
MARGIN_SECONDS: Final = 10.0
"""A value is out of use so long before its end: requests take time, and clocks differ."""
MARGIN_SHARE: Final = 0.1
"""Of a short life, at most this share is margin."""
AHEAD_SECONDS: Final = 300.0
AHEAD_SHARE: Final = 0.2
"""A fresh value is fetched so long before, while the old one serves on."""

FIRST_PAUSE_SECONDS: Final = 1.0
LONGEST_PAUSE_SECONDS: Final = 4.0
"""After a failure: short, so that the end of an outage is noticed within five seconds."""
FIRST_PAUSE_AFTER_NO_SECONDS: Final = 30.0
LONGEST_PAUSE_AFTER_NO_SECONDS: Final = 300.0
LONGEST_RETRY_AFTER_SECONDS: Final = 60.0
"""What a provider's `Retry-After` may ask for."""
NEVER: Final = 1e15


class Standing(StrEnum):
    FRESH = "fresh"
    """Use it."""
    DUE = "due"
    """Use it, and fetch another one meanwhile."""
    STALE = "stale"
    """Use it only because its provider does not answer."""
    WANTED = "wanted"
    """There is none to use: fetch one first."""
    REFUSED = "refused"
    """There is none, and it is not the time to ask for one."""


def standing(minted: MintedValue | None, *, now: float, max_stale_seconds: float) -> Standing:
    if minted is None:
        return Standing.WANTED
    may_ask = now >= minted.retry_at
    if minted.state in (MintingState.REJECTED, MintingState.CONSENT_LOST) or minted.envelope is None:
        return Standing.WANTED if may_ask else Standing.REFUSED
    if now < end_of_use(minted):
        return Standing.DUE if now >= _due_at(minted) and may_ask else Standing.FRESH
    if may_ask:
        return Standing.WANTED
    # Its provider does not answer. What says nothing of its own end may bridge that for a while.
    bridges = minted.expires_at is None and now < end_of_use(minted) + max_stale_seconds
    return Standing.STALE if bridges else Standing.REFUSED


def end_of_use(minted: MintedValue) -> float:
    """Unix seconds; from then on it is not used as if it were fresh."""
    life = _life(minted)
    if minted.expires_at is None:
        return minted.minted_at + life
    return minted.expires_at - min(MARGIN_SECONDS, life * MARGIN_SHARE)


def pause_after_failure(failures: int, *, asked_for: float | None = None) -> float:
    """Seconds, after so many failures in a row."""
    pause = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** max(0, failures - 1))
    return max(pause, min(asked_for, LONGEST_RETRY_AFTER_SECONDS)) if asked_for is not None else pause


def pause_after_no(failures: int) -> float:
    return float(min(LONGEST_PAUSE_AFTER_NO_SECONDS, FIRST_PAUSE_AFTER_NO_SECONDS * 2.0 ** max(0, failures - 1)))


def lost(minted: MintedValue, *, reason: str) -> MintedValue:
    """Its secret is used up, or may be, and there is no other one."""
    return replace(minted, state=MintingState.CONSENT_LOST, reason=reason, retry_at=NEVER, envelope=None, kek_id=None)


def _due_at(minted: MintedValue) -> float:
    return end_of_use(minted) - min(AHEAD_SECONDS, _life(minted) * AHEAD_SHARE)


def _life(minted: MintedValue) -> float:
    return ASSUMED_SECONDS if minted.expires_at is None else max(0.0, minted.expires_at - minted.minted_at)


REASONS: Final = {
    "unavailable": (
        "the provider of this credential's tokens does not answer",
        "it is asked again within seconds; check its status and the setting that names its URL",
    ),
    "unusable": (
        "the provider of this credential's tokens gave an answer that holds no usable token",
        "it is asked again within seconds; check the setting that names its URL",
    ),
    "denied_address": (
        "the provider's address is not one that may be fetched from",
        "the platform's administrator makes exceptions with COATCHECK_CONTROL_PLANE_OUTBOUND_ALLOW",
    ),
    "unverified": (
        "the provider's certificate is not trusted",
        "the platform's administrator adds its CA with COATCHECK_CONTROL_PLANE_OUTBOUND_CA_FILES",
    ),
    "consent_ended": (
        "the provider does not accept what this credential holds (invalid_grant): it has ended, or was revoked",
        "obtain a new consent or key, and submit it with: coatcheck credential rotate NAME",
    ),
    "client_refused": (
        "the provider does not accept what this credential proves itself with (invalid_client)",
        "check the client's id and secret, and submit them with: coatcheck credential rotate NAME",
    ),
    "request_refused": (
        "the provider refuses what this credential's settings ask for",
        "check scopes, audience and permissions",
    ),
    "consent_lost": (
        "a new token was asked for and the answer was lost, so that the consent may be used up; it is not tried again",
        "obtain a new consent and submit it with: coatcheck credential rotate NAME",
    ),
}
"""Why there is no value, in words: what is the matter, and what to do."""
