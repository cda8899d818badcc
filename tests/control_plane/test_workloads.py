"""Which client a workload is that calls a proxy: asked over `/internal/resolve`, by a token or a certificate."""

import base64
import datetime
import time
from hashlib import sha256
from typing import Any

import pytest
import trustme
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509 import load_pem_x509_certificate

from tests.control_plane.issuing import Provider, SigningKey
from tests.control_plane.test_client_authentication import Cluster, add_client
from tests.control_plane.test_events import position, streaming
from tests.control_plane.workspace import Json, Workspace

WORKLOADS = "control_plane/workloads.py"
AUDIENCE = "coatcheck-proxy"


class ProxyCluster(Cluster):
    """Whose ServiceAccount tokens prove clients towards proxies."""

    def __init__(self, workspace: Workspace, **fields: Any) -> None:
        super().__init__(workspace, **({"uses": ["proxy"]} | fields))

    def token(self, namespace: str = "agents", account: str = "runtime", **claims: Any) -> str:
        return super().token(namespace, account, **({"aud": [AUDIENCE]} | claims))

    def who(self, token: str | None = None) -> Json:
        return who(self.workspace, token=token or self.token())


@pytest.fixture
def cluster(workspace: Workspace) -> ProxyCluster:
    return ProxyCluster(workspace)


def who(workspace: Workspace, *, token: str = "", der: bytes = b"", **fields: Any) -> Json:
    """The answer to the question which client this is."""
    ask = {
        "kind": "workload",
        "proof_sha256": sha256(token.encode() or der).hexdigest(),
        "token": token,
        "certificate": base64.b64encode(der).decode(),
    }
    answer: Json = workspace.ask(ask | fields)["answer"]
    return answer


def is_nobody(answer: Json, true_code: str = "token_invalid") -> bool:
    return (answer["kind"], answer["code"], answer["true_code"]) == (
        "refused",
        "proxy_authentication_required",
        true_code,
    )


# --- tokens ----------------------------------------------------------------------------------------------------------


def test_a_service_account_is_its_client_until_the_token_is_over(cluster: ProxyCluster) -> None:
    client = add_client(cluster.workspace, proofs=cluster.proof(), subject="ci-job", kind="operator")
    exp = int(time.time()) + 120

    answer = cluster.who(cluster.token(exp=exp))

    assert answer == {
        "kind": "workload",
        "client": client,
        "expires_at": float(exp),
        "tenant": cluster.workspace.tenant,
        "subject": "ci-job",
        "issuer": cluster.provider.name,
    }


def test_a_jwt_svid_is_its_client(workspace: Workspace) -> None:
    domain, key = f"spiffe://{workspace.tenant}.test", SigningKey("svid")
    provider = Provider(f"mesh-{workspace.tenant}", key)
    provider.register(
        workspace.control_plane, tenant="", issuer=domain, preset="spiffe", uses=["proxy"], audiences=None, claims={}
    )
    proofs = {"workload": {"issuer": provider.name, "subject": f"{domain}/ns/agents/sa/*"}}
    client = add_client(workspace, proofs=proofs)
    now = int(time.time())

    token = key.sign({"sub": f"{domain}/ns/agents/sa/runtime", "aud": [AUDIENCE], "exp": now + 60, "iat": now})

    assert who(workspace, token=token)["client"] == client


@pytest.mark.guards(
    "control_plane/core/identity.py",
    "others = Others.REFUSE if use is Use.PROXY else issuer.other_audiences",
    "others = issuer.other_audiences",
)
@pytest.mark.guards("control_plane/identification.py", "return (PROXY_AUDIENCE,)", "return issuer.audiences")
def test_a_token_for_anybody_else_is_no_proof_towards_a_proxy(workspace: Workspace) -> None:
    cluster = ProxyCluster(workspace, other_audiences="ignore")
    add_client(workspace, proofs=cluster.proof())
    control_plane = workspace.control_plane.url

    for audience in (control_plane, [control_plane], [AUDIENCE, control_plane], [AUDIENCE, "x"], [], AUDIENCE + "x"):
        assert is_nobody(cluster.who(cluster.token(aud=audience))), audience
    assert cluster.who()["kind"] == "workload"


def test_a_token_for_proxies_is_no_proof_towards_the_control_plane(workspace: Workspace) -> None:
    cluster = ProxyCluster(workspace, uses=["client", "proxy"])
    add_client(workspace, proofs=cluster.proof())

    assert cluster.ask(cluster.token()).status_code == 401
    assert cluster.ask(cluster.token(aud=[workspace.control_plane.url])).status_code == 400


@pytest.mark.guards("control_plane/core/identity.py", "if use not in issuer.uses:", "if False:")
@pytest.mark.guards(WORKLOADS, "if issuer is None or Use.PROXY not in issuer.uses:", "if issuer is None:")
def test_an_issuer_whose_use_is_not_proxy_vouches_for_nobody_there(workspace: Workspace) -> None:
    cluster = ProxyCluster(workspace, uses=["client"])
    add_client(workspace, proofs=cluster.proof())

    assert is_nobody(cluster.who())


CONFUSED: dict[str, Any] = {
    "an expired one": {"exp": 1},
    "one without an end": {"exp": None},
    "one of tomorrow": {"nbf": int(time.time()) + 86_400},
    "another issuer's": {"iss": "https://evil.test"},
    "one with an inner list for an audience": {"aud": [[AUDIENCE]]},
}


@pytest.mark.parametrize("claims", CONFUSED.values(), ids=CONFUSED.keys())
def test_a_token_that_is_not_exactly_right_is_nobodys(cluster: ProxyCluster, claims: Json) -> None:
    add_client(cluster.workspace, proofs=cluster.proof())

    answer = cluster.who(cluster.token(**claims))

    assert is_nobody(answer, "token_expired" if claims == {"exp": 1} else "token_invalid")


@pytest.mark.parametrize(
    "header",
    [{"jku": "https://evil.test/keys"}, {"x5u": "https://evil.test"}, {"jwk": {"kty": "oct"}}, {"kid": "../x"}],
)
def test_what_a_tokens_header_says_is_not_followed(cluster: ProxyCluster, header: Json) -> None:
    add_client(cluster.workspace, proofs=cluster.proof())
    payload: Json = {"iss": cluster.provider.issuer, "sub": "system:serviceaccount:agents:runtime", "aud": [AUDIENCE]}
    inside = {"namespace": "agents", "serviceaccount": {"name": "runtime", "uid": "1"}}
    payload |= {"exp": int(time.time()) + 60, "kubernetes.io": inside}
    foreign = SigningKey("evil")

    assert is_nobody(cluster.who(foreign.sign(payload, **header)))


@pytest.mark.guards(WORKLOADS, "if len(callers) != 1:", "if not callers:")
def test_a_workload_that_two_clients_could_be_is_neither(cluster: ProxyCluster) -> None:
    add_client(cluster.workspace, proofs=cluster.proof())
    add_client(cluster.workspace, proofs=cluster.proof("system:serviceaccount:agents:*"))

    assert is_nobody(cluster.who())
    assert is_nobody(cluster.who(cluster.token("elsewhere")))


@pytest.mark.guards(WORKLOADS, "if client.kind is not ClientKind.EGRESS_PROXY]", "]")
def test_a_proxy_is_no_caller_of_proxies(cluster: ProxyCluster) -> None:
    add_client(cluster.workspace, proofs=cluster.proof(), kind="egress_proxy")

    assert is_nobody(cluster.who())


@pytest.mark.guards(
    WORKLOADS, "if bool(ask.token) == bool(ask.certificate) or _digest(ask) != ask.proof_sha256:", "if False:"
)
def test_a_digest_is_only_ever_answered_for_the_proof_it_is_of(cluster: ProxyCluster) -> None:
    add_client(cluster.workspace, proofs=cluster.proof())
    token = cluster.token()

    assert who(cluster.workspace, token=token, proof_sha256="ab" * 32)["kind"] == "refused"
    assert who(cluster.workspace, token=token, certificate="MIIB")["kind"] == "refused"
    assert who(cluster.workspace)["kind"] == "refused"
    assert who(cluster.workspace, certificate="no base64!")["kind"] == "refused"


# --- certificates ----------------------------------------------------------------------------------------------------


def certificate(*names: str) -> tuple[bytes, float]:
    pem = trustme.CA().issue_cert(*names).cert_chain_pems[0].bytes()
    found = load_pem_x509_certificate(pem)
    return found.public_bytes(Encoding.DER), found.not_valid_after_utc.timestamp()


def test_a_certificates_registered_name_is_its_client_until_the_certificate_is_over(workspace: Workspace) -> None:
    der, ends_at = certificate(f"{workspace.tenant}.agents.test")
    client = add_client(workspace, proofs={"certificate": {"san_dns": f"{workspace.tenant}.agents.test"}})

    answer = who(workspace, der=der)

    assert (answer["client"], answer["subject"], answer["issuer"]) == (client, None, "")
    assert answer["expires_at"] == ends_at


@pytest.mark.guards(WORKLOADS, "if self._clock() >= expires_at:", "if False:")
def test_a_certificate_that_is_over_or_unknown_or_none_is_nobodys(workspace: Workspace) -> None:
    name = f"{workspace.tenant}.agents.test"
    add_client(workspace, proofs={"certificate": {"san_dns": name}})
    pem = trustme.CA().issue_cert(name, not_after=_yesterday()).cert_chain_pems[0].bytes()
    over = load_pem_x509_certificate(pem).public_bytes(Encoding.DER)

    assert is_nobody(who(workspace, der=over), "token_expired")
    assert is_nobody(who(workspace, der=certificate("other.test")[0]))
    assert is_nobody(who(workspace, der=b"no certificate"))


def _yesterday() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)


# --- clients of one subject ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"kind": "egress_proxy", "subject": "x"}, "an egress proxy acts for nobody"),
        ({"kind": "runtime", "tenant": None, "subject": "x"}, "belongs to one tenant"),
        ({"kind": "operator", "scopes": ["subject:assert"], "subject": "x"}, "names its subjects itself"),
        ({"kind": "runtime", "subject": ""}, "1 to 255 characters"),
    ],
)
def test_one_subject_is_one_tenants_and_no_proxys(workspace: Workspace, fields: Json, said: str) -> None:
    body = {"id": f"{workspace.tenant}-c", "tenant": workspace.tenant} | fields

    response = workspace.control_plane.admin("POST", "/v1/clients", body)

    assert response.status_code == 422, response.text
    assert said in response.text


@pytest.mark.guards(
    "control_plane/core/records.py",
    "self.serves(tenant) and self.subject in (None, subject)",
    "self.serves(tenant)",
)
def test_a_client_of_one_subject_exchanges_and_holds_placeholders_for_that_one_alone(granted: Workspace) -> None:
    runtime = f"{granted.tenant}-one"
    body = {"id": runtime, "kind": "runtime", "tenant": granted.tenant, "subject": "ci-job"}
    granted.control_plane.made("POST", "/v1/clients", body)
    issue = {"audience": "api", "ttl_seconds": 60, "client": runtime}

    refused = granted.control_plane.admin("POST", granted.path("placeholders"), issue | {"subject": "alice"})
    policy = granted.policy({"client": runtime, "tenant": granted.tenant, "subject": "alice", "session": None})

    assert (refused.status_code, refused.json()["code"]) == (422, "invalid_field")
    assert policy["kind"] == "refused"
    own = granted.policy({"client": runtime, "tenant": granted.tenant, "subject": "ci-job", "session": None})
    assert own["kind"] == "policy"


# --- what is taken back ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["client removed", "client changed", "issuer removed", "issuer replaced"])
@pytest.mark.guards(
    "control_plane/registry.py",
    "(client.id, now)\n        await self._tell_proxies(records, client)\n",
    "(client.id, now)\n",
)
@pytest.mark.guards(
    "control_plane/issuers.py",
    "            await records.issuers.remove(name)\n            await self._tell_proxies(records, issuer)\n",
    "            await records.issuers.remove(name)\n",
)
def test_proxies_are_told_when_what_vouches_for_a_workload_changes(cluster: ProxyCluster, change: str) -> None:
    workspace, provider = cluster.workspace, cluster.provider
    client = add_client(workspace, proofs=cluster.proof())
    before, control_plane = position(workspace.control_plane), workspace.control_plane
    record = provider.record(tenant="", preset="kubernetes", uses=["client"], audiences=None, claims={})
    match change:
        case "client removed":
            control_plane.made("DELETE", f"/v1/clients/{client}")
        case "client changed":
            control_plane.made("PATCH", f"/v1/clients/{client}", {"secret": "new"})
        case "issuer removed":
            control_plane.made("DELETE", f"/v1/issuers/{provider.name}")
        case _:
            control_plane.made("PUT", f"/v1/issuers/{provider.name}", record)
    expected = f"client:{client}" if change.startswith("client") else f"issuer:{provider.name}"

    with streaming(control_plane, after=before) as stream:
        (event,) = stream.until(lambda each: each["id"] == expected)[-1:]

    assert (event["kind"], event["revoked"]) == ("proxy_credential", True)
    if change != "client changed":
        assert is_nobody(cluster.who())


def test_no_token_of_a_workload_is_in_the_trail(cluster: ProxyCluster) -> None:
    token = cluster.token(exp=1)

    cluster.who(token)

    page = cluster.workspace.control_plane.admin("GET", "/v1/audit?limit=500")
    assert token.rpartition(".")[2] not in page.text
