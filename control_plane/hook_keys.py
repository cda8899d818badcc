"""The key that the secrets of alarm hooks are derived from.

Rule: it makes nothing else. It is sealed in the store like any secret, so that no hook's own secret has to be kept.
"""

import contextlib
import functools
from collections.abc import Sequence
from typing import Final

import structlog

from control_plane.contract.refusal import RefusedError
from control_plane.core.alarms import hook_secret
from control_plane.core.records import KeyPurpose, OwnKey
from control_plane.core.sealing import own_key_aad
from control_plane.custody import Custody, UnopenableError
from control_plane.own_keys import KEYS_DO_NOT_OPEN, OwnKeyring
from control_plane.ports import CrossTenantReason, PlatformScope, Store, TakenError

_SCOPE: Final = PlatformScope(CrossTenantReason.START)
_log = structlog.get_logger("control_plane.hook_keys")


class HookKeys:
    def __init__(self, store: Store, custody: Custody, own_keys: OwnKeyring) -> None:
        self._store = store
        self._custody = custody
        self._own_keys = own_keys
        self._opened: dict[str, bytes] = {}

    async def newest(self) -> str:
        """The id of the key that a new hook's secret is derived from; the first one is made here."""
        return await self._custody.with_keys(self._newest)

    async def _newest(self) -> str:
        stored = await self._stored()
        if not stored:
            with contextlib.suppress(TakenError):  # another replica was quicker
                async with self._store.write(_SCOPE) as records:
                    purpose = KeyPurpose.WEBHOOK
                    new = self._own_keys.new(purpose, in_use_from=0.0, key_id=f"first-{purpose.value}")
                    await records.own_keys.add(new)
            stored = await self._stored()
        return stored[0].id

    async def secret(self, key_id: str, hook_id: str) -> str:
        """Raises `RefusedError(credential_unavailable)` where the key does not open, or is gone."""
        key = self._opened.get(key_id)
        if key is None:
            key = self._opened[key_id] = await self._custody.with_keys(functools.partial(self._open, key_id))
        return hook_secret(key, hook_id)

    async def _open(self, key_id: str) -> bytes:
        envelope = next((key.envelope for key in await self._stored() if key.id == key_id), None)
        try:
            return self._custody.open(envelope, aad=own_key_aad(key_id=key_id, purpose=KeyPurpose.WEBHOOK))
        except UnopenableError:
            _log.error("own_keys_do_not_open", purpose=KeyPurpose.WEBHOOK.value)
            raise RefusedError(KEYS_DO_NOT_OPEN) from None

    async def _stored(self) -> Sequence[OwnKey]:
        async with self._store.read(_SCOPE) as records:
            return await records.own_keys.list(KeyPurpose.WEBHOOK)
