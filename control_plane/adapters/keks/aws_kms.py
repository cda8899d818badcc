"""A key-encryption key in AWS KMS. https://docs.aws.amazon.com/kms/latest/APIReference/API_Encrypt.html

Rule: the place that a data key is wrapped for is its encryption context, as a digest, because AWS writes contexts into
its own trail in the clear. KMS rotates what is inside a key by itself; that is no change of the ring.
"""

import hashlib
from typing import Any, Final

from control_plane.adapters.aws import AwsDoor
from control_plane.adapters.sources.asking import in_thread
from control_plane.adapters.sources.auth_files import ReadAuthFile
from control_plane.core.sources import AwsAuth
from control_plane.ports import KekError, KekFailure, Outbound, SourceError, SourceFailure

_CONTEXT: Final = "coatcheck-place"
_NOT_THIS: Final = ("InvalidCiphertextException", "IncorrectKeyException")


class AwsKmsKek:
    provider: Final = "AWS KMS"

    def __init__(
        self,
        outbound: Outbound,
        *,
        key_arn: str,
        region: str,
        endpoint: str | None,
        auth: AwsAuth,
        read_auth_file: ReadAuthFile,
    ) -> None:
        self.id: Final = "aws-" + hashlib.sha256(key_arn.encode()).hexdigest()[:16]
        self.place: Final = key_arn
        self._key_arn = key_arn
        self._door = AwsDoor(
            outbound,
            service="kms",
            region=region,
            endpoint=endpoint,
            sts_endpoint=endpoint,
            auth=auth,
            read_auth_file=read_auth_file,
        )

    async def wrap(self, data_key: bytes, *, context: bytes) -> bytes:
        return await self._asked(
            lambda kms: kms.encrypt(KeyId=self._key_arn, Plaintext=data_key, EncryptionContext=_named(context)),
            "CiphertextBlob",
            nothing=KekFailure.DENIED,
        )

    async def unwrap(self, wrapped: bytes, *, context: bytes) -> bytes:
        return await self._asked(
            lambda kms: kms.decrypt(KeyId=self._key_arn, CiphertextBlob=wrapped, EncryptionContext=_named(context)),
            "Plaintext",
            nothing=KekFailure.UNOPENABLE,
        )

    async def _asked(self, question: Any, field: str, *, nothing: KekFailure) -> bytes:
        try:
            answer: bytes = await in_thread(
                lambda: self._door.ask(lambda kms: bytes(question(kms)[field]), gone=_NOT_THIS)
            )
        except SourceError as error:
            raise kek_error(error, nothing=nothing) from None
        return answer


def kek_error(error: SourceError, *, nothing: KekFailure) -> KekError:
    match error.failure:
        case SourceFailure.NOT_FOUND:
            return KekError(nothing, error.detail)
        case SourceFailure.UNAVAILABLE:
            return KekError(KekFailure.UNAVAILABLE, error.detail)
        case SourceFailure.DENIED | SourceFailure.UNUSABLE | SourceFailure.MISCONFIGURED:
            return KekError(KekFailure.DENIED, error.detail)


def _named(context: bytes) -> dict[str, str]:
    return {_CONTEXT: hashlib.sha256(context).hexdigest()}
