"""What an envelope is sealed to: the additional authenticated data (AAD) of AES-GCM.

Rule: everything that decides where a secret goes is in here, with the row it belongs to. A blob moved to another row,
or a row edited in the database, then does not open. Canonical JSON: sorted keys, no spaces, ASCII.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from control_plane.contract.caller import CredentialId, TenantId
from control_plane.contract.destination import Destination, destination_to_json
from control_plane.contract.placement import Placement, placement_to_json
from control_plane.core.records import KeyPurpose


@dataclass(frozen=True, slots=True, repr=False)
class Kek:
    """One key-encryption key. Its id is a digest of it, so that a file keeps its id wherever it is mounted."""

    id: str
    key: bytes

    @classmethod
    def of(cls, key: bytes) -> "Kek":
        return cls(id=hashlib.sha256(b"coatcheck kek id\0" + key).hexdigest()[:16], key=key)

    def __repr__(self) -> str:
        return f"Kek({self.id})"


def credential_aad(
    *,
    tenant: TenantId,
    credential_id: CredentialId,
    version: int,
    kind: str,
    destinations: Sequence[Destination],
    placements: Sequence[Placement],
) -> bytes:
    """The order of destinations and placements takes part: the first is where a reverse route leads."""
    return _canonical(
        {
            "sealed": "credential",
            "tenant": tenant,
            "credential": credential_id,
            "version": version,
            "kind": kind,
            "destinations": [destination_to_json(destination) for destination in destinations],
            "placements": [placement_to_json(placement) for placement in placements],
        }
    )


def own_key_aad(*, key_id: str, purpose: KeyPurpose) -> bytes:
    return _canonical({"sealed": "own key", "key": key_id, "purpose": purpose.value})


def _canonical(facts: dict[str, Any]) -> bytes:
    return json.dumps(facts, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode("ascii")
