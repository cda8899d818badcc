"""Each kind against a real server: what it is sent, what is made of the answer, which secrets and settings it takes."""

import base64
import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote_plus

import jwt
import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from cryptography.x509.oid import NameOID
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

from control_plane.contract.kinds import CredentialKind, is_placed
from control_plane.contract.refusal import RefusalCode, RefusedError
from control_plane.contract.secret import Secret
from control_plane.contract.wire import Refused, ResolvedPlaceholder
from control_plane.core.kinds import (
    KINDS,
    InvalidSecretError,
    InvalidSettingsError,
    narrows,
    settled_secret,
    settled_settings,
)
from tests.control_plane.minting import Minting, minting
from tests.control_plane.test_minting import ca, ca_file, provider, world  # noqa: F401 (fixtures)
from tests.support.token_provider import TokenProvider
from tests.support.upstream import Upstream, plain

K = CredentialKind


def pem(key: Any, *, passphrase: bytes | None = None) -> str:
    encryption = BestAvailableEncryption(passphrase) if passphrase else NoEncryption()
    text: bytes = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption)
    return text.decode()


RSA = rsa.generate_private_key(65537, 2048)
EC, ED = ec.generate_private_key(ec.SECP256R1()), ed25519.Ed25519PrivateKey.generate()
RSA_PEM, EC_PEM, ED_PEM = pem(RSA), pem(EC), pem(ED)
TOKEN_URL = "https://auth.example.com/token"
GOOGLE_KEY = {
    "type": "service_account",
    "project_id": "p",
    "private_key_id": "key-1",
    "private_key": RSA_PEM,
    "client_email": "robot@p.iam.example.com",
    "token_uri": TOKEN_URL,
}
AWS_KEY = {"access_key_id": "AKIAIOSFODNN7EXAMPLE", "secret_access_key": "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"}
ROLE = {"role_arn": "arn:aws:iam::123456789012:role/agent", "region": "eu-west-1"}


def claims(token: str, key: Any, algorithm: str, audience: str) -> dict[str, Any]:
    """Verified as a provider verifies them, but for the time, which is the test's own."""
    found: dict[str, Any] = jwt.decode(
        token,
        key.public_key(),
        algorithms=[algorithm],
        audience=audience,
        options={"verify_exp": False, "verify_iat": False},
    )
    return found


# --- what providers are sent -----------------------------------------------------------------------------------------


async def test_a_client_proves_itself_by_basic_form_encoded_first(world: Minting, provider: TokenProvider) -> None:  # noqa: F811
    secret = "p%ss:wörd&x y"
    await world.add(
        "oauth_client_credentials",
        secret,
        settings={
            "token_url": provider.token_url,
            "client_id": "app:1 x",
            "scope": "a b",
            "audience": "https://api.example.com",
            "resource": "urn:thing",
        },
    )

    value = await world.value()

    assert value.startswith("at-")
    (scheme, encoded) = provider.heads[0].header("authorization").split(" ")
    user, _, password = base64.b64decode(encoded).decode().partition(":")
    assert (scheme, unquote_plus(user), unquote_plus(password)) == ("Basic", "app:1 x", secret)
    assert provider.forms == [
        {
            "grant_type": "client_credentials",
            "scope": "a b",
            "audience": "https://api.example.com",
            "resource": "urn:thing",
        }
    ]


@pytest.mark.parametrize(
    ("algorithm", "key", "text"), [("RS256", RSA, RSA_PEM), ("ES256", EC, EC_PEM), ("EdDSA", ED, ED_PEM)]
)
async def test_a_client_proves_itself_by_a_signed_assertion(
    world: Minting,  # noqa: F811
    provider: TokenProvider,  # noqa: F811
    algorithm: str,
    key: Any,
    text: str,
) -> None:
    settings = {
        "token_url": provider.token_url,
        "client_id": "our-app",
        "client_authentication": "private_key_jwt",
        "algorithm": algorithm,
        "key_id": "kid-1",
    }
    await world.add("oauth_client_credentials", text, settings=settings)

    assert (await world.value()).startswith("at-")
    (form,) = provider.forms
    assert form["client_assertion_type"] == "urn:ietf:params:oauth:client-assertion-type:jwt-bearer"
    found = claims(form["client_assertion"], key, algorithm, provider.token_url)
    assert jwt.get_unverified_header(form["client_assertion"])["kid"] == "kid-1"
    assert (found["iss"], found["sub"]) == ("our-app", "our-app")
    assert found["exp"] - found["iat"] == 120
    assert found["jti"].startswith("jti_")


async def test_a_jwt_bearer_is_an_assertion_of_its_issuer(world: Minting, provider: TokenProvider) -> None:  # noqa: F811
    settings = {"token_url": provider.token_url, "issuer": "robot", "subject": "alice", "audience": "aud", "scope": "s"}
    await world.add("jwt_bearer", RSA_PEM, settings=settings)

    assert (await world.value()).startswith("at-")
    (form,) = provider.forms
    assert form["grant_type"] == "urn:ietf:params:oauth:grant-type:jwt-bearer"
    assert form["scope"] == "s"
    found = claims(form["assertion"], RSA, "RS256", "aud")
    assert (found["iss"], found["sub"]) == ("robot", "alice")


async def test_a_google_service_account_gets_an_access_token(world: Minting, provider: TokenProvider) -> None:  # noqa: F811
    key_file = json.dumps(GOOGLE_KEY | {"token_uri": provider.token_url}, indent=2)
    settings = {"scopes": ["https://www.googleapis.com/auth/drive"], "token_url": provider.token_url, "subject": "a@p"}
    await world.add("google_service_account", key_file, settings=settings)

    assert (await world.value()).startswith("at-")
    found = claims(provider.forms[0]["assertion"], RSA, "RS256", provider.token_url)
    assert jwt.get_unverified_header(provider.forms[0]["assertion"])["kid"] == "key-1"
    assert found["iss"] == GOOGLE_KEY["client_email"]
    assert (found["scope"], found["sub"]) == ("https://www.googleapis.com/auth/drive", "a@p")


async def test_a_google_service_account_gets_an_id_token_that_ends_when_it_says(
    world: Minting,  # noqa: F811
    provider: TokenProvider,  # noqa: F811
) -> None:
    end = int(world.replica.clock()) + 1800
    token = jwt.encode({"exp": end, "aud": "https://run.example"}, RSA_PEM, "RS256")
    provider.extra = {"id_token": token}
    settings = {"token": "id_token", "target_audience": "https://run.example", "token_url": provider.token_url}
    key_file = json.dumps(GOOGLE_KEY | {"token_uri": provider.token_url})
    await world.add("google_service_account", key_file, settings=settings)

    answer = await world.resolve()

    assert isinstance(answer, ResolvedPlaceholder)
    assert answer.secret == token
    assert answer.binding.secret_expires_at == end - 10
    found = claims(provider.forms[0]["assertion"], RSA, "RS256", provider.token_url)
    assert found["target_audience"] == "https://run.example"


async def test_a_github_app_gets_an_installation_token_of_its_repositories(
    world: Minting,  # noqa: F811
    provider: TokenProvider,  # noqa: F811
) -> None:
    now = world.replica.clock()
    end = datetime.fromtimestamp(now + 3600, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    path = "/api/v3/app/installations/77/access_tokens"
    provider.server.on(path, plain(json.dumps({"token": "ghs_1", "expires_at": end}).encode(), status="201 Created"))
    settings = {
        "app_id": "12",
        "installation_id": "77",
        "repositories": ["one", "two"],
        "permissions": {"contents": "read"},
        "api_url": f"{provider.server.url}/api/v3",
    }
    await world.add("github_app", RSA_PEM, settings=settings)

    answer = await world.resolve()

    assert isinstance(answer, ResolvedPlaceholder)
    assert answer.secret == "ghs_1"
    assert answer.binding.secret_expires_at == now + 3600 - 10
    (request,) = provider.server.seen(path)
    assert json.loads(request.body) == {"repositories": ["one", "two"], "permissions": {"contents": "read"}}
    app_token = request.header("authorization").removeprefix("Bearer ")
    found = jwt.decode(
        app_token, RSA.public_key(), algorithms=["RS256"], options={"verify_exp": False, "verify_iat": False}
    )
    assert found == {"iss": "12", "iat": int(now) - 60, "exp": int(now) + 540}


@pytest.mark.parametrize(
    ("status", "body", "headers", "told"),
    [
        ("401 Unauthorized", b"{}", [], "invalid_client"),
        ("404 Not Found", b"{}", [], "refuses what this credential's settings ask for"),
        ("422 Unprocessable", b"{}", [], "refuses what this credential's settings ask for"),
        ("403 Forbidden", b"{}", [("X-RateLimit-Remaining", "0")], "does not answer"),
        ("500 Oops", b"", [], "does not answer"),
        ("201 Created", b'{"token": "ghs_1"}', [], "no usable token"),
        ("201 Created", b'{"token": "ghs_1", "expires_at": "2099-01-01"}', [], "no usable token"),
        ("201 Created", b'{"token": "ghs_1", "expires_at": "2001-01-01T00:00:00Z"}', [], "no usable token"),
    ],
)
async def test_what_github_refuses_is_told_in_our_words(
    world: Minting,  # noqa: F811
    provider: TokenProvider,  # noqa: F811
    status: str,
    body: bytes,
    headers: list[tuple[str, str]],
    told: str,
) -> None:
    provider.server.on("/app/installations/77/access_tokens", plain(body, status=status, headers=headers))
    settings = {"app_id": "12", "installation_id": "77", "api_url": provider.server.url}
    await world.add("github_app", RSA_PEM, settings=settings)

    assert told in await world.value()


# --- AWS -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def aws(ca: trustme.CA) -> Iterator[int]:  # noqa: F811
    """AWS's services over TLS; its port."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert("localhost").configure_cert(context)
    server = make_server("127.0.0.1", 0, DomainDispatcherApplication(create_backend_app), True, ssl_context=context)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()


async def test_an_aws_role_gives_temporary_keys_as_a_document(
    world: Minting,  # noqa: F811
    provider: TokenProvider,  # noqa: F811
    ca_file: Path,  # noqa: F811
    aws: int,
) -> None:
    world = minting(world.replica.database, provider, ca_file, aws)
    world.replica.clock.now = datetime.now(UTC).timestamp()
    settings = {**ROLE, "sts_url": f"https://localhost:{aws}/", "external_id": "ext-1", "service": "s3"}
    await world.add("aws_assume_role", json.dumps(AWS_KEY), settings=settings)

    answer = await world.resolve()

    assert isinstance(answer, ResolvedPlaceholder)
    document = json.loads(answer.secret)
    assert document["access_key_id"].startswith("ASIA")
    assert document["access_key_id"] != AWS_KEY["access_key_id"]
    assert (document["region"], document["service"]) == ("eu-west-1", "s3")
    assert document["session_token"]
    assert answer.binding.secret_expires_at == pytest.approx(world.replica.clock() + 3600 - 10, abs=5)
    assert await world.value(world.replica.another()) == answer.secret


async def test_the_question_to_sts_is_signed_and_holds_no_key(world: Minting, provider: TokenProvider) -> None:  # noqa: F811
    settings = {**ROLE, "sts_url": f"{provider.server.url}/sts", "external_id": "ext-1", "duration_seconds": 900}
    await world.add("aws_assume_role", json.dumps(AWS_KEY), settings=settings)

    await world.resolve()

    (request,) = provider.server.seen("/sts")
    assert b"RoleArn=arn%3Aaws%3Aiam%3A%3A123456789012%3Arole%2Fagent" in request.body
    assert b"DurationSeconds=900" in request.body
    assert b"ExternalId=ext-1" in request.body
    assert request.header("authorization").startswith("AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/")
    assert AWS_KEY["secret_access_key"].encode() not in provider.server.received()


@pytest.mark.parametrize(
    ("status", "body", "told"),
    [
        ("403 Forbidden", "<ErrorResponse><Error><Code>AccessDenied</Code></Error></ErrorResponse>", "refuses"),
        ("403 Forbidden", "<ErrorResponse><Error><Code>InvalidClientTokenId</Code></Error></ErrorResponse>", "client"),
        ("400 Bad", "<ErrorResponse><Error><Code>Throttling</Code></Error></ErrorResponse>", "does not answer"),
        ("503 Away", "", "does not answer"),
        ("200 OK", "", "no usable token"),
        ("200 OK", "{}", "no usable token"),
        ("200 OK", "<AssumeRoleResponse/>", "no usable token"),
    ],
)
async def test_what_sts_refuses_is_told_in_our_words(
    world: Minting,  # noqa: F811
    provider: TokenProvider,  # noqa: F811
    status: str,
    body: str,
    told: str,
) -> None:
    provider.server.on("/sts", plain(body.encode(), status=status))
    settings = {**ROLE, "sts_url": f"{provider.server.url}/sts"}
    await world.add("aws_assume_role", json.dumps(AWS_KEY), settings=settings)

    assert told in await world.value()


async def test_botocore_opens_no_connection_of_its_own(world: Minting, ca: trustme.CA) -> None:  # noqa: F811
    """A server that the outbound client refuses sees nothing: there is no other way out."""
    with Upstream(ca) as refused:
        settings = {**ROLE, "sts_url": f"{refused.url}/"}
        await world.add("aws_assume_role", json.dumps(AWS_KEY), settings=settings)

        value = await world.value()

    assert "not one that may be fetched from" in value
    assert refused.accepted == 0


# --- what is kept here -----------------------------------------------------------------------------------------------


async def test_a_signing_key_is_resolved_with_how_to_sign(world: Minting) -> None:  # noqa: F811
    await world.add("hmac", "0123456789abcdef", settings={"algorithm": "sha512", "key_id": "k1"})

    answer = await world.resolve()

    assert isinstance(answer, ResolvedPlaceholder)
    assert json.loads(answer.secret) == {
        "key": "0123456789abcdef",
        "algorithm": "sha512",
        "encoding": "text",
        "key_id": "k1",
    }
    assert answer.binding.credential_kind == "hmac"


def certificate(key: Any, *, days: int, now: float) -> str:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "machine.test")])
    start = datetime.fromtimestamp(now, UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(start - timedelta(days=1))
        .not_valid_after(start + timedelta(days=days))
        .sign(key, hashes.SHA256())
    )
    return made.public_bytes(Encoding.PEM).decode()


async def test_a_client_certificate_is_resolved_until_it_ends(world: Minting) -> None:  # noqa: F811
    now = world.replica.clock()
    await world.add("client_certificate", certificate(EC, days=2, now=now) + EC_PEM, settings={})

    before = await world.resolve()
    world.pass_time(2 * 86_400)
    after = await world.resolve()

    assert isinstance(before, ResolvedPlaceholder)
    assert before.binding.secret_expires_at == now + 2 * 86_400
    assert set(json.loads(before.secret)) == {"certificate", "private_key"}
    assert isinstance(after, Refused)
    assert after.code is RefusalCode.CREDENTIAL_UNAVAILABLE
    assert "has expired" in after.detail


@pytest.mark.guards("control_plane/resolution.py", 'else ("credential_kind",)', "else ()")
async def test_a_proxy_that_knows_nothing_of_kinds_is_told_that_it_must(world: Minting) -> None:  # noqa: F811
    from control_plane.contract.caller import Caller, SubjectId
    from control_plane.contract.wire import AskPlaceholder, ResolveRequest
    from tests.control_plane.rotating import ACME, DESTINATION, RUNTIME

    await world.add("hmac", "0123456789abcdef", settings={})
    caller = Caller(client=RUNTIME, tenant=ACME, subject=SubjectId("alice"), session=None)

    answer = await world.replica.resolution(
        ResolveRequest(AskPlaceholder(world.replica.tokens["alice"], caller, DESTINATION.endpoint))
    )

    assert answer.must_understand == ("credential_kind",)


def test_every_kind_is_either_placed_or_a_document_and_an_unknown_one_is_not_placed() -> None:
    assert {kind for kind in K if not is_placed(kind)} == {K.AWS_ASSUME_ROLE, K.HMAC, K.CLIENT_CERTIFICATE}
    assert set(KINDS) == set(K)
    assert not is_placed("invented_later")


# --- secrets ---------------------------------------------------------------------------------------------------------

MINIMAL: dict[CredentialKind, dict[str, Any]] = {
    K.STATIC: {},
    K.OAUTH_REFRESH_TOKEN: {"token_url": TOKEN_URL, "client_id": "a"},
    K.OAUTH_CLIENT_CREDENTIALS: {"token_url": TOKEN_URL, "client_id": "a"},
    K.JWT_BEARER: {"token_url": TOKEN_URL, "issuer": "a"},
    K.GOOGLE_SERVICE_ACCOUNT: {"scopes": ["s"], "token_url": TOKEN_URL},
    K.GITHUB_APP: {"app_id": "1", "installation_id": "2"},
    K.AWS_ASSUME_ROLE: ROLE,
    K.HMAC: {},
    K.CLIENT_CERTIFICATE: {},
}
REFRESH_PAIR = json.dumps({"refresh_token": "rt", "client_secret": "cs"})

SECRETS: list[tuple[CredentialKind, dict[str, Any], str, str]] = [
    (K.OAUTH_REFRESH_TOKEN, {}, REFRESH_PAIR, ""),
    (K.OAUTH_REFRESH_TOKEN, {}, "rt", "'refresh_token' and 'client_secret'"),
    (K.OAUTH_REFRESH_TOKEN, {}, '{"refresh_token": "rt"}', "'refresh_token' and 'client_secret'"),
    (K.OAUTH_REFRESH_TOKEN, {}, '{"refresh_token": "rt", "client_secret": 1}', "'refresh_token' and 'client_secret'"),
    (K.OAUTH_REFRESH_TOKEN, {}, '{"refresh_token": "rt", "client_secret": "cs", "x": "y"}', "it has 1 more"),
    (K.OAUTH_REFRESH_TOKEN, {"client_authentication": "none"}, "rt", ""),
    (K.OAUTH_REFRESH_TOKEN, {"client_authentication": "none"}, "rt\nx", "control character"),
    (
        K.OAUTH_REFRESH_TOKEN,
        {"client_authentication": "private_key_jwt"},
        json.dumps({"refresh_token": "rt", "private_key": RSA_PEM}),
        "",
    ),
    (K.OAUTH_CLIENT_CREDENTIALS, {}, "cs", ""),
    (K.OAUTH_CLIENT_CREDENTIALS, {}, '{"client_secret": "cs"}', ""),
    (K.OAUTH_CLIENT_CREDENTIALS, {}, '{"client_secret": ""}', "'client_secret'"),
    (K.OAUTH_CLIENT_CREDENTIALS, {"client_authentication": "private_key_jwt"}, RSA_PEM, ""),
    (K.OAUTH_CLIENT_CREDENTIALS, {"client_authentication": "private_key_jwt"}, "cs", "expected a private key"),
    (K.JWT_BEARER, {}, RSA_PEM, ""),
    (K.JWT_BEARER, {"algorithm": "ES256"}, EC_PEM, ""),
    (K.JWT_BEARER, {"algorithm": "EdDSA"}, ED_PEM, ""),
    (K.JWT_BEARER, {}, EC_PEM, "RS256 needs an RSA key"),
    (K.JWT_BEARER, {"algorithm": "ES256"}, RSA_PEM, "ES256 needs an EC key on P-256"),
    (K.JWT_BEARER, {"algorithm": "ES256"}, pem(ec.generate_private_key(ec.SECP384R1())), "on P-256"),
    (K.JWT_BEARER, {}, pem(rsa.generate_private_key(65537, 1024)), "2048 bits"),
    (K.JWT_BEARER, {}, pem(RSA, passphrase=b"x"), "without a passphrase"),
    (K.GOOGLE_SERVICE_ACCOUNT, {}, json.dumps(GOOGLE_KEY), ""),
    (K.GOOGLE_SERVICE_ACCOUNT, {}, json.dumps(GOOGLE_KEY, indent=4), ""),
    (K.GOOGLE_SERVICE_ACCOUNT, {}, "AIza-key", "key file"),
    (K.GOOGLE_SERVICE_ACCOUNT, {}, json.dumps(GOOGLE_KEY | {"type": "authorized_user"}), "'type'"),
    (K.GOOGLE_SERVICE_ACCOUNT, {}, json.dumps(GOOGLE_KEY | {"client_email": None}), "'client_email'"),
    (K.GOOGLE_SERVICE_ACCOUNT, {}, json.dumps(GOOGLE_KEY | {"token_uri": "https://evil.example/"}), "'token_uri'"),
    (K.GITHUB_APP, {}, RSA_PEM, ""),
    (K.GITHUB_APP, {}, "ghp_x", "expected a private key"),
    (K.AWS_ASSUME_ROLE, {}, json.dumps(AWS_KEY), ""),
    (K.AWS_ASSUME_ROLE, {}, json.dumps(AWS_KEY | {"session_token": "st"}), ""),
    (K.AWS_ASSUME_ROLE, {}, json.dumps(AWS_KEY | {"access_key_id": "akia"}), "'access_key_id'"),
    (K.AWS_ASSUME_ROLE, {}, "AKIAIOSFODNN7EXAMPLE", "'access_key_id' and 'secret_access_key'"),
    (K.HMAC, {}, "0123456789abcdef", ""),
    (K.HMAC, {}, "short", "16 bytes"),
    (K.HMAC, {"encoding": "hex"}, "00" * 16, ""),
    (K.HMAC, {"encoding": "hex"}, "zz" * 16, "is not hex"),
    (K.HMAC, {"encoding": "base64"}, base64.b64encode(b"0" * 16).decode(), ""),
    (K.HMAC, {"encoding": "base64"}, "?" * 32, "is not base64"),
    (K.CLIENT_CERTIFICATE, {}, certificate(EC, days=9, now=1.8e9) + EC_PEM, ""),
    (K.CLIENT_CERTIFICATE, {}, EC_PEM + certificate(EC, days=9, now=1.8e9), ""),
    (
        K.CLIENT_CERTIFICATE,
        {},
        json.dumps({"certificate": certificate(EC, days=9, now=1.8e9), "private_key": EC_PEM}),
        "",
    ),
    (K.CLIENT_CERTIFICATE, {}, certificate(EC, days=9, now=1.8e9), "expected a private key"),
    (K.CLIENT_CERTIFICATE, {}, EC_PEM, "certificate chain and a private key"),
    (K.CLIENT_CERTIFICATE, {}, certificate(EC, days=9, now=1.8e9) + RSA_PEM, "is not the first certificate's"),
    (K.STATIC, {}, "sk-1", ""),
    (K.STATIC, {}, '{"a": "json is a key like any other"}', ""),
    (K.STATIC, {}, "a\nb", "control character"),
    (K.STATIC, {}, RSA_PEM, "control character"),
]


@pytest.mark.parametrize(("kind", "settings", "text", "says"), SECRETS)
def test_a_secret_has_its_kinds_form_or_is_refused_in_words_that_do_not_quote_it(
    kind: CredentialKind, settings: dict[str, Any], text: str, says: str
) -> None:
    settings = settled_settings(kind, MINIMAL[kind] | settings)
    if not says:
        once = settled_secret(kind, settings, Secret(text))

        assert settled_secret(kind, settings, once) == once
        assert "\n" not in once.reveal()
        return
    with pytest.raises(InvalidSecretError) as refused:
        settled_secret(kind, settings, Secret(text))

    assert says in str(refused.value)
    assert text not in str(refused.value)


@pytest.mark.parametrize("kind", K)
@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"a": 1}', "[" * 9000, "\x00", "-----BEGIN PRIVATE KEY-----"])
def test_nothing_that_is_submitted_as_a_secret_is_more_than_an_error(kind: CredentialKind, text: str) -> None:
    with suppress(InvalidSecretError):
        settled_secret(kind, settled_settings(kind, MINIMAL[kind]), Secret(text))


# --- settings --------------------------------------------------------------------------------------------------------

WRONG: list[tuple[CredentialKind, dict[str, Any], str]] = [
    (K.STATIC, {"token_url": TOKEN_URL}, "token_url"),
    (K.OAUTH_REFRESH_TOKEN, {"token_url": None}, "token_url"),
    (K.OAUTH_REFRESH_TOKEN, {"token_url": "http://auth.example.com/"}, "token_url"),
    (K.OAUTH_REFRESH_TOKEN, {"token_url": "https://u:p@auth.example.com/"}, "token_url"),
    (K.OAUTH_REFRESH_TOKEN, {"client_id": ""}, "client_id"),
    (K.OAUTH_REFRESH_TOKEN, {"client_id": "a\r\nb"}, "client_id"),
    (K.OAUTH_REFRESH_TOKEN, {"client_id": 1}, "client_id"),
    (K.OAUTH_REFRESH_TOKEN, {"client_authentication": "magic"}, "client_authentication"),
    (K.OAUTH_REFRESH_TOKEN, {"scope": " a"}, "scope"),
    (K.OAUTH_REFRESH_TOKEN, {"scope": "a  b"}, "scope"),
    (K.OAUTH_REFRESH_TOKEN, {"refresh_token_use": "always"}, "refresh_token_use"),
    (K.OAUTH_CLIENT_CREDENTIALS, {"client_authentication": "none"}, "client_authentication"),
    (K.JWT_BEARER, {"algorithm": "none"}, "algorithm"),
    (K.JWT_BEARER, {"algorithm": "HS256"}, "algorithm"),
    (K.GOOGLE_SERVICE_ACCOUNT, {"scopes": None}, "scopes"),
    (K.GOOGLE_SERVICE_ACCOUNT, {"scopes": []}, "scopes"),
    (K.GOOGLE_SERVICE_ACCOUNT, {"token": "id_token"}, "target_audience"),
    (K.GOOGLE_SERVICE_ACCOUNT, {"target_audience": "x"}, "target_audience"),
    (K.GITHUB_APP, {"installation_id": "../1"}, "installation_id"),
    (K.GITHUB_APP, {"permissions": {"contents": "own"}}, "permissions.contents"),
    (K.GITHUB_APP, {"api_url": "https://api.example.com/#x"}, "api_url"),
    (K.AWS_ASSUME_ROLE, {"role_arn": "arn:aws:iam::1:role/x"}, "role_arn"),
    (K.AWS_ASSUME_ROLE, {"region": "eu-west-1.evil.example/"}, "region"),
    (K.AWS_ASSUME_ROLE, {"duration_seconds": 1}, "duration_seconds"),
    (K.AWS_ASSUME_ROLE, {"duration_seconds": "900"}, "duration_seconds"),
    (K.HMAC, {"algorithm": "md5"}, "algorithm"),
    (K.CLIENT_CERTIFICATE, {"x": 1}, "x"),
]


@pytest.mark.parametrize(("kind", "change", "field"), WRONG)
def test_a_setting_that_cannot_be_is_named(kind: CredentialKind, change: dict[str, Any], field: str) -> None:
    given = {name: value for name, value in {**MINIMAL[kind], **change}.items() if value is not None}

    with pytest.raises(InvalidSettingsError) as refused:
        settled_settings(kind, given)

    assert refused.value.field == field


@pytest.mark.parametrize("kind", K)
def test_settled_settings_are_settled(kind: CredentialKind) -> None:
    once = settled_settings(kind, MINIMAL[kind])

    assert settled_settings(kind, once) == once


NARROWER: list[tuple[str, Any, Any, bool]] = [
    ("scope", "a b", "a", True),
    ("scope", "a", "a b", False),
    ("scope", None, "a", False),
    ("scope", "a", None, False),
    ("scopes", ["a", "b"], ["b"], True),
    ("scopes", ["a"], ["b"], False),
    ("repositories", None, ["a"], True),
    ("repositories", ["a"], None, False),
    ("repositories", ["a", "b"], ["a"], True),
    ("permissions", None, {"a": "read"}, True),
    ("permissions", {"a": "read"}, {"a": "write"}, False),
    ("permissions", {"a": "read", "b": "read"}, {"b": "read"}, True),
    ("permissions", {"a": "read"}, {}, False),
    ("token_url", "https://a.test/", "https://b.test/", False),
    ("duration_seconds", 3600, 900, False),
]


@pytest.mark.parametrize(("field", "old", "new", "expected"), NARROWER)
def test_what_lets_a_secret_reach_less(field: str, old: Any, new: Any, expected: bool) -> None:
    assert narrows(field, new, old=old) is expected


async def test_a_kind_is_chosen_once(world: Minting) -> None:  # noqa: F811
    with pytest.raises(RefusedError) as raised:
        await world.add("magic", "x", settings={})

    assert raised.value.refusal.code is RefusalCode.INVALID_FIELD
    assert raised.value.refusal.detail.startswith("kind: one of static, ")


async def test_a_kind_in_the_database_that_we_do_not_know_opens_nothing(world: Minting) -> None:  # noqa: F811
    from control_plane.ports import TenantScope
    from tests.control_plane.rotating import ACME

    await world.add("static", "sk-1", settings={})
    async with world.replica.store.write(TenantScope(ACME)) as records:
        await records.credentials.replace(replace(await world.replica.credential(), kind="invented_later"))

    assert (await world.value()).startswith("credential_unavailable: the credential is of a kind")


def test_a_public_key_is_no_private_key() -> None:
    public = RSA.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()

    with pytest.raises(InvalidSecretError):
        settled_secret(K.JWT_BEARER, settled_settings(K.JWT_BEARER, MINIMAL[K.JWT_BEARER]), Secret(public))
