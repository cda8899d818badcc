"""One decision as the trail has it: names, never values, and of the path what the decision says of it."""

from control_plane.contract.refusal import Refusal
from control_plane.contract.wire import AuditEvent, Binding
from egress_proxy.core.decision import Connection, Forward, Refuse
from egress_proxy.core.http1 import RequestHead
from egress_proxy.services import Services


def event_of(
    action: str,
    services: Services,
    *,
    connection: Connection,
    request_id: str,
    head: RequestHead | None,
    refusal: Refusal | None = None,
    decided: Refuse | None = None,
    forward: Forward | None = None,
    status: int | None = None,
    binding: Binding | None = None,
) -> AuditEvent:
    """`head`: None where there was none that could be read. `binding`: of several, which it is about."""
    facts = forward or decided
    caller = facts.caller if facts is not None else None
    endpoint = facts.endpoint if facts is not None else connection.tunnel
    if binding is None and forward is not None:
        binding = forward.bindings[0] if forward.bindings else None
    elif binding is None:
        binding = decided.binding if decided is not None else None
    return AuditEvent(
        event_id=services.request_ids.next(),
        at=services.clock(),
        request_id=request_id,
        action=action,
        tenant=caller.tenant if caller else None,
        subject=caller.subject if caller else None,
        session=caller.session if caller else None,
        client=caller.client if caller else None,
        code=refusal.code if refusal else None,
        true_code=refusal.audited_code if refusal else None,
        detail=refusal.detail if refusal else "",
        hint=refusal.hint if refusal else "",
        credential=binding.credential_name if binding else None,
        version=binding.version if binding else None,
        placeholder_id=binding.placeholder_id if binding else None,
        method=head.method if head is not None else None,
        scheme=endpoint.scheme if endpoint else None,
        host=endpoint.host if endpoint else None,
        port=endpoint.port if endpoint else None,
        path=facts.path if facts is not None else None,
        status=refusal.status if refusal else status,
        listener=connection.mode.value,
        proxy=services.proxy_id,
    )
