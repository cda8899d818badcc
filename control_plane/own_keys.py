"""The control plane's own keys: it signs session tokens with one, and tags placeholders with the other.

Each is a ring. A new key is published before it is used, and an old one kept until the last thing that it made is dead
(`keys`), so that turning the ring breaks nothing, on any replica.

Rule: they are sealed in the store like any secret. Where they do not open (a wrong key-encryption key), nothing is
minted and nothing verifies: everything that needs them is refused, and the process is not ready.
"""

import asyncio
import base64
import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import jwt
import structlog
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from control_plane.contract.caller import ClientId
from control_plane.contract.headers import CLIENT_TOKEN_TYP, SESSION_TOKEN_TYP
from control_plane.contract.placeholder import ForgedTokenError, GenuineToken, parse
from control_plane.contract.refusal import Refusal, RefusalCode, RefusedError
from control_plane.core import client_token, session_token
from control_plane.core.client_token import ClientClaims
from control_plane.core.records import KeyPurpose, OwnKey
from control_plane.core.sealing import own_key_aad
from control_plane.core.session_token import (
    ALGORITHM,
    MAX_TOKEN_BYTES,
    InvalidSessionTokenError,
    SessionClaims,
    check_header,
)
from control_plane.custody import Custody, UnopenableError
from control_plane.faults import reach
from control_plane.ports import Clock, CrossTenantReason, Entropy, PlatformScope, Store, TakenError

LOOK_AGAIN_SECONDS: Final = 15.0
"""How long a replica goes on with the keys that it knows: by then it has what another one made or took out."""
ASK_AGAIN_SECONDS: Final = 2.0
"""A token of an unknown key has us look at once, but not more often than this."""

_log = structlog.get_logger("control_plane.own_keys")

_KEY_BYTES: Final = 32


@dataclass(frozen=True, slots=True, repr=False)
class SigningKey:
    """One Ed25519 key (RFC 8037)."""

    id: str
    private: Ed25519PrivateKey

    @classmethod
    def of(cls, seed: bytes) -> "SigningKey":
        private = Ed25519PrivateKey.from_private_bytes(seed)
        spki = private.public_key().public_bytes(
            serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        return cls(id=hashlib.sha256(spki).hexdigest()[:16], private=private)

    def public_jwk(self) -> dict[str, Any]:
        jwk: dict[str, Any] = jwt.algorithms.OKPAlgorithm.to_jwk(self.private.public_key(), as_dict=True)
        return {**jwk, "kid": self.id, "use": "sig", "alg": ALGORITHM}


@dataclass(frozen=True, slots=True, repr=False)
class KeyRings:
    """Both rings, the key in use first, never empty. The others verify: they were in use, or are going to be."""

    signing: tuple[SigningKey, ...]
    tags: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, repr=False)
class _Opened:
    """Every stored key, opened, and when it was looked at."""

    signing: tuple[tuple[OwnKey, SigningKey], ...]
    tags: tuple[tuple[OwnKey, bytes], ...]
    at: float

    def rings(self, now: float) -> KeyRings:
        return KeyRings(
            signing=tuple(key for _, key in _in_use_first(self.signing, now)),
            tags=tuple(key for _, key in _in_use_first(self.tags, now)),
        )


class OwnKeyring:
    """Opens the rings and looks again now and then; makes the first keys of a new database."""

    def __init__(self, store: Store, custody: Custody, *, clock: Clock, entropy: Entropy) -> None:
        self._store = store
        self._custody = custody
        self._clock = clock
        self._entropy = entropy
        self._opened: _Opened | None = None
        self._asked_at = 0.0
        self._looking = asyncio.Lock()

    async def rings(self) -> KeyRings:
        """Raises `RefusedError(credential_unavailable)` where the stored keys do not open."""
        now = self._clock()
        opened = self._opened
        if opened is None or abs(now - opened.at) >= LOOK_AGAIN_SECONDS:
            opened = await self._look(unless_since=now - LOOK_AGAIN_SECONDS)
        return opened.rings(now)

    async def sign(self, payload: Mapping[str, Any], *, typ: str) -> str:
        """A JWT of that type, by the key in use."""
        key = (await self.rings()).signing[0]
        return jwt.encode(dict(payload), key.private, algorithm=ALGORITHM, headers={"typ": typ, "kid": key.id})

    async def verify(self, unverified_token: str, *, issuer: str, audience: ClientId | None) -> SessionClaims:
        """A session token's claims. Raises `InvalidSessionTokenError`."""
        payload = await self._signed_payload(unverified_token, typ=SESSION_TOKEN_TYP)
        return session_token.check_claims(payload, issuer=issuer, audience=audience, now=self._clock())

    async def verify_client(self, unverified_token: str, *, issuer: str, audience: ClientId | None) -> ClientClaims:
        """A client token's claims. Raises `InvalidSessionTokenError`."""
        payload = await self._signed_payload(unverified_token, typ=CLIENT_TOKEN_TYP)
        return client_token.check_claims(payload, issuer=issuer, audience=audience, now=self._clock())

    async def genuine(self, text: str) -> GenuineToken | None:
        """The placeholder or proxy credential, if it is one that we minted."""
        try:
            return parse(text, (await self.rings()).tags)
        except ForgedTokenError:
            return None

    async def _signed_payload(self, unverified_token: str, *, typ: str) -> dict[str, Any]:
        if len(unverified_token) > MAX_TOKEN_BYTES or not unverified_token.isascii():
            raise InvalidSessionTokenError("form")
        try:
            key_id = check_header(_unverified_header(unverified_token), typ=typ)
        except jwt.PyJWTError:
            raise InvalidSessionTokenError("form") from None
        key = await self._signing_key(key_id)
        if key is None:
            raise InvalidSessionTokenError("kid")
        try:
            # The signature here; the claims, each of them, in `check_claims`, by our own clock.
            signed = _SIGNED.decode_complete(unverified_token, key.private.public_key(), algorithms=[ALGORITHM])
            return _json_object(signed["payload"])
        except (jwt.PyJWTError, ValueError):
            raise InvalidSessionTokenError("signature") from None

    async def _signing_key(self, key_id: str) -> SigningKey | None:
        found = _by_id((await self.rings()).signing, key_id)
        if found is None and self._clock() - self._asked_at >= ASK_AGAIN_SECONDS:
            # Another replica may have made it since. Made-up key ids cause no more than one look in this time.
            opened = await self._look(unless_since=self._clock() - ASK_AGAIN_SECONDS)
            found = _by_id(opened.rings(self._clock()).signing, key_id)
        return found

    async def _look(self, *, unless_since: float) -> _Opened:
        async with self._looking:
            opened = self._opened
            if opened is not None and unless_since < self._asked_at <= self._clock():
                return opened  # somebody else looked while we waited
            self._asked_at = self._clock()
            try:
                self._opened = opened = await self._custody.with_keys(self._open_or_make)
            except RefusedError as refused:
                if opened is None or refused.refusal.code is not RefusalCode.STORE_UNAVAILABLE:
                    raise
                # The keys that we have are no worse for the store being away.
            return opened

    async def _open_or_make(self) -> _Opened:
        async with self._store.read(PlatformScope(CrossTenantReason.START)) as records:
            signing = await records.own_keys.list(KeyPurpose.SIGNING)
            tags = await records.own_keys.list(KeyPurpose.TAG)
        signing = signing or await self._first(KeyPurpose.SIGNING)
        tags = tags or await self._first(KeyPurpose.TAG)
        return _Opened(
            signing=tuple((key, SigningKey.of(self._open(key))) for key in signing),
            tags=tuple((key, self._open(key)) for key in tags),
            at=self._clock(),
        )

    async def _first(self, purpose: KeyPurpose) -> Sequence[OwnKey]:
        """Of replicas that start at once, one makes the first key and the others find it."""
        scope = PlatformScope(CrossTenantReason.START)
        with contextlib.suppress(TakenError):
            async with self._store.write(scope) as records:
                await records.own_keys.add(self.new(purpose, key_id=f"first-{purpose.value}", in_use_from=0.0))
                reach("own_keys.added")
        async with self._store.read(scope) as records:
            return await records.own_keys.list(purpose)

    async def made(self, purpose: KeyPurpose, *, in_use_from: float) -> OwnKey:
        """A fresh key, sealed; not stored yet. Not for use in a transaction."""
        key_id = self._entropy(8).hex()

        async def attempt() -> OwnKey:
            return self.new(purpose, key_id=key_id, in_use_from=in_use_from)

        return await self._custody.with_keys(attempt)

    def new(self, purpose: KeyPurpose, *, in_use_from: float, key_id: str) -> OwnKey:
        """The same under an id that is known. Raises `KeyNeededError`."""
        key = self._entropy(_KEY_BYTES)
        sealed = self._custody.seal(key, aad=own_key_aad(key_id=key_id, purpose=purpose))
        return OwnKey(
            id=key_id,
            purpose=purpose,
            envelope=sealed.envelope,
            kek_id=sealed.kek_id,
            created_at=self._clock(),
            in_use_from=in_use_from,
        )

    def forget(self) -> None:
        """What was opened: the next one who asks looks again."""
        self._opened = None

    def _open(self, key: OwnKey) -> bytes:
        try:
            return self._custody.open(key.envelope, aad=own_key_aad(key_id=key.id, purpose=key.purpose))
        except UnopenableError:
            _log.error("own_keys_do_not_open", purpose=key.purpose.value, kek_ids=list(self._custody.kek_ids))
            raise RefusedError(KEYS_DO_NOT_OPEN) from None


def unverified_typ(unverified_token: str) -> str | None:
    """What a JWT says it is. Nothing else of it may be believed."""
    if len(unverified_token) > MAX_TOKEN_BYTES or not unverified_token.isascii():
        return None
    try:
        typ = _unverified_header(unverified_token).get("typ")
    except jwt.PyJWTError:
        return None
    return typ if isinstance(typ, str) else None


K = TypeVar("K")


def _in_use_first(keys: Sequence[tuple[OwnKey, K]], now: float) -> list[tuple[OwnKey, K]]:
    """The newest of those whose time has come, then the others."""
    in_use = key_in_use([key for key, _ in keys], now)
    return sorted(keys, key=lambda pair: pair[0].id != in_use.id)


def key_in_use(keys: Sequence[OwnKey], now: float) -> OwnKey:
    """The newest of those whose time has come; where none has, the one whose time comes first."""
    begun = [key for key in keys if key.in_use_from <= now]
    if not begun:
        return min(keys, key=lambda key: (key.in_use_from, key.id))
    return max(begun, key=lambda key: (key.in_use_from, key.created_at, key.id))


def _by_id(keys: Sequence[SigningKey], key_id: str) -> SigningKey | None:
    return next((key for key in keys if key.id == key_id), None)


_SIGNED: Final = jwt.PyJWS([ALGORITHM])

KEYS_DO_NOT_OPEN: Final = Refusal(
    RefusalCode.CREDENTIAL_UNAVAILABLE,
    "no key-encryption key of the ring opens what is stored",
    "check that COATCHECK_CONTROL_PLANE_KEK_FILES names the key that this database was written with",
)


def _json_object(raw: bytes) -> dict[str, Any]:
    value = json.loads(raw)
    if not isinstance(value, dict):
        raise ValueError("a payload is an object")  # noqa: TRY004 (one error for every bad payload)
    return value


def _unverified_header(token: str) -> dict[str, Any]:
    """What a token says of itself. Raises `jwt.DecodeError`.

    Nothing follows from it that `decode_complete` does not check again, which reads the token strictly. PyJWT's own
    look at a header reads all three parts each time, letter by letter: that was a sixth of an exchange.
    """
    encoded = token.partition(".")[0]
    try:
        return _json_object(base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)))
    except (ValueError, RecursionError):
        raise jwt.DecodeError("no header") from None
