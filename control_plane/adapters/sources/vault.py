"""The `vault` source: HashiCorp Vault's KV secrets engine, versions 1 and 2.

https://developer.hashicorp.com/vault/api-docs/secret/kv/kv-v2, …/kv-v1
"""

from collections.abc import Mapping
from typing import Any

import hvac

from control_plane.adapters.sources.asking import in_thread
from control_plane.adapters.sources.auth_files import ReadAuthFile
from control_plane.adapters.vault import VaultDoor
from control_plane.contract.secret import Secret
from control_plane.core.records import Source
from control_plane.core.sources import VaultPlace, vault_place
from control_plane.ports import Outbound, SourceError, SourceFailure


class VaultReader:
    def __init__(self, outbound: Outbound, read_auth_file: ReadAuthFile) -> None:
        self._outbound = outbound
        self._read_auth_file = read_auth_file
        self._doors: dict[str, tuple[VaultPlace, VaultDoor]] = {}

    async def read(self, source: Source, *, path: str, field: str | None) -> Secret:
        place = vault_place(source)
        door = self._door(source.name, place)
        return await in_thread(lambda: _value(door.ask(lambda client: _fields(client, place, path)), field or "value"))

    def _door(self, name: str, place: VaultPlace) -> VaultDoor:
        """A source that was changed gets a door of its own: what was logged in to the old address stays there."""
        known = self._doors.get(name)
        if known is not None and known[0] == place:
            return known[1]
        door = VaultDoor(
            self._outbound,
            address=place.address,
            namespace=place.namespace,
            auth=place.auth,
            read_auth_file=self._read_auth_file,
        )
        self._doors[name] = (place, door)
        return door


def _fields(client: hvac.Client, place: VaultPlace, path: str) -> Mapping[str, Any]:
    if place.kv_version == 1:
        answer = client.secrets.kv.v1.read_secret(path=path, mount_point=place.mount)
        fields = answer["data"]
    else:
        answer = client.secrets.kv.v2.read_secret_version(
            path=path, mount_point=place.mount, raise_on_deleted_version=True
        )
        fields = answer["data"]["data"]
    if not isinstance(fields, Mapping):
        raise TypeError("fields are an object")
    return fields


def _value(fields: Mapping[str, Any], field: str) -> Secret:
    if field not in fields:
        raise SourceError(SourceFailure.NOT_FOUND, "the secret in Vault has no field of the agreed name")
    value = fields[field]
    if not isinstance(value, str):
        raise SourceError(SourceFailure.UNUSABLE, "the field in Vault is no text")
    return Secret(value)
