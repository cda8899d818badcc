"""Where secrets come from and what seals them: sources, key-encryption keys. For the platform's administrators.

Rule: nothing here has a field for a secret or a key; what a source holds is not shown, only whether it can be read.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Path, Request, Response
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from control_plane.access import Access
from control_plane.api.guard import AdminRoutes, actor
from control_plane.api.lists import Items
from control_plane.contract.caller import TenantId
from control_plane.contract.refusal import RefusedError
from control_plane.core.names import NAME_IN_SOURCE, SOURCE_NAME, TENANT_ID
from control_plane.core.policy import Action
from control_plane.core.records import Source, SourceKind
from control_plane.core.sources import DEFAULT_TTL_SECONDS, MAX_TTL_SECONDS, MIN_TTL_SECONDS
from control_plane.kek_ring import NO_REWRAP, KekRing, KekStatus, RewrapStatus
from control_plane.source_registry import NewSource, SourceRegistry

SourcePath = Annotated[str, Path(pattern=SOURCE_NAME)]
KekPath = Annotated[str, Path(pattern=r"^[A-Za-z0-9-]{1,32}$")]

_Text: Final = StringConstraints(max_length=512)
_Short: Final = StringConstraints(max_length=256)


class _Incoming(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)


class _Outgoing(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class VaultAuthIn(_Incoming):
    """Files are names inside the folder of the setting SOURCES_AUTH_FOLDER."""

    method: Literal["token", "kubernetes", "approle"]
    mount: Annotated[str, _Short] | None = None
    role: Annotated[str, _Short] | None = None
    token_file: Annotated[str, _Short] | None = None
    role_id_file: Annotated[str, _Short] | None = None
    secret_id_file: Annotated[str, _Short] | None = None


class VaultIn(_Incoming):
    address: Annotated[str, _Text]
    mount: Annotated[str, _Short] | None = None
    kv_version: Literal["1", "2"] = "2"
    field: Annotated[str, _Short] | None = None
    namespace: Annotated[str, _Text] | None = None
    auth: VaultAuthIn


class AwsAuthIn(_Incoming):
    """Files are names inside the folder of the setting SOURCES_AUTH_FOLDER."""

    method: Literal["keys", "web_identity"]
    keys_file: Annotated[str, _Short] | None = None
    token_file: Annotated[str, _Short] | None = None
    role_arn: Annotated[str, _Text] | None = None


class AwsIn(_Incoming):
    region: Annotated[str, _Short]
    endpoint: Annotated[str, _Text] | None = None
    field: Annotated[str, _Short] | None = None
    auth: AwsAuthIn


class SourceIn(_Incoming):
    """`vault` goes with the kind `vault`, `aws` with `aws_secrets_manager`; the other kinds need neither."""

    kind: Literal["file", "vault", "aws_secrets_manager", "kubernetes"]
    path_template: Annotated[str, _Text]
    ttl_seconds: Annotated[float, Field(ge=MIN_TTL_SECONDS, le=MAX_TTL_SECONDS, allow_inf_nan=False)] = (
        DEFAULT_TTL_SECONDS
    )
    tenants: (
        Annotated[list[Annotated[str, StringConstraints(pattern=TENANT_ID)]], Field(min_length=1, max_length=1000)]
        | None
    ) = None
    vault: VaultIn | None = None
    aws: AwsIn | None = None

    def to_new(self, name: str) -> NewSource:
        given = {SourceKind.VAULT: self.vault, SourceKind.AWS_SECRETS_MANAGER: self.aws}
        settings: dict[str, Any] = {}
        for kind, facts in given.items():
            if facts is not None:
                # Facts of another kind go along, so that they are refused by name instead of being passed over.
                found = facts.model_dump(exclude_none=True)
                settings |= found if kind.value == self.kind else {kind.value: found}
        return NewSource(
            name=name,
            kind=SourceKind(self.kind),
            settings=settings,
            path_template=self.path_template,
            ttl_seconds=self.ttl_seconds,
            tenants=tuple(self.tenants) if self.tenants is not None else None,
        )


class SourceTestIn(_Incoming):
    tenant: Annotated[str, StringConstraints(pattern=TENANT_ID)]
    name: Annotated[str, StringConstraints(pattern=NAME_IN_SOURCE)]


class SourceOut(_Outgoing):
    name: str
    kind: str
    settings: dict[str, Any]
    path_template: str
    ttl_seconds: float
    tenants: list[str] | None
    created_at: float
    updated_at: float

    @classmethod
    def of(cls, source: Source) -> "SourceOut":
        return cls(
            name=source.name,
            kind=source.kind.value,
            settings=dict(source.settings),
            path_template=source.path_template,
            ttl_seconds=source.ttl_seconds,
            tenants=list(source.tenants) if source.tenants is not None else None,
            created_at=source.created_at,
            updated_at=source.updated_at,
        )


class ReadingOut(_Outgoing):
    """How reading went: never what was there."""

    readable: bool
    failure: str | None
    detail: str


class KekOut(_Outgoing):
    kek_id: str
    provider: str
    place: str
    """Its file, or its name elsewhere; where it was last, if it is in the ring no more."""
    in_ring: bool
    seals: bool
    seals_from: float | None
    """When it began, or will begin. Null: it only opens."""
    problem: str
    """Why it does not serve, or soon will not."""
    envelopes: int
    first_seen_at: float | None
    retired_at: float | None

    @classmethod
    def of(cls, status: KekStatus) -> "KekOut":
        return cls(
            kek_id=status.id,
            provider=status.provider,
            place=status.place,
            in_ring=status.in_ring,
            seals=status.seals,
            seals_from=status.seals_from,
            problem=status.problem,
            envelopes=status.envelopes,
            first_seen_at=status.first_seen_at,
            retired_at=status.retired_at,
        )


class RetireIn(_Incoming):
    abandon: bool = False
    """Give up what is under it and does not open: a key that is lost."""


class RewrapOut(_Outgoing):
    id: str
    target: str
    state: Literal["running", "done"]
    total: int
    rewrapped: int
    remaining: int
    unopenable: int
    unopenable_names: list[str]
    """Some of them."""
    started_at: float
    started_by: str
    moved_at: float
    finished_at: float | None

    @classmethod
    def of(cls, status: RewrapStatus) -> "RewrapOut":
        rewrap = status.rewrap
        return cls(
            id=rewrap.id,
            target=rewrap.target,
            state="running" if rewrap.finished_at is None else "done",
            total=rewrap.total,
            rewrapped=rewrap.rewrapped,
            remaining=status.remaining,
            unopenable=rewrap.unopenable,
            unopenable_names=list(status.unopenable),
            started_at=rewrap.started_at,
            started_by=rewrap.started_by,
            moved_at=rewrap.moved_at,
            finished_at=rewrap.finished_at,
        )


@dataclass(frozen=True, slots=True)
class CustodyApi:
    access: Access
    sources: SourceRegistry
    keks: KekRing

    def router(self) -> APIRouter:
        routes = AdminRoutes(self.access)
        add = routes.add
        add("GET", "/sources", self.list_sources, Action.SOURCE_READ)
        add("GET", "/sources/{source}", self.get_source, Action.SOURCE_READ)
        add("PUT", "/sources/{source}", self.put_source, Action.SOURCE_WRITE)
        add("DELETE", "/sources/{source}", self.delete_source, Action.SOURCE_WRITE, status_code=204)
        add("POST", "/sources/{source}/test", self.test_source, Action.SOURCE_WRITE)
        add("GET", "/keks", self.list_keks, Action.KEK_READ)
        add("POST", "/keks/reload", self.reload_keks, Action.KEK_WRITE)
        add("GET", "/keks/rewrap", self.rewrap_status, Action.KEK_READ)
        add("POST", "/keks/rewrap", self.start_rewrap, Action.KEK_WRITE, status_code=202)
        add("POST", "/keks/{kek}/retire", self.retire_kek, Action.KEK_WRITE, status_code=204)
        return routes.router

    # --- sources

    async def list_sources(self) -> Items[SourceOut]:
        return Items(items=[SourceOut.of(source) for source in await self.sources.list()])

    async def get_source(self, source: SourcePath) -> SourceOut:
        return SourceOut.of(await self.sources.get(source))

    async def put_source(self, request: Request, source: SourcePath, body: SourceIn) -> SourceOut:
        """Adds it, or replaces it. Secrets that are read from it are asked for anew."""
        return SourceOut.of(await self.sources.put(body.to_new(source), by=actor(request)))

    async def delete_source(self, request: Request, source: SourcePath) -> Response:
        """422 while credentials read from it."""
        await self.sources.remove(source, by=actor(request))
        return Response(status_code=204)

    async def test_source(self, source: SourcePath, body: SourceTestIn) -> ReadingOut:
        """Reads once, as it would for that tenant, and says how it went."""
        reading = await self.sources.try_out(source, TenantId(body.tenant), body.name)
        return ReadingOut(readable=reading.readable, failure=reading.failure, detail=reading.detail)

    # --- key-encryption keys

    async def list_keks(self) -> Items[KekOut]:
        """The ring of this replica, newest first, and what envelopes are under. One with none can retire. Keys
        elsewhere are asked whether they answer."""
        return Items(items=[KekOut.of(status) for status in await self.keks.statuses()])

    async def reload_keks(self) -> Items[KekOut]:
        """Reads the settings' files again now; 422 where they cannot be read. Every replica does so by itself within
        ten seconds."""
        await self.keks.reload_or_refuse()
        return await self.list_keks()

    async def start_rewrap(self, request: Request) -> RewrapOut:
        """Brings every envelope under the key that seals, in the background. One that runs is not begun again."""
        return RewrapOut.of(await self.keks.start_rewrap(by=actor(request)))

    async def rewrap_status(self) -> RewrapOut:
        status = await self.keks.rewrap_status()
        if status is None:
            raise RefusedError(NO_REWRAP)
        return RewrapOut.of(status)

    async def retire_kek(self, request: Request, kek: KekPath, body: RetireIn) -> Response:
        """422 while envelopes are under it."""
        await self.keks.retire(kek, abandon=body.abandon, by=actor(request))
        return Response(status_code=204)
