"""Alarms: somebody used what was not theirs to use. What is seen, what is told of it, and how that is signed.

Rule: a tenant learns that its own placeholder turned up, and who of its own had it. Of another tenant it learns that it
was another, and no more; the platform's administrators see both sides. Nothing here holds a placeholder.
"""

import hashlib
import hmac
import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from control_plane.contract.caller import Caller, ClientId, PlaceholderId, SessionId, SubjectId, TenantId

WINDOW_SECONDS: Final = 900
"""One placeholder in the hands of one caller is one alarm in this time, however often it is tried."""
SIGNATURE_HEADER: Final = "Coatcheck-Signature"
MAX_ATTEMPTS: Final = 6
RETRY_SECONDS: Final = (10.0, 60.0, 300.0, 1_800.0, 7_200.0)
"""After each attempt that failed; the last one is given up."""
SECRET_PREFIX: Final = "whsec_"


class AlarmKind(StrEnum):
    STOLEN_PLACEHOLDER = "stolen_placeholder"
    """A genuine placeholder from a caller that it was not issued to."""
    DECOY_USED = "decoy_used"
    """A placeholder that nobody was ever given to use."""
    SECRET_RETURNED = "secret_returned"
    """A reply to its own caller held the secret that a placeholder stands for."""
    TEST = "test"


@dataclass(frozen=True, slots=True)
class Sighting:
    """A placeholder was seen where it does not belong, or its secret where that does not."""

    kind: AlarmKind
    tenant: TenantId
    """Whose placeholder it is."""
    placeholder_id: PlaceholderId
    """Or the decoy's id."""
    credential: str | None
    """By name."""
    caller: Caller
    """Who had it."""
    host: str | None
    at: float
    request_id: str = ""

    @property
    def is_foreign(self) -> bool:
        return self.caller.tenant != self.tenant

    @property
    def window(self) -> int:
        return int(self.at // WINDOW_SECONDS)

    @property
    def caller_key(self) -> str:
        """For telling callers apart."""
        caller = self.caller
        facts = [caller.tenant, caller.client, caller.subject, caller.session]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Alarm:
    """What was raised: one for each placeholder, caller and window."""

    id: str
    tenant: TenantId
    kind: AlarmKind
    placeholder_id: PlaceholderId
    credential: str | None
    caller_key: str
    window: int
    caller_tenant: TenantId
    client: ClientId
    subject: SubjectId
    session: SessionId | None
    host: str | None
    first_at: float
    last_at: float
    count: int
    revoked: bool
    """The placeholder was revoked because of it."""

    @property
    def is_foreign(self) -> bool:
        return self.caller_tenant != self.tenant


@dataclass(frozen=True, slots=True)
class AlarmHook:
    """Where alarms are told. `tenant` None: those of every tenant, to the platform's administrators."""

    id: str
    tenant: TenantId | None
    url: str
    key_id: str
    """Of the key that its secret is derived from."""
    created_at: float


@dataclass(frozen=True, slots=True)
class Delivery:
    """One alarm on its way to one hook."""

    alarm_id: str
    hook_id: str
    tenant: TenantId
    """The alarm's."""
    attempts: int
    due_at: float
    done_at: float | None
    """When it was taken, or given up."""
    error: str | None
    """Why the last attempt failed: a word of ours, or a status."""


@dataclass(frozen=True, slots=True)
class Decoy:
    """A placeholder that only ever alarms. Known by its fingerprint, like any other."""

    id: PlaceholderId
    tenant: TenantId
    sha256: str
    preset: str | None
    note: str
    created_at: float
    used_at: float | None


def raised(sighting: Sighting, *, alarm_id: str, count: int = 1) -> Alarm:
    return Alarm(
        id=alarm_id,
        tenant=sighting.tenant,
        kind=sighting.kind,
        placeholder_id=sighting.placeholder_id,
        credential=sighting.credential,
        caller_key=sighting.caller_key,
        window=sighting.window,
        caller_tenant=sighting.caller.tenant,
        client=sighting.caller.client,
        subject=sighting.caller.subject,
        session=sighting.caller.session,
        host=sighting.host,
        first_at=sighting.at,
        last_at=sighting.at,
        count=count,
        revoked=False,
    )


def described(alarm: Alarm, *, to_platform: bool) -> dict[str, Any]:
    """What is shown and told of an alarm."""
    caller: dict[str, Any] | None = {"client": alarm.client, "subject": alarm.subject, "session": alarm.session}
    if to_platform and caller is not None:
        caller["tenant"] = alarm.caller_tenant
    elif alarm.is_foreign:
        caller = None
    return {
        "id": alarm.id,
        "kind": alarm.kind.value,
        "tenant": alarm.tenant,
        "placeholder_id": alarm.placeholder_id,
        "credential": alarm.credential,
        "caller": caller,
        "caller_is_of_another_tenant": alarm.is_foreign,
        "host": alarm.host if to_platform or not alarm.is_foreign else None,
        "first_at": alarm.first_at,
        "last_at": alarm.last_at,
        "count": alarm.count,
        "revoked": alarm.revoked,
    }


def sentence(alarm: Alarm) -> str:
    """For the trail."""
    match alarm.kind:
        case AlarmKind.STOLEN_PLACEHOLDER:
            what = "the placeholder was used by a caller that it was not issued to"
        case AlarmKind.DECOY_USED:
            what = "a decoy was used"
        case AlarmKind.SECRET_RETURNED:
            return "a reply held the secret, which was taken out of it"
        case AlarmKind.TEST:
            return "a test of the alarm"
    return f"{what}, of another tenant" if alarm.is_foreign else what


def hook_secret(key: bytes, hook_id: str) -> str:
    """The secret of a hook, from our own key: shown once, and made again when it is needed."""
    return SECRET_PREFIX + hmac.digest(key, b"coatcheck alarm hook\0" + hook_id.encode(), "sha256").hex()


def signature(secret: str, body: bytes, *, at: int) -> str:
    """`t=<unix seconds>,v1=<hex>`: HMAC-SHA-256 over `<t>.<body>`, so that an old message cannot be sent again."""
    digest = hmac.digest(secret.encode(), str(at).encode() + b"." + body, "sha256").hex()
    return f"t={at},v1={digest}"


def retry_at(attempts: int, *, now: float) -> float | None:
    """When to try again after that many attempts; None: not any more."""
    if attempts >= MAX_ATTEMPTS:
        return None
    return now + RETRY_SECONDS[min(attempts, len(RETRY_SECONDS)) - 1]
