"""Resolve: what a proxy asks before it swaps. Who is this caller, where may it go, what does a placeholder stand for?

Rule: every answer is of one moment, with the outbox position of that same moment, so that a proxy can tell whether an
event it has seen is newer. A "no" is an answer too; a store that does not answer is never read as "unknown". To a
caller of another tenant every placeholder is unknown; the truth goes to the audit trail alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, assert_never

import structlog

from control_plane.contract.caller import Caller, CredentialId
from control_plane.contract.grant import GrantScope
from control_plane.contract.kinds import is_placed
from control_plane.contract.refusal import RefusalCode, RefusedError
from control_plane.contract.wire import (
    Answer,
    Ask,
    AskCaller,
    AskPlaceholder,
    AskPolicy,
    AskWorkload,
    Binding,
    BoundLimit,
    CallerFacts,
    Policy,
    Refused,
    ResolveAnswer,
    ResolvedPlaceholder,
    ResolveRequest,
    Route,
)
from control_plane.core.alarms import AlarmKind, Sighting
from control_plane.core.presets import probe_of
from control_plane.core.records import Credential, CredentialVersion, Grant, RotationPhase, Session, TokenKind
from control_plane.core.rotation import PROBE_CLIENT, version_for
from control_plane.core.scopes import narrowed_by_token
from control_plane.custody import UnopenableError
from control_plane.issuance import live
from control_plane.material import Material, NotAtHandError
from control_plane.ports import (
    Clock,
    CrossTenantReason,
    PlatformScope,
    Position,
    Records,
    Store,
    TokenFacts,
    UnreadableRowError,
)
from control_plane.together import Together
from control_plane.workloads import Vouched, Workloads

_log = structlog.get_logger("control_plane.resolution")


@dataclass(frozen=True, slots=True)
class _Asked:
    ask: Ask
    without: Refused | None = None
    """What is said in the place of a secret that has to be fetched and could not be."""
    vouched: Vouched | Refused | None = None
    """What the token of a workload proves, or why not."""


@dataclass(frozen=True, slots=True)
class _Known:
    """What the store has of everything that one look is about, read at once."""

    tokens: Mapping[str, TokenFacts | None]
    grants: Mapping[CredentialId, Sequence[Grant]]

    def facts(self, sha256: str) -> TokenFacts | None:
        """Raises `UnreadableRowError`."""
        if sha256 not in self.tokens:
            return None
        if (facts := self.tokens[sha256]) is None:
            raise UnreadableRowError("a stored token is not readable")
        return facts


class Resolution:
    def __init__(
        self,
        store: Store,
        material: Material,
        workloads: Workloads,
        *,
        clock: Clock,
        on_sighting: Callable[[Sighting], None],
    ) -> None:
        """`on_sighting` is told of every placeholder that is asked about by somebody it is not for."""
        self._on_sighting = on_sighting
        self._store = store
        self._material = material
        self._workloads = workloads
        self._clock = clock
        self._look = Together(self._look_at_all)

    async def __call__(self, request: ResolveRequest) -> ResolveAnswer:
        ask = request.ask
        if isinstance(ask, AskWorkload):
            # Outside of the transaction: keys may have to be fetched. Inside it is looked at whether that still holds.
            return await self._look(_Asked(ask, vouched=await self._workloads.vouched(ask)))
        without: Refused | None = None
        for _ in range(_LOOKS):
            try:
                return await self._look(_Asked(ask, without))
            except NotAtHandError as missing:
                # Outside of the transaction: a provider takes its time, and what is answered is of one moment.
                without = await self._fetched(missing)
        return await self._look(_Asked(ask, without or _NOT_AT_HAND))

    async def _look_at_all(self, asked: Sequence[_Asked]) -> Sequence[ResolveAnswer | Exception]:
        async with self._store.read(PlatformScope(CrossTenantReason.RESOLVE)) as records:
            known = await _known(records, asked)
            position = await records.outbox.position()
            return [await self._looked(records, one, known, position) for one in asked]

    async def _looked(
        self, records: Records, asked: _Asked, known: _Known, position: Position
    ) -> ResolveAnswer | NotAtHandError | UnreadableRowError:
        try:
            answer = await self._answer(records, asked, known)
        except (NotAtHandError, UnreadableRowError) as its_own:
            return its_own  # raised where it was asked: the others are not looked for again because of it
        return ResolveAnswer(
            answer=answer,
            epoch=position.epoch,
            as_of=position.sequence,
            must_understand=_must_understand(answer),
        )

    async def _fetched(self, missing: NotAtHandError) -> Refused | None:
        try:
            await self._material.fetch(missing.needed)
        except UnopenableError:
            return _UNAVAILABLE
        except RefusedError as refused:
            if refused.refusal.code is not RefusalCode.CREDENTIAL_UNAVAILABLE:
                raise
            return _refused(refused)
        return None

    async def _answer(self, records: Records, asked: _Asked, known: _Known) -> Answer:
        match asked.ask:
            case AskCaller(proxy_credential_sha256=sha256):
                return self._caller(known, sha256)
            case AskPolicy(caller=caller):
                return await self._policy(records, caller)
            case AskPlaceholder() as ask:
                return await self._placeholder(records, ask, asked.without, known)
            case AskWorkload() as ask:
                vouched = asked.vouched
                return vouched if isinstance(vouched, Refused) else await self._workloads.client(records, ask, vouched)
            case _:
                assert_never(asked.ask)

    def _caller(self, known: _Known, sha256: str) -> Answer:
        facts = known.facts(sha256)
        if facts is None or facts.token.kind is not TokenKind.PROXY_CREDENTIAL or not _is_known_client(facts):
            return _unauthenticated(RefusalCode.TOKEN_INVALID)
        if facts.token.revoked_at is not None or _session_is_over(facts, self._clock()):
            return _unauthenticated(RefusalCode.TOKEN_INVALID)
        if self._clock() >= facts.token.expires_at:
            return _unauthenticated(RefusalCode.TOKEN_EXPIRED)
        return CallerFacts(caller=facts.token.caller, expires_at=facts.token.expires_at)

    async def _policy(self, records: Records, caller: Caller) -> Answer:
        if caller.client == PROBE_CLIENT:
            return await self._policy_of_probe(records, caller)
        session = await records.sessions.get(caller.session) if caller.session is not None else None
        if caller.session is not None and not _is_of(session, caller, self._clock()):
            return _unauthenticated(RefusalCode.SESSION_NOT_FOUND)
        client = await records.clients.get(caller.client)
        if client is None or not client.acts_for(caller.tenant, caller.subject):
            return _unauthenticated(RefusalCode.TOKEN_INVALID)
        return await policy_for(records, caller, session.roles if session else (), self._clock())

    async def _policy_of_probe(self, records: Records, caller: Caller) -> Answer:
        """One route, to try one pending version with one request."""
        credential = await records.credentials.get(CredentialId(caller.subject.partition(".")[0]))
        rotation = await records.rotations.of(credential.id) if credential is not None else None
        probe = probe_of(credential) if credential is not None else None
        if credential is None or rotation is None or probe is None or credential.tenant != caller.tenant:
            return _unauthenticated(RefusalCode.TOKEN_INVALID)
        if rotation.phase is not RotationPhase.PROBING:
            return _unauthenticated(RefusalCode.TOKEN_INVALID)
        return Policy(caller=caller, routes=(_route(credential, (probe.scope,)),), allow=())

    async def _placeholder(
        self, records: Records, ask: AskPlaceholder, without: Refused | None, known: _Known
    ) -> Answer:
        # (1) Known at all?
        try:
            facts = known.facts(ask.placeholder_sha256)
        except UnreadableRowError:
            return _UNAVAILABLE
        if facts is None or facts.token.kind is not TokenKind.PLACEHOLDER:
            await self._look_for_decoy(records, ask)
            return _UNKNOWN
        # (2) Another tenant's is unknown too, whatever else is the matter with it.
        binding = await self._binding(records, facts, known)
        if facts.token.caller != ask.caller:
            self._on_sighting(_stolen(facts, ask, at=self._clock()))
        if facts.token.tenant != ask.caller.tenant:
            return replace(_UNKNOWN, true_code=RefusalCode.CALLER_MISMATCH, binding=binding)
        # (3) The caller is exactly the one it was issued to; an absent session matches only an absent session.
        if facts.token.caller != ask.caller:
            return replace(_CALLER_MISMATCH, binding=binding)
        # (4) Not taken back, neither itself nor what it hangs on.
        now = self._clock()
        if facts.token.revoked_at is not None or _session_is_over(facts, now) or not _is_known_client(facts):
            return replace(_REVOKED, binding=binding)
        if facts.credential is None or facts.version is None or binding is None or not binding.scopes:
            return replace(_REVOKED, binding=binding)
        if facts.token.suspended_until is not None and now < facts.token.suspended_until:
            return replace(_SUSPENDED, binding=binding)
        # (5) Not expired.
        if now >= facts.token.expires_at:
            return replace(_EXPIRED, binding=binding)
        # (6) Bound to where it is about to go.
        if not facts.credential.reaches(ask.endpoint):
            is_plain = ask.endpoint.scheme == "http" and facts.credential.is_at(ask.endpoint.host)
            return replace(_PLAINTEXT if is_plain else _DESTINATION_DENIED, binding=binding)
        # (7) The secret of this subject's version, if the row is the one that was sealed, or what a provider gave.
        version: CredentialVersion | None = facts.version
        if binding.version != facts.version.version:
            version = await records.versions.get(facts.credential.id, binding.version)
        return await self._opened(records, facts.credential, version, binding, without)

    async def _look_for_decoy(self, records: Records, ask: AskPlaceholder) -> None:
        """For every string that nobody knows, so that how long it takes tells nothing."""
        decoy = await records.decoys.by_fingerprint(ask.placeholder_sha256)
        if decoy is not None:
            self._on_sighting(
                Sighting(
                    kind=AlarmKind.DECOY_USED,
                    tenant=decoy.tenant,
                    placeholder_id=decoy.id,
                    credential=None,
                    caller=ask.caller,
                    host=ask.endpoint.host,
                    at=self._clock(),
                )
            )

    async def _opened(
        self,
        records: Records,
        credential: Credential,
        version: CredentialVersion | None,
        binding: Binding,
        without: Refused | None,
    ) -> Answer:
        try:
            current = await self._material.current(records, credential, version)
        except NotAtHandError:
            if without is None:
                raise
            return replace(without, binding=binding)
        except RefusedError as refused:
            return replace(_refused(refused), binding=binding)
        except UnopenableError:
            _log.error("envelope_does_not_open", credential=credential.id, version=binding.version)
            return replace(_UNAVAILABLE, binding=binding)
        return ResolvedPlaceholder(
            binding=replace(binding, secret_expires_at=current.expires_at), secret=current.secret.reveal()
        )

    async def _binding(self, records: Records, facts: TokenFacts, known: _Known) -> Binding | None:
        """What the placeholder is bound to, as it is now. None where its credential is gone."""
        credential, token = facts.credential, facts.token
        if credential is None:
            return None
        version = version_for(token.subject, current=credential.current_version, rotation=facts.rotation)
        grants = self._grants(facts, known.grants.get(credential.id, ()))
        scopes = narrowed_by_token([grant.scope for grant in grants], token.scope)
        if token.client == PROBE_CLIENT:
            version, scopes = _probed(facts, credential)
        return Binding(
            placeholder_id=token.id,
            caller=token.caller,
            credential_id=credential.id,
            credential_name=credential.name,
            version=version,
            grant_ids=tuple(grant.id for grant in grants),
            destinations=credential.destinations,
            placements=credential.placements,
            scopes=scopes,
            expires_at=token.expires_at,
            max_stale_seconds=credential.max_stale_seconds,
            provider=credential.preset,
            credential_kind=credential.kind,
            reports_replies=facts.rotation is not None and token.client != PROBE_CLIENT,
            limits=await _limits(records, facts, credential),
        )

    def _grants(self, facts: TokenFacts, of_credential: Sequence[Grant]) -> tuple[Grant, ...]:
        """Those by which the placeholder's caller may use the credential now."""
        token, roles = facts.token, facts.session.roles if facts.session else ()
        return live(
            [
                grant
                for grant in of_credential
                if grant.applies_to(subject=token.subject, roles=roles, client=token.client)
            ],
            self._clock(),
        )


async def _known(records: Records, asked: Sequence[_Asked]) -> _Known:
    fingerprints = {sha256 for one in asked if (sha256 := _fingerprint(one.ask)) is not None}
    tokens = await records.hot.token_facts(sorted(fingerprints)) if fingerprints else {}
    of = {facts.credential.id for facts in tokens.values() if facts is not None and facts.credential is not None}
    grants: dict[CredentialId, list[Grant]] = {credential: [] for credential in of}
    for grant in await records.grants.of_credentials(sorted(of)) if of else ():
        grants[grant.credential_id].append(grant)
    return _Known(tokens, grants)


def _fingerprint(ask: Ask) -> str | None:
    match ask:
        case AskCaller():
            return ask.proxy_credential_sha256
        case AskPlaceholder():
            return ask.placeholder_sha256
        case _:
            return None


async def policy_for(records: Records, caller: Caller, roles: tuple[str, ...], now: float) -> Policy:
    """Everything that this caller may reach now, in these roles."""
    granted = await records.hot.granted(subject=caller.subject, roles=roles, client=caller.client, tenant=caller.tenant)
    rules = await records.rules.for_session(caller.session)
    return Policy(
        caller=caller,
        routes=tuple(
            _route(credential, tuple(grant.scope for grant in live(grants, now)))
            for credential, grants in granted
            if live(grants, now)
        ),
        allow=tuple(rule.rule for rule in rules if rule.tenant == caller.tenant),
    )


def _is_known_client(facts: TokenFacts) -> bool:
    # Probes come from nobody that is registered: only a rotation records tokens of theirs.
    return facts.client_registered or facts.token.client == PROBE_CLIENT


def _probed(facts: TokenFacts, credential: Credential) -> tuple[int, tuple[GrantScope, ...]]:
    """The version that a probe's placeholder stands for, and what it may do: nothing, once the probe is over."""
    rotation, probe = facts.rotation, probe_of(credential)
    is_under_way = rotation is not None and rotation.probe_sha256 == facts.token.sha256
    if rotation is None or probe is None or not is_under_way:
        return credential.current_version, ()
    return rotation.new_version, (probe.scope,)


def _refused(error: RefusedError) -> Refused:
    return Refused(error.refusal.code, error.refusal.detail, error.refusal.hint)


async def _limits(records: Records, facts: TokenFacts, credential: Credential) -> tuple[BoundLimit, ...]:
    if not facts.has_limits or facts.token.client == PROBE_CLIENT:
        return ()
    subject = facts.token.subject
    return tuple(
        limit.bound(subject)
        for limit in await records.limits.of_tenant(facts.token.tenant)
        if limit.applies_to(subject=subject, credential=credential.id)
    )


def _must_understand(answer: Answer) -> tuple[str, ...]:
    """A proxy that knows nothing of kinds would put a document where a token belongs, and one that knows nothing of
    limits would let through what is over them: it is to refuse instead."""
    if not isinstance(answer, ResolvedPlaceholder):
        return ()
    binding = answer.binding
    return (
        *(() if is_placed(binding.credential_kind) else ("credential_kind",)),
        *(("limits",) if binding.limits else ()),
    )


def _stolen(facts: TokenFacts, ask: AskPlaceholder, *, at: float) -> Sighting:
    return Sighting(
        kind=AlarmKind.STOLEN_PLACEHOLDER,
        tenant=facts.token.tenant,
        placeholder_id=facts.token.id,
        credential=facts.credential.name if facts.credential is not None else None,
        caller=ask.caller,
        host=ask.endpoint.host,
        at=at,
    )


def _session_is_over(facts: TokenFacts, now: float) -> bool:
    if facts.token.session is None:
        return False
    return facts.session is None or not facts.session.is_live(now)


def _is_of(session: Session | None, caller: Caller, now: float) -> bool:
    return (
        session is not None
        and session.is_live(now)
        and session.tenant == caller.tenant
        and session.subject == caller.subject
        and session.runtime == caller.client
    )


def _route(credential: Credential, scopes: tuple[GrantScope, ...]) -> Route:
    return Route(
        credential_name=credential.name,
        credential_id=credential.id,
        destinations=credential.destinations,
        scopes=scopes,
        placements=credential.placements,
        credential_required=credential.credential_required,
    )


def _unauthenticated(true_code: RefusalCode) -> Refused:
    return Refused(
        RefusalCode.PROXY_AUTHENTICATION_REQUIRED,
        "the proxy credential is not valid, or no longer",
        "exchange again for a fresh one, or renew it together with its placeholder",
        true_code=true_code,
    )


_UNKNOWN = Refused(
    RefusalCode.UNKNOWN_PLACEHOLDER,
    "no such placeholder",
    "exchange for one, and use it with the proxy credential that came with it",
)
_CALLER_MISMATCH = Refused(
    RefusalCode.CALLER_MISMATCH,
    "the placeholder was issued to another client, subject or session",
    "use it with the proxy credential that came with it",
)
_REVOKED = Refused(
    RefusalCode.REVOKED_PLACEHOLDER,
    "the placeholder was revoked, or its session, grant or credential is gone",
    "exchange again for a new one",
)
_SUSPENDED = Refused(
    RefusalCode.REVOKED_PLACEHOLDER,
    "the placeholder is suspended: replies to its requests gave its secret back, several times within ten minutes",
    "see what the upstream echoes (coatcheck audit tail shows leak_blocked); it works again by itself in ten minutes",
)
_EXPIRED = Refused(RefusalCode.EXPIRED_PLACEHOLDER, "the placeholder has expired", "renew it, or exchange again")
_DESTINATION_DENIED = Refused(
    RefusalCode.DESTINATION_DENIED,
    "the placeholder's credential is not for this destination",
    "an operator sees its destinations with: coatcheck credential show NAME",
)
_PLAINTEXT = Refused(
    RefusalCode.PLAINTEXT_CREDENTIAL,
    "this host has a credential, and a credential does not travel over plain http",
    "use https://",
)
_LOOKS: Final = 8
"""A value may be taken back between being fetched and being looked at; not again and again."""
_NOT_AT_HAND = Refused(
    RefusalCode.CREDENTIAL_UNAVAILABLE,
    "the credential's value could not be fetched",
    "try again in a moment",
)
_UNAVAILABLE = Refused(
    RefusalCode.CREDENTIAL_UNAVAILABLE,
    "the credential's secret does not open",
    "an operator looks whether a key-encryption key is missing (GET /readyz); if none is, submits the secret again: "
    "coatcheck credential rotate NAME",
)
