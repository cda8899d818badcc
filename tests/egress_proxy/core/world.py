"""A small world for the pure core: one tag key, two tenants, a few credentials, and a view made of dictionaries."""

from dataclasses import dataclass, field, replace

from control_plane.contract.caller import (
    Caller,
    ClientId,
    CredentialId,
    GrantId,
    PlaceholderId,
    SessionId,
    SubjectId,
    TenantId,
)
from control_plane.contract.destination import AllowRule, Destination, Endpoint, parse_destination
from control_plane.contract.grant import GrantScope
from control_plane.contract.placeholder import GenuineToken, Shape, TokenKind, fingerprint, mint, parse
from control_plane.contract.placement import BEARER, Placement
from control_plane.contract.secret import Secret
from control_plane.contract.wire import Binding, BoundLimit, CallerFacts, Policy, Refused, Route
from egress_proxy.core.decision import Connection, Forward, Mode, Refuse, Resolve, decide
from egress_proxy.core.http1 import parse_request_head
from egress_proxy.core.plan import Plan
from egress_proxy.core.quota import Standing
from egress_proxy.core.view import KnownCaller, KnownWorkload, Resolved

NOW = 1_800_000_000.0
TAG_KEY = b"k" * 32
SECRET = "sk-real-9f1c2b7e5a"

ALICE = Caller(ClientId("runtime"), TenantId("acme"), SubjectId("alice"), SessionId("s1"))
BOB = Caller(ClientId("runtime"), TenantId("acme"), SubjectId("bob"), SessionId("s2"))
MALLORY = Caller(ClientId("runtime"), TenantId("evil"), SubjectId("mallory"), SessionId("s3"))


def minted(kind: TokenKind, number: int, prefix: str = "coat_") -> str:
    return mint(Shape(prefix), kind, tag_key=TAG_KEY, entropy=number.to_bytes(24))


@dataclass
class World:
    """The view, and the tokens in it. Everything is open to change before a test acts."""

    tag_keys: tuple[bytes, ...] = (TAG_KEY,)
    callers: dict[str, KnownCaller | Refused] = field(default_factory=dict)
    policies: dict[Caller, Policy | Refused] = field(default_factory=dict)
    placeholders: dict[str, Resolved | Refused] = field(default_factory=dict)
    quotas: dict[str, Standing] = field(default_factory=dict)
    workloads: dict[str, KnownWorkload | Refused] = field(default_factory=dict)
    count: int = 1
    revision: int = 0

    def caller(self, fingerprint: str) -> KnownCaller | Refused | None:
        return self.callers.get(fingerprint)

    def workload(self, fingerprint: str) -> KnownWorkload | Refused | None:
        return self.workloads.get(fingerprint)

    def policy(self, caller: Caller) -> Policy | Refused | None:
        return self.policies.get(caller)

    def placeholder(self, fingerprint: str, caller: Caller, endpoint: Endpoint) -> Resolved | Refused | None:
        return self.placeholders.get(fingerprint)

    def quota(self, limit: BoundLimit) -> Standing:
        return self.quotas.get(limit.id, Standing.UNKNOWN)

    def quota_resets_in_seconds(self, limit: BoundLimit) -> float:
        return 12.3

    def proxy_credential(
        self, caller: Caller, *, expires_at: float = NOW + 900, asked_at: float = NOW - 30
    ) -> GenuineToken:
        self.count += 1
        token = parse(minted(TokenKind.PROXY_CREDENTIAL, self.count), self.tag_keys)
        self.callers[token.fingerprint] = KnownCaller(CallerFacts(caller, expires_at), asked_at)
        self.policies.setdefault(caller, Policy(caller, (), ()))
        return token

    def credential(
        self,
        caller: Caller,
        *urls: str,
        name: str = "api",
        placements: tuple[Placement, ...] = (BEARER,),
        scopes: tuple[GrantScope, ...] = (GrantScope(),),
        methods: frozenset[str] | None = None,
        secret: str = SECRET,
        expires_at: float = NOW + 900,
        asked_at: float = NOW - 30,
        required: bool = False,
        prefix: str = "coat_",
        kind: str = "static",
        secret_expires_at: float | None = None,
    ) -> str:
        """Grant `caller` a credential for the urls; returns the placeholder."""
        self.count += 1
        text = minted(TokenKind.PLACEHOLDER, self.count, prefix)
        destinations: tuple[Destination, ...] = tuple(parse_destination(url, methods=methods) for url in urls)
        binding = Binding(
            placeholder_id=PlaceholderId(f"ph{self.count}"),
            caller=caller,
            credential_id=CredentialId(f"cr{self.count}"),
            credential_name=name,
            version=1,
            grant_ids=(GrantId("g1"),),
            destinations=destinations,
            placements=placements,
            scopes=scopes,
            expires_at=expires_at,
            credential_kind=kind,
            secret_expires_at=secret_expires_at,
        )
        self.placeholders[fingerprint(text)] = Resolved(binding, Secret(secret), asked_at)
        route = Route(name, binding.credential_id, destinations, scopes, placements, required)
        policy = self.policies.get(caller, Policy(caller, (), ()))
        assert isinstance(policy, Policy)
        self.policies[caller] = replace(policy, routes=(*policy.routes, route))
        return text

    def allow(self, caller: Caller, *rules: AllowRule) -> None:
        policy = self.policies.get(caller, Policy(caller, (), ()))
        assert isinstance(policy, Policy)
        self.policies[caller] = replace(policy, allow=(*policy.allow, *rules))


def tunnel_to(url: str, credential: GenuineToken | None) -> Connection:
    """The connection inside an intercepted CONNECT."""
    return Connection(Mode.FORWARD, credential, parse_destination(url).endpoint)


def head_of(request_line: str, *lines: str, host: str | None = "api.test") -> bytes:
    named = [] if host is None else [f"Host: {host}"]
    return "\r\n".join([request_line, *named, *lines, "", ""]).encode("latin-1")


def ask(raw: bytes, connection: Connection, world: World, now: float = NOW) -> Forward | Resolve | Refuse:
    return decide(parse_request_head(raw), connection, world, now)


def sent(decision: Forward | Resolve | Refuse) -> bytes:
    """The head that goes upstream."""
    assert isinstance(decision, Forward), decision
    head = decision.head
    raw = b"\r\n".join([head.line, *(field.line for field in head.fields), b"", b""])
    return Plan(raw, head, decision, revision=0, now=NOW).render()


def code(decision: object) -> str:
    assert isinstance(decision, Refuse), decision
    return decision.refusal.code.value
