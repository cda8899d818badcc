"""One transaction with everything the store can do in it (`ports.Records`).

A new topic has its repository in a file of its own, made of `repositories.Transaction`, and its line here.
"""

from control_plane.adapters.sql.access import SqlInjectors, SqlUses
from control_plane.adapters.sql.alarms import SqlAlarms, SqlDecoys
from control_plane.adapters.sql.chain import SqlAuditChain
from control_plane.adapters.sql.figures import figures
from control_plane.adapters.sql.issuers import SqlIssuers, SqlUsedAssertions
from control_plane.adapters.sql.limits import SqlLimits
from control_plane.adapters.sql.minted import SqlMintedValues
from control_plane.adapters.sql.repositories import (
    SqlAllowRules,
    SqlAudit,
    SqlClients,
    SqlCredentials,
    SqlGrants,
    SqlHotReads,
    SqlOutbox,
    SqlOwnKeys,
    SqlSessions,
    SqlTenants,
    SqlTokens,
    SqlVersions,
    Transaction,
)
from control_plane.adapters.sql.rotations import SqlRotations
from control_plane.adapters.sql.sealed import SqlKeks, SqlSealedRows
from control_plane.adapters.sql.sources import SqlSources
from control_plane.ports import Figures


class SqlRecords:
    """`ports.Records` over one transaction."""

    def __init__(self, tx: Transaction) -> None:
        self.tenants = SqlTenants(tx)
        self.clients = SqlClients(tx)
        self.credentials = SqlCredentials(tx)
        self.versions = SqlVersions(tx)
        self.rotations = SqlRotations(tx)
        self.minted = SqlMintedValues(tx)
        self.grants = SqlGrants(tx)
        self.rules = SqlAllowRules(tx)
        self.sessions = SqlSessions(tx)
        self.tokens = SqlTokens(tx)
        self.own_keys = SqlOwnKeys(tx)
        self.issuers = SqlIssuers(tx)
        self.used_assertions = SqlUsedAssertions(tx)
        self.injectors = SqlInjectors(tx)
        self.uses = SqlUses(tx)
        self.limits = SqlLimits(tx)
        self.sources = SqlSources(tx)
        self.sealed = SqlSealedRows(tx)
        self.keks = SqlKeks(tx)
        self.alarms = SqlAlarms(tx)
        self.decoys = SqlDecoys(tx)
        self.outbox = SqlOutbox(tx)
        self.audit = SqlAudit(tx)
        self.chain = SqlAuditChain(tx)
        self.hot = SqlHotReads(tx)
        self._tx = tx

    async def now(self) -> float:
        return await self._tx.now()

    async def figures(self, *, now: float) -> Figures:
        return await figures(self._tx, now=now)
