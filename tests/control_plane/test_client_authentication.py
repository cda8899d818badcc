"""How clients prove themselves beside a secret: assertions of their own (RFC 7523), workload tokens, certificates."""

import datetime
import json
import ssl
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.control_plane.conftest import OwnControlPlane
from tests.control_plane.issuing import ADMINISTRATOR, Provider, SigningKey, bearer
from tests.control_plane.serving import ControlPlane, control_plane_in
from tests.control_plane.workspace import GRANT_TYPE, JWT, Json, Workspace
from tests.support.upstream import Upstream, plain

JWT_BEARER = "urn:ietf:params:oauth:client-assertion-type:jwt-bearer"
JWT_SPIFFE = "urn:ietf:params:oauth:client-assertion-type:jwt-spiffe"
ASSERTIONS = "control_plane/client_assertions.py"
ACCESS = "control_plane/access.py"

_numbers = count(1)


def add_client(workspace: Workspace, *, proofs: Json, kind: str = "runtime", **fields: Any) -> str:
    """Its id."""
    client = f"{workspace.tenant}-client-{next(_numbers)}"
    tenant = None if kind == "egress_proxy" else workspace.tenant
    body = {"id": client, "kind": kind, "tenant": tenant, "proofs": proofs} | fields
    workspace.control_plane.made("POST", "/v1/clients", body)
    return client


def asked(workspace: Workspace, **form: str) -> httpx.Response:
    """A token request that is refused for its content once the client is known: 400, and else 401."""
    return workspace.control_plane.http.post("/oauth/token", data={"grant_type": GRANT_TYPE} | form)


def is_known(answer: httpx.Response) -> bool:
    if answer.status_code == 401:
        assert answer.json()["error"] == "invalid_client"
        return False
    assert (answer.status_code, answer.json()["error"]) == (400, "invalid_request"), answer.text
    return True


# --- private_key_jwt -------------------------------------------------------------------------------------------------


class Keyed:
    """A runtime that registered a key."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        self.key = SigningKey("mine")
        self.id = add_client(workspace, proofs={"keys": [self.key.jwk]})

    def claims(self, **claims: Any) -> Json:
        now = int(time.time())
        usual: Json = {
            "iss": self.id,
            "sub": self.id,
            "aud": self.workspace.control_plane.url,
            "exp": now + 60,
            "jti": f"jti-{next(_numbers)}",
        }
        return {name: value for name, value in (usual | claims).items() if value is not None}

    def ask(self, assertion: str | None = None, **form: str) -> httpx.Response:
        assertion = assertion or self.key.sign(self.claims())
        usual = {"client_assertion_type": JWT_BEARER, "client_assertion": assertion}
        return asked(self.workspace, **(usual | form))


@pytest.fixture
def keyed(workspace: Workspace) -> Keyed:
    return Keyed(workspace)


def test_a_client_proves_itself_by_its_key_and_exchanges(keyed: Keyed) -> None:
    workspace = keyed.workspace
    workspace.add_credential()
    workspace.grant()
    session = workspace.open_session(runtime=keyed.id)

    answer = keyed.ask(subject_token=session["session_token"], subject_token_type=JWT, audience="example")

    assert answer.status_code == 200, answer.text


def test_an_assertion_is_for_the_token_endpoint_or_the_issuer(keyed: Keyed) -> None:
    url = keyed.workspace.control_plane.url

    assert is_known(keyed.ask(keyed.key.sign(keyed.claims(aud=f"{url}/oauth/token"))))
    assert is_known(keyed.ask(keyed.key.sign(keyed.claims(aud=[url]))))
    assert is_known(keyed.ask(client_id=keyed.id))


@pytest.mark.guards(ASSERTIONS, "if not fresh:", "if False:")
def test_an_assertion_is_good_once_also_on_another_route(keyed: Keyed) -> None:
    assertion = keyed.key.sign(keyed.claims())
    form = {"client_assertion_type": JWT_BEARER, "client_assertion": assertion}

    first = keyed.workspace.control_plane.http.post("/oauth/revoke", data=form | {"token": "x"})
    again = keyed.workspace.control_plane.http.post("/oauth/revoke", data=form | {"token": "x"})

    assert (first.status_code, again.status_code) == (200, 401)
    assert not is_known(keyed.ask(assertion))


def test_what_was_used_is_remembered_over_a_restart_and_no_longer_than_needed(
    own_control_plane: OwnControlPlane, tmp_path: Path
) -> None:
    first = own_control_plane(issuer_url="https://coatcheck.test")
    keyed = Keyed(Workspace(first, "acme"))
    claims = keyed.claims(aud="https://coatcheck.test")
    assertion = keyed.key.sign(claims)
    assert is_known(keyed.ask(assertion))
    first.stop()
    second = own_control_plane(issuer_url="https://coatcheck.test")
    form = {"grant_type": GRANT_TYPE, "client_assertion_type": JWT_BEARER, "client_assertion": assertion}

    again = second.http.post("/oauth/token", data=form)

    assert again.status_code == 401
    assert second.look("SELECT count(*) FROM used_assertions") == [(1,)]


@pytest.mark.guards(ASSERTIONS, 'if token.payload.get("sub") != client_id:', "if False:")
@pytest.mark.parametrize(
    "claims",
    [
        {"sub": "another-client"},
        {"sub": None},
        {"aud": None},
        {"aud": "coatcheck-proxy"},
        {"aud": "https://elsewhere.test"},
        {"aud": ["{url}", "https://elsewhere.test"]},
        {"aud": "{url}/"},
        {"aud": "{url}.evil.test"},
        {"exp": None},
        {"exp": 1},
        {"exp": 4_000_000_000},
        {"exp": "4000000000"},
        {"iat": 4_000_000_000},
        {"nbf": 4_000_000_000},
        {"jti": None},
        {"jti": ""},
        {"jti": 7},
    ],
    ids=str,
)
def test_an_assertion_that_says_something_else_proves_nothing(keyed: Keyed, claims: Json) -> None:
    url = keyed.workspace.control_plane.url
    meant = {
        name: [each.replace("{url}", url) for each in value]
        if isinstance(value, list)
        else (value.replace("{url}", url) if isinstance(value, str) else value)
        for name, value in claims.items()
    }

    assert not is_known(keyed.ask(keyed.key.sign(keyed.claims(**meant))))


def test_one_proof_a_request(keyed: Keyed) -> None:
    workspace = keyed.workspace
    form = {"client_assertion_type": JWT_BEARER, "client_assertion": keyed.key.sign(keyed.claims())}

    both = workspace.token_as((workspace.runtime, workspace.runtime_secret), **form)
    another = workspace.token_as((workspace.runtime, workspace.runtime_secret), client_id=keyed.id)

    assert (both.status_code, another.status_code) == (401, 401)
    assert not is_known(keyed.ask(client_id=workspace.runtime))
    assert not is_known(keyed.ask(client_assertion_type="urn:ietf:params:oauth:client-assertion-type:saml2-bearer"))


def test_a_client_with_keys_alone_has_no_secret_to_steal(keyed: Keyed) -> None:
    for secret in ("", "0" * 64, "x" * 43):
        answer = keyed.workspace.token_as((keyed.id, secret))
        assert answer.status_code == 401
    (shown,) = [
        item for item in keyed.workspace.control_plane.made("GET", "/v1/clients")["items"] if item["id"] == keyed.id
    ]
    assert shown["proven_by"] == ["private_key_jwt"]


def test_keys_are_changed_without_losing_the_client(keyed: Keyed) -> None:
    path = f"/v1/clients/{keyed.id}"
    old, keyed.key = keyed.key, SigningKey("second")
    keyed.workspace.control_plane.made("PATCH", path, {"proofs": {"keys": [old.jwk, keyed.key.jwk]}})
    overlapping = [is_known(keyed.ask(key.sign(keyed.claims()))) for key in (old, keyed.key)]

    keyed.workspace.control_plane.made("PATCH", path, {"proofs": {"keys": [keyed.key.jwk]}})

    assert overlapping == [True, True]
    assert [is_known(keyed.ask(key.sign(keyed.claims()))) for key in (old, keyed.key)] == [False, True]


def test_a_secret_is_replaced_or_taken_away(workspace: Workspace) -> None:
    path, old = f"/v1/clients/{workspace.runtime}", workspace.runtime_secret

    new = workspace.control_plane.made("PATCH", path, {"secret": "new"})["client_secret"]
    tries = [is_known(workspace.token_as((workspace.runtime, secret))) for secret in (old, new)]
    refused = workspace.control_plane.admin("PATCH", path, {"secret": "none"})

    assert tries == [False, True]
    assert (refused.status_code, refused.json()["code"]) == (422, "invalid_field")


@pytest.mark.parametrize(
    ("proofs", "said"),
    [
        ({"keys": [{"kty": "oct", "k": "c2VjcmV0"}]}, "keys.0"),
        ({"jwks_url": "http://client.test/keys"}, "jwks_url"),
        ({"keys": [SigningKey("a").jwk], "jwks_url": "https://client.test/keys"}, "either"),
        ({"workload": {"issuer": "nobody", "subject": "a"}}, "workload.issuer"),
        ({"workload": {"issuer": "nobody", "subject": "**"}}, "every workload"),
        ({"certificate": {}}, "exactly one"),
        ({"certificate": {"san_dns": "a", "san_uri": "b"}}, "exactly one"),
        ({"certificate": {"subject_dn": "no name"}}, "distinguished name"),
        ({"self_signed": "-----BEGIN"}, "PEM"),
        ({"passwords": 1}, "passwords"),
    ],
)
def test_proofs_that_make_no_sense_are_refused(workspace: Workspace, proofs: Json, said: str) -> None:
    body = {"id": f"{workspace.tenant}-x", "kind": "runtime", "tenant": workspace.tenant, "proofs": proofs}

    response = workspace.control_plane.admin("POST", "/v1/clients", body)

    assert (response.status_code, response.json()["code"]) == (422, "invalid_field"), response.text
    assert said in response.json()["detail"]
    assert "c2VjcmV0" not in response.text


def test_of_many_who_present_one_assertion_at_once_one_gets_in(keyed: Keyed) -> None:
    form = {"client_assertion_type": JWT_BEARER, "client_assertion": keyed.key.sign(keyed.claims()), "token": "x"}
    url = f"{keyed.workspace.control_plane.url}/oauth/revoke"

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda _: httpx.post(url, data=form, trust_env=False).status_code, range(12)))

    assert sorted(answers) == [200] + [401] * 11


def test_a_client_that_publishes_its_keys_turns_them_by_itself(
    own_control_plane: OwnControlPlane, authorities: dict[str, trustme.CA], tmp_path: Path
) -> None:
    authorities["server"].cert_pem.write_to_path(tmp_path / "ca.pem")
    with Upstream(authorities["server"]) as server:
        allowed = (f"localhost:{server.port}",)
        plane = own_control_plane(outbound_ca_files=(tmp_path / "ca.pem",), outbound_allow=allowed)
        keyed = Keyed(Workspace(plane, "acme"))
        first, second = keyed.key, SigningKey("second")
        server.on("/keys", plain(json.dumps({"keys": [first.jwk]}).encode()))
        plane.made("PATCH", f"/v1/clients/{keyed.id}", {"proofs": {"jwks_url": f"{server.url}/keys"}})

        before = is_known(keyed.ask())
        server.on("/keys", plain(json.dumps({"keys": [second.jwk]}).encode()))
        turned = is_known(keyed.ask(second.sign(keyed.claims())))

        assert (before, turned, is_known(keyed.ask(first.sign(keyed.claims())))) == (True, True, False)


# --- workload tokens -------------------------------------------------------------------------------------------------


class Cluster:
    """A Kubernetes cluster whose ServiceAccount tokens prove clients."""

    SUBJECT = "system:serviceaccount:{namespace}:{account}"

    def __init__(self, workspace: Workspace, **fields: Any) -> None:
        self.workspace = workspace
        self.provider = Provider(f"k8s-{workspace.tenant}")
        record: Json = {"preset": "kubernetes", "uses": ["client"], "audiences": None, "claims": {}}
        self.provider.register(workspace.control_plane, tenant="", **(record | fields))

    def token(self, namespace: str = "agents", account: str = "runtime", **claims: Any) -> str:
        inside = {"namespace": namespace, "serviceaccount": {"name": account, "uid": "1"}}
        usual = {"aud": [self.workspace.control_plane.url], "nbf": int(time.time()), "kubernetes.io": inside}
        return self.provider.token(self.SUBJECT.format(namespace=namespace, account=account), **(usual | claims))

    def ask(self, token: str | None = None, **form: str) -> httpx.Response:
        usual = {"client_assertion_type": JWT_BEARER, "client_assertion": token or self.token()}
        return asked(self.workspace, **(usual | form))

    def proof(self, subject: str = "system:serviceaccount:agents:runtime") -> Json:
        return {"workload": {"issuer": self.provider.name, "subject": subject}}


@pytest.fixture
def cluster(workspace: Workspace) -> Cluster:
    return Cluster(workspace)


def test_a_service_account_is_the_client_that_registered_it_as_often_as_it_likes(cluster: Cluster) -> None:
    client, token = add_client(cluster.workspace, proofs=cluster.proof()), cluster.token()

    answers = [is_known(cluster.ask(token)) for _ in range(3)]

    assert answers == [True, True, True]
    assert is_known(cluster.ask(token, client_id=client))
    assert not is_known(cluster.ask(token, client_id=cluster.workspace.runtime))


@pytest.mark.guards(
    "control_plane/identification.py",
    "                return (self._own_issuer,)\n",
    "                return issuer.audiences\n",
)
@pytest.mark.guards(
    "control_plane/core/tokens.py",
    "if PROXY_AUDIENCE in named_in_token and",
    "if False and",
)
def test_a_token_for_the_proxy_or_for_sessions_is_no_proof_here(workspace: Workspace) -> None:
    url = workspace.control_plane.url
    cluster = Cluster(workspace, audiences=["https://sessions.test"], other_audiences="ignore")
    add_client(workspace, proofs=cluster.proof())

    assert is_known(cluster.ask(cluster.token(aud=[url, "somebody-else"])))
    for audience in (["coatcheck-proxy"], "https://sessions.test", [url, "coatcheck-proxy"]):
        assert not is_known(cluster.ask(cluster.token(aud=audience)))


def test_a_workloads_token_opens_the_routes_of_its_kind_of_client_as_bearer(cluster: Cluster) -> None:
    workspace, proxy = cluster.workspace, "system:serviceaccount:edge:proxy"
    runtime = add_client(workspace, proofs=cluster.proof())
    add_client(workspace, kind="egress_proxy", proofs=cluster.proof(proxy))
    session = workspace.open_session(runtime=runtime)["session_id"]

    def status(method: str, path: str, token: str) -> int:
        return workspace.control_plane.http.request(method, path, headers=bearer(token)).status_code

    assert status("GET", "/internal/tag-keys", cluster.token("edge", "proxy")) == 200
    assert status("GET", "/internal/tag-keys", cluster.token()) == 403
    assert status("GET", "/internal/tag-keys", cluster.token("edge", "other")) == 401
    assert status("GET", f"/v1/sessions/{session}", cluster.token()) == 200
    assert status("GET", f"/v1/sessions/{session}", cluster.token("edge", "proxy")) == 404
    assert status("POST", f"/v1/sessions/{session}/token", cluster.token()) == 401
    assert status("GET", "/v1/tenants", cluster.token()) == 401


@pytest.mark.guards(ASSERTIONS, "or not Pattern(workload.subject).fits(identity.subject)", "or False")
def test_another_service_account_is_nobody(cluster: Cluster) -> None:
    add_client(cluster.workspace, proofs=cluster.proof())

    for token in (cluster.token("agents", "other"), cluster.token("other", "runtime"), cluster.token("x:agents")):
        assert not is_known(cluster.ask(token))


def test_a_pattern_stays_within_its_segment(cluster: Cluster) -> None:
    add_client(cluster.workspace, proofs=cluster.proof("system:serviceaccount:agents:*"))

    assert is_known(cluster.ask(cluster.token("agents", "any")))
    assert not is_known(cluster.ask(cluster.token("agents", "any:more")))


@pytest.mark.guards(ASSERTIONS, "if len(known) != 1:", "if not known:")
def test_a_workload_that_two_clients_could_be_has_to_say_which(cluster: Cluster) -> None:
    one = add_client(cluster.workspace, proofs=cluster.proof())
    add_client(cluster.workspace, proofs=cluster.proof("system:serviceaccount:agents:*"))

    assert not is_known(cluster.ask())
    assert is_known(cluster.ask(client_id=one))


@pytest.mark.guards(ASSERTIONS, "return identity.tenant is None or client.serves(identity.tenant)", "return True")
def test_a_workload_of_another_tenant_is_no_client_of_this_one(workspace: Workspace) -> None:
    rule = {"tenant": {"claim": "/kubernetes.io/namespace", "map": {"agents": workspace.tenant, "evil": "evil"}}}
    cluster = Cluster(workspace, claims=rule)
    add_client(workspace, proofs=cluster.proof("system:serviceaccount:*:runtime"))

    assert is_known(cluster.ask(cluster.token("agents")))
    assert not is_known(cluster.ask(cluster.token("evil")))


def test_an_issuer_that_is_not_for_clients_proves_none(workspace: Workspace) -> None:
    cluster = Cluster(workspace)
    add_client(workspace, proofs=cluster.proof())
    assert is_known(cluster.ask())
    record = cluster.provider.record(tenant=workspace.tenant, preset="kubernetes", uses=["session"])

    workspace.control_plane.made("PUT", f"/v1/issuers/{cluster.provider.name}", record)

    assert not is_known(cluster.ask())


def test_a_spiffe_workload_proves_itself_without_an_iss(workspace: Workspace) -> None:
    key, domain = SigningKey("svid-1"), f"spiffe://{workspace.tenant}.test"
    jwk = key.jwk | {"use": "jwt-svid"}
    record = {
        "name": f"spiffe-{workspace.tenant}",
        "preset": "spiffe",
        "issuer": domain,
        "uses": ["client"],
        "keys": [jwk],
    }
    workspace.control_plane.made("POST", "/v1/issuers", record)
    proof = {"workload": {"issuer": record["name"], "subject": f"{domain}/ns/agents/sa/*"}}
    add_client(workspace, proofs=proof)

    def answer(subject: str, assertion_type: str = JWT_SPIFFE, **claims: Any) -> bool:
        payload = {"sub": subject, "aud": [workspace.control_plane.url], "exp": int(time.time()) + 300} | claims
        token = key.sign(payload, typ="JWT")
        return is_known(asked(workspace, client_assertion_type=assertion_type, client_assertion=token))

    assert answer(f"{domain}/ns/agents/sa/runtime")
    assert answer(f"{domain}/ns/agents/sa/runtime", JWT_BEARER)
    assert not answer(f"{domain}/ns/other/sa/runtime")
    assert not answer(f"{domain}.evil.test/ns/agents/sa/runtime")
    assert not answer(f"{domain}/ns/agents/sa/runtime", aud=["coatcheck-proxy"])
    assert not answer(f"{domain}/ns/agents/../agents/sa/runtime")


# --- certificates ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authorities() -> dict[str, trustme.CA]:
    return {name: trustme.CA() for name in ("server", "clients", "stranger")}


@pytest.fixture(scope="module")
def over_tls(authorities: dict[str, trustme.CA], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    folder = tmp_path_factory.mktemp("over-tls")
    leaf = authorities["server"].issue_cert("127.0.0.1")
    leaf.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    leaf.private_key_pem.write_to_path(folder / "key.pem")
    authorities["clients"].cert_pem.write_to_path(folder / "clients.pem")
    files = {"tls_cert_file": folder / "cert.pem", "tls_key_file": folder / "key.pem"}
    asking = {"client_ca_files": (folder / "clients.pem",), "client_self_signed": True}
    with (
        control_plane_in(folder, **files, **asking) as plane,
        httpx.Client(base_url=plane.url, verify=context(authorities), trust_env=False) as http,
    ):
        plane.http = http
        yield plane


@pytest.fixture
def name() -> str:
    """Nobody else's, in a certificate."""
    return f"proxy-{next(_numbers)}.test"


@pytest.fixture
def tls_workspace(over_tls: ControlPlane) -> Workspace:
    return Workspace(over_tls, f"tls-{next(_numbers)}")


def context(authorities: dict[str, trustme.CA]) -> ssl.SSLContext:
    made = ssl.create_default_context()
    authorities["server"].configure_trust(made)
    return made


Connect = Callable[..., httpx.Client]


@pytest.fixture
def connect(over_tls: ControlPlane, authorities: dict[str, trustme.CA], tmp_path: Path) -> Iterator[Connect]:
    """A connection that shows this certificate and key (PEM)."""
    opened: list[httpx.Client] = []

    def connected(certificate: bytes, key: bytes) -> httpx.Client:
        file = tmp_path / f"client-{len(opened)}.pem"
        file.write_bytes(certificate + key)
        trusting = context(authorities)
        trusting.load_cert_chain(file)
        client = httpx.Client(base_url=over_tls.url, verify=trusting, trust_env=False)
        opened.append(client)
        return client

    yield connected
    for client in opened:
        client.close()


def issued_by(ca: trustme.CA, *names: str, **fields: Any) -> tuple[bytes, bytes]:
    leaf = ca.issue_cert(*names, **fields)
    return b"".join(pem.bytes() for pem in leaf.cert_chain_pems), leaf.private_key_pem.bytes()


def self_signed(dns: str = "proxy.test") -> tuple[bytes, bytes]:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "me")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(dns)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    return certificate.public_bytes(serialization.Encoding.PEM), key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def resolves(client: httpx.Client) -> int:
    return client.get("/internal/tag-keys").status_code


@pytest.mark.guards(
    "control_plane/core/certificates.py",
    "if self.anchor is None or self.anchor == self.leaf or fingerprint(self.anchor) not in authorities:",
    "if False:",
)
def test_a_proxy_is_known_by_a_name_in_a_certificate_that_our_authority_issued(
    tls_workspace: Workspace, name: str, connect: Connect, authorities: dict[str, trustme.CA]
) -> None:
    workspace = tls_workspace
    add_client(workspace, kind="egress_proxy", proofs={"certificate": {"san_dns": name}})
    # Registered for another client, and with the proxy's name in it: known by its digest, and by nothing else.
    own = self_signed(name)
    add_client(workspace, proofs={"self_signed": own[0].decode()})

    assert resolves(connect(*issued_by(authorities["clients"], name))) == 200
    assert resolves(connect(*issued_by(authorities["clients"], name.upper()))) == 200
    assert resolves(connect(*issued_by(authorities["clients"], f"x.{name}"))) == 401
    assert resolves(workspace.control_plane.http) == 401
    assert resolves(connect(*own)) == 403


def test_a_certificate_of_a_stranger_is_refused_in_the_handshake(
    tls_workspace: Workspace, name: str, connect: Connect, authorities: dict[str, trustme.CA]
) -> None:
    add_client(tls_workspace, kind="egress_proxy", proofs={"certificate": {"san_dns": name}})

    for certificate in (issued_by(authorities["stranger"], name), self_signed(name)):
        with pytest.raises(httpx.TransportError):
            resolves(connect(*certificate))


def test_a_certificate_of_a_clients_own_making_is_that_client_until_it_is_taken_back(
    tls_workspace: Workspace, connect: Connect
) -> None:
    workspace, (certificate, key) = tls_workspace, self_signed()
    client = add_client(workspace, proofs={"self_signed": certificate.decode()})
    connection = connect(certificate, key)
    form = {"grant_type": GRANT_TYPE, "client_id": client}

    known = connection.post("/oauth/token", data=form).status_code
    stranger = connection.post("/oauth/token", data=form | {"client_id": workspace.runtime}).status_code
    workspace.control_plane.made("DELETE", f"/v1/clients/{client}")
    afterwards = connection.post("/oauth/token", data=form).status_code

    assert (known, stranger, afterwards) == (400, 401, 401)


@pytest.mark.guards("control_plane/adapters/tls.py", "context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN", "pass")
def test_a_certificate_of_ones_own_making_is_turned_under_the_same_name(
    tls_workspace: Workspace, connect: Connect
) -> None:
    (old, old_key), (new, new_key) = self_signed(), self_signed()
    client = add_client(tls_workspace, proofs={"self_signed": old.decode()})
    form = {"grant_type": GRANT_TYPE, "client_id": client}

    before = connect(old, old_key).post("/oauth/token", data=form).status_code
    tls_workspace.control_plane.made("PATCH", f"/v1/clients/{client}", {"proofs": {"self_signed": new.decode()}})
    turned = [connect(*pair).post("/oauth/token", data=form).status_code for pair in ((old, old_key), (new, new_key))]

    assert (before, turned) == (400, [401, 400])


def test_a_certificate_is_looked_at_only_where_nothing_else_is_presented(
    tls_workspace: Workspace, name: str, connect: Connect, authorities: dict[str, trustme.CA]
) -> None:
    workspace = tls_workspace
    add_client(workspace, kind="egress_proxy", proofs={"certificate": {"san_dns": name}})
    client = connect(*issued_by(authorities["clients"], name))

    assert client.get("/internal/tag-keys", headers={"Authorization": "Bearer x"}).status_code == 401
    assert client.get("/internal/tag-keys", auth=(workspace.runtime, workspace.runtime_secret)).status_code == 403
    assert client.get("/v1/tenants").status_code == 401
    assert client.get("/v1/tenants", headers=ADMINISTRATOR).status_code == 200


def test_a_header_that_names_a_certificate_is_not_believed(
    tls_workspace: Workspace, name: str, authorities: dict[str, trustme.CA]
) -> None:
    add_client(tls_workspace, kind="egress_proxy", proofs={"certificate": {"san_dns": name}})
    pem, _ = issued_by(authorities["clients"], name)
    encoded = pem.decode().replace("\n", "%0A")

    for header in ("X-Forwarded-Client-Cert", "X-Client-Cert", "SSL-Client-Cert", "X-SSL-Client-Cert", "Client-Cert"):
        answer = tls_workspace.control_plane.http.get("/internal/tag-keys", headers={header: encoded})
        assert answer.status_code == 401


def test_two_clients_are_not_known_by_one_certificate(workspace: Workspace) -> None:
    add_client(workspace, kind="egress_proxy", proofs={"certificate": {"san_uri": "spiffe://td/proxy"}})
    body = {
        "id": f"{workspace.tenant}-another",
        "kind": "runtime",
        "proofs": {"certificate": {"san_uri": "spiffe://td/proxy"}},
    }

    response = workspace.control_plane.admin("POST", "/v1/clients", body)

    assert (response.status_code, response.json()["code"]) == (422, "invalid_field")
