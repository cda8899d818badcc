"""Every URL that somebody may give the control plane to fetch, against servers that mean it ill.

The fields are found in the documents that describe bodies and settings, not in a list: one that is new fails here until
it says what becomes of it.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trustme
from pydantic import TypeAdapter

from control_plane.config import Settings
from control_plane.contract.kinds import CredentialKind
from control_plane.core.client_proofs import ClientProofs
from control_plane.core.kinds import KINDS
from tests.control_plane.issuing import Provider, SigningKey
from tests.control_plane.serving import ControlPlane, control_plane_in, private_file
from tests.control_plane.test_kinds import AWS_KEY, GOOGLE_KEY, MINIMAL, RSA_PEM
from tests.control_plane.workspace import Json, Workspace
from tests.support.upstream import Behaviour, Upstream, hold, message, plain, sends

SECRETS = {
    CredentialKind.OAUTH_REFRESH_TOKEN: json.dumps({"refresh_token": "rt-secret", "client_secret": "cs-secret"}),
    CredentialKind.OAUTH_CLIENT_CREDENTIALS: "cs-secret",
    CredentialKind.JWT_BEARER: RSA_PEM,
    CredentialKind.GITHUB_APP: RSA_PEM,
    CredentialKind.AWS_ASSUME_ROLE: json.dumps(AWS_KEY),
}

# --- what there is ---------------------------------------------------------------------------------------------------

_LOOKS_LIKE_ONE = re.compile(r"(^|_)(ur[li]|host|endpoint|address|issuer|webhook)(_|$)")


def found_in(schema: Json, definitions: Json, path: str, above: frozenset[str] = frozenset()) -> Iterator[str]:
    """Fields that hold a URL or a host, by their name or their format."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        if name not in above:
            yield from found_in(definitions[name], definitions, path, above | {name})
        return
    if schema.get("format") == "uri":
        yield path
    for part in (*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("allOf", ())):
        yield from found_in(part, definitions, path, above)
    if isinstance(schema.get("items"), dict):
        yield from found_in(schema["items"], definitions, f"{path}[]", above)
    for name, property_ in schema.get("properties", {}).items():
        if _LOOKS_LIKE_ONE.search(name):
            yield f"{path}.{name}"
        yield from found_in(property_, definitions, f"{path}.{name}", above)


def fields_of_bodies(document: Json) -> set[str]:
    found = set()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            for content in operation.get("requestBody", {}).get("content", {}).values():
                start = f"{method.upper()} {path}"
                found |= set(found_in(content["schema"], document["components"]["schemas"], start))
    return found


def fields_of_kinds() -> set[str]:
    found = set()
    for kind, facts in KINDS.items():
        schema = facts.settings.model_json_schema()
        found |= set(found_in(schema, schema.get("$defs", {}), f"kind {kind}"))
    return found


def fields_of_proofs() -> set[str]:
    schema = TypeAdapter(ClientProofs).json_schema()
    return set(found_in(schema, schema.get("$defs", {}), "client proofs"))


def fields_of_settings() -> set[str]:
    return {f"setting {name}" for name in Settings.model_fields if _LOOKS_LIKE_ONE.search(name)}


# --- what becomes of each --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class World:
    control_plane: ControlPlane
    workspace: Workspace

    def submit(self, method: str, path: str, body: Json | None) -> Any:
        return self.control_plane.admin(method, path, body)


@dataclass(frozen=True)
class Fetched:
    """`submit(world, url)` gives the field that URL; `ask(world)` has it fetched, and answers what callers see."""

    submit: Callable[[World, str], Any]
    ask: Callable[[World], Any] | None
    """None: fetched by upkeep, in its own time, by the same client."""
    field: str
    """As a refusal names it."""


NOT_FETCHED = {
    "POST /v1/tenants/{tenant}/credentials.destinations[].url": "a destination: the proxy judges its address",
    "PATCH /v1/tenants/{tenant}/credentials/{name}.destinations[].url": "a destination",
    "POST /v1/tenants/{tenant}/allow-rules.host": "a destination",
    "POST /v1/access/check.url": "compared with destinations",
    "setting database_url": "the platform's own",
    "setting database_url_file": "the platform's own",
    "setting migration_database_url": "the platform's own",
    "setting migration_database_url_file": "the platform's own",
    "setting redis_url": "the platform's own",
    "setting issuer_url": "its own name",
    "setting proxy_base_url": "given out",
    "kind jwt_bearer.issuer": "a name that the provider knows",
    "client proofs.certificate.san_uri": "a name in a certificate",
    "setting kek_vault_address": "the platform's own, by the same client",
    "setting kek_aws_endpoint": "the platform's own, by the same client",
}


def of_kind(kind: CredentialKind, setting: str) -> Fetched:
    def submit(world: World, url: str) -> Any:
        settings = {**MINIMAL[kind], setting: url}
        secret = SECRETS.get(kind) or json.dumps({k: v for k, v in GOOGLE_KEY.items() if k != "token_uri"})
        body = {"name": "fetched", "kind": kind.value, "settings": settings, "secret": secret}
        return world.workspace.post_credential(body | {"destinations": [{"url": "https://api.example.com"}]})

    def ask(world: World) -> Any:
        world.workspace.grant("fetched")
        return world.workspace.resolve(world.workspace.exchange(audience="fetched"))

    return Fetched(submit, ask, f"settings.{setting}")


def of_issuer(field: str, method: str = "POST") -> Fetched:
    name = f"issuer-{field.replace('_', '-')}"

    def submit(world: World, url: str) -> Any:
        provider = Provider(name)
        record = provider.record(tenant=world.workspace.tenant, keys=[], discovery=field == "issuer") | {field: url}
        if method == "PUT":
            world.submit("POST", "/v1/issuers", provider.record(tenant=world.workspace.tenant))
            return world.submit("PUT", f"/v1/issuers/{name}", record)
        return world.submit("POST", "/v1/issuers", record)

    def ask(world: World) -> Any:
        issuer = world.control_plane.made("GET", f"/v1/issuers/{name}")["issuer"]
        token = Provider(name).token(iss=issuer)
        return world.submit("POST", f"/v1/issuers/{name}/test", {"token": token, "use": "session"}).text

    return Fetched(submit, ask, field)


def _submit_client(world: World, url: str) -> Any:
    body = {"id": "with-keys", "kind": "runtime", "tenant": world.workspace.tenant, "proofs": {"jwks_url": url}}
    return world.submit("POST", "/v1/clients", body)


def _ask_as_client(world: World) -> Any:
    claims = Provider("any").claims("with-keys", iss="with-keys", aud=world.control_plane.url, jti="one")
    form = {
        "grant_type": "client_credentials",
        "client_assertion_type": "urn:ietf:params:oauth:client-assertion-type:jwt-bearer",
        "client_assertion": SigningKey("unknown").sign(claims),
    }
    return world.control_plane.http.post("/oauth/token", data=form).text


def _submit_hook(world: World, url: str) -> Any:
    world.workspace.post_credential(
        {"name": "hooked", "destinations": [{"url": "https://api.example.com"}], "secret": "sk-hooked"}
    )
    body = {"every_seconds": 3600, "hook": {"kind": "http", "url": url}}
    return world.submit("PUT", world.workspace.path("credentials/hooked/rotation/schedule"), body)


SOURCES: dict[str, tuple[str, str, Json]] = {
    "vault": ("vault", "address", {"auth": {"method": "token", "token_file": "vault-token"}}),
    "aws": ("aws_secrets_manager", "endpoint", {"region": "eu-west-1", "auth": {"method": "keys", "keys_file": "aws"}}),
}


def of_source(name: str) -> Fetched:
    kind, field, facts = SOURCES[name]

    def submit(world: World, url: str) -> Any:
        origin = re.sub(r"^(https://[^/\s]+)/[0-9a-z-]*$", r"\1", url) if url not in MISSPELT else url
        body = {"kind": kind, "path_template": "{tenant}/{name}", name: {**facts, field: origin}}
        return world.submit("PUT", f"/v1/sources/source-{name}", body)

    def ask(world: World) -> Any:
        body = {"tenant": world.workspace.tenant, "name": "one"}
        return world.submit("POST", f"/v1/sources/source-{name}/test", body).text

    return Fetched(submit, ask, f"{name}.{field}")


def of_alarms(where: str) -> Fetched:
    def submit(world: World, url: str) -> Any:
        path = where.replace("{tenant}", world.workspace.tenant)
        return world.submit("POST", path, {"url": url})

    return Fetched(submit, None, "url")


FETCHED = {
    **{
        f"kind {kind}.{setting}": of_kind(kind, setting)
        for kind, setting in [
            (CredentialKind.OAUTH_REFRESH_TOKEN, "token_url"),
            (CredentialKind.OAUTH_CLIENT_CREDENTIALS, "token_url"),
            (CredentialKind.JWT_BEARER, "token_url"),
            (CredentialKind.GOOGLE_SERVICE_ACCOUNT, "token_url"),
            (CredentialKind.GITHUB_APP, "api_url"),
            (CredentialKind.AWS_ASSUME_ROLE, "sts_url"),
        ]
    },
    "POST /v1/issuers.issuer": of_issuer("issuer"),
    "POST /v1/issuers.jwks_url": of_issuer("jwks_url"),
    "PUT /v1/issuers/{name}.issuer": of_issuer("issuer", "PUT"),
    "PUT /v1/issuers/{name}.jwks_url": of_issuer("jwks_url", "PUT"),
    "PUT /v1/sources/{source}.vault.address": of_source("vault"),
    "PUT /v1/sources/{source}.aws.endpoint": of_source("aws"),
    "client proofs.jwks_url": Fetched(_submit_client, _ask_as_client, "jwks_url"),
    "POST /v1/tenants/{tenant}/alarm-hooks.url": of_alarms("/v1/tenants/{tenant}/alarm-hooks"),
    "POST /v1/alarm-hooks.url": of_alarms("/v1/alarm-hooks"),
    "PUT /v1/tenants/{tenant}/credentials/{name}/rotation/schedule.hook.url": Fetched(_submit_hook, None, "hook"),
}
ASKED = [name for name, field in FETCHED.items() if field.ask is not None]


def test_every_field_that_holds_a_url_says_what_becomes_of_it(control_plane: ControlPlane) -> None:
    document = control_plane.http.get("/openapi.json").json()
    mentioned = {"issuer"}  # a client's workload tokens name an issuer that is registered

    found = fields_of_bodies(document) | fields_of_kinds() | fields_of_settings()
    found |= {name for name in fields_of_proofs() if name.rpartition(".")[2] not in mentioned}

    assert found == set(FETCHED) | set(NOT_FETCHED)


# --- spelling --------------------------------------------------------------------------------------------------------

MISSPELT = [
    "http://auth.example.com/",
    "ftp://auth.example.com/",
    "file:///etc/passwd",
    "javascript:alert(1)",
    "//auth.example.com/",
    "auth.example.com",
    "https://",
    "https://user@auth.example.com/",
    "https://user:hunter2@auth.example.com/",
    "https://auth.example.com/#fragment",
    "https://auth.example.com:0/",
    "https://2130706433/",
    "https://0177.0.0.1/",
    "https://127.1/",
    "https://[fe80::1%25eth0]/",
    "https://auth.example.com\\@evil.test/",
    "https://auth.example.com/\r\nX: y",
    "https://auth example.com/",
    "https://auth.example.com\u0000/",
]


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Where nothing internal may be fetched from."""
    folder = tmp_path_factory.mktemp("strict")
    with control_plane_in(folder, sources_auth_folder=_auth_folder(folder)) as serving:
        yield World(serving, Workspace(serving, "strict"))


@pytest.mark.parametrize("name", FETCHED)
def test_what_is_no_url_of_ours_is_refused_where_it_is_given(strict: World, name: str) -> None:
    for url in MISSPELT:
        response = FETCHED[name].submit(strict, url)

        assert response.status_code == 422, (url, response.text)
        assert response.json()["code"] == "invalid_field"
        assert response.json()["detail"].startswith(FETCHED[name].field), (url, response.text)
        assert "hunter2" not in response.text


# --- servers ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ca(tmp_path_factory: pytest.TempPathFactory) -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def server(ca: trustme.CA) -> Iterator[Upstream]:
    with Upstream(ca) as running:
        yield running


INTERNAL = ["localhost", "127.0.0.1", "[::1]", "169.254.169.254", "[::ffff:127.0.0.1]", "[64:ff9b::7f00:1]"]


@pytest.mark.parametrize("name", ASKED)
def test_an_internal_address_is_not_reached(strict: World, name: str, server: Upstream) -> None:
    field = FETCHED[name]
    assert field.ask is not None
    for number, host in enumerate(INTERNAL):
        world = World(strict.control_plane, Workspace(strict.control_plane, f"t{ASKED.index(name)}-{number}"))
        _forget(world)
        given = field.submit(world, f"https://{host}:{server.port}/x{number}")

        if given.is_success:
            field.ask(world)

    assert server.accepted == 0


HOSTILE: dict[str, Callable[[Upstream], Behaviour]] = {
    "redirecting": lambda elsewhere: plain(b"", status="302 Found", headers=[("Location", elsewhere.url + "/x")]),
    "oversized": lambda _: sends(message(b"BODY-MARK" * 100_000)),
    "slow": lambda _: hold(b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\nBODY-MARK"),
    "wrong": lambda _: plain(b'{"access_token": "BODY-MARK'),
}


@dataclass(frozen=True)
class Hostile:
    control_plane: ControlPlane
    server: Upstream
    elsewhere: Upstream
    """Where redirects lead; it may be reached too."""


@pytest.fixture(scope="module")
def hostile(ca: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hostile]:
    folder = tmp_path_factory.mktemp("hostile")
    ca.cert_pem.write_to_path(folder / "ca.pem")
    with Upstream(ca) as server, Upstream(ca) as elsewhere:
        allowed = tuple(f"localhost:{each.port}" for each in (server, elsewhere))
        with control_plane_in(
            folder,
            outbound_allow=allowed,
            outbound_ca_files=(folder / "ca.pem",),
            sources_auth_folder=_auth_folder(folder),
        ) as serving:
            yield Hostile(serving, server, elsewhere)


@pytest.mark.parametrize("name", ASKED)
def test_a_server_that_redirects_floods_stalls_or_babbles_gains_nothing(
    name: str, hostile: Hostile, monkeypatch: pytest.MonkeyPatch
) -> None:
    field, number = FETCHED[name], ASKED.index(name)
    assert field.ask is not None
    for behaviour in HOSTILE:
        # Who waits for nothing is given up soon; the others answer, however busy the machine is.
        monkeypatch.setattr("control_plane.adapters.outbound.MAX_SECONDS", 0.5 if behaviour == "slow" else 20.0)
        hostile.server.default = HOSTILE[behaviour](hostile.elsewhere)
        world = World(hostile.control_plane, Workspace(hostile.control_plane, f"t{number}-{behaviour}"))
        _forget(world)
        given = field.submit(world, f"{hostile.server.url}/{number}-{behaviour}")
        assert given.is_success, given.text
        before = hostile.server.accepted

        told = str(field.ask(world))

        _wait_for_more_than(before, hostile.server)
        assert "internal_error" not in told
        assert "BODY-MARK" not in told
    assert hostile.elsewhere.accepted == 0


def _wait_for_more_than(connections: int, server: Upstream) -> None:
    server.wait_for(lambda seen: seen.accepted > connections)


def _auth_folder(folder: Path) -> Path:
    """What sources are asked with."""
    (folder / "auth").mkdir()
    private_file(folder / "auth" / "vault-token", "vault-token-0123456789")
    keys = "\n".join(("[default]", *(f"aws_{name} = {value}" for name, value in AWS_KEY.items())))
    private_file(folder / "auth" / "aws", keys)
    return folder / "auth"


def _forget(world: World) -> None:
    """What the field was given to before."""
    for issuer in world.control_plane.made("GET", "/v1/issuers")["items"]:
        world.submit("DELETE", f"/v1/issuers/{issuer['name']}", None)
    world.submit("DELETE", "/v1/clients/with-keys", None)
