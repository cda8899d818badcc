"""A new version tried before anybody uses it: one request through the proxy, as everybody's requests go.

Rule: the probe's placeholder stands for the pending version and nobody else's does; it may make the declared request
and no other, and it is worth nothing once the probe is over. Whatever is not clearly the upstream's "yes" or "no" is
unknown.
"""

from dataclasses import dataclass
from typing import Final

from control_plane.contract.caller import Caller, SubjectId
from control_plane.contract.placeholder import fingerprint
from control_plane.core.names import ID_ENTROPY_BYTES, new_id
from control_plane.core.presets import probe_of
from control_plane.core.probe import Probe, request_of
from control_plane.core.records import Credential, ProbeResult
from control_plane.core.rotation import PROBE_CLIENT, probe_result
from control_plane.issuance import Issuance, Mandate
from control_plane.ports import Entropy, ProbeCall, ProbeCaller, ProbeUnansweredError, Records

SECONDS: Final = 10.0
"""For the whole probe; the proxy's own wait for an address to answer is within it."""
LEASE_SECONDS: Final = 30
"""After that somebody else tries: whoever was at it is gone."""


@dataclass(frozen=True, slots=True)
class ProbeOutcome:
    result: ProbeResult
    status: int | None
    detail: str


@dataclass(frozen=True, slots=True, repr=False)
class ReadyProbe:
    """A probe that can be made. Never logged: it holds a placeholder and a proxy credential."""

    call: ProbeCall
    probe: Probe
    placeholder_sha256: str


class Prober:
    def __init__(self, issuance: Issuance, caller: ProbeCaller, *, entropy: Entropy) -> None:
        self._issuance = issuance
        self._caller = caller
        self._entropy = entropy

    async def prepare(self) -> None:
        """Before the transaction of `ready`. Raises `RefusedError`."""
        await self._issuance.prepare()

    async def ready(self, records: Records, credential: Credential) -> ReadyProbe | None:
        """With a placeholder and a proxy credential of its own, recorded. None: it has none any more."""
        probe = probe_of(credential)
        if probe is None:
            return None
        # A caller that there never was before, so that no proxy remembers what it might do.
        nonce = new_id("try", self._entropy(ID_ENTROPY_BYTES))
        caller = Caller(PROBE_CLIENT, credential.tenant, SubjectId(f"{credential.id}.{nonce}"), None)
        issued = await self._issuance.new(
            records, Mandate(caller, roles=(), not_after=None), credential, ttl_seconds=LEASE_SECONDS
        )
        request = request_of(probe, credential.placements[0], placeholder=issued.placeholder.value)
        call = ProbeCall(
            method=request.method,
            target=f"/{credential.name}{request.target}",
            headers=request.headers,
            proxy_credential=issued.proxy_credential,
            seconds=SECONDS,
        )
        return ReadyProbe(call, probe, fingerprint(issued.placeholder.value))

    async def ask(self, ready: ReadyProbe) -> ProbeOutcome:
        """What the upstream says to the pending version. Never raises: no answer is an outcome."""
        try:
            reply = await self._caller.call(ready.call)
        except ProbeUnansweredError as error:
            return ProbeOutcome(ProbeResult.UNKNOWN, None, str(error))
        if reply.refusal:
            return ProbeOutcome(ProbeResult.UNKNOWN, None, f"the egress proxy refused it: {reply.refusal}")
        result = probe_result(reply.status, rejected=ready.probe.rejected)
        return ProbeOutcome(result, reply.status, f"the upstream answered {reply.status}")
