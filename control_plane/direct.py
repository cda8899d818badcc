"""Direct mode: when the key itself may be handed out. Almost never.

Rule: it takes all of these, and nothing that answers or does not answer changes them: the installation is for one
tenant, the credential allows it, and no injector is registered. Where an injector is registered but silent the answer
is 503, since a fall-back to handing out keys is what this product is against (ADR 0012).
"""

from typing import Final

from control_plane.contract.refusal import Refusal, RefusalCode, RefusedError
from control_plane.contract.secret import Secret
from control_plane.core.oauth import invalid_request
from control_plane.core.records import Credential
from control_plane.custody import Custody, UnopenableError, open_secret
from control_plane.injectors import require_one_heard
from control_plane.ports import Clock, CrossTenantReason, PlatformScope, Records, Store
from control_plane.proof import Proof


class DirectMode:
    def __init__(self, store: Store, custody: Custody, *, clock: Clock, is_single_tenant: bool) -> None:
        self._store = store
        self._custody = custody
        self._clock = clock
        self._is_single_tenant = is_single_tenant

    async def require_possible(self, proof: Proof) -> None:
        """What does not depend on the credential. Raises `RefusedError`."""
        if proof.token_id is None:
            raise invalid_request(
                "a key is handed out for a token, once", hint="subject_token is a session token, not a session's id"
            )
        if not self._is_single_tenant:
            raise RefusedError(DIRECT_NOT_ALLOWED)
        async with self._store.read(PlatformScope(CrossTenantReason.AUTHENTICATE)) as records:
            tenants = await records.tenants.list()
            injectors = await records.injectors.list()
        require_one_heard(injectors, self._clock())
        if injectors or len(tenants) != 1:
            raise RefusedError(DIRECT_NOT_ALLOWED)

    async def key(self, records: Records, credential: Credential) -> Secret:
        """The credential's secret, in the transaction that records that it was handed out. Raises `RefusedError`."""
        if not credential.allow_direct:
            raise RefusedError(DIRECT_NOT_ALLOWED)
        version = await records.versions.get(credential.id, credential.current_version)
        try:
            return open_secret(self._custody, version, credential)
        except UnopenableError:
            raise RefusedError(DOES_NOT_OPEN) from None


DIRECT_NOT_ALLOWED: Final = Refusal(
    RefusalCode.DIRECT_NOT_ALLOWED,
    "a proxy swaps placeholders here, so keys are never handed out",
    "leave requested_token_type out",
)
DOES_NOT_OPEN: Final = Refusal(
    RefusalCode.CREDENTIAL_UNAVAILABLE,
    "the credential's secret does not open",
    "an operator submits it again with: coatcheck credential rotate NAME",
)
