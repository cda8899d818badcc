"""Requests and answers of `/internal`, between an egress proxy and the control plane.

Rule: both ends ignore fields they do not know, unless `must_understand` names them; contract N and N-1 are both served.
Frozen dataclasses, checked by pydantic at the edge: `read(RESOLVE_REQUEST, raw)`, `write(RESOLVE_ANSWER, value)`.

    POST /internal/resolve    ResolveRequest -> ResolveAnswer        200, also for a refusal; 503 when the store is away
    GET  /internal/tag-keys   -> TagKeys
    GET  /internal/events     -> text/event-stream of Event          `Last-Event-ID` or `?after=<sequence>`
    POST /internal/injector   -> 204                                 at the start, and every `INJECTOR_SECONDS`
    POST /internal/audit      AuditBatch -> 204                      idempotent by `event_id`
    POST /internal/quota      QuotaRequest -> QuotaAnswer            takes slices of limits, gives back, reports
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import Field, TypeAdapter

from control_plane.contract.caller import (
    Caller,
    ClientId,
    CredentialId,
    GrantId,
    PlaceholderId,
    SubjectId,
    TenantId,
)
from control_plane.contract.destination import AllowRule, Destination, Endpoint
from control_plane.contract.grant import GrantScope
from control_plane.contract.placement import Placement
from control_plane.contract.refusal import RefusalCode

CONTRACT: Final = 1
SERVED_CONTRACTS: Final = frozenset({CONTRACT})

HEARTBEAT_SECONDS: Final = 3.0
INJECTOR_SECONDS: Final = 5.0
"""How often a proxy says that it is there."""
SILENCE_SECONDS: Final = 10.0
"""An event stream quiet for longer is not to be trusted: entries are shortened."""


# --- questions -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AskCaller:
    """Who holds this proxy credential?"""

    proxy_credential_sha256: str
    kind: Literal["caller"] = "caller"


@dataclass(frozen=True, slots=True)
class AskPolicy:
    """Where may this caller go, with and without a credential?"""

    caller: Caller
    kind: Literal["policy"] = "policy"


@dataclass(frozen=True, slots=True)
class AskPlaceholder:
    """What does this placeholder stand for, asked on behalf of this caller, for this destination?"""

    placeholder_sha256: str
    caller: Caller
    endpoint: Endpoint
    kind: Literal["placeholder"] = "placeholder"


@dataclass(frozen=True, slots=True)
class AskWorkload:
    """Which registered client is the workload that proved itself by this? Either a token is there or a certificate.

    Two questions about one proof are equal, and what shows or remembers a question has no use for the proof itself.
    """

    proof_sha256: str
    """Of the token's text, or of the certificate's DER, in hex."""
    token: str = field(default="", compare=False, repr=False)
    """A JWT for the audience of proxies. The asker has checked nothing of it."""
    certificate: str = field(default="", compare=False, repr=False)
    """DER in base64. The asker has checked its chain, and that the other end holds its key."""
    kind: Literal["workload"] = "workload"


Ask = AskCaller | AskPolicy | AskPlaceholder | AskWorkload


@dataclass(frozen=True, slots=True)
class ResolveRequest:
    ask: Ask
    contract: int = CONTRACT
    must_understand: tuple[str, ...] = ()


# --- answers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CallerFacts:
    """A live proxy credential: its caller, and until when (unix seconds)."""

    caller: Caller
    expires_at: float
    kind: Literal["caller"] = "caller"


@dataclass(frozen=True, slots=True)
class WorkloadFacts:
    """The registered client that a workload is. By itself it is a caller only where the client has one subject."""

    client: ClientId
    expires_at: float
    """Unix seconds: when the token, or the certificate, is over."""
    tenant: TenantId | None = None
    """None: the client serves every tenant."""
    subject: SubjectId | None = None
    """The one that the client acts for, and then `tenant` is there too. None: it acts for several."""
    issuer: str = ""
    """The trusted issuer that vouched for it, by name. Empty: a certificate."""
    kind: Literal["workload"] = "workload"


@dataclass(frozen=True, slots=True)
class Route:
    """One credential that the caller is granted: its reverse route `/<name>/…`, and the hosts it is bound to."""

    credential_name: str
    credential_id: CredentialId
    destinations: tuple[Destination, ...]
    """The first one is where the reverse route leads."""
    scopes: tuple[GrantScope, ...]
    placements: tuple[Placement, ...]
    credential_required: bool = False
    """The operator wants no request to these destinations without the credential."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Everything a caller may reach. Default deny: what neither a route nor an allow rule admits is refused."""

    caller: Caller
    routes: tuple[Route, ...]
    allow: tuple[AllowRule, ...]
    kind: Literal["policy"] = "policy"


class Measure(StrEnum):
    """What a limit counts."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    """Of a model, as far as the provider's reply says how many it used."""


@dataclass(frozen=True, slots=True)
class BoundLimit:
    """A limit that what a placeholder stands for falls under, and which of its buckets."""

    id: str
    measure: Measure
    amount: int
    window_seconds: int
    bucket: str = ""
    """Empty: one for all. Otherwise each subject has its own."""


@dataclass(frozen=True, slots=True)
class Binding:
    """What a placeholder is bound to. The proxy checks all of it on every hit."""

    placeholder_id: PlaceholderId
    caller: Caller
    credential_id: CredentialId
    credential_name: str
    version: int
    grant_ids: tuple[GrantId, ...]
    destinations: tuple[Destination, ...]
    placements: tuple[Placement, ...]
    scopes: tuple[GrantScope, ...]
    """A request must be admitted by at least one; an empty tuple admits nothing."""
    expires_at: float
    """Unix seconds."""
    max_stale_seconds: float = 0.0
    provider: str | None = None
    reports_replies: Annotated[bool, Field(exclude_if=lambda told: not told)] = False
    """Its credential is being rotated: how the upstream answers each version is to be reported (`action` `replies`).
    Left out where it is false, so that contract 1 is written as it always was."""
    credential_kind: Annotated[str, Field(exclude_if=lambda kind: kind == "static")] = "static"
    """`contract.kinds`: whether the secret is a text for a placement, or a document to sign or prove with."""
    secret_expires_at: Annotated[float | None, Field(exclude_if=lambda end: end is None)] = None
    """Unix seconds: the secret's own end. From then on it is asked for again, and never used."""
    limits: Annotated[tuple[BoundLimit, ...], Field(exclude_if=lambda limits: not limits)] = ()
    """What it is used for counts against all of these. Where there is one, it must be understood."""


@dataclass(frozen=True, slots=True, repr=False)
class ResolvedPlaceholder:
    """A binding with its secret. `secret` is the opened value: wrap it in `Secret` at once."""

    binding: Binding
    secret: str
    kind: Literal["placeholder"] = "placeholder"

    def __repr__(self) -> str:
        return f"ResolvedPlaceholder({self.binding!r}, secret=***)"


@dataclass(frozen=True, slots=True)
class Refused:
    """A "no" from the store. `true_code` is for audit alone."""

    code: RefusalCode
    detail: str
    hint: str = ""
    true_code: RefusalCode | None = None
    binding: Binding | None = None
    """For audit, where the placeholder is known: whose it is."""
    kind: Literal["refused"] = "refused"


Answer = CallerFacts | WorkloadFacts | Policy | ResolvedPlaceholder | Refused


@dataclass(frozen=True, slots=True)
class ResolveAnswer:
    answer: Answer
    epoch: str
    """Changes when the outbox's sequence is not comparable with what was seen before (a restored database)."""
    as_of: int
    """The outbox sequence read in the same transaction as the answer."""
    contract: int = CONTRACT
    must_understand: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, repr=False)
class TagKeys:
    """The ring of tag keys, newest first, each 32 bytes in hex."""

    keys_hex: tuple[str, ...]
    epoch: str
    as_of: int


# --- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Event:
    """One change, pushed from the outbox. Holds ids only.

    `placeholder`, `session`, `grant`, `credential` say which cached answers it touches; `policy` touches the policies
    (and, when the tenant itself is gone, everything) of its tenant; `proxy_credential` a cached caller (its SHA-256) or
    workload (`client_of`, `issuer_of`); `tag_keys` the ring; `heartbeat` nothing.
    """

    sequence: int
    epoch: str
    kind: Literal[
        "placeholder", "session", "grant", "credential", "policy", "tenant", "proxy_credential", "tag_keys", "heartbeat"
    ]
    tenant: str = ""
    id: str = ""
    revoked: bool = False
    """True cuts open streams within 5 s; False (a rotation, a new rule) lets them finish."""


def client_of(client: str) -> str:
    """The id in an event of kind `proxy_credential` about every proof of a client. A proxy of contract N-1, which knows
    no such proofs, finds nothing by it."""
    return f"client:{client}"


def issuer_of(issuer: str) -> str:
    """The same, about every workload that a trusted issuer vouched for."""
    return f"issuer:{issuer}"


# --- audit -----------------------------------------------------------------------------------------------------------


LEAK_BLOCKED: Final = "leak_blocked"


@dataclass(frozen=True, slots=True)
class AuditEvent:
    """The record of one decision: names, never values. `path` is the one before the swap, redacted, ≤ 256 bytes."""

    event_id: str
    at: float
    request_id: str
    action: str
    """`swap`, `forward` (no credential in it), `refuse`, `leak_blocked` (the secret came back), `replies` (how many
    answers of which status a version got, of one subject); at the control plane `credential.add`, …"""
    tenant: str | None = None
    subject: str | None = None
    session: str | None = None
    client: str | None = None
    code: RefusalCode | None = None
    """What the caller was told."""
    true_code: RefusalCode | None = None
    detail: str = ""
    hint: str = ""
    credential: str | None = None
    version: int | None = None
    placeholder_id: str | None = None
    method: str | None = None
    scheme: str | None = None
    host: str | None = None
    port: int | None = None
    path: str | None = None
    status: int | None = None
    listener: str | None = None
    proxy: str | None = None
    extra: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AuditBatch:
    events: tuple[AuditEvent, ...]
    dropped: int = 0
    """Events lost before these, because the spool was full: written to the trail as a gap."""


# --- limits -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class QuotaEntry:
    """About one bucket of one limit."""

    limit_id: str
    bucket: str = ""
    wanted: int = 0
    """At least so much of it, if there is any left; more is given where that saves asking again."""
    used: int = 0
    """Used beyond what was given, since it was told last: counts in the window that runs now. Told again until it is
    answered."""
    returned: int = 0
    """Given, and not going to be used. Told once: what is lost on the way stays counted."""
    window: int = 0
    """The window that `returned` was given in."""


@dataclass(frozen=True, slots=True)
class QuotaRequest:
    entries: tuple[QuotaEntry, ...]
    contract: int = CONTRACT
    must_understand: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class QuotaGrant:
    """What there is for one `QuotaEntry`."""

    limit_id: str
    bucket: str
    granted: int
    """To be used until the window ends. 0 where something was wanted: it is used up."""
    window: int
    ends_in_seconds: float
    exists: bool = True
    """False: there is no such limit any more."""


@dataclass(frozen=True, slots=True)
class QuotaAnswer:
    grants: tuple[QuotaGrant, ...]
    contract: int = CONTRACT
    must_understand: tuple[str, ...] = ()


RESOLVE_REQUEST: Final = TypeAdapter(ResolveRequest)
RESOLVE_ANSWER: Final = TypeAdapter(ResolveAnswer)
TAG_KEYS: Final = TypeAdapter(TagKeys)
EVENT: Final = TypeAdapter(Event)
AUDIT_EVENT: Final = TypeAdapter(AuditEvent)
AUDIT_BATCH: Final = TypeAdapter(AuditBatch)
QUOTA_REQUEST: Final = TypeAdapter(QuotaRequest)
QUOTA_ANSWER: Final = TypeAdapter(QuotaAnswer)

UNDERSTOOD: Final = frozenset(
    name
    for message in (
        *(ResolveRequest, AskCaller, AskPolicy, AskPlaceholder, AskWorkload, Caller, Endpoint),
        *(ResolveAnswer, CallerFacts, WorkloadFacts, Policy, Route, ResolvedPlaceholder, Binding, Refused),
        *(Destination, GrantScope, AllowRule, BoundLimit),
        *(QuotaRequest, QuotaEntry, QuotaAnswer, QuotaGrant),
    )
    for name in message.__dataclass_fields__
)
"""The field names that `must_understand` may hold: what this contract knows."""

T = TypeVar("T")


class WireError(ValueError):
    """Not a message of this contract. Says which field was wrong, never its value."""


def read(adapter: TypeAdapter[T], raw: bytes | str) -> T:
    """Parse one message. Raises `WireError`, also for a contract that is not served or a field that we must know."""
    try:
        message = adapter.validate_json(raw)
    except ValueError as error:
        raise WireError(_where(error)) from None
    if getattr(message, "contract", CONTRACT) not in SERVED_CONTRACTS:
        raise WireError("contract: not_served")
    if not UNDERSTOOD.issuperset(getattr(message, "must_understand", ())):
        raise WireError("must_understand: unknown_field")
    return message


def write(adapter: TypeAdapter[Any], value: object) -> bytes:
    """One message as JSON."""
    return adapter.dump_json(value)


def join_audit_batch(pieces: Sequence[bytes], *, dropped: int) -> bytes:
    """An `AuditBatch` of events that are JSON already, each led by a comma, in pieces."""
    return b'{"events":[%b],"dropped":%d}' % (b"".join(pieces)[1:], dropped)


def _where(error: ValueError) -> str:
    errors = getattr(error, "errors", None)
    if errors is None:
        return "not JSON"
    first = errors(include_url=False, include_context=False, include_input=False)[0]
    return f"{'.'.join(str(part) for part in first['loc']) or 'message'}: {first['type']}"
