"""Requests that are signed with a key (AWS Signature Version 4): a placeholder for it makes no signature, and no header
swap can mend that. Such a request is refused by name, and neither the placeholder nor the key goes anywhere."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError
from botocore.parsers import ResponseParserError

from tests.support.processes import Deployment
from tests.support.upstream import Upstream
from tests.support.ways import Kind, Way

Call = Callable[[Any], Any]


def signing(through: Way, deployment: Deployment, service: str) -> Any:
    """A client of boto3's whose key id and key are both the placeholder."""
    proxies = {"https": through.proxy.forward_url(through.ticket)}
    tunnel = through.kind is Kind.TUNNEL
    endpoint = (
        f"https://{through.authority}" if tunnel else through.proxy.reverse_url(through.ticket, through.credential)
    )
    return boto3.client(
        service,
        region_name="eu-central-1",
        endpoint_url=endpoint,
        aws_access_key_id=through.ticket.placeholder,
        aws_secret_access_key=through.ticket.placeholder,
        verify=str(deployment.ca_file),
        config=Config(
            proxies=proxies if tunnel else {},
            retries={"max_attempts": 1, "mode": "standard"},
            s3={"addressing_style": "path"},
            connect_timeout=5,
            read_timeout=5,
        ),
    )


CALLS: dict[str, tuple[str, Call]] = {
    "GET object": ("s3", lambda s3: s3.get_object(Bucket="bucket", Key="object")),
    "PUT 1 MiB": ("s3", lambda s3: s3.put_object(Bucket="bucket", Key="object", Body=io.BytesIO(b"x" * 2**20))),
    "STS": ("sts", lambda sts: sts.get_caller_identity()),
}


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "HTTPS_PROXY", "https_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.mark.parametrize("call", CALLS)
def test_a_request_signed_with_a_placeholder_is_refused_by_name(
    deployment: Deployment, through: Way, upstream: Upstream, secret: str, call: str
) -> None:
    service, ask = CALLS[call]

    # To clients that expect XML the refusal is shown as it came: its reason is in their exception.
    with pytest.raises((ClientError, ResponseParserError)) as refused:
        ask(signing(through, deployment, service))

    if isinstance(refused.value, ClientError):
        answer = refused.value.response["ResponseMetadata"]
        assert answer["HTTPStatusCode"] == 403
        assert answer["HTTPHeaders"]["coatcheck-refusal"] == "placement_denied"
    else:
        assert '"code": "placement_denied"' in str(refused.value)
    assert_nothing_went(upstream, through, secret)


def test_a_presigned_url_with_a_placeholder_is_refused_by_name(
    deployment: Deployment, through: Way, upstream: Upstream, secret: str
) -> None:
    s3 = signing(through, deployment, "s3")
    url = s3.generate_presigned_url("get_object", Params={"Bucket": "bucket", "Key": "object"})
    target = "/" + url.partition("://")[2].partition("/")[2]
    if through.kind is Kind.REVERSE:  # the path credential and the route are the client's to keep
        target = target.partition(f"/{through.credential}/")[2]
        target = "/" + target

    response = through.ask("GET", target, bearer=False)

    assert "X-Amz-Credential=" in target
    assert (response.status, response.refusal) == (403, "placement_denied")
    assert_nothing_went(upstream, through, secret)


def assert_nothing_went(upstream: Upstream, through: Way, secret: str) -> None:
    received = upstream.received()
    assert secret.encode() not in received
    assert through.ticket.placeholder.encode() not in received
    assert upstream.requests == []
