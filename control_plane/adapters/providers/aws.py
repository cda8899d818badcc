"""Temporary keys of an AWS role (AssumeRole of AWS's Security Token Service).

Rule: botocore signs and reads, and does nothing else here: no session, no client, no configuration, no connection.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import Any, Final
from urllib.parse import urlencode

import botocore.auth
import botocore.awsrequest
import botocore.credentials
import botocore.loaders
import botocore.model
import botocore.parsers

from control_plane.adapters.providers.token_endpoint import SECONDS, send
from control_plane.contract.secret import Secret
from control_plane.core.kinds import AwsAssumeRoleSettings, KindSettings
from control_plane.ports import Outbound, OutboundReply, OutboundRequest, ProviderAnswer, ProviderError, ProviderFailure

F = ProviderFailure

_CLIENT_CODES: Final = frozenset(
    "InvalidClientTokenId SignatureDoesNotMatch ExpiredToken ExpiredTokenException IncompleteSignature "
    "UnrecognizedClientException MissingAuthenticationToken OptInRequired".split()
)
_REQUEST_CODES: Final = frozenset(
    "AccessDenied AccessDeniedException ValidationError MalformedPolicyDocument PackedPolicyTooLarge "
    "RegionDisabledException RegionDisabled InvalidParameterValue MissingParameter InvalidAction".split()
)


@dataclass(frozen=True, slots=True)
class AwsAssumeRole:
    outbound: Outbound

    async def mint(self, settings: KindSettings, secret: Secret, *, now: float) -> ProviderAnswer:
        assert isinstance(settings, AwsAssumeRoleSettings)
        found = _parsed(await send(self.outbound, _signed(settings, json.loads(secret.reveal()))))
        keys = found.get("Credentials", {})
        texts = [keys.get(name) for name in ("AccessKeyId", "SecretAccessKey", "SessionToken")]
        end = keys.get("Expiration")
        if not all(isinstance(text, str) and text for text in texts) or not isinstance(end, datetime):
            raise ProviderError(F.UNUSABLE)
        document = {
            "access_key_id": texts[0],
            "secret_access_key": texts[1],
            "session_token": texts[2],
            "region": settings.region,
            "service": settings.service,
        }
        return ProviderAnswer(Secret(json.dumps(document)), end.timestamp() - now)


def _signed(settings: AwsAssumeRoleSettings, keys: Mapping[str, str]) -> OutboundRequest:
    form = {
        "Action": "AssumeRole",
        "Version": "2011-06-15",
        "RoleArn": settings.role_arn,
        "RoleSessionName": settings.session_name,
        "DurationSeconds": str(settings.duration_seconds),
        **({"ExternalId": settings.external_id} if settings.external_id is not None else {}),
    }
    body = urlencode(form).encode()
    request = botocore.awsrequest.AWSRequest(
        "POST",
        settings.sts_endpoint,
        data=body,
        headers={"Content-Type": "application/x-www-form-urlencoded; charset=utf-8"},
    )
    credentials = botocore.credentials.Credentials(
        keys["access_key_id"], keys["secret_access_key"], keys.get("session_token")
    )
    botocore.auth.SigV4Auth(credentials, "sts", settings.region).add_auth(request)
    return OutboundRequest("POST", settings.sts_endpoint, dict(request.headers.items()), body, seconds=SECONDS)


def _parsed(reply: OutboundReply) -> dict[str, Any]:
    try:
        found: dict[str, Any] = botocore.parsers.create_parser("query").parse(
            {"headers": dict(reply.headers), "body": reply.body, "status_code": reply.status}, _answer_shape()
        )
    except (botocore.parsers.ResponseParserError, ValueError, KeyError, TypeError, AttributeError):
        raise ProviderError(F.UNAVAILABLE if reply.status >= 500 else F.UNUSABLE) from None
    if reply.status >= 300:
        raise _refused(reply.status, str(found.get("Error", {}).get("Code", "")))
    return found


def _refused(status: int, code: str) -> ProviderError:
    if status >= 500 or status == 429 or "Throttl" in code:
        return ProviderError(F.UNAVAILABLE)
    if code in _CLIENT_CODES:
        return ProviderError(F.CLIENT_REFUSED)
    return ProviderError(F.REQUEST_REFUSED if code in _REQUEST_CODES else F.UNUSABLE)


@cache
def _answer_shape() -> Any:
    # Of the package alone: not what somebody's home directory or environment has for a model.
    builtin = botocore.loaders.Loader.BUILTIN_DATA_PATH
    loader = botocore.loaders.Loader(extra_search_paths=[builtin], include_default_search_paths=False)
    model = botocore.model.ServiceModel(loader.load_service_model("sts", "service-2"), "sts")
    return model.operation_model("AssumeRole").output_shape
