"""The hook `aws_iam`: access keys of an IAM user, rotated with the user's own key (CreateAccessKey, DeleteAccessKey).

Rule: nothing is deleted that is in use, or that was not ours to begin with: of the two keys that a user can have, the
one that was replaced, or the one that was made and not kept. Where there are two already, somebody has to look first.
(https://docs.aws.amazon.com/IAM/latest/UserGuide/id_credentials_access-keys.html)
"""

import asyncio
import json
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar

import botocore.session
from botocore.awsrequest import AWSPreparedRequest, AWSResponse
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from control_plane.contract.secret import Secret
from control_plane.ports import Created, HookAsk, HookFailedError, Outbound, OutboundError, OutboundRequest

T = TypeVar("T")

_REGION: Final = "us-east-1"  # IAM is one service for all regions of a partition
_CONFIG: Final = Config(retries={"mode": "standard", "total_max_attempts": 1}, ignore_configured_endpoint_urls=True)
_FROM_NOWHERE: Final = {
    "profile": (None, None, None, None),
    "config_file": (None, None, "/dev/null", None),
    "credentials_file": (None, None, "/dev/null", None),
}
"""No profile and no file of this machine takes part."""
_CALL_SECONDS: Final = 10.0


class IamAccessKeyHook:
    def __init__(self, outbound: Outbound, *, endpoint: str | None = None) -> None:
        """`endpoint` in the place of AWS's own."""
        self._outbound = outbound
        self._endpoint = endpoint

    async def create(self, ask: HookAsk) -> Created:
        """Raises `HookFailedError`."""
        current = _keys(ask)

        def make(iam: Any) -> dict[str, Any]:
            if len(iam.list_access_keys()["AccessKeyMetadata"]) > 1:
                raise HookFailedError("the IAM user has two access keys already: delete the one that nobody uses")
            made: dict[str, Any] = iam.create_access_key()["AccessKey"]
            return made

        made = await self._asked(current, make)
        secret = {"access_key_id": made["AccessKeyId"], "secret_access_key": made["SecretAccessKey"]}
        return Created(
            Secret(json.dumps(secret)), state={"old": current["access_key_id"], "new": secret["access_key_id"]}
        )

    async def settle(self, ask: HookAsk, *, new_is_in_use: bool) -> None:
        """Raises `HookFailedError`."""
        current = _keys(ask)
        unused = ask.state.get("old" if new_is_in_use else "new")
        if unused is None or unused == current["access_key_id"]:
            return

        def delete(iam: Any) -> None:
            if unused in {key["AccessKeyId"] for key in iam.list_access_keys()["AccessKeyMetadata"]}:
                iam.delete_access_key(AccessKeyId=unused)

        await self._asked(current, delete)

    async def _asked(self, keys: dict[str, str], question: Callable[[Any], T]) -> T:
        """What the question gets from a client that acts with these keys. botocore blocks, so it runs in a thread."""
        loop = asyncio.get_running_loop()
        try:
            return await asyncio.to_thread(lambda: question(self._client(keys, loop)))
        except ClientError as error:
            code = str(error.response.get("Error", {}).get("Code", ""))
            raise HookFailedError(f"IAM said no: {code[:64] if code.isalnum() else 'unreadable'}") from None
        except OutboundError as error:
            raise HookFailedError(f"IAM could not be asked ({error.failure.value})") from None
        except (BotoCoreError, TimeoutError, KeyError, TypeError) as error:
            raise HookFailedError(f"IAM could not be asked ({type(error).__name__})") from None

    def _client(self, keys: dict[str, str], loop: asyncio.AbstractEventLoop) -> Any:
        session = botocore.session.Session(session_vars=_FROM_NOWHERE)
        session.register("before-send", lambda request, **_: self._send(request, loop))
        return session.create_client(
            "iam",
            region_name=_REGION,
            endpoint_url=self._endpoint,
            aws_access_key_id=keys["access_key_id"],
            aws_secret_access_key=keys["secret_access_key"],
            config=_CONFIG,
        )

    def _send(self, request: AWSPreparedRequest, loop: asyncio.AbstractEventLoop) -> AWSResponse:
        """In botocore's stead: through the one door to the network."""
        body = request.body
        sending = self._outbound.send(
            OutboundRequest(
                request.method,
                request.url,
                headers={
                    name: value.decode("latin-1") if isinstance(value, bytes) else str(value)
                    for name, value in request.headers.items()
                },
                body=body.encode() if isinstance(body, str) else body,
            )
        )
        reply = asyncio.run_coroutine_threadsafe(sending, loop).result(_CALL_SECONDS)
        return AWSResponse(request.url, reply.status, dict(reply.headers), _Raw(reply.body))


class _Raw:
    """What botocore reads a body from."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    def stream(self) -> Iterable[bytes]:
        yield self._body


def _keys(ask: HookAsk) -> dict[str, str]:
    if ask.current is None:
        raise HookFailedError("the key in use does not open, so IAM cannot be asked with it")
    try:
        keys = json.loads(ask.current.reveal())
        return {"access_key_id": str(keys["access_key_id"]), "secret_access_key": str(keys["secret_access_key"])}
    except (ValueError, KeyError, TypeError):
        raise HookFailedError('the secret in use is not {"access_key_id", "secret_access_key"}') from None
