"""Secrets at rest: envelopes of AES-256-GCM (ADR 0016).

    1 | nonce | data key, wrapped by a key that we hold | nonce | ciphertext
    2 | length, id of the key | length, data key, wrapped by a key that we must ask | nonce | ciphertext

Each envelope has a data key of its own, wrapped by one key-encryption key of the ring; both layers are bound to the
same AAD (`core.sealing`), so that neither a ciphertext nor a wrapped key works in another row.

Rule: opening never yields ciphertext, and every failure to open is the same error. A key that must be asked (AWS KMS,
Vault transit) is never asked while a transaction is open: sealing and opening raise `KeyNeededError` instead, and
`with_keys` asks outside and begins again. What was unwrapped is kept in memory alone, for a bounded time.
"""

import hashlib
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import structlog
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from control_plane.contract.refusal import Refusal, RefusalCode, RefusedError
from control_plane.contract.secret import Secret
from control_plane.core.records import Credential, CredentialVersion
from control_plane.core.rotation import OVER
from control_plane.core.sealing import Kek, credential_aad
from control_plane.ports import Clock, Entropy, KekError, KekFailure, KekProvider

_HELD: Final = b"\x01"
_ASKED: Final = b"\x02"
_NONCE: Final = 12
_DATA_KEY: Final = 32
_TAG: Final = 16
_WRAPPED: Final = _NONCE + _DATA_KEY + _TAG
_WRAP: Final = b"wrap\0"
_DATA: Final = b"data\0"

CACHE_SECONDS: Final = 300.0
"""How long an unwrapped data key serves before its key-encryption key is asked again."""
MAX_STALE_SECONDS: Final = 900.0
"""How much longer it serves while that key cannot be asked."""
_KEPT_KEYS: Final = 8192
_PREPARED_KEYS: Final = 256
_REFUSED_SECONDS: Final = 10.0
_DOWN_SECONDS: Final = 2.0
_ATTEMPTS: Final = 12

T = TypeVar("T")
RingMember = Kek | KekProvider

_log = structlog.get_logger("control_plane.custody")


class UnopenableError(Exception):
    """Not sealed by this ring for this row. Says no more than that, on purpose."""

    def __init__(self) -> None:
        super().__init__("the envelope does not open")


class KeyNeededError(RefusedError):
    """A key-encryption key must be asked first: see `Custody.with_keys`. Uncaught, it is a refusal like any other."""

    def __init__(self, *, kek_id: str, aad: bytes, wrapped: bytes | None) -> None:
        super().__init__(_unavailable("a key-encryption key has to be asked first"))
        self.kek_id = kek_id
        self.aad = aad
        self.wrapped = wrapped
        """None: a new data key is to be wrapped."""


@dataclass(frozen=True, slots=True)
class Sealed:
    kek_id: str
    envelope: bytes


@dataclass(slots=True, repr=False)
class _KeptKey:
    data_key: bytes | None
    """None: the key-encryption key has said that it does not open this."""
    fresh_until: float
    stale_until: float


@dataclass(frozen=True, slots=True, repr=False)
class _PreparedKey:
    kek_id: str
    data_key: bytes
    wrapped: bytes


class Custody:
    """Seals with one key of the ring, opens with any."""

    def __init__(
        self,
        ring: Sequence[RingMember],
        *,
        entropy: Entropy,
        clock: Clock = time.time,
        cache_seconds: float = CACHE_SECONDS,
        max_stale_seconds: float = MAX_STALE_SECONDS,
    ) -> None:
        self._entropy = entropy
        self._clock = clock
        self._cache_seconds = cache_seconds
        self._max_stale_seconds = max_stale_seconds
        self._kept: OrderedDict[bytes, _KeptKey] = OrderedDict()
        self._prepared: OrderedDict[bytes, _PreparedKey] = OrderedDict()
        self._down: dict[str, tuple[float, KekError]] = {}
        self.arrange(ring)

    def arrange(self, ring: Sequence[RingMember], *, sealing: str | None = None) -> None:
        """The ring from now on, newest first; the newest seals unless another one of it is named."""
        self._ring = tuple(ring)
        self._sealing = next((member for member in self._ring if member.id == sealing), self._ring[0])

    @property
    def kek_ids(self) -> tuple[str, ...]:
        """Newest first."""
        return tuple(member.id for member in self._ring)

    @property
    def ring(self) -> tuple[RingMember, ...]:
        return self._ring

    @property
    def sealing_id(self) -> str:
        return self._sealing.id

    def seal(self, plaintext: bytes, *, aad: bytes) -> Sealed:
        """Raises `KeyNeededError`."""
        member = self._sealing
        if isinstance(member, Kek):
            data_key = self._entropy(_DATA_KEY)
            return Sealed(member.id, self._wrapped_by(member, data_key, aad) + self._body(data_key, plaintext, aad))
        prepared = self._prepared.pop(aad, None)
        if prepared is None or prepared.kek_id != member.id:
            raise KeyNeededError(kek_id=member.id, aad=aad, wrapped=None)
        head = _head_of_asked(member.id, prepared.wrapped)
        return Sealed(member.id, head + self._body(prepared.data_key, plaintext, aad))

    def open(self, envelope: bytes | None, *, aad: bytes) -> bytes:
        """The plaintext. Raises `UnopenableError`, `KeyNeededError`."""
        parts = _parts(envelope)
        data_key = self._unwrapped(parts, aad)
        try:
            return AESGCM(data_key).decrypt(parts.body[:_NONCE], parts.body[_NONCE:], _DATA + aad)
        except (InvalidTag, ValueError):
            raise UnopenableError from None

    async def rewrapped(self, envelope: bytes, *, aad: bytes, by: str) -> Sealed:
        """The same ciphertext, its data key wrapped by that key of the ring. The secret itself stays closed.

        Asks keys as needed: not for use in a transaction. Raises `UnopenableError`, `RefusedError`.
        """
        parts = _parts(envelope)
        data_key = await self.with_keys(_now(lambda: self._unwrapped(parts, aad)))
        member = self._member(by)
        if isinstance(member, Kek):
            return Sealed(member.id, self._wrapped_by(member, data_key, aad) + parts.body)
        return Sealed(member.id, _head_of_asked(by, await self._ask_to_wrap(member, data_key, aad)) + parts.body)

    async def with_keys(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """What `attempt` gives, once every key it needed has been asked. It may run several times.

        Raises what `attempt` raises, and `RefusedError(credential_unavailable)` where a key cannot be asked.
        """
        for _ in range(_ATTEMPTS):
            try:
                return await attempt()
            except KeyNeededError as needed:
                await self._ask(needed)
        raise RefusedError(_unavailable("the key-encryption keys are asked more often than one request may"))

    async def sealed(self, plaintext: bytes, *, aad: bytes) -> Sealed:
        """`seal`, with every key asked that has to be. Not for use in a transaction. Raises `RefusedError`."""

        async def attempt() -> Sealed:
            return self.seal(plaintext, aad=aad)

        return await self.with_keys(attempt)

    async def ask(self, needed: "KeyNeededError") -> None:
        """Asks what was needed, outside of any transaction; then begin again. Raises `RefusedError`."""
        await self._ask(needed)

    # --- keys that we hold

    def _wrapped_by(self, kek: Kek, data_key: bytes, aad: bytes) -> bytes:
        nonce = self._entropy(_NONCE)
        return _HELD + nonce + AESGCM(kek.key).encrypt(nonce, data_key, _WRAP + aad)

    def _body(self, data_key: bytes, plaintext: bytes, aad: bytes) -> bytes:
        nonce = self._entropy(_NONCE)
        return nonce + AESGCM(data_key).encrypt(nonce, plaintext, _DATA + aad)

    def _unwrapped(self, parts: "_Parts", aad: bytes) -> bytes:
        if parts.kek_id is not None:
            return self._unwrapped_before(parts.kek_id, parts.wrapped, aad)
        for member in self._ring:
            if not isinstance(member, Kek):
                continue
            try:
                return AESGCM(member.key).decrypt(parts.wrapped[:_NONCE], parts.wrapped[_NONCE:], _WRAP + aad)
            except (InvalidTag, ValueError):
                continue
        raise UnopenableError

    # --- keys that we must ask

    def _unwrapped_before(self, kek_id: str, wrapped: bytes, aad: bytes) -> bytes:
        if kek_id not in self.kek_ids:
            raise UnopenableError
        kept = self._kept.get(_place(kek_id, wrapped, aad))
        if kept is None or self._clock() >= kept.fresh_until:
            raise KeyNeededError(kek_id=kek_id, aad=aad, wrapped=wrapped)
        if kept.data_key is None:
            raise UnopenableError
        return kept.data_key

    async def _ask(self, needed: KeyNeededError) -> None:
        member = self._member(needed.kek_id)
        if isinstance(member, Kek):
            raise UnopenableError  # the ring changed its mind about this id meanwhile
        if needed.wrapped is None:
            data_key = self._entropy(_DATA_KEY)
            wrapped = await self._ask_to_wrap(member, data_key, needed.aad)
            self._prepared[needed.aad] = _PreparedKey(member.id, data_key, wrapped)
            while len(self._prepared) > _PREPARED_KEYS:
                self._prepared.popitem(last=False)
            self._keep(_place(member.id, wrapped, needed.aad), data_key)
        else:
            await self._ask_to_unwrap(member, needed.wrapped, needed.aad)

    async def _ask_to_wrap(self, member: KekProvider, data_key: bytes, aad: bytes) -> bytes:
        try:
            return await self._answer(member, lambda: member.wrap(data_key, context=_WRAP + aad))
        except KekError as error:
            raise RefusedError(_cannot_be_asked(member, error)) from None

    async def _ask_to_unwrap(self, member: KekProvider, wrapped: bytes, aad: bytes) -> None:
        place = _place(member.id, wrapped, aad)
        try:
            self._keep(place, await self._answer(member, lambda: member.unwrap(wrapped, context=_WRAP + aad)))
        except KekError as error:
            now, kept = self._clock(), self._kept.get(place)
            if error.failure is KekFailure.UNOPENABLE:
                self._kept[place] = _KeptKey(None, now + _REFUSED_SECONDS, now + _REFUSED_SECONDS)
                return
            # Bridged only where nobody answers: a key that says no says it to what was unwrapped before, too.
            if error.failure is KekFailure.UNAVAILABLE and kept and kept.data_key and now < kept.stale_until:
                kept.fresh_until = min(now + _DOWN_SECONDS, kept.stale_until)
                return
            self._kept.pop(place, None)
            raise RefusedError(_cannot_be_asked(member, error)) from None

    async def _answer(self, member: KekProvider, question: Callable[[], Awaitable[bytes]]) -> bytes:
        """One that did not answer just now is not waited for by everybody. Raises `KekError`."""
        until, said = self._down.get(member.id, (0.0, None))
        if said is not None and self._clock() < until:
            raise said
        try:
            answer = await question()
        except KekError as error:
            if error.failure is KekFailure.UNAVAILABLE:
                self._down[member.id] = (self._clock() + _DOWN_SECONDS, error)
            _log.warning("key_encryption_key_refuses", kek_id=member.id, failure=error.failure.value)
            raise
        self._down.pop(member.id, None)
        return answer

    def _keep(self, place: bytes, data_key: bytes) -> None:
        now = self._clock()
        fresh_until = now + self._cache_seconds
        self._kept[place] = _KeptKey(data_key, fresh_until, fresh_until + self._max_stale_seconds)
        self._kept.move_to_end(place)
        while len(self._kept) > _KEPT_KEYS:
            self._kept.popitem(last=False)

    def _member(self, kek_id: str) -> RingMember:
        member = next((member for member in self._ring if member.id == kek_id), None)
        if member is None:
            raise UnopenableError
        return member


@dataclass(frozen=True, slots=True, repr=False)
class _Parts:
    kek_id: str | None
    """None: wrapped by one of the keys that we hold."""
    wrapped: bytes
    body: bytes


def _parts(envelope: bytes | None) -> _Parts:
    if not envelope:
        raise UnopenableError
    if envelope[:1] == _HELD:
        return _Parts(None, envelope[1 : 1 + _WRAPPED], envelope[1 + _WRAPPED :])
    if envelope[:1] != _ASKED:
        raise UnopenableError
    kek_id, rest = _cut(envelope[1:], 1)
    wrapped, body = _cut(rest, 2)
    # The id says whom to ask. Nobody has to believe it: the answer opens this row or it does not.
    return _Parts(kek_id.decode("ascii", "replace"), wrapped, body)


def _cut(raw: bytes, size: int) -> tuple[bytes, bytes]:
    """What a length in so many bytes announces, and what follows."""
    length = int.from_bytes(raw[:size])
    if len(raw) < size + length:
        raise UnopenableError
    return raw[size : size + length], raw[size + length :]


def _head_of_asked(kek_id: str, wrapped: bytes) -> bytes:
    name = kek_id.encode("ascii")
    return _ASKED + len(name).to_bytes(1) + name + len(wrapped).to_bytes(2) + wrapped


def _place(kek_id: str, wrapped: bytes, aad: bytes) -> bytes:
    """Where an unwrapped data key is kept: bound to what it was unwrapped for."""
    key = kek_id.encode("ascii", "replace") + b"\0" + len(wrapped).to_bytes(4) + wrapped
    return hashlib.sha256(key + aad).digest()


def _now(work: Callable[[], T]) -> Callable[[], Awaitable[T]]:
    async def attempt() -> T:
        return work()

    return attempt


def _unavailable(detail: str, hint: str = "try again in a moment") -> Refusal:
    return Refusal(RefusalCode.CREDENTIAL_UNAVAILABLE, detail, hint, retry_after_seconds=2)


def _cannot_be_asked(member: KekProvider, error: KekError) -> Refusal:
    return _unavailable(
        f"the key-encryption key at {member.provider} cannot be used: {error.detail}",
        "an operator sees the ring with: coatcheck kek list",
    )


def seal_secret(custody: Custody, secret: Secret, credential: Credential, *, version: int) -> Sealed:
    """A credential's secret, bound to where that credential may send it. Raises `KeyNeededError`."""
    return custody.seal(secret.reveal().encode(), aad=credential_aad(credential, version=version))


def open_secret(custody: Custody, version: CredentialVersion | None, credential: Credential) -> Secret:
    """One version of the credential. Raises `KeyNeededError`, and `UnopenableError` where a row is not the one that was
    sealed."""
    # An envelope that was put back into a version that is over stays closed.
    if version is None or version.state in OVER:
        raise UnopenableError
    return Secret(custody.open(version.envelope, aad=credential_aad(credential, version=version.version)).decode())
