"""What providers gave, and whose turn it is to ask them (`ports.MintedValues`).

Rule: a lease is taken by one conditional update, so that of all replicas one has it; it ends by itself, by the
database's clock. What is written afterwards is written under the fence of the question, which a later question has
replaced.
"""

from typing import Any

from sqlalchemy import ColumnElement, delete, exists, select, tuple_, update

from control_plane.adapters.sql.repositories import MINTED, VERSIONS, Transaction
from control_plane.adapters.sql.rows import to_columns, to_record
from control_plane.contract.caller import CredentialId
from control_plane.core.records import CredentialVersion, MintedValue, MintingState, VersionState

_KEY = ("credential_id", "version")
_OVER = (VersionState.RETIRED.value, VersionState.REVOKED.value)


class SqlMintedValues:
    def __init__(self, tx: Transaction) -> None:
        self._tx = tx

    def _where(self, credential: CredentialId, version: int) -> tuple[ColumnElement[bool], ...]:
        return MINTED.c.credential_id == credential, MINTED.c.version == version, self._tx.mine(MINTED.c.tenant)

    async def get(self, credential: CredentialId, version: int) -> MintedValue | None:
        row = await self._tx.row(select(MINTED).where(*self._where(credential, version)))
        return to_record(MintedValue, row) if row else None

    async def lease(self, version: CredentialVersion, *, seconds: float) -> MintedValue | None:
        self._tx.require_mine(version.tenant)
        await self._tx.change(self._tx.insert_once(MINTED, by=_KEY).values(to_columns(_new(version))))
        now = await self._tx.now()
        where = (*self._where(version.credential_id, version.version), MINTED.c.leased_until <= now)
        values = {"fence": MINTED.c.fence + 1, "leased_until": now + seconds}
        if not await self._tx.change(update(MINTED).where(*where).values(values)):
            return None
        return await self.get(version.credential_id, version.version)

    async def settle(self, minted: MintedValue, *, asked_fence: int) -> bool:
        if not await self._update(minted, MINTED.c.asked_fence == asked_fence):
            return False
        await self.release(minted)
        return True

    async def put(self, minted: MintedValue) -> bool:
        return await self._update(minted, MINTED.c.fence == minted.fence)

    async def release(self, minted: MintedValue) -> None:
        where = (*self._where(minted.credential_id, minted.version), MINTED.c.fence == minted.fence)
        await self._tx.change(update(MINTED).where(*where).values(leased_until=0.0))

    async def _update(self, minted: MintedValue, condition: ColumnElement[bool]) -> bool:
        self._tx.require_mine(minted.tenant)
        where = (*self._where(minted.credential_id, minted.version), condition)
        return await self._tx.change(update(MINTED).where(*where).values(_settled(minted))) > 0

    async def discard(self, credential: CredentialId, version: int) -> None:
        where = self._where(credential, version)
        await self._tx.change(update(MINTED).where(*where).values(envelope=None, kek_id=None))

    async def forget(self, credential: CredentialId, version: int) -> None:
        await self._tx.change(delete(MINTED).where(*self._where(credential, version)))

    async def purge(self, *, limit: int) -> int:
        in_use = select(VERSIONS.c.version).where(
            VERSIONS.c.credential_id == MINTED.c.credential_id,
            VERSIONS.c.version == MINTED.c.version,
            VERSIONS.c.state.not_in(_OVER),
        )
        key = (MINTED.c.credential_id, MINTED.c.version)
        some = select(*key).where(~exists(in_use), self._tx.mine(MINTED.c.tenant)).limit(limit)
        return await self._tx.change(delete(MINTED).where(tuple_(*key).in_(some)))


def _new(version: CredentialVersion) -> MintedValue:
    return MintedValue(
        credential_id=version.credential_id,
        version=version.version,
        tenant=version.tenant,
        fence=0,
        leased_until=0.0,
        asked_fence=None,
        state=MintingState.NEW,
        reason="",
        failures=0,
        retry_at=0.0,
        replaces_secret=None,
        kek_id=None,
        envelope=None,
        minted_at=0.0,
        expires_at=None,
    )


def _settled(minted: MintedValue) -> dict[str, Any]:
    """What a holder writes: neither whose row it is nor who has the lease, which somebody may have taken over."""
    kept = {*_KEY, "tenant", "fence", "leased_until"}
    return {name: value for name, value in to_columns(minted).items() if name not in kept}
