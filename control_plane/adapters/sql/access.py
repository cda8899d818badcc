"""Registered injectors, and when credentials were last used (`ports.Injectors`, `ports.Uses`), in SQL."""

from collections.abc import Sequence

from sqlalchemy import bindparam, delete, func, select, update

from control_plane.adapters.sql.repositories import CREDENTIALS, Transaction, table_of
from control_plane.adapters.sql.rows import to_records
from control_plane.adapters.sql.tables import InjectorRow, UseRow
from control_plane.contract.caller import ClientId, SubjectId
from control_plane.core.records import Injector, NewUse, Use

INJECTORS, USES = table_of(InjectorRow), table_of(UseRow)


class SqlInjectors:
    """The platform's: no tenant's transaction reaches them."""

    def __init__(self, tx: Transaction) -> None:
        self._tx = tx

    async def list(self) -> Sequence[Injector]:
        self._tx.require_mine(None)
        return to_records(Injector, await self._tx.rows(select(INJECTORS).order_by(INJECTORS.c.id)))

    async def seen(self, injector: ClientId, at: float) -> bool:
        self._tx.require_mine(None)
        if await self._tx.change(update(INJECTORS).where(INJECTORS.c.id == injector).values(seen_at=at)):
            return False
        row = {"id": injector, "registered_at": at, "seen_at": at}
        return await self._tx.change(self._tx.insert_once(INJECTORS, by="id"), row) > 0

    async def remove(self, injector: ClientId) -> bool:
        self._tx.require_mine(None)
        return await self._tx.change(delete(INJECTORS).where(INJECTORS.c.id == injector)) > 0


class SqlUses:
    def __init__(self, tx: Transaction) -> None:
        self._tx = tx

    async def note(self, uses: Sequence[NewUse]) -> None:
        for use in uses:
            self._tx.require_mine(use.tenant)
        await self._tx.change_each(
            self._added(),
            [
                {
                    "of_tenant": use.tenant,
                    "of_subject": use.subject,
                    "of_client": use.client,
                    "of_credential": use.credential,
                    "of_host": use.host,
                    "of_at": use.at,
                    "of_requests": use.requests,
                }
                for use in uses
            ],
        )

    def _added(self) -> object:
        named = select(
            bindparam("of_tenant", type_=USES.c.tenant.type),
            bindparam("of_subject", type_=USES.c.subject.type),
            bindparam("of_client", type_=USES.c.client.type),
            CREDENTIALS.c.id,
            bindparam("of_host", type_=USES.c.host.type),
            bindparam("of_at", type_=USES.c.last_used_at.type),
            bindparam("of_requests", type_=USES.c.requests.type),
        ).where(
            # Only what there still is: the report of a credential that is gone is in the trail, and no use of it.
            CREDENTIALS.c.tenant == bindparam("of_tenant"),
            CREDENTIALS.c.name == bindparam("of_credential"),
        )
        columns = ("tenant", "subject", "client", "credential_id", "host", "last_used_at", "requests")
        new = self._tx.insert(USES).from_select(columns, named)
        later = func.max if not self._tx.is_postgresql else func.greatest
        return new.on_conflict_do_update(
            index_elements=["tenant", "subject", "client", "credential_id", "host"],
            set_={
                "last_used_at": later(USES.c.last_used_at, new.excluded.last_used_at),
                "requests": USES.c.requests + new.excluded.requests,
            },
        )

    async def list(self, subject: SubjectId | None) -> Sequence[Use]:
        statement = select(USES).where(self._tx.mine(USES.c.tenant))
        if subject is not None:
            statement = statement.where(USES.c.subject == subject)
        return to_records(Use, await self._tx.rows(statement.order_by(USES.c.last_used_at.desc())))
