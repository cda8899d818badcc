"""The `aws_secrets_manager` source. https://docs.aws.amazon.com/secretsmanager/latest/apireference/API_GetSecretValue.html

A secret is the whole `SecretString`, or one field of it where the source names a field and the string is a JSON object.
"""

import json
from collections.abc import Mapping
from typing import Any

from control_plane.adapters.aws import AwsDoor
from control_plane.adapters.sources.asking import in_thread
from control_plane.adapters.sources.auth_files import ReadAuthFile
from control_plane.contract.secret import Secret
from control_plane.core.records import Source
from control_plane.core.sources import AwsPlace, aws_place
from control_plane.ports import Outbound, SourceError, SourceFailure

_MARKED_FOR_DELETION = "InvalidRequestException"


class SecretsManagerReader:
    def __init__(self, outbound: Outbound, read_auth_file: ReadAuthFile) -> None:
        self._outbound = outbound
        self._read_auth_file = read_auth_file
        self._doors: dict[str, tuple[AwsPlace, AwsDoor]] = {}

    async def read(self, source: Source, *, path: str, field: str | None) -> Secret:
        door = self._door(source.name, aws_place(source))
        return await in_thread(lambda: _value(door.ask(_asking_for(path), gone=(_MARKED_FOR_DELETION,)), field))

    def _door(self, name: str, place: AwsPlace) -> AwsDoor:
        known = self._doors.get(name)
        if known is not None and known[0] == place:
            return known[1]
        door = AwsDoor(
            self._outbound,
            service="secretsmanager",
            region=place.region,
            endpoint=place.endpoint,
            sts_endpoint=place.endpoint,
            auth=place.auth,
            read_auth_file=self._read_auth_file,
        )
        self._doors[name] = (place, door)
        return door


def _asking_for(path: str) -> Any:
    return lambda client: client.get_secret_value(SecretId=path).get("SecretString")


def _value(text: Any, field: str | None) -> Secret:
    if not isinstance(text, str):
        raise SourceError(SourceFailure.UNUSABLE, "the secret at AWS is binary, not text")
    if field is None:
        return Secret(text)
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, Mapping):
        raise SourceError(SourceFailure.UNUSABLE, "the secret at AWS is no JSON object, and a field of it was agreed")
    if field not in fields:
        raise SourceError(SourceFailure.NOT_FOUND, "the secret at AWS has no field of the agreed name")
    if not isinstance(fields[field], str):
        raise SourceError(SourceFailure.UNUSABLE, "the field in the secret at AWS is no text")
    return Secret(fields[field])
