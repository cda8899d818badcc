"""When credentials were used, as the proxies' audit events say.

Rule: a request counts where its secret went along (`swap`). Of a batch, one entry for each subject, client, credential
and host: what is written does not grow with the traffic.
"""

from collections.abc import Iterable, Sequence

from control_plane.contract.caller import ClientId, SubjectId, TenantId
from control_plane.contract.wire import AuditEvent
from control_plane.core.records import NewUse

SWAP = "swap"


def uses_in(events: Iterable[AuditEvent]) -> Sequence[NewUse]:
    """What the events say was used."""
    found: dict[tuple[str, str, str, str, str], tuple[float, int]] = {}
    for event in events:
        if event.action != SWAP or not (event.tenant and event.subject and event.client and event.credential):
            continue
        key = (event.tenant, event.subject, event.client, event.credential, event.host or "")
        at, requests = found.get(key, (0.0, 0))
        found[key] = (max(at, event.at), requests + 1)
    return [
        NewUse(TenantId(tenant), SubjectId(subject), ClientId(client), credential, host, at, requests)
        for (tenant, subject, client, credential, host), (at, requests) in sorted(found.items())
    ]
