"""Trusted issuers: whom to believe, and exactly in what. The platform's administrator says so (ADR 0015).

Rule: an issuer is kept only if it makes sense as a whole: one source of keys, asymmetric algorithms, an audience, a
use, and a claims table that gives what each use needs. Every mistake names the field and what was expected.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from control_plane.contract.refusal import Refusal, RefusalCode, RefusedError
from control_plane.contract.wire import issuer_of
from control_plane.core.claims import ClaimsTable
from control_plane.core.identity import IdentifiedBy, TrustedIssuer, Use, VerifiedIdentity, explain, is_trust_domain
from control_plane.core.issuer_presets import ISSUER_PRESETS, NO_PRESET, IssuerPreset, merged_claims
from control_plane.core.jwk import ALGORITHMS, UnusableKeyError, read_jwk
from control_plane.core.records import NO_TENANT, Change, ChangeKind
from control_plane.core.tokens import OWN_TYP_PREFIX, PROXY_AUDIENCE, InvalidTokenError, Others, read
from control_plane.core.urls import InvalidUrlError, parse_outbound_url
from control_plane.credentials import invalid_field
from control_plane.identification import Identification
from control_plane.ports import Clock, CrossTenantReason, PlatformScope, Records, Store, TakenError
from control_plane.trail import Actor, Trail

_PLATFORM: Final = PlatformScope(CrossTenantReason.ADMINISTER)
_CLAIMS: Final = TypeAdapter(ClaimsTable)
_DEFAULT_MAX_AGE: Final = 300
_DEFAULT_MAX_STALE: Final = 3_600


@dataclass(frozen=True, slots=True)
class NewIssuer:
    """None: as the preset has it."""

    name: str
    preset: str | None
    issuer: str | None
    uses: tuple[Use, ...]
    audiences: tuple[str, ...] | None
    claims: Mapping[str, Any]
    identified_by: IdentifiedBy | None = None
    other_audiences: Others | None = None
    unknown_claims: Others | None = None
    algorithms: tuple[str, ...] | None = None
    token_types: tuple[str, ...] | None = None
    discovery: bool | None = None
    jwks_url: str | None = None
    keys: tuple[Mapping[str, Any], ...] = ()
    max_lifetime_seconds: int | None = None
    keys_max_age_seconds: int | None = None
    keys_max_stale_seconds: int | None = None


@dataclass(frozen=True, slots=True)
class DryRun:
    """What would become of a token, and why."""

    identity: VerifiedIdentity | None
    reason: str | None
    claims: Sequence[tuple[str, str]]
    """Each claim of the token, and what the table makes of it."""


class IssuerKeeper:
    def __init__(
        self, store: Store, identification: Identification, trail: Trail, *, clock: Clock, own_issuer: str
    ) -> None:
        self._store = store
        self._identification = identification
        self._trail = trail
        self._clock = clock
        self._own_issuer = own_issuer

    async def add(self, new: NewIssuer, *, by: Actor) -> TrustedIssuer:
        """Raises `RefusedError(invalid_field)`."""
        issuer = settled(new, own_issuer=self._own_issuer, now=self._clock())
        async with self._store.write(_PLATFORM) as records:
            if await records.issuers.named(issuer.name) is not None:
                raise invalid_field("name", "there is an issuer of that name already")
            try:
                await records.issuers.add(issuer)
            except TakenError:
                raise invalid_field("issuer", "there is a record of that issuer already") from None
            await records.audit.append([self._trail.event("issuer.add", by=by, tenant=None, detail=_told(issuer))])
        return issuer

    async def replace(self, new: NewIssuer, *, by: Actor) -> TrustedIssuer:
        """The whole record. Raises `RefusedError`: `not_found`, `invalid_field`."""
        issuer = settled(new, own_issuer=self._own_issuer, now=self._clock())
        async with self._store.write(_PLATFORM) as records:
            present = await records.issuers.named(issuer.name)
            if present is None:
                raise RefusedError(ISSUER_NOT_FOUND)
            issuer = replace(issuer, created_at=present.created_at)
            try:
                await records.issuers.replace(issuer)
            except TakenError:
                raise invalid_field("issuer", "there is a record of that issuer already") from None
            await self._tell_proxies(records, issuer)
            await records.audit.append([self._trail.event("issuer.change", by=by, tenant=None, detail=_told(issuer))])
        return issuer

    async def list(self) -> Sequence[TrustedIssuer]:
        async with self._store.read(_PLATFORM) as records:
            return await records.issuers.list()

    async def get(self, name: str) -> TrustedIssuer:
        """Raises `RefusedError(not_found)`."""
        async with self._store.read(_PLATFORM) as records:
            issuer = await records.issuers.named(name)
        if issuer is None:
            raise RefusedError(ISSUER_NOT_FOUND)
        return issuer

    async def remove(self, name: str, *, by: Actor) -> None:
        """From then on its tokens are nobody's; sessions that they opened live on. Raises `RefusedError(not_found)`."""
        async with self._store.write(_PLATFORM) as records:
            issuer = await records.issuers.named(name)
            if issuer is None:
                raise RefusedError(ISSUER_NOT_FOUND)
            await records.issuers.remove(name)
            await self._tell_proxies(records, issuer)
            await records.audit.append([self._trail.event("issuer.delete", by=by, tenant=None, detail=_told(issuer))])

    async def _tell_proxies(self, records: Records, issuer: TrustedIssuer) -> None:
        """That they ask again about the workloads that it vouched for."""
        change = Change(ChangeKind.PROXY_CREDENTIAL, NO_TENANT, issuer_of(issuer.name), revoked=True)
        await records.outbox.append([change], self._clock())

    async def test(self, name: str, unverified_token: str, *, use: Use) -> DryRun:
        """What would become of the token. Nothing is opened, used up or written."""
        issuer = await self.get(name)
        try:
            token = read(unverified_token)
        except InvalidTokenError as error:
            return DryRun(None, error.reason, ())
        claims = explain(token, issuer)
        try:
            return DryRun(await self._identification.verified_of(token, issuer, use=use), None, claims)
        except InvalidTokenError as error:
            return DryRun(None, error.reason, claims)


def settled(new: NewIssuer, *, own_issuer: str, now: float) -> TrustedIssuer:
    """The record, of what was given and what the preset has. Raises `RefusedError(invalid_field)`."""
    preset = _preset(new.preset)
    given_source = new.jwks_url is not None or bool(new.keys)
    issuer = TrustedIssuer(
        name=new.name,
        preset=new.preset,
        issuer=new.issuer or preset.issuer or _missing("issuer", "the 'iss' of its tokens, such as https://idp.test"),
        identified_by=new.identified_by or preset.identified_by,
        uses=frozenset(new.uses),
        audiences=new.audiences if new.audiences is not None else (own_issuer,),
        other_audiences=new.other_audiences or preset.other_audiences,
        algorithms=new.algorithms if new.algorithms is not None else preset.algorithms,
        token_types=_types(new.token_types if new.token_types is not None else preset.token_types),
        discovery=new.discovery if new.discovery is not None else preset.discovery and not given_source,
        jwks_url=new.jwks_url,
        keys=new.keys,
        claims=_table(merged_claims(preset, new.claims)),
        unknown_claims=new.unknown_claims or preset.unknown_claims,
        max_lifetime_seconds=new.max_lifetime_seconds or preset.max_lifetime_seconds,
        keys_max_age_seconds=new.keys_max_age_seconds or _DEFAULT_MAX_AGE,
        keys_max_stale_seconds=new.keys_max_stale_seconds or _DEFAULT_MAX_STALE,
        created_at=now,
        updated_at=now,
    )
    _require_a_name_of_its_own(issuer, own_issuer)
    _require_for_whom(issuer)
    _require_one_key_source(issuer)
    _require_what_uses_need(issuer)
    _require_narrowed(issuer, preset)
    return issuer


def _preset(name: str | None) -> IssuerPreset:
    if name is None:
        return NO_PRESET
    if name not in ISSUER_PRESETS:
        raise invalid_field("preset", f"is one of {', '.join(ISSUER_PRESETS)}")
    return ISSUER_PRESETS[name]


def _table(claims: Mapping[str, Any]) -> ClaimsTable:
    try:
        return _CLAIMS.validate_python(claims)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        place = ".".join(str(part) for part in ("claims", *first["loc"][:2]))
        said = str(first["msg"]).removeprefix("Value error, ")
        raise invalid_field(place if place.isprintable() else "claims", said[:200]) from None


def _types(given: Sequence[str]) -> tuple[str, ...]:
    if not given:
        raise invalid_field("token_types", "at least one value of the header's 'typ'; '' is none at all")
    types = tuple(dict.fromkeys(each.lower().removeprefix("application/") for each in given))
    if any(each.startswith(OWN_TYP_PREFIX) for each in types):
        raise invalid_field("token_types", f"types that begin with '{OWN_TYP_PREFIX}' are our own")
    return types


def _require_a_name_of_its_own(issuer: TrustedIssuer, own_issuer: str) -> None:
    if issuer.issuer.rstrip("/") == own_issuer.rstrip("/"):
        raise invalid_field("issuer", "that is this control plane itself; its own tokens are verified otherwise")
    if issuer.identified_by is IdentifiedBy.TRUST_DOMAIN:
        if not is_trust_domain(issuer.issuer):
            raise invalid_field("issuer", "a trust domain: spiffe://example.org")
    elif not issuer.issuer.startswith("https://") or not issuer.issuer.isprintable():
        raise invalid_field("issuer", "the 'iss' of its tokens, an https:// URL")


def _require_one_key_source(issuer: TrustedIssuer) -> None:
    sources = [issuer.discovery, issuer.jwks_url is not None, bool(issuer.keys)]
    if sum(sources) != 1:
        raise invalid_field("keys", "exactly one source of keys: 'discovery', 'jwks_url' or 'keys'")
    if issuer.keys_max_stale_seconds < issuer.keys_max_age_seconds:
        raise invalid_field("keys_max_stale_seconds", "at least keys_max_age_seconds")
    for field, url in (("issuer", issuer.issuer if issuer.discovery else None), ("jwks_url", issuer.jwks_url)):
        if url is not None:
            require_url(field, url)
    require_sound_keys(issuer.keys, issuer.algorithms)


def require_url(field: str, url: str) -> None:
    """Raises `RefusedError(invalid_field)` for what is not fetched."""
    try:
        parse_outbound_url(url)
    except InvalidUrlError as error:
        raise invalid_field(field, str(error)) from None


def require_sound_keys(keys: Sequence[Mapping[str, Any]], algorithms: Sequence[str]) -> None:
    """Raises `RefusedError(invalid_field)`. Of a client's own keys too."""
    seen: set[str | None] = set()
    for number, jwk in enumerate(keys):
        try:
            key = read_jwk(jwk)
        except UnusableKeyError as error:
            raise invalid_field(f"keys.{number}", str(error)) from None
        if not key.algorithms & set(algorithms):
            raise invalid_field(f"keys.{number}", "is for none of the algorithms that are allowed")
        if key.id in seen or (key.id is None and len(keys) > 1):
            raise invalid_field(f"keys.{number}", "has no 'kid' of its own, and there are several keys")
        seen.add(key.id)


def _require_for_whom(issuer: TrustedIssuer) -> None:
    if not issuer.algorithms or set(issuer.algorithms) - set(ALGORITHMS):
        raise invalid_field("algorithms", f"of {', '.join(ALGORITHMS)}: a shared secret verifies nothing here")
    if not issuer.audiences:
        raise invalid_field("audiences", "at least one: a token without an audience could be for anybody")
    if PROXY_AUDIENCE in issuer.audiences:
        raise invalid_field("audiences", f"'{PROXY_AUDIENCE}' is the audience of tokens for the egress proxy")


def _require_what_uses_need(issuer: TrustedIssuer) -> None:
    uses, claims = issuer.uses, issuer.claims
    if not uses:
        raise invalid_field("uses", "at least one of session, client, proxy and admin")
    if Use.SESSION in uses and claims.tenant is None:
        raise invalid_field("claims.tenant", "is missing: whose tokens are these? 'fixed', or 'claim' with a map")
    if Use.ADMIN in uses and claims.admin is None:
        raise invalid_field("claims.admin", "is missing: which values of which claim give which role?")
    if Use.ADMIN not in uses and claims.admin is not None:
        raise invalid_field("claims.admin", "gives roles, but 'uses' does not say admin")


def _require_narrowed(issuer: TrustedIssuer, preset: IssuerPreset) -> None:
    if not preset.narrowed_by:
        return
    claims = issuer.claims
    deciding = set(claims.require)
    if claims.tenant is not None and claims.tenant.claim is not None and (claims.tenant.map or claims.tenant.pattern):
        deciding.add(claims.tenant.claim)
    if claims.subject is not None and (claims.subject.map or claims.subject.pattern):
        deciding.add(claims.subject.claim)
    if not deciding & set(preset.narrowed_by):
        raise invalid_field(
            "claims.require",
            f"anybody can get a token of {preset.title}: require a value of one of {', '.join(preset.narrowed_by)}",
        )


def _missing(field: str, expected: str) -> Any:
    raise invalid_field(field, f"is missing: {expected}")


def _told(issuer: TrustedIssuer) -> str:
    return f"{issuer.name} {issuer.issuer} for {', '.join(sorted(use.value for use in issuer.uses))}"


ISSUER_NOT_FOUND: Final = Refusal(RefusalCode.NOT_FOUND, "there is no such issuer", "list them with GET /v1/issuers")
