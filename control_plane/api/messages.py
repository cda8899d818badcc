"""The JSON bodies of the public API: what comes in, strictly, and what goes out.

Rule: an unknown field is an error, a value is never coerced ("yes" is no boolean), and no outgoing message has a field
for a secret. Each incoming body turns into domain values once, here.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    StringConstraints,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError

from control_plane.contract.credential import to_wire
from control_plane.contract.destination import (
    Destination,
    InvalidDestinationError,
    canonical_host,
    check_methods,
    destination_from_json,
    is_plain_path,
    parse_destination,
)
from control_plane.contract.headers import (
    TOKEN_TYPE_DIRECT,
    TOKEN_TYPE_JWT,
    TOKEN_TYPE_PLACEHOLDER,
    TOKEN_TYPE_PROXY_CREDENTIAL,
)
from control_plane.contract.kinds import CredentialKind
from control_plane.contract.placement import (
    BEARER,
    InvalidPlacementError,
    Placement,
    placement_from_json,
    placement_to_json,
)
from control_plane.contract.secret import MAX_SECRET_BYTES, Secret, UnusableSecretError
from control_plane.contract.wire import Measure
from control_plane.core.alarms import AlarmHook, Decoy
from control_plane.core.client_proofs import NO_PROOFS, ClientProofs
from control_plane.core.client_token import LIFETIME_SECONDS
from control_plane.core.delegation import to_act
from control_plane.core.minting import NEVER, REASONS
from control_plane.core.moments import MAX_UNIX_SECONDS, within_calendar
from control_plane.core.names import (
    CLIENT_ID,
    CREDENTIAL_NAME,
    NAME_IN_SOURCE,
    NOTE,
    OBJECT_ID,
    PRINTABLE,
    SOURCE_NAME,
    TENANT_ID,
    VARIABLE,
)
from control_plane.core.probe import MAX_PATH, InvalidProbeError, Probe
from control_plane.core.probe import SETTING as PROBE_SETTING
from control_plane.core.records import SUBJECT_ASSERT, Client, MintedValue, Rotation, Session, TenantAllowRule
from control_plane.core.rotation import Replies
from control_plane.core.urls import MAX_URL_LENGTH, InvalidUrlError, OutboundUrlText, parse_outbound_url
from control_plane.credentials import Described
from control_plane.grants import NamedGrant
from control_plane.issuance import Issued, IssuedDirect, IssuedProxyCredential
from control_plane.limits import NamedLimit
from control_plane.placeholders import NamedToken
from control_plane.scheduling import Scheduled

MAX_ITEMS: Final = 64
MAX_TTL_SECONDS: Final = 30 * 86_400
MAX_STALE_SECONDS: Final = 86_400.0
MAX_AGE_SECONDS: Final = 10 * 366 * 86_400
MAX_WINDOW_SECONDS: Final = 31 * 86_400


def _measure(value: Any) -> Measure:
    try:
        return Measure(value)
    except ValueError:
        raise PydanticCustomError("measure", "one of: requests, tokens") from None


def _secret(value: Any) -> Secret:
    if not isinstance(value, str):
        raise PydanticCustomError("secret_type", "a string is expected")
    try:
        # Of which form it is to be, its credential's kind says (`core.kinds`).
        return Secret.document(value) if "\n" in value.strip() or "\t" in value else Secret.submitted(value)
    except UnusableSecretError as error:
        raise PydanticCustomError("secret_unusable", "{reason}", {"reason": str(error)}) from None


def _whole(value: Any) -> Any:
    # JSON Schema counts 5.0 among the integers; strict validation would not.
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _placement(value: Any) -> Placement:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise PydanticCustomError("placement", "an object is expected")
    try:
        return placement_from_json(value)
    except InvalidPlacementError as error:
        raise PydanticCustomError("placement", "{reason}", {"reason": str(error)}) from None


def _host(value: str) -> str:
    try:
        return canonical_host(value)
    except InvalidDestinationError as error:
        raise PydanticCustomError("host", "{reason}", {"reason": str(error)}) from None


def _method(value: str) -> str:
    try:
        check_methods(frozenset({value}))
    except InvalidDestinationError as error:
        raise PydanticCustomError("method", "{reason}", {"reason": str(error)}) from None
    return value


def _path_prefix(value: str) -> str:
    try:
        Destination(parse_destination("https://host.test").endpoint, value)
    except InvalidDestinationError as error:
        raise PydanticCustomError("path_prefix", "{reason}", {"reason": str(error)}) from None
    assert is_plain_path(value)
    return value


def _outbound_url(value: str) -> str:
    try:
        return parse_outbound_url(value).text
    except InvalidUrlError as error:
        raise PydanticCustomError("url", "{reason}", {"reason": str(error)}) from None


SecretField = Annotated[
    Secret,
    PlainValidator(_secret),
    WithJsonSchema({"type": "string", "minLength": 1, "maxLength": MAX_SECRET_BYTES, "writeOnly": True}),
]
Whole = Annotated[int, BeforeValidator(_whole)]
TenantName = Annotated[str, StringConstraints(pattern=TENANT_ID)]
ClientName = Annotated[str, StringConstraints(pattern=CLIENT_ID)]
CredentialName = Annotated[str, StringConstraints(pattern=CREDENTIAL_NAME)]
Printable = Annotated[str, StringConstraints(pattern=PRINTABLE)]
Variable = Annotated[str, StringConstraints(pattern=VARIABLE)]
ObjectId = Annotated[str, StringConstraints(pattern=OBJECT_ID)]
Method = Annotated[str, AfterValidator(_method), Field(json_schema_extra={"pattern": "^[A-Z][A-Z-]{0,31}$"})]
Methods = Annotated[list[Method], Field(min_length=1, max_length=MAX_ITEMS)]
PathPrefix = Annotated[str, StringConstraints(max_length=1024), AfterValidator(_path_prefix)]
Host = Annotated[str, StringConstraints(max_length=255), AfterValidator(_host)]
Port = Annotated[Whole, Field(ge=1, le=65_535)]
Seconds = Annotated[float, Field(ge=0, le=MAX_TTL_SECONDS, allow_inf_nan=False)]
UnixSeconds = Annotated[float, Field(ge=0, le=MAX_UNIX_SECONDS, allow_inf_nan=False)]

Kind = Annotated[
    str, StringConstraints(max_length=40), WithJsonSchema({"enum": [kind.value for kind in CredentialKind]})
]
KindSettingsField = Annotated[dict[str, Any], Field(max_length=MAX_ITEMS)]
"""What they are, `core.kinds` says for each kind; they are checked where the kind is known."""
StaleSeconds = Annotated[float, Field(ge=0, le=MAX_STALE_SECONDS, allow_inf_nan=False)]

PLACEMENT_SCHEMA: Final[dict[str, Any]] = {
    "oneOf": [
        {
            "type": "object",
            "properties": {
                "kind": {"const": "header"},
                "name": {"type": "string"},
                "format": {"type": "string"},
            },
            "required": ["kind", "name"],
            "additionalProperties": False,
        },
        {
            "type": "object",
            "properties": {"kind": {"const": "basic"}, "username": {"type": "string"}},
            "required": ["kind", "username"],
            "additionalProperties": False,
        },
        {
            "type": "object",
            "properties": {"kind": {"const": "query"}, "parameter": {"type": "string"}},
            "required": ["kind", "parameter"],
            "additionalProperties": False,
        },
        {
            "type": "object",
            "properties": {"kind": {"const": "path"}, "format": {"type": "string"}},
            "required": ["kind"],
            "additionalProperties": False,
        },
    ]
}
PlacementField = Annotated[Placement, PlainValidator(_placement), WithJsonSchema(PLACEMENT_SCHEMA)]


def _proofs(value: Any) -> ClientProofs:
    if isinstance(value, ClientProofs):
        return value
    try:
        return _PROOFS.validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"][:2])
        said = str(first["msg"]).removeprefix("Value error, ")[:200]
        reason = f"{place}: {said}" if place and place.isprintable() else said
        raise PydanticCustomError("proofs", "{reason}", {"reason": reason}) from None


_PROOFS: Final = TypeAdapter(ClientProofs)
ProofsField = Annotated[ClientProofs, PlainValidator(_proofs), WithJsonSchema({"type": "object"})]


class _Incoming(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)


class _Outgoing(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


# --- incoming --------------------------------------------------------------------------------------------------------


class DestinationIn(_Incoming):
    url: Annotated[str, StringConstraints(max_length=2048)]
    methods: Methods | None = None
    allow_private: bool = False
    websocket: bool = False
    ranges: bool = False
    unsearchable: bool = False
    strict: bool = False
    ca_pem: Annotated[str, StringConstraints(max_length=65_536)] | None = None

    def to_destination(self) -> Destination:
        return destination_from_json(self.model_dump())


def _destination(value: Any) -> Destination:
    try:
        return DestinationIn.model_validate(value).to_destination()
    except InvalidDestinationError as error:
        raise PydanticCustomError("destination", "{reason}", {"reason": str(error)}) from None


DestinationField = Annotated[
    Destination,
    PlainValidator(_destination),
    WithJsonSchema(DestinationIn.model_json_schema()),
]
Destinations = Annotated[list[DestinationField], Field(min_length=1, max_length=MAX_ITEMS)]
Placements = Annotated[list[PlacementField], Field(min_length=1, max_length=MAX_ITEMS)]
Variables = Annotated[list[Variable], Field(max_length=MAX_ITEMS)]


class SecretSourceIn(_Incoming):
    """Where the secret is read from: a source, and a name in it."""

    source: Annotated[str, StringConstraints(pattern=SOURCE_NAME)]
    name: Annotated[str, StringConstraints(pattern=NAME_IN_SOURCE)]

    def to_reference(self) -> dict[str, str]:
        return {"source": self.source, "name": self.name}


class ProbeIn(_Incoming):
    """A request that costs nothing and needs the secret, such as `GET /v1/models`: it shows whether that is good."""

    method: Literal["GET", "HEAD", "POST"] = "GET"
    path: Annotated[str, StringConstraints(max_length=MAX_PATH)]

    def to_probe(self) -> Probe:
        return Probe(method=self.method, path=self.path)


def _declared_probe(value: Any) -> Probe | None:
    if value is None:
        return None
    try:
        return ProbeIn.model_validate(value).to_probe()
    except InvalidProbeError as error:
        raise PydanticCustomError("probe", "{reason}", {"reason": str(error)}) from None


DeclaredProbe = Annotated[
    Probe | None,
    PlainValidator(_declared_probe),
    WithJsonSchema({"anyOf": [ProbeIn.model_json_schema(), {"type": "null"}]}),
]


class CredentialIn(_Incoming):
    """A new credential. What is left out comes from the preset, or else is `Authorization: Bearer`."""

    name: CredentialName
    preset: Annotated[str, StringConstraints(max_length=64)] | None = None
    destinations: Destinations | None = None
    placements: Placements | None = None
    variables: Variables | None = None
    credential_required: bool = False
    allow_direct: bool = False
    """Lets an exchange hand the secret out itself, the other conditions holding too. For the platform to allow."""
    kind: Kind = CredentialKind.STATIC.value
    settings: KindSettingsField = {}
    max_stale_seconds: StaleSeconds = 0.0
    secret: SecretField | None = None
    """Exactly one of this and the next."""
    secret_source: SecretSourceIn | None = None
    probe: DeclaredProbe = None
    """How a new version is tried before it is used (`rotate` with `probe`). None: as the preset has it."""


class CredentialChangeIn(_Incoming):
    """What is left out stays. Anything by which the secret could go further needs the secret again."""

    destinations: Destinations | None = None
    placements: Placements | None = None
    variables: Variables | None = None
    credential_required: bool | None = None
    allow_direct: bool | None = None
    settings: KindSettingsField | None = None
    """All of them, as they are to be."""
    max_stale_seconds: StaleSeconds | None = None
    secret: SecretField | None = None
    secret_source: SecretSourceIn | None = None
    """The secret is read from there from now on; named again it is read again."""
    probe: DeclaredProbe = None
    """Another one needs the secret again; null takes it away. Left out it stays."""

    @property
    def without_probe(self) -> bool:
        return "probe" in self.model_fields_set and self.probe is None


def _probe(value: Any) -> Any:
    if isinstance(value, bool):
        return value
    try:
        return ProbeIn.model_validate(value).to_probe()
    except InvalidProbeError as error:
        raise PydanticCustomError("probe", "{reason}", {"reason": str(error)}) from None


ProbeField = Annotated[
    bool | Probe,
    PlainValidator(_probe),
    WithJsonSchema({"anyOf": [{"type": "boolean"}, ProbeIn.model_json_schema()]}),
]


class RotationIn(_Incoming):
    """Without options the new secret is in use at once, by everybody, and the old one is gone."""

    secret: SecretField | None = None
    """May be left out where `compromised`: then nothing is in use until a successor is submitted."""
    compromised: bool = False
    """The old secret leaked: no canary, no overlap, no way back, and open streams are cut."""
    probe: ProbeField = False
    """Try the new secret before anybody uses it: by the probe of the credential or its preset, or by this one."""
    proceed_if_unknown: bool = False
    """Go on also where the probe got neither a yes nor a no."""
    if_version: Annotated[Whole, Field(ge=1, le=2**31 - 1)] | None = None
    """Only while this is the current version: 409 where somebody else was faster."""
    canary_percent: Annotated[Whole, Field(ge=0, le=99)] = 0
    """The share of subjects that use the new version first."""
    canary_seconds: Seconds = 0.0
    overlap_seconds: Seconds = 0.0
    """How long the old version is kept, to go back to."""


class HttpHookIn(_Incoming):
    """An endpoint of the operator's, which is asked by a signed request (docs/rotation.md)."""

    kind: Literal["http"]
    url: Annotated[str, StringConstraints(max_length=MAX_URL_LENGTH), AfterValidator(_outbound_url)]

    def to_settings(self) -> dict[str, str]:
        return {"kind": self.kind, "url": self.url}


class AwsIamHookIn(_Incoming):
    """Access keys of the IAM user whose key the secret is: `{"access_key_id", "secret_access_key"}`."""

    kind: Literal["aws_iam"]

    def to_settings(self) -> dict[str, str]:
        return {"kind": self.kind}


HookIn = Annotated[HttpHookIn | AwsIamHookIn, Field(discriminator="kind")]


class ScheduleIn(_Incoming):
    """Without a hook: reminders alone. The options are those of the rotations that the hook's values go through."""

    every_seconds: Annotated[float, Field(ge=3600, le=MAX_AGE_SECONDS, allow_inf_nan=False)]
    """How old a version may become."""
    remind_seconds: Annotated[float, Field(ge=0, le=MAX_AGE_SECONDS, allow_inf_nan=False)] = 0.0
    """So long before that, it is said."""
    hook: HookIn | None = None
    probe: bool = False
    proceed_if_unknown: bool = False
    canary_percent: Annotated[Whole, Field(ge=0, le=99)] = 0
    canary_seconds: Seconds = 0.0
    overlap_seconds: Seconds = 0.0


class GrantIn(_Incoming):
    """Exactly one of `subject` and `role`."""

    credential: CredentialName
    subject: Printable | None = None
    role: Printable | None = None
    client: ClientName | None = None
    methods: Methods | None = None
    path_prefixes: Annotated[list[PathPrefix], Field(min_length=1, max_length=MAX_ITEMS)] | None = None
    until: UnixSeconds | None = None


class AllowRuleIn(_Incoming):
    host: Host
    port: Port | None = None
    methods: Methods | None = None
    allow_private: bool = False
    session: ObjectId | None = None
    tunnel: bool = False
    """A CONNECT to it is not intercepted: for clients that pin certificates. Nothing inside is looked at."""


class LimitIn(_Incoming):
    """Neither `credential` nor `subject`: all of the tenant's together."""

    credential: CredentialName | None = None
    subject: Printable | None = None
    each_subject: bool = False
    measure: Annotated[Measure, BeforeValidator(_measure)]
    amount: Annotated[Whole, Field(ge=1, le=10**15)]
    window_seconds: Annotated[Whole, Field(ge=1, le=MAX_WINDOW_SECONDS)]


class AlarmHookIn(_Incoming):
    url: OutboundUrlText


class AlarmSettings(_Incoming):
    revoke_on_mismatch: bool
    """A placeholder in the hands of another caller of the same tenant is revoked."""


class DecoyIn(_Incoming):
    preset: CredentialName | None = None
    note: Annotated[str, StringConstraints(pattern=NOTE)] = ""


class ClientIn(_Incoming):
    """A client and how it proves itself: by a secret, unless `proofs` say otherwise."""

    id: ClientName
    kind: Literal["runtime", "egress_proxy", "operator"]
    tenant: TenantName | None = None
    scopes: Annotated[list[Literal["subject:assert"]], Field(max_length=MAX_ITEMS)] = []
    subject: Printable | None = None
    """The one subject that it acts for: then its own token or certificate says all that a proxy has to know."""
    proofs: ProofsField = NO_PROOFS
    secret: bool | None = None
    """Whether it gets a secret. None: exactly where it has no other proof."""


class ClientChangeIn(_Incoming):
    """What is left out stays. `proofs` replaces all of them."""

    proofs: ProofsField | None = None
    secret: Literal["keep", "new", "none"] = "keep"


class PlaceholderIn(_Incoming):
    subject: Printable
    audience: Printable
    ttl_seconds: Annotated[Whole, Field(ge=1, le=MAX_TTL_SECONDS)]
    client: ClientName | None = None
    session: bool = False


class MayActIn(_Incoming):
    """Somebody, by each of these that is there: a subject, and for a client its id."""

    sub: Printable
    client_id: ClientName | None = None

    def to_claim(self) -> dict[str, str]:
        return {"sub": self.sub, **({"client_id": self.client_id} if self.client_id is not None else {})}


class SessionIn(_Incoming):
    """An administrator names tenant and subject; a client with `subject:assert` names a subject of its own tenant; with
    the token of a trusted issuer both are the token's own."""

    runtime: ClientName
    subject: Printable | None = None
    tenant: TenantName | None = None
    roles: Annotated[list[Printable], Field(max_length=MAX_ITEMS)] = []
    may_act: MayActIn | None = None
    """Who may act for the subject with an actor token (RFC 8693 §4.4). None: nobody."""


# --- outgoing --------------------------------------------------------------------------------------------------------


class DestinationOut(_Outgoing):
    url: str
    methods: list[str] | None
    allow_private: bool
    websocket: bool
    ranges: bool
    unsearchable: bool
    strict: bool
    ca_pem: str | None


class VersionOut(_Outgoing):
    version: int
    state: str
    created_at: float


class RotationOut(_Outgoing):
    """Where a rotation is, or how it ended."""

    id: str
    phase: str
    running: bool
    old_version: int | None
    new_version: int
    canary_percent: int
    canary_seconds: float
    overlap_seconds: float
    started_at: float
    started_by: str
    since: float
    ends_at: float | None
    """When its step ends by itself."""
    probe: str | None
    """`accepted`, `rejected` or `unknown`."""
    probe_status: int | None
    probe_detail: str
    reason: str

    @classmethod
    def of(cls, rotation: Rotation) -> "RotationOut":
        return cls(
            id=rotation.id,
            phase=rotation.phase.value,
            running=rotation.is_running,
            old_version=rotation.old_version,
            new_version=rotation.new_version,
            canary_percent=rotation.canary_percent,
            canary_seconds=rotation.canary_seconds,
            overlap_seconds=rotation.overlap_seconds,
            started_at=rotation.started_at,
            started_by=rotation.started_by,
            since=rotation.since,
            ends_at=rotation.ends_at,
            probe=rotation.probe_result.value if rotation.probe_result is not None else None,
            probe_status=rotation.probe_status,
            probe_detail=rotation.probe_detail,
            reason=rotation.reason,
        )


class RepliesOut(_Outgoing):
    """How upstreams answered one version within the window."""

    version: int
    replies: int
    authentication_errors: int
    failing_subjects: int


class RotationStateOut(_Outgoing):
    rotation: RotationOut | None
    """None: the credential was never rotated."""
    replies: list[RepliesOut]

    @classmethod
    def of(cls, rotation: Rotation | None, replies: Mapping[int, Replies]) -> "RotationStateOut":
        return cls(
            rotation=RotationOut.of(rotation) if rotation is not None else None,
            replies=[
                RepliesOut(
                    version=version,
                    replies=each.count,
                    authentication_errors=each.failures,
                    failing_subjects=each.failing_subjects,
                )
                for version, each in sorted(replies.items())
            ],
        )


class MintedOut(_Outgoing):
    """What a provider gave last for a credential whose values are minted, or why it gave nothing."""

    state: str
    reason: str
    detail: str
    hint: str
    minted_at: float | None
    expires_at: float | None
    retry_at: float | None

    @classmethod
    def of(cls, minted: MintedValue) -> "MintedOut":
        detail, hint = REASONS.get(minted.reason, ("", ""))
        return cls(
            state=minted.state.value,
            reason=minted.reason,
            detail=detail,
            hint=hint,
            minted_at=minted.minted_at if minted.envelope is not None else None,
            expires_at=minted.expires_at if minted.envelope is not None else None,
            retry_at=minted.retry_at if 0 < minted.retry_at < NEVER else None,
        )


class ScheduleOut(_Outgoing):
    every_seconds: float
    remind_seconds: float
    hook: dict[str, Any] | None
    probe: bool
    proceed_if_unknown: bool
    canary_percent: int
    canary_seconds: float
    overlap_seconds: float
    due_at: float | None
    """When the version in use is too old; null where none is in use."""
    suspended: str
    """Why nothing is rotated by itself; empty where it is."""
    last_failure: str
    """Why the hook gave nothing when it was last asked."""

    @classmethod
    def of(cls, scheduled: Scheduled) -> "ScheduleOut":
        schedule = scheduled.schedule
        return cls(
            every_seconds=schedule.every_seconds,
            remind_seconds=schedule.remind_seconds,
            hook=dict(schedule.hook) if schedule.hook is not None else None,
            probe=schedule.probes,
            proceed_if_unknown=schedule.proceeds_unproven,
            canary_percent=schedule.canary_percent,
            canary_seconds=schedule.canary_seconds,
            overlap_seconds=schedule.overlap_seconds,
            due_at=within_calendar(scheduled.due_at) if scheduled.due_at is not None else None,
            suspended=scheduled.suspended,
            last_failure=schedule.last_failure,
        )


class CredentialOut(_Outgoing):
    """Everything about a credential but its secret."""

    id: str
    name: str
    tenant: str
    preset: str | None
    kind: str
    settings: dict[str, Any]
    max_stale_seconds: float
    secret_source: dict[str, str] | None
    minted: MintedOut | None
    destinations: list[DestinationOut]
    placements: list[dict[str, str]]
    variables: list[str]
    credential_required: bool
    allow_direct: bool
    probe: dict[str, str] | None
    """The credential's own. Null: its preset's, if that has one."""
    current_version: int
    versions: list[VersionOut]
    rotation: RotationOut | None
    """The latest one: under way, or how it ended."""
    rotated_at: float | None
    """When the version in use was submitted; null where none is in use."""
    rotation_due_at: float | None
    """When that is too old by its schedule; null without one."""
    created_at: float
    updated_at: float

    @classmethod
    def of(cls, described: Described) -> "CredentialOut":
        credential = described.credential
        return cls(
            id=credential.id,
            name=credential.name,
            tenant=credential.tenant,
            preset=credential.preset,
            kind=credential.kind,
            settings={name: value for name, value in credential.settings.items() if name != PROBE_SETTING},
            max_stale_seconds=credential.max_stale_seconds,
            secret_source=dict(credential.secret_source) if credential.secret_source is not None else None,
            minted=MintedOut.of(described.minted) if described.minted is not None else None,
            destinations=[
                DestinationOut(
                    url=destination.url,
                    methods=sorted(destination.methods) if destination.methods is not None else None,
                    allow_private=destination.allow_private,
                    websocket=destination.websocket,
                    ranges=destination.ranges,
                    unsearchable=destination.unsearchable,
                    strict=destination.strict,
                    ca_pem=destination.ca_pem,
                )
                for destination in credential.destinations
            ],
            placements=[placement_to_json(placement) for placement in credential.placements],
            variables=list(credential.variables),
            credential_required=credential.credential_required,
            allow_direct=credential.allow_direct,
            probe=credential.settings.get(PROBE_SETTING),
            current_version=credential.current_version,
            versions=[
                VersionOut(version=version.version, state=version.state.value, created_at=version.created_at)
                for version in described.versions
            ],
            rotation=RotationOut.of(described.rotation) if described.rotation is not None else None,
            rotated_at=described.active.created_at if described.active is not None else None,
            rotation_due_at=described.due_at,
            created_at=credential.created_at,
            updated_at=credential.updated_at,
        )


class GrantOut(_Outgoing):
    id: str
    tenant: str
    credential: str
    subject: str | None
    role: str | None
    client: str | None
    methods: list[str] | None
    path_prefixes: list[str] | None
    until: float | None
    created_at: float

    @classmethod
    def of(cls, named: NamedGrant) -> "GrantOut":
        grant = named.grant
        return cls(
            id=grant.id,
            tenant=grant.tenant,
            credential=named.credential_name,
            subject=grant.subject,
            role=grant.role,
            client=grant.client,
            methods=sorted(grant.methods) if grant.methods is not None else None,
            path_prefixes=sorted(grant.path_prefixes) if grant.path_prefixes is not None else None,
            until=within_calendar(grant.until) if grant.until is not None else None,
            created_at=grant.created_at,
        )


class AllowRuleOut(_Outgoing):
    id: str
    tenant: str
    host: str
    port: int | None
    methods: list[str] | None
    allow_private: bool
    session: str | None
    created_at: float
    tunnel: bool

    @classmethod
    def of(cls, rule: TenantAllowRule) -> "AllowRuleOut":
        return cls(
            id=rule.id,
            tenant=rule.tenant,
            host=rule.host,
            port=rule.port,
            methods=sorted(rule.methods) if rule.methods is not None else None,
            allow_private=rule.allow_private,
            session=rule.session,
            created_at=rule.created_at,
            tunnel=rule.tunnel,
        )


class TenantOut(_Outgoing):
    id: str
    created_at: float


class ClientOut(_Outgoing):
    id: str
    kind: str
    tenant: str | None
    scopes: list[str]
    subject: str | None
    source: str
    created_at: float
    proven_by: list[str]
    proofs: dict[str, Any]

    @classmethod
    def of(cls, client: Client) -> "ClientOut":
        return cls(**_client_fields(client))


class NewClientOut(ClientOut):
    client_secret: str | None
    """Shown once, here. None: the client has none, or keeps the one that it has."""

    @classmethod
    def with_secret(cls, client: Client, secret: Secret | None) -> "NewClientOut":
        return cls(**_client_fields(client), client_secret=secret.reveal() if secret is not None else None)


class PlaceholderOut(_Outgoing):
    id: str
    kind: str
    subject: str
    session: str | None
    client: str
    credential: str | None
    created_at: float
    expires_at: float
    revoked_at: float | None
    suspended_until: float | None
    """It is refused until then: replies to its requests gave its secret back, again and again."""

    @classmethod
    def of(cls, named: NamedToken) -> "PlaceholderOut":
        token = named.token
        return cls(
            id=token.id,
            kind=token.kind.value,
            subject=token.subject,
            session=token.session,
            client=token.client,
            credential=named.credential_name,
            created_at=token.created_at,
            expires_at=token.expires_at,
            revoked_at=token.revoked_at,
            suspended_until=token.suspended_until,
        )


class UpstreamCredentialOut(_Outgoing):
    mode: Literal["placeholder", "direct"]
    value: str


class ExchangeOut(_Outgoing):
    """RFC 8693 §2.2.1, and what a caller needs to use the placeholder. Holds the placeholder: for its owner alone."""

    access_token: str
    issued_token_type: str
    token_type: Literal["Bearer", "N_A"]
    expires_in: int
    scope: str
    upstream_credential: UpstreamCredentialOut
    proxy_credential: str
    base_url: str
    placement: dict[str, str]
    placements: list[dict[str, str]]
    subject: str
    tenant: str
    session_id: str | None
    credential: str
    variables: list[str]
    destinations: list[str]
    id: str
    act: dict[str, Any] | None
    """Who acts for the subject (RFC 8693 §4.1). None: the subject itself."""

    @classmethod
    def of(cls, issued: Issued) -> "ExchangeOut":
        credential, token = issued.credential, issued.token
        upstream = to_wire(issued.placeholder)
        return cls(
            access_token=issued.placeholder.value,
            issued_token_type=TOKEN_TYPE_PLACEHOLDER,
            token_type="Bearer" if credential.placements[0] == BEARER else "N_A",
            expires_in=issued.expires_in,
            scope=token.scope,
            upstream_credential=UpstreamCredentialOut.model_validate(upstream),
            proxy_credential=issued.proxy_credential,
            base_url=issued.base_url,
            placement=placement_to_json(credential.placements[0]),
            placements=[placement_to_json(placement) for placement in credential.placements],
            subject=token.subject,
            tenant=token.tenant,
            session_id=token.session,
            credential=credential.name,
            variables=list(credential.variables),
            destinations=[destination.url for destination in credential.destinations],
            id=token.id,
            act=to_act(token.act),
        )


class ProxyCredentialOut(_Outgoing):
    """RFC 8693 §2.2.1 for a proxy credential by itself. Holds it: for its owner alone."""

    access_token: str
    issued_token_type: str
    token_type: Literal["N_A"]
    expires_in: int
    scope: str
    proxy_credential: str
    subject: str
    tenant: str
    session_id: str | None
    id: str
    act: dict[str, Any] | None

    @classmethod
    def of(cls, issued: IssuedProxyCredential) -> "ProxyCredentialOut":
        return cls(
            access_token=issued.text,
            issued_token_type=TOKEN_TYPE_PROXY_CREDENTIAL,
            token_type="N_A",
            expires_in=issued.expires_in,
            scope="",
            proxy_credential=issued.text,
            subject=issued.token.subject,
            tenant=issued.token.tenant,
            session_id=issued.token.session,
            id=issued.token.id,
            act=to_act(issued.token.act),
        )


class DirectOut(_Outgoing):
    """RFC 8693 §2.2.1 for a key itself. Holds it: for its owner alone, and once."""

    access_token: str
    issued_token_type: str
    token_type: Literal["Bearer", "N_A"]
    expires_in: int
    """How long the receiver may keep it; the key itself may be good for longer."""
    scope: str
    upstream_credential: UpstreamCredentialOut
    base_url: str
    placement: dict[str, str]
    placements: list[dict[str, str]]
    subject: str
    tenant: str
    session_id: str | None
    credential: str
    variables: list[str]
    destinations: list[str]
    id: str
    act: dict[str, Any] | None

    @classmethod
    def of(cls, issued: IssuedDirect) -> "DirectOut":
        credential, token = issued.credential, issued.token
        upstream = to_wire(issued.key)
        return cls(
            access_token=upstream["value"],
            issued_token_type=TOKEN_TYPE_DIRECT,
            token_type="Bearer" if credential.placements[0] == BEARER else "N_A",
            expires_in=issued.expires_in,
            scope="",
            upstream_credential=UpstreamCredentialOut.model_validate(upstream),
            base_url=issued.base_url,
            placement=placement_to_json(credential.placements[0]),
            placements=[placement_to_json(placement) for placement in credential.placements],
            subject=token.subject,
            tenant=token.tenant,
            session_id=token.session,
            credential=credential.name,
            variables=list(credential.variables),
            destinations=[destination.url for destination in credential.destinations],
            id=token.id,
            act=to_act(token.act),
        )


class ClientTokenOut(_Outgoing):
    """RFC 6749 §4.4.3."""

    access_token: str
    issued_token_type: str
    token_type: Literal["Bearer"]
    expires_in: int
    scope: str

    @classmethod
    def of(cls, text: str) -> "ClientTokenOut":
        return cls(
            access_token=text,
            issued_token_type=TOKEN_TYPE_JWT,
            token_type="Bearer",
            expires_in=LIFETIME_SECONDS,
            scope=SUBJECT_ASSERT,
        )


class IntrospectionOut(_Outgoing):
    """RFC 7662 §2.2. An inactive token has `active` alone; an absent member does not apply."""

    active: bool
    iss: str | None = None
    client_id: str | None = None
    sub: str | None = None
    aud: str | None = None
    scope: str | None = None
    token_type: str | None = None
    exp: int | None = None
    iat: int | None = None
    jti: str | None = None
    tenant: str | None = None
    session_id: str | None = None
    credential: str | None = None
    act: dict[str, Any] | None = None


class SessionOut(_Outgoing):
    session_id: str
    tenant: str
    subject: str
    roles: list[str]
    runtime: str
    created_at: float
    not_after: float
    ended_at: float | None
    act: dict[str, Any] | None
    may_act: dict[str, Any] | None
    erased_at: float | None

    @classmethod
    def of(cls, session: Session) -> "SessionOut":
        return cls(
            session_id=session.id,
            tenant=session.tenant,
            subject=session.subject,
            roles=list(session.roles),
            runtime=session.runtime,
            created_at=session.created_at,
            not_after=session.not_after,
            ended_at=session.ended_at,
            act=to_act(session.act),
            may_act=dict(session.may_act) if session.may_act is not None else None,
            erased_at=session.erased_at,
        )


class EndedSessionOut(_Outgoing):
    session_id: str
    tenant: str
    ended_at: float


class SessionTokenOut(_Outgoing):
    session_id: str
    session_token: str
    expires_in: int
    not_after: float


class LimitOut(_Outgoing):
    id: str
    credential: str | None
    subject: str | None
    each_subject: bool
    measure: Measure
    amount: int
    window_seconds: int
    granted: int
    """Given out to proxies in the window that runs now; of all subjects together where each has its own."""
    created_at: float

    @classmethod
    def of(cls, named: NamedLimit) -> "LimitOut":
        limit = named.limit
        return cls(
            id=limit.id,
            credential=named.credential_name,
            subject=limit.subject,
            each_subject=limit.each_subject,
            measure=limit.measure,
            amount=limit.amount,
            window_seconds=limit.window_seconds,
            granted=named.granted,
            created_at=limit.created_at,
        )


class AlarmHookOut(_Outgoing):
    id: str
    tenant: str | None
    url: str
    created_at: float

    @classmethod
    def of(cls, hook: AlarmHook) -> "AlarmHookOut":
        return cls(id=hook.id, tenant=hook.tenant, url=hook.url, created_at=hook.created_at)


class NewAlarmHookOut(AlarmHookOut):
    secret: str

    @classmethod
    def with_secret(cls, hook: AlarmHook, secret: str) -> "NewAlarmHookOut":
        return cls(id=hook.id, tenant=hook.tenant, url=hook.url, created_at=hook.created_at, secret=secret)


class DecoyOut(_Outgoing):
    id: str
    preset: str | None
    note: str
    created_at: float
    used_at: float | None

    @classmethod
    def of(cls, decoy: Decoy) -> "DecoyOut":
        return cls(
            id=decoy.id,
            preset=decoy.preset,
            note=decoy.note,
            created_at=decoy.created_at,
            used_at=decoy.used_at,
        )


class NewDecoyOut(DecoyOut):
    placeholder: str

    @classmethod
    def with_placeholder(cls, decoy: Decoy, placeholder: str) -> "NewDecoyOut":
        return cls(**DecoyOut.of(decoy).model_dump(), placeholder=placeholder)


def _client_fields(client: Client) -> dict[str, Any]:
    return {
        "id": client.id,
        "kind": client.kind.value,
        "tenant": client.tenant,
        "scopes": list(client.scopes),
        "subject": client.subject,
        "source": client.source.value,
        "created_at": client.created_at,
        "proven_by": list(client.proven_by),
        "proofs": _PROOFS.dump_python(client.proofs, mode="json", exclude_defaults=True),
    }
