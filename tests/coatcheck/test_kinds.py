"""`--kind` and `--setting`: read as the kind has them, and refused before anybody types a secret."""

from typing import Any

import pytest

from coatcheck.kinds import is_a_document, kind_fields
from coatcheck.terminal import WrongUsageError

TOKEN_URL = "token_url=https://auth.example.com/token"


@pytest.mark.parametrize(
    ("kind", "settings", "expected"),
    [
        (None, [], {}),
        ("static", [], {"kind": "static", "settings": {}}),
        (
            "oauth_client_credentials",
            [TOKEN_URL, "client_id=a=b", "scope=read write"],
            {"token_url": "https://auth.example.com/token", "client_id": "a=b", "scope": "read write"},
        ),
        (
            "github_app",
            ["app_id=1", "installation_id=2", "repositories=one", "repositories=two", "permissions.contents=read"],
            {
                "app_id": "1",
                "installation_id": "2",
                "repositories": ["one", "two"],
                "permissions": {"contents": "read"},
            },
        ),
        (
            "aws_assume_role",
            ["role_arn=arn:aws:iam::123456789012:role/agent", "region=eu-west-1", "duration_seconds=900"],
            {"role_arn": "arn:aws:iam::123456789012:role/agent", "region": "eu-west-1", "duration_seconds": 900},
        ),
    ],
)
def test_settings_are_read_as_their_kind_has_them(
    kind: str | None, settings: list[str], expected: dict[str, Any]
) -> None:
    fields = kind_fields(kind, settings)

    assert fields == expected or fields == {"kind": kind, "settings": expected}


@pytest.mark.parametrize(
    ("kind", "settings", "says"),
    [
        (None, [TOKEN_URL], "give --kind too"),
        ("oauth", [], "one of static, oauth_refresh_token"),
        ("oauth_client_credentials", [TOKEN_URL], "client_id"),
        ("oauth_client_credentials", ["token_url"], "name=value"),
        ("oauth_client_credentials", ["token_ur=x"], "did you mean 'token_url'?"),
        ("oauth_client_credentials", ["token_url=http://auth.example.com/", "client_id=a"], "begins with https://"),
        ("github_app", ["permissions=read"], "permissions.key=value"),
        ("aws_assume_role", ["duration_seconds=long"], "whole number"),
        ("hmac", ["zzz=1"], "algorithm, encoding, key_id"),
        ("client_certificate", ["zzz=1"], "it has none"),
    ],
)
def test_a_setting_that_cannot_be_is_wrong_usage(kind: str | None, settings: list[str], says: str) -> None:
    with pytest.raises(WrongUsageError, match=says):
        kind_fields(kind, settings)


def test_only_a_static_secret_has_one_line() -> None:
    assert not is_a_document("static")
    assert is_a_document("github_app")
