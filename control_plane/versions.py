"""The versions of a credential, written as its lineage says (`core.rotation.Lineage`).

Rule: whoever calls holds the credential's lock (`ports.Credentials.locked`). What is over is no longer kept: its
envelope goes in the transaction that ends it.
"""

from contextlib import suppress
from dataclasses import dataclass, replace

from control_plane.contract.secret import Secret
from control_plane.core.records import Credential, CredentialVersion, RotationPhase, VersionState
from control_plane.core.rotation import OVER, Lineage
from control_plane.custody import Custody, UnopenableError, open_secret, seal_secret
from control_plane.faults import reach
from control_plane.ports import Clock, Records


@dataclass(frozen=True, slots=True)
class Versions:
    custody: Custody
    clock: Clock

    async def lineage(self, records: Records, credential: Credential) -> Lineage:
        return Lineage.of(await records.versions.of(credential.id))

    async def write(
        self, records: Records, credential: Credential, lineage: Lineage, *, secret: Secret | None = None
    ) -> Credential:
        """The versions as `lineage` has them; `secret` is the new one's. Gives the credential with its current version.

        `credential` is as it shall be stored: the secret is sealed to where it may go.
        """
        known = {version.version: version for version in await records.versions.of(credential.id)}
        # What is left comes before what is entered: there are never two active ones.
        for number, state in sorted(lineage.states.items(), key=lambda item: item[1] is VersionState.ACTIVE):
            if number not in known:
                assert secret is not None, "a new version has a secret"
                await records.versions.add(self._sealed(secret, credential, number, state))
            elif known[number].state is not state:
                await records.versions.replace(_moved(known[number], state))
                if state in OVER:
                    await records.minted.forget(credential.id, number)
        credential = replace(credential, current_version=lineage.active or credential.current_version)
        await records.credentials.replace(credential)
        reach("version.written")
        return credential

    async def replace_all(
        self, records: Records, credential: Credential, secret: Secret, *, over: VersionState, reason: str
    ) -> Credential:
        """A new version at once; everything before it is over, a rotation that was under way, too."""
        await self.overtake(records, credential, reason=reason)
        lineage = (await self.lineage(records, credential)).replaced(by_state=over)
        return await self.write(records, credential, lineage, secret=secret)

    async def overtake(self, records: Records, credential: Credential, *, reason: str) -> None:
        """Ends a rotation that is under way; what becomes of its versions is its caller's to write."""
        rotation = await records.rotations.of(credential.id)
        if rotation is not None and rotation.is_running:
            now = self.clock()
            over = replace(rotation, phase=RotationPhase.OVERTAKEN, since=now, ends_at=None, reason=reason)
            await records.rotations.put(replace(over, probe_sha256=None, probe_due_at=None))
            await records.rotations.forget_replies(credential.id)

    async def sealed_again(self, records: Records, old: Credential, new: Credential) -> None:
        """Every envelope of `old`, sealed to what `new` says. One that does not open stays as it is: closed."""
        for version in await records.versions.of(old.id):
            if version.state in OVER:
                continue
            with suppress(UnopenableError):
                secret = open_secret(self.custody, version, old)
                sealed = seal_secret(self.custody, secret, new, version=version.version)
                await records.versions.replace(replace(version, envelope=sealed.envelope, kek_id=sealed.kek_id))
                await records.minted.discard(old.id, version.version)

    def _sealed(self, secret: Secret, credential: Credential, number: int, state: VersionState) -> CredentialVersion:
        sealed = seal_secret(self.custody, secret, credential, version=number)
        return CredentialVersion(
            credential_id=credential.id,
            version=number,
            tenant=credential.tenant,
            state=state,
            kek_id=sealed.kek_id,
            envelope=sealed.envelope,
            created_at=self.clock(),
        )


def _moved(version: CredentialVersion, state: VersionState) -> CredentialVersion:
    if state in OVER:
        return replace(version, state=state, envelope=None, kek_id=None)
    return replace(version, state=state)
