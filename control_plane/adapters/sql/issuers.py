"""Trusted issuers and used assertions, in SQL (`ports.Issuers`, `ports.UsedAssertions`).

Rule: both are the platform's. No tenant's transaction reaches them.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError
from sqlalchemy import delete, insert, select, update

from control_plane.adapters.sql.repositories import Transaction
from control_plane.adapters.sql.tables import Base, IssuerRow, UsedAssertionRow
from control_plane.core.identity import TrustedIssuer
from control_plane.ports import UnreadableRowError

ISSUERS: Final = Base.metadata.tables[IssuerRow.__tablename__]
USED: Final = Base.metadata.tables[UsedAssertionRow.__tablename__]

_ISSUER: Final = TypeAdapter(TrustedIssuer)


class SqlIssuers:
    def __init__(self, tx: Transaction) -> None:
        self._tx = tx

    async def add(self, issuer: TrustedIssuer) -> None:
        self._tx.require_mine(None)
        await self._tx.change(insert(ISSUERS), _columns(issuer))

    async def replace(self, issuer: TrustedIssuer) -> None:
        self._tx.require_mine(None)
        await self._tx.change(update(ISSUERS).where(ISSUERS.c.name == issuer.name).values(_columns(issuer)))

    async def named(self, name: str) -> TrustedIssuer | None:
        self._tx.require_mine(None)
        row = await self._tx.row(select(ISSUERS).where(ISSUERS.c.name == name))
        return _record(row) if row else None

    async def of(self, issuers: Sequence[str]) -> Sequence[TrustedIssuer]:
        self._tx.require_mine(None)
        return [_record(row) for row in await self._tx.rows(select(ISSUERS).where(ISSUERS.c.issuer.in_(issuers)))]

    async def list(self) -> Sequence[TrustedIssuer]:
        self._tx.require_mine(None)
        return [_record(row) for row in await self._tx.rows(select(ISSUERS).order_by(ISSUERS.c.name))]

    async def remove(self, name: str) -> bool:
        self._tx.require_mine(None)
        return await self._tx.change(delete(ISSUERS).where(ISSUERS.c.name == name)) > 0


class SqlUsedAssertions:
    def __init__(self, tx: Transaction) -> None:
        self._tx = tx

    async def use(self, sha256: str, *, expires_at: float) -> bool:
        self._tx.require_mine(None)
        row = {"sha256": sha256, "expires_at": expires_at}
        return await self._tx.change(self._tx.insert_once(USED, by="sha256"), row) == 1

    async def purge(self, *, over_before: float, limit: int) -> int:
        self._tx.require_mine(None)
        some = select(USED.c.sha256).where(USED.c.expires_at < over_before).limit(limit)
        return await self._tx.change(delete(USED).where(USED.c.sha256.in_(some)))


def _columns(issuer: TrustedIssuer) -> dict[str, Any]:
    return {"name": issuer.name, "issuer": issuer.issuer, "definition": _ISSUER.dump_python(issuer, mode="json")}


def _record(row: Mapping[str, Any]) -> TrustedIssuer:
    """Whom to believe is never guessed: a row that does not read as it was written is no issuer."""
    try:
        issuer = _ISSUER.validate_python(row["definition"])
    except ValidationError:
        raise UnreadableRowError("a stored TrustedIssuer is not readable") from None
    if (issuer.name, issuer.issuer) != (row["name"], row["issuer"]):
        raise UnreadableRowError("a stored TrustedIssuer is not readable")
    return issuer
