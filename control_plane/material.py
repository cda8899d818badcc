"""What a credential's secret is at this moment: the secret itself, or what a provider minted for it (ADR 0020).

    async with store.read(…) as records:
        current = await material.current(records, credential, version)     NotAtHandError: nothing usable is here
    await material.fetch(needed)                                           outside of any transaction; then look again

Rules:
- No provider is asked while a transaction is open, and of all replicas one asks at a time: a lease in the database.
- That a question is about to be sent is written before it is sent. A question whose answer was never written may have
  used its secret up: where secrets are replaced, that secret is not sent again, and the credential says so.
- A new secret is written before what came with it is used, in the same transaction.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final, assert_never

import structlog

from control_plane.contract.caller import CredentialId, TenantId
from control_plane.contract.kinds import PLACED, CredentialKind
from control_plane.contract.placement import fits
from control_plane.contract.refusal import Refusal, RefusalCode, RefusedError
from control_plane.contract.secret import Secret, UnusableSecretError
from control_plane.core.kinds import (
    KINDS,
    InvalidSettingsError,
    certificate_end,
    is_replaced,
    kind_named,
    parsed_settings,
)
from control_plane.core.minting import (
    REASONS,
    Standing,
    end_of_use,
    lost,
    pause_after_failure,
    pause_after_no,
    standing,
)
from control_plane.core.records import Credential, CredentialVersion, MintedValue, MintingState
from control_plane.core.sealing import minted_aad
from control_plane.custody import Custody, KeyNeededError, open_secret, seal_secret
from control_plane.faults import reach
from control_plane.ports import (
    Clock,
    Provider,
    ProviderAnswer,
    ProviderError,
    ProviderFailure,
    Records,
    Store,
    TenantScope,
    Turns,
    on_behalf_of,
)
from control_plane.sources import SecretSources
from control_plane.trail import Actor, Trail

LEASE_SECONDS: Final = 15.0
"""Longer than any question takes. Whoever died with one is waited for so long."""
HELD_SECONDS: Final = 120.0
"""An answer waits so long for the database, or for a key to seal it with."""
TURN_SECONDS: Final = 1.0
"""So long others are let go first, before the lease is looked at."""
WAIT_SECONDS: Final = 4.5
"""A request waits so long for a value; less than proxies wait for us."""
_LOOK_AGAIN_SECONDS: Final = 0.05
_ACTOR: Final = Actor("control_plane", "material")

_log = structlog.get_logger("control_plane.material")


@dataclass(frozen=True, slots=True)
class Current:
    secret: Secret
    """A text for a placement, or a document (`contract.kinds`)."""
    expires_at: float | None
    """Unix seconds; nobody uses it from then on. None: it has no end of its own."""


class Lacking(StrEnum):
    """Who has to be asked."""

    MINTED = "minted"
    """The credential's provider."""
    SOURCE = "source"
    """The source that its secret is read from."""
    KEY = "key"
    """A key-encryption key that is kept elsewhere."""


@dataclass(frozen=True, slots=True)
class Needed:
    """A value that somebody has to fetch."""

    tenant: TenantId
    credential: CredentialId
    version: int
    what: Lacking = Lacking.MINTED
    key: KeyNeededError | None = field(default=None, compare=False)
    """The key-encryption key to ask, and for what."""


class NotAtHandError(Exception):
    """`fetch` what is needed, outside of the transaction, and look again."""

    def __init__(self, needed: Needed) -> None:
        super().__init__("a value has to be fetched first")
        self.needed = needed


@dataclass(frozen=True, slots=True)
class _Question:
    credential: Credential
    version: CredentialVersion
    secret: Secret
    row: MintedValue


class Material:
    def __init__(
        self,
        store: Store,
        custody: Custody,
        sources: SecretSources,
        trail: Trail,
        providers: Mapping[CredentialKind, Provider],
        turns: Turns,
        *,
        clock: Clock,
    ) -> None:
        self._store = store
        self._custody = custody
        self._sources = sources
        self._trail = trail
        self._providers = providers
        self._turns = turns
        self._clock = clock
        self._fetching: dict[Needed, asyncio.Task[None]] = {}

    async def current(self, records: Records, credential: Credential, version: CredentialVersion | None) -> Current:
        """Raises `UnopenableError`, `NotAtHandError`, and `RefusedError(credential_unavailable)` with the reason."""
        try:
            kind = kind_named(credential.kind)
        except InvalidSettingsError:
            raise RefusedError(_UNKNOWN_KIND) from None
        try:
            return await self._current(records, kind, credential, version)
        except KeyNeededError as needed:
            assert version is not None, "one that there is not needs no key"
            raise NotAtHandError(
                Needed(credential.tenant, credential.id, version.version, Lacking.KEY, needed)
            ) from None

    async def _current(
        self, records: Records, kind: CredentialKind, credential: Credential, version: CredentialVersion | None
    ) -> Current:
        # What was minted is used for as long as the secret it was minted with is the credential's.
        secret = open_secret(self._custody, version, credential)
        assert version is not None, "it was opened"
        if not KINDS[kind].mints:
            return self._while_confirmed(credential, version, self._kept(kind, credential, secret))
        minted = await records.minted.get(credential.id, version.version)
        needed = Needed(credential.tenant, credential.id, version.version)
        match standing(minted, now=self._clock(), max_stale_seconds=credential.max_stale_seconds):
            case Standing.FRESH | Standing.STALE:
                return self._opened(credential, minted)
            case Standing.DUE:
                current = self._opened(credential, minted)
                self.begin(needed)
                return current
            case Standing.WANTED:
                raise NotAtHandError(needed)
            case Standing.REFUSED:
                raise RefusedError(_refusal(minted, now=self._clock()))
            case other:
                assert_never(other)

    async def fetch(self, needed: Needed) -> None:
        """Until there is a value or a reason why not, or `WAIT_SECONDS` have passed. Raises `RefusedError`."""
        task = self.begin(needed)
        try:
            # Shielded: a request that goes away does not take the answer from the others that wait for it.
            await asyncio.wait_for(asyncio.shield(task), WAIT_SECONDS)
        except TimeoutError:
            raise RefusedError(_SLOW) from None

    def _while_confirmed(self, credential: Credential, version: CredentialVersion, current: Current) -> Current:
        """A secret that is read from a source is good for as long as that has confirmed it. Raises `NotAtHandError`."""
        if credential.secret_source is None:
            return current
        good_until = self._sources.at_hand(credential, version=version.version)
        if good_until is None:
            raise NotAtHandError(Needed(credential.tenant, credential.id, version.version, Lacking.SOURCE))
        ends = [end for end in (current.expires_at, good_until) if end is not None]
        return replace(current, expires_at=min(ends))

    async def close(self) -> None:
        """Waits for questions that are on their way: their answers are not to be lost."""
        if self._fetching:
            await asyncio.wait(list(self._fetching.values()), timeout=LEASE_SECONDS)

    # --- what is kept here

    def _kept(self, kind: CredentialKind, credential: Credential, secret: Secret) -> Current:
        match kind:
            case CredentialKind.HMAC:
                document = {**json.loads(secret.reveal()), **credential.settings}
                return Current(Secret(json.dumps(document, sort_keys=True)), None)
            case CredentialKind.CLIENT_CERTIFICATE:
                end = certificate_end(secret.reveal())
                if self._clock() >= end:
                    raise RefusedError(_CERTIFICATE_IS_OVER)
                return Current(secret, end)
            case _:
                return Current(secret, None)

    def _opened(self, credential: Credential, minted: MintedValue | None) -> Current:
        assert minted is not None
        aad = minted_aad(credential, version=minted.version, expires_at=minted.expires_at)
        value = Secret(self._custody.open(minted.envelope, aad=aad).decode())
        return Current(value, end_of_use(minted) if minted.expires_at is not None else None)

    # --- what is fetched

    def begin(self, needed: Needed) -> "asyncio.Task[None]":
        """A question, unless one is under way in this process. Its end is waited for by `close`."""
        task = self._fetching.get(needed)
        if task is None:
            task = asyncio.create_task(self._fetch(needed), name="mint")
            self._fetching[needed] = task
            task.add_done_callback(lambda done: self._fetched(needed, done))
        return task

    def _fetched(self, needed: Needed, task: "asyncio.Task[None]") -> None:
        self._fetching.pop(needed, None)
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, RefusedError):
            _log.error("minting_failed", credential=needed.credential, error=type(error).__name__)

    async def _fetch(self, needed: Needed) -> None:
        match needed.what:
            case Lacking.KEY:
                assert needed.key is not None
                await self._custody.ask(needed.key)
            case Lacking.SOURCE:
                await self._look_at_source(needed)
            case Lacking.MINTED:
                await self._look_at_source(needed)
                await self._mint(needed)

    async def _look_at_source(self, needed: Needed) -> None:
        """The secret itself, as its source has it now. Raises `RefusedError` where it may not be used."""
        async with self._store.read(TenantScope(needed.tenant)) as records:
            credential = await records.credentials.get(needed.credential)
        if credential is not None and credential.secret_source is not None:
            await self._sources.current(credential)

    async def _mint(self, needed: Needed) -> None:
        # One of all replicas first: the others then find what it got. The lease is what keeps them apart.
        name = f"mint {needed.credential} {needed.version}"
        async with self._turns.turn(name, tenant=needed.tenant, seconds=TURN_SECONDS):
            await self._mint_in_turn(needed)

    async def _mint_in_turn(self, needed: Needed) -> None:
        while (question := await self._custody.with_keys(lambda: self._question(needed))) is _SOMEBODY_ELSES_TURN:  # noqa: ASYNC110 (of another process)
            await asyncio.sleep(_LOOK_AGAIN_SECONDS)
        if isinstance(question, _Question):
            await self._ask(question)

    async def _question(self, needed: Needed) -> "_Question | object | None":
        """What to ask, with the lease for it. None: there is nothing to ask (any more)."""
        async with self._store.read(TenantScope(needed.tenant)) as records:
            seen = await records.minted.get(needed.credential, needed.version)
            is_leased = seen is not None and seen.leased_until > await records.now()
        if is_leased:
            return _SOMEBODY_ELSES_TURN
        async with self._store.write(TenantScope(needed.tenant)) as records:
            # (1) Is it still the credential's, and still wanted?
            credential = await records.credentials.locked(needed.credential)
            version = await records.versions.get(needed.credential, needed.version)
            if credential is None or version is None:
                return None
            if not self._is_wanted(credential, await records.minted.get(needed.credential, needed.version)):
                return None
            secret = open_secret(self._custody, version, credential)
            if is_replaced(credential.kind):
                # Could another one be sealed? Better to know before this one counts as used.
                seal_secret(self._custody, secret, credential, version=version.version)
            # (2) Our turn?
            row = await records.minted.lease(version, seconds=LEASE_SECONDS)
            if row is None:
                return _SOMEBODY_ELSES_TURN
            if not self._is_wanted(credential, row):
                await records.minted.release(row)
                return None
            # (3) Somebody asked before, and is gone. Where that may have used the secret up, it is not sent again.
            if row.asked_fence is not None and _is_used_once(credential, row):
                await self._lose(records, credential, row)
                await records.minted.release(row)
                return None
            # (4) From here on a question is under way, whatever becomes of us.
            row = replace(row, asked_fence=row.fence)
            await records.minted.put(row)
            return _Question(credential, version, secret, row)

    def _is_wanted(self, credential: Credential, row: MintedValue | None) -> bool:
        found = standing(row, now=self._clock(), max_stale_seconds=credential.max_stale_seconds)
        return found in (Standing.WANTED, Standing.DUE)

    async def _ask(self, question: _Question) -> None:
        credential, kind = question.credential, CredentialKind(question.credential.kind)
        try:
            settings = parsed_settings(kind, credential.settings)
            reach("minting.leased")
            with on_behalf_of(credential.tenant):
                answer = await self._providers[kind].mint(settings, question.secret, now=self._clock())
            reach("minting.answered")
        except InvalidSettingsError:
            await self._failed(question, ProviderError(ProviderFailure.REQUEST_REFUSED))
        except ProviderError as error:
            await self._failed(question, error)
        else:
            if _is_usable(kind, answer, credential):
                await self._answered(question, answer)
            else:
                await self._failed(question, ProviderError(ProviderFailure.UNUSABLE), secret=answer.secret)

    async def _answered(self, question: _Question, answer: ProviderAnswer) -> None:
        now = self._clock()  # one for every attempt: a value is sealed to its end
        await self._held_on_to(lambda: self._write_answer(question, answer, now=now))

    async def _held_on_to(self, write: Callable[[], Awaitable[None]]) -> None:
        """Until it is written: what came once may be all that is left of a consent. Raises `RefusedError`."""
        loop = asyncio.get_running_loop()
        gives_up_at = loop.time() + HELD_SECONDS
        while True:
            try:
                await self._custody.with_keys(write)
            except RefusedError:
                if loop.time() >= gives_up_at:
                    raise
                await asyncio.sleep(_LOOK_AGAIN_SECONDS * 4)
            else:
                return

    async def _write_answer(self, question: _Question, answer: ProviderAnswer, *, now: float) -> None:
        row = question.row
        expires_at = now + answer.expires_in_seconds if answer.expires_in_seconds is not None else None
        async with self._store.write(TenantScope(row.tenant)) as records:
            # Before any of its rows, as everybody does; and as it is now, which is what it is sealed to.
            credential = await records.credentials.locked(row.credential_id)
            if credential is None:
                return
            aad = minted_aad(credential, version=row.version, expires_at=expires_at)
            sealed = self._custody.seal(answer.value.reveal().encode(), aad=aad)
            settled = await records.minted.settle(
                replace(
                    row,
                    asked_fence=None,
                    state=MintingState.READY,
                    reason="",
                    failures=0,
                    retry_at=0.0,
                    replaces_secret=answer.secret is not None,
                    kek_id=sealed.kek_id,
                    envelope=sealed.envelope,
                    minted_at=now,
                    expires_at=expires_at,
                ),
                asked_fence=row.fence,
            )
            if not settled:
                _log.warning("minted_too_late", credential=credential.id)
                return
            if answer.secret is not None:
                await self._replace_secret(records, credential, row.version, answer.secret)
                reach("minting.secret_replaced")
            event = self._trail.event(
                "credential.mint",
                by=_ACTOR,
                tenant=credential.tenant,
                credential=credential.name,
                version=row.version,
            )
            await records.audit.append([event])
        reach("minting.settled")

    async def _replace_secret(self, records: Records, credential: Credential, number: int, secret: Secret) -> None:
        """In the same version, which is the same consent; also where its envelope was wrapped anew meanwhile."""
        while True:
            version = await records.versions.get(credential.id, number)
            if version is None or version.envelope is None:
                return  # the operator has submitted another one
            sealed = seal_secret(self._custody, secret, credential, version=number)
            resealed = replace(version, envelope=sealed.envelope, kek_id=sealed.kek_id)
            if await records.versions.reseal(resealed, instead_of=version.envelope):
                return

    async def _failed(self, question: _Question, error: ProviderError, *, secret: Secret | None = None) -> None:
        now = self._clock()
        await self._held_on_to(lambda: self._write_failure(question, error, secret, now=now))

    async def _write_failure(
        self, question: _Question, error: ProviderError, secret: Secret | None, *, now: float
    ) -> None:
        credential, row = question.credential, question.row
        is_no = error.failure in _NOES
        failures = row.failures + 1 if (row.state is MintingState.REJECTED) == is_no else 1
        pause = (
            pause_after_no(failures) if is_no else pause_after_failure(failures, asked_for=error.retry_after_seconds)
        )
        after = replace(
            row,
            asked_fence=None,
            state=MintingState.REJECTED if is_no else MintingState.FAILING,
            reason=error.code if error.code in REASONS else error.failure.value,
            failures=failures,
            retry_at=now + pause,
        )
        is_lost = (error.unheard and _is_used_once(credential, row, strictly=True)) or (
            # It does not count any more, and the last thing that was done with it is not known.
            error.failure is ProviderFailure.CONSENT_ENDED and row.reason == _UNHEARD
        )
        _log.warning("provider_gave_nothing", credential=credential.id, failure=error.failure.value, code=error.code)
        async with self._store.write(TenantScope(credential.tenant)) as records:
            now_known = await records.credentials.locked(credential.id)
            if now_known is None:
                return
            if error.unheard and not is_lost:
                after = replace(after, reason=_UNHEARD)
            if not await records.minted.settle(after, asked_fence=row.fence):
                return
            if secret is not None:  # nothing to use, but the next question needs it
                await self._replace_secret(records, now_known, row.version, secret)
            if is_lost:
                await self._lose(records, credential, after)
            elif is_no and row.state is not MintingState.REJECTED:
                await self._report(records, credential, row.version, "credential.mint_rejected", after.reason)

    async def _lose(self, records: Records, credential: Credential, row: MintedValue) -> None:
        # The question stays open: whoever sent it and is merely late may still write its answer.
        await records.minted.put(lost(row, reason="consent_lost"))
        _log.error("consent_lost", credential=credential.id, version=row.version)
        await self._report(records, credential, row.version, "credential.consent_lost", "consent_lost")

    async def _report(self, records: Records, credential: Credential, version: int, action: str, reason: str) -> None:
        refusal = _why_not(reason)
        event = self._trail.refusal(action, refusal, by=_ACTOR, tenant=credential.tenant)
        await records.audit.append([replace(event, credential=credential.name, version=version)])


def _is_used_once(credential: Credential, row: MintedValue, *, strictly: bool = False) -> bool:
    """Whether its secret may be used up by a question that nobody heard the answer of.

    Not `strictly`: also where that is not known. After a crash it is not sent again on suspicion; after a time-out it
    is, since a provider that did not answer has more likely not read it.
    """
    if not is_replaced(credential.kind):
        return False
    said = credential.settings.get("refresh_token_use")
    if said is not None:
        return bool(said == "once")
    return not strictly and row.replaces_secret is not False


def _is_usable(kind: CredentialKind, answer: ProviderAnswer, credential: Credential) -> bool:
    """Not a token that no request can carry, or that is over already."""
    if answer.expires_in_seconds is not None and answer.expires_in_seconds <= 0:
        return False
    if kind not in PLACED:
        return True
    try:
        text = Secret.submitted(answer.value.reveal()).reveal()
    except UnusableSecretError:
        return False
    return text == answer.value.reveal() and all(fits(text, placement) for placement in credential.placements)


def _refusal(minted: MintedValue | None, *, now: float) -> Refusal:
    assert minted is not None
    refusal = _why_not("unavailable" if minted.reason == _UNHEARD else minted.reason)
    if minted.state is MintingState.CONSENT_LOST:
        return refusal
    return replace(refusal, retry_after_seconds=max(1, round(minted.retry_at - now)))


def _why_not(reason: str) -> Refusal:
    detail, hint = REASONS.get(reason, REASONS["unavailable"])
    return Refusal(RefusalCode.CREDENTIAL_UNAVAILABLE, detail, hint)


_SOMEBODY_ELSES_TURN: Final = object()
_UNHEARD: Final = "unheard"
_NOES: Final = frozenset(
    {ProviderFailure.CONSENT_ENDED, ProviderFailure.CLIENT_REFUSED, ProviderFailure.REQUEST_REFUSED}
)
_UNKNOWN_KIND: Final = Refusal(
    RefusalCode.CREDENTIAL_UNAVAILABLE, "the credential is of a kind that this control plane does not know"
)
_CERTIFICATE_IS_OVER: Final = Refusal(
    RefusalCode.CREDENTIAL_UNAVAILABLE,
    "the client certificate has expired",
    "submit a new one with: coatcheck credential rotate NAME",
)
_SLOW: Final = Refusal(
    RefusalCode.CREDENTIAL_UNAVAILABLE,
    "the provider of this credential's tokens has not answered yet",
    "try again in a moment",
    retry_after_seconds=1,
)
