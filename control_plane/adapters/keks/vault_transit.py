"""A key-encryption key in Vault's transit engine. https://developer.hashicorp.com/vault/api-docs/secret/transit

Rule: the place that a data key is wrapped for is its associated data, so the key's type is an AEAD: `aes256-gcm96` (the
default) or `chacha20-poly1305`. Rotating the key inside Vault is no change of the ring: Vault keeps its old versions.
"""

import base64
import hashlib
from collections.abc import Callable
from typing import Any, Final

import hvac
from hvac.exceptions import InvalidRequest

from control_plane.adapters.keks.aws_kms import kek_error
from control_plane.adapters.sources.asking import in_thread
from control_plane.adapters.sources.auth_files import ReadAuthFile
from control_plane.adapters.vault import VaultDoor
from control_plane.core.sources import VaultAuth
from control_plane.ports import KekError, KekFailure, Outbound, SourceError


class VaultTransitKek:
    provider: Final = "Vault transit"

    def __init__(
        self,
        outbound: Outbound,
        *,
        address: str,
        namespace: str | None,
        mount: str,
        key: str,
        auth: VaultAuth,
        read_auth_file: ReadAuthFile,
    ) -> None:
        named = "\0".join((address, namespace or "", mount, key))
        self.id: Final = "vault-" + hashlib.sha256(named.encode()).hexdigest()[:16]
        self.place: Final = f"{mount}/keys/{key} at {address}"
        self._mount = mount
        self._key = key
        self._door = VaultDoor(outbound, address=address, namespace=namespace, auth=auth, read_auth_file=read_auth_file)

    async def wrap(self, data_key: bytes, *, context: bytes) -> bytes:
        def question(vault: hvac.Client) -> bytes:
            answer = vault.secrets.transit.encrypt_data(
                name=self._key, plaintext=_base64(data_key), associated_data=_base64(context), mount_point=self._mount
            )
            return bytes(answer["data"]["ciphertext"].encode("ascii"))

        return await self._asked(question)

    async def unwrap(self, wrapped: bytes, *, context: bytes) -> bytes:
        def question(vault: hvac.Client) -> bytes:
            try:
                answer = vault.secrets.transit.decrypt_data(
                    name=self._key,
                    ciphertext=wrapped.decode("ascii", "replace"),
                    associated_data=_base64(context),
                    mount_point=self._mount,
                )
            except InvalidRequest:
                # Another key's, another place's, or edited: Vault calls all of them a bad request.
                raise KekError(KekFailure.UNOPENABLE, "Vault does not open it") from None
            return base64.b64decode(answer["data"]["plaintext"], validate=True)

        return await self._asked(question)

    async def _asked(self, question: Callable[[Any], bytes]) -> bytes:
        try:
            return await in_thread(lambda: self._door.ask(question))
        except SourceError as error:
            raise kek_error(error, nothing=KekFailure.DENIED) from None


def _base64(raw: bytes) -> str:
    return base64.b64encode(raw).decode("ascii")
