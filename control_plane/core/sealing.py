"""What an envelope is sealed to: the additional authenticated data (AAD) of AES-GCM.

Rule: everything that decides where a secret goes is in here, with the row it belongs to. A blob moved to another row,
or a row edited in the database, then does not open. Canonical JSON: sorted keys, no spaces, ASCII.
"""

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from control_plane.contract.destination import destination_to_json
from control_plane.contract.placement import placement_to_json
from control_plane.core.records import Credential, KeyPurpose, Source


@dataclass(frozen=True, slots=True, repr=False)
class Kek:
    """One key-encryption key. Its id is a digest of it, so that a file keeps its id wherever it is mounted."""

    id: str
    key: bytes
    place: str = field(default="", compare=False)
    """The file that it came from, for people."""

    @classmethod
    def of(cls, key: bytes, *, place: str = "") -> "Kek":
        return cls(id=hashlib.sha256(b"coatcheck kek id\0" + key).hexdigest()[:16], key=key, place=place)

    def __repr__(self) -> str:
        return f"Kek({self.id})"


def credential_aad(credential: Credential, *, version: int) -> bytes:
    """The order of destinations and placements takes part: the first is where a reverse route leads.

    What a credential does not have is not named, so that envelopes from before it could have it still open.
    """
    return _canonical(_facts(credential, version=version))


def minted_aad(credential: Credential, *, version: int, expires_at: float | None) -> bytes:
    """What was minted goes where its credential's secret goes, and for no longer than the provider said."""
    return _canonical({**_facts(credential, version=version), "sealed": "minted", "expires_at": expires_at})


def own_key_aad(*, key_id: str, purpose: KeyPurpose) -> bytes:
    return _canonical({"sealed": "own key", "key": key_id, "purpose": purpose.value})


def _facts(credential: Credential, *, version: int) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "sealed": "credential",
        "tenant": credential.tenant,
        "credential": credential.id,
        "version": version,
        "kind": credential.kind,
        "destinations": [destination_to_json(destination) for destination in credential.destinations],
        "placements": [placement_to_json(placement) for placement in credential.placements],
    }
    if credential.settings:
        facts["settings"] = dict(credential.settings)
    if credential.secret_source is not None:
        facts["source"] = dict(credential.secret_source)
    if credential.allow_direct:
        facts["allow_direct"] = True
    return facts


def source_aad(source: Source) -> bytes:
    """Everything that decides what is read, from where, and who may name it."""
    return _canonical(
        {
            "sealed": "source",
            "source": source.name,
            "kind": source.kind.value,
            "settings": dict(source.settings),
            "path_template": source.path_template,
            "ttl_seconds": float(source.ttl_seconds),
            "tenants": None if source.tenants is None else list(source.tenants),
        }
    )


def _canonical(facts: dict[str, Any]) -> bytes:
    return json.dumps(facts, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode("ascii")
