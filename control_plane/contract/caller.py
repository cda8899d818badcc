"""Who is asking: the attested identity of whoever talks to the proxy.

Rule: a `Caller` is only ever built from what the control plane signed or stored, never from what a workload says.
"""

from dataclasses import dataclass
from typing import NewType

TenantId = NewType("TenantId", str)
SubjectId = NewType("SubjectId", str)
SessionId = NewType("SessionId", str)
ClientId = NewType("ClientId", str)
CredentialId = NewType("CredentialId", str)
PlaceholderId = NewType("PlaceholderId", str)
GrantId = NewType("GrantId", str)


@dataclass(frozen=True, slots=True)
class Caller:
    """The tuple that a placeholder is bound to. An absent session matches only an absent session."""

    client: ClientId
    tenant: TenantId
    subject: SubjectId
    session: SessionId | None
