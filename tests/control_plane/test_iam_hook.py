"""The hook of IAM access keys, against moto over TLS: made with the key in use, put away only where nobody uses it."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trustme

from control_plane.adapters.hooks.aws_iam import IamAccessKeyHook
from control_plane.adapters.outbound import Exceptions, HttpOutbound
from control_plane.contract.caller import TenantId
from control_plane.contract.destination import split_authority
from control_plane.contract.secret import Secret
from control_plane.ports import HookAsk, HookFailedError
from tests.support.fake_aws import FakeAws, serving_aws

USER = "robot"


@pytest.fixture
def aws(tmp_path: Path) -> Iterator[FakeAws]:
    ca = trustme.CA()
    ca.cert_pem.write_to_path(tmp_path / "ca.pem")
    with serving_aws(ca, str(tmp_path / "ca.pem")) as fake:
        fake.client("iam").create_user(UserName=USER)
        yield fake


@pytest.fixture
def hook(aws: FakeAws, tmp_path: Path) -> IamAccessKeyHook:
    host, port = split_authority(aws.url.removeprefix("https://"), default_port=443)
    outbound = HttpOutbound(ca_files=[tmp_path / "ca.pem"], exceptions=Exceptions(frozenset({(host, port)})))
    return IamAccessKeyHook(outbound, endpoint=aws.url)


def key_of(aws: FakeAws) -> dict[str, str]:
    made = aws.client("iam").create_access_key(UserName=USER)["AccessKey"]
    return {"access_key_id": made["AccessKeyId"], "secret_access_key": made["SecretAccessKey"]}


def ids(aws: FakeAws) -> set[str]:
    return {key["AccessKeyId"] for key in aws.client("iam").list_access_keys(UserName=USER)["AccessKeyMetadata"]}


def asked(current: dict[str, str] | None) -> HookAsk:
    secret = Secret(json.dumps(current)) if current is not None else None
    return HookAsk({"kind": "aws_iam"}, TenantId("acme"), "aws", "att_1", secret, {})


async def test_a_key_is_made_by_the_one_in_use_and_the_old_one_goes_when_it_is_over(
    aws: FakeAws, hook: IamAccessKeyHook
) -> None:
    old = key_of(aws)
    created = await hook.create(asked(old))
    new = json.loads(created.secret.reveal())
    between = ids(aws)

    await hook.settle(replace(asked(new), state=created.state), new_is_in_use=True)
    await hook.settle(replace(asked(new), state=created.state), new_is_in_use=True)

    assert between == {old["access_key_id"], new["access_key_id"]}
    assert ids(aws) == {new["access_key_id"]}
    assert new["secret_access_key"]


async def test_after_a_roll_back_the_new_key_goes(aws: FakeAws, hook: IamAccessKeyHook) -> None:
    old = key_of(aws)
    created = await hook.create(asked(old))

    await hook.settle(replace(asked(old), state=created.state), new_is_in_use=False)

    assert ids(aws) == {old["access_key_id"]}


@pytest.mark.guards(
    "control_plane/adapters/hooks/aws_iam.py", 'if unused is None or unused == current["access_key_id"]:', "if False:"
)
async def test_the_key_in_use_is_never_deleted_whatever_is_said(aws: FakeAws, hook: IamAccessKeyHook) -> None:
    old = key_of(aws)
    created = await hook.create(asked(old))
    before = ids(aws)

    await hook.settle(replace(asked(old), state=created.state), new_is_in_use=True)
    await hook.settle(replace(asked(old), state={}), new_is_in_use=True)

    assert ids(aws) == before


async def test_where_there_are_two_keys_already_somebody_has_to_look(aws: FakeAws, hook: IamAccessKeyHook) -> None:
    old, other = key_of(aws), key_of(aws)

    with pytest.raises(HookFailedError, match="two access keys already"):
        await hook.create(asked(old))

    assert ids(aws) == {old["access_key_id"], other["access_key_id"]}


@pytest.mark.parametrize("current", [None, {"access_key_id": "AKIA"}, {}])
async def test_without_a_usable_key_iam_is_not_asked(hook: IamAccessKeyHook, current: Any) -> None:
    with pytest.raises(HookFailedError):
        await hook.create(asked(current))


async def test_where_iam_does_not_answer_the_hook_says_so(tmp_path: Path) -> None:
    hook = IamAccessKeyHook(HttpOutbound(), endpoint="https://127.0.0.1:9")

    with pytest.raises(HookFailedError, match="IAM could not be asked"):
        await hook.create(asked({"access_key_id": "A" * 20, "secret_access_key": "s" * 40}))
