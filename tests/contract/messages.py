"""One message of every kind on `/internal`, each beside the name of its golden file."""

from dataclasses import replace
from typing import Any

from pydantic import TypeAdapter

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
from control_plane.contract.destination import AllowRule, Destination, Endpoint
from control_plane.contract.grant import GrantScope
from control_plane.contract.placement import BEARER, BasicPlacement, QueryPlacement
from control_plane.contract.refusal import RefusalCode
from control_plane.contract.wire import (
    AUDIT_BATCH,
    EVENT,
    QUOTA_ANSWER,
    QUOTA_REQUEST,
    RESOLVE_ANSWER,
    RESOLVE_REQUEST,
    TAG_KEYS,
    AskCaller,
    AskPlaceholder,
    AskPolicy,
    AskWorkload,
    AuditBatch,
    AuditEvent,
    Binding,
    BoundLimit,
    CallerFacts,
    Event,
    Measure,
    Policy,
    QuotaAnswer,
    QuotaEntry,
    QuotaGrant,
    QuotaRequest,
    Refused,
    ResolveAnswer,
    ResolvedPlaceholder,
    ResolveRequest,
    Route,
    TagKeys,
    WorkloadFacts,
)

REAL = "sk-real-golden-secret"

CALLER = Caller(ClientId("runtime-1"), TenantId("acme"), SubjectId("alice"), SessionId("ses_1"))
SESSIONLESS = Caller(ClientId("ci-1"), TenantId("acme"), SubjectId("ci"), None)
ENDPOINT = Endpoint("https", "api.example.com", 443)
DESTINATION = Destination(ENDPOINT, "/v1", frozenset({"POST"}), allow_private=False)
SCOPE = GrantScope(
    endpoints=frozenset({ENDPOINT}),
    methods=frozenset({"POST"}),
    path_prefixes=frozenset({"/v1"}),
    until=1_800_000_000.5,
)
BINDING = Binding(
    placeholder_id=PlaceholderId("ph_1"),
    caller=CALLER,
    credential_id=CredentialId("cred_1"),
    credential_name="example",
    version=3,
    grant_ids=(GrantId("grant_1"), GrantId("grant_2")),
    destinations=(DESTINATION,),
    placements=(BEARER, BasicPlacement("x-access-token"), QueryPlacement("key")),
    scopes=(SCOPE, GrantScope()),
    expires_at=1_800_000_900.0,
    max_stale_seconds=30.0,
    provider="anthropic",
)
LIMITS = (
    BoundLimit("lim_1", Measure.REQUESTS, amount=1_000, window_seconds=60, bucket="ab12"),
    BoundLimit("lim_2", Measure.TOKENS, amount=5_000_000, window_seconds=86_400),
)
POLICY = Policy(
    caller=CALLER,
    routes=(
        Route(
            credential_name="example",
            credential_id=CredentialId("cred_1"),
            destinations=(DESTINATION,),
            scopes=(SCOPE,),
            placements=(BEARER,),
            credential_required=True,
        ),
    ),
    allow=(AllowRule("files.example.com", 8443, frozenset({"GET"}), allow_private=True, id="allow_1"),),
)
REFUSED = Refused(
    code=RefusalCode.UNKNOWN_PLACEHOLDER,
    detail="no such placeholder",
    hint="exchange again",
    true_code=RefusalCode.CALLER_MISMATCH,
    binding=BINDING,
)
AUDIT_EVENT = AuditEvent(
    event_id="evt_1",
    at=1_800_000_000.25,
    request_id="req_1",
    action="refuse",
    tenant="acme",
    subject="alice",
    session="ses_1",
    client="runtime-1",
    code=RefusalCode.UNKNOWN_PLACEHOLDER,
    true_code=RefusalCode.CALLER_MISMATCH,
    detail="no such placeholder",
    hint="exchange again",
    credential="example",
    version=3,
    placeholder_id="ph_1",
    method="POST",
    scheme="https",
    host="api.example.com",
    port=443,
    path="/v1/{placeholder:ph_1}",
    status=403,
    listener="forward",
    proxy="proxy-1",
    extra={"note": "x"},
)


def _answer(answer: CallerFacts | WorkloadFacts | Policy | ResolvedPlaceholder | Refused) -> ResolveAnswer:
    return ResolveAnswer(answer, epoch="e1", as_of=42)


MESSAGES: dict[str, tuple[TypeAdapter[Any], object]] = {
    "resolve_request.caller": (RESOLVE_REQUEST, ResolveRequest(AskCaller("ab" * 32))),
    "resolve_request.policy": (RESOLVE_REQUEST, ResolveRequest(AskPolicy(SESSIONLESS))),
    "resolve_request.placeholder": (RESOLVE_REQUEST, ResolveRequest(AskPlaceholder("cd" * 32, CALLER, ENDPOINT))),
    "resolve_request.workload_token": (RESOLVE_REQUEST, ResolveRequest(AskWorkload("ef" * 32, token="e30.e30.c2ln"))),
    "resolve_request.certificate": (RESOLVE_REQUEST, ResolveRequest(AskWorkload("ef" * 32, certificate="MIIB"))),
    "resolve_answer.caller": (RESOLVE_ANSWER, _answer(CallerFacts(CALLER, 1_800_000_900.0))),
    "resolve_answer.workload": (
        RESOLVE_ANSWER,
        _answer(
            WorkloadFacts(
                ClientId("ci-1"), 1_800_000_900.0, tenant=TenantId("acme"), subject=SubjectId("ci"), issuer="cluster-a"
            )
        ),
    ),
    "resolve_answer.policy": (RESOLVE_ANSWER, _answer(POLICY)),
    "resolve_answer.placeholder": (RESOLVE_ANSWER, _answer(ResolvedPlaceholder(BINDING, REAL))),
    "resolve_answer.refused": (RESOLVE_ANSWER, _answer(REFUSED)),
    "resolve_answer.placeholder.limits": (
        RESOLVE_ANSWER,
        replace(
            _answer(ResolvedPlaceholder(replace(BINDING, limits=LIMITS), REAL)),
            must_understand=("limits",),
        ),
    ),
    "quota_request": (
        QUOTA_REQUEST,
        QuotaRequest(
            (QuotaEntry("lim_1", "ab12", wanted=1), QuotaEntry("lim_2", used=7, returned=3, window=1_800_000))
        ),
    ),
    "quota_answer": (
        QUOTA_ANSWER,
        QuotaAnswer(
            (
                QuotaGrant("lim_1", "ab12", granted=50, window=1_800_000, ends_in_seconds=12.5),
                QuotaGrant("lim_2", "", granted=0, window=0, ends_in_seconds=0.0, exists=False),
            )
        ),
    ),
    "tag_keys": (TAG_KEYS, TagKeys(("ab" * 32, "cd" * 32), epoch="e1", as_of=42)),
    "event": (EVENT, Event(43, "e1", "placeholder", tenant="acme", id="ph_1", revoked=True)),
    "event.heartbeat": (EVENT, Event(43, "e1", "heartbeat")),
    "audit_batch": (AUDIT_BATCH, AuditBatch((AUDIT_EVENT,), dropped=2)),
}
