"""Direct mode: when the key itself may be handed out. Almost never.

Rule: it takes all of these, and nothing that answers or does not answer changes them: the installation is for one
tenant, the credential allows it, and no injector is registered. Where an injector is registered but silent the answer
is 503, since a fall-back to handing out keys is what this product is against (ADR 0022).
"""

from typing import Final

from control_plane.contract.kinds import is_placed
from control_plane.contract.refusal import Refusal, RefusalCode, RefusedError
from control_plane.contract.secret import Secret
from control_plane.core.oauth import invalid_request
from control_plane.core.records import Credential
from control_plane.custody import UnopenableError
from control_plane.injectors import require_one_heard
from control_plane.material import Material, NotAtHandError
from control_plane.ports import Clock, CrossTenantReason, PlatformScope, Records, Store
from control_plane.proof import Proof


class DirectMode:
    def __init__(self, store: Store, material: Material, *, clock: Clock, is_single_tenant: bool) -> None:
        self._store = store
        self._material = material
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
        # A document to sign or prove with is nobody's key: it never leaves for a client.
        if not credential.allow_direct or not is_placed(credential.kind):
            raise RefusedError(DIRECT_NOT_ALLOWED)
        version = await records.versions.get(credential.id, credential.current_version)
        try:
            current = await self._material.current(records, credential, version)
        except UnopenableError:
            raise RefusedError(DOES_NOT_OPEN) from None
        except NotAtHandError as missing:
            self._material.begin(missing.needed)  # whoever asks again finds it
            raise RefusedError(NOT_YET) from None
        return current.secret


DIRECT_NOT_ALLOWED: Final = Refusal(
    RefusalCode.DIRECT_NOT_ALLOWED,
    "a proxy swaps placeholders here, so keys are never handed out",
    "leave requested_token_type out",
)
NOT_YET: Final = Refusal(
    RefusalCode.CREDENTIAL_UNAVAILABLE,
    "the credential's token is being fetched",
    "try again in a moment",
    retry_after_seconds=1,
)
DOES_NOT_OPEN: Final = Refusal(
    RefusalCode.CREDENTIAL_UNAVAILABLE,
    "the credential's secret does not open",
    "an operator looks whether a key-encryption key is missing (GET /readyz); if none is, submits the secret again: "
    "coatcheck credential rotate NAME",
)
