"""A trusted issuer's token as subject token: a session is opened, of whom the issuer says, and ends with the token."""

import time

import httpx
import pytest

from tests.control_plane.conftest import OwnControlPlane
from tests.control_plane.issuing import Provider
from tests.control_plane.test_delegation import Operator
from tests.control_plane.test_exchange import assert_oauth_error
from tests.control_plane.test_introspection import introspected, revoke
from tests.control_plane.workspace import JWT, SESSION, Workspace

ID_TOKEN = "urn:ietf:params:oauth:token-type:id_token"


@pytest.fixture
def provider(granted: Workspace) -> Provider:
    """Vouches for people of the workspace's tenant."""
    made = Provider(f"people-{granted.tenant}")
    claims = {
        "subject": {"claim": "sub"},
        "tenant": {"fixed": granted.tenant},
        "roles": {"claim": "groups", "map": {"eng": ["engineers"]}},
    }
    made.register(granted.control_plane, tenant=granted.tenant, claims=claims)
    return made


def exchanged(workspace: Workspace, token: str, kind: str = JWT, **form: str) -> httpx.Response:
    return workspace.token(subject_token=token, subject_token_type=kind, **({"audience": "example"} | form))


@pytest.mark.parametrize("kind", [JWT, ID_TOKEN])
def test_it_opens_a_session_of_whom_the_issuer_says_in_the_roles_that_it_says(
    granted: Workspace, provider: Provider, kind: str
) -> None:
    granted.add_credential("shared", destinations=[{"url": "https://shared.example"}])
    granted.grant("shared", role="engineers")

    answer = exchanged(granted, provider.token("alice", groups=["eng"]), kind, audience="shared").json()

    session = granted.control_plane.made("GET", f"/v1/sessions/{answer['session_id']}")
    assert (answer["subject"], answer["tenant"]) == ("alice", granted.tenant)
    assert (session["roles"], session["runtime"]) == (["engineers"], granted.runtime)
    assert granted.resolve(answer)["kind"] == "refused"  # asked for another host
    assert granted.policy(granted.caller(answer))["routes"]


@pytest.mark.guards("control_plane/proof.py", "not_after=identity.expires_at,", "not_after=None,")
def test_nothing_of_it_outlives_the_token(granted: Workspace, provider: Provider) -> None:
    until = int(time.time()) + 120

    answer = exchanged(granted, provider.token(exp=until)).json()

    session = granted.control_plane.made("GET", f"/v1/sessions/{answer['session_id']}")
    assert session["not_after"] == until
    assert 100 <= answer["expires_in"] <= 120
    assert granted.resolve(answer)["binding"]["expires_at"] <= until
    assert granted.who(answer["proxy_credential"])["expires_at"] <= until
    assert granted.renew(answer)["expires_in"] <= 120


def test_a_long_lived_token_opens_no_longer_session_than_any_other(own_control_plane: OwnControlPlane) -> None:
    workspace = Workspace(own_control_plane(session_seconds=60), "acme")
    workspace.add_credential()
    workspace.grant()
    people = Provider("people")
    people.register(workspace.control_plane, tenant="acme")

    assert exchanged(workspace, people.token()).json()["expires_in"] <= 60


def test_the_runtime_goes_on_with_the_sessions_id(granted: Workspace, provider: Provider) -> None:
    first = exchanged(granted, provider.token()).json()

    second = exchanged(granted, first["session_id"], SESSION).json()

    assert second["session_id"] == first["session_id"]
    assert second["access_token"] != first["access_token"]


@pytest.mark.guards("control_plane/proof.py", "act=chain,", "act=(),")
def test_who_acts_already_by_the_issuers_word_goes_on_acting(granted: Workspace, provider: Provider) -> None:
    act = {"sub": "assistant", "iss": "https://agents.example", "act": {"sub": "planner"}}

    answer = exchanged(granted, provider.token(act=act)).json()
    further = exchanged(granted, answer["session_id"], SESSION).json()

    of_the_issuer = {"sub": "planner", "iss": provider.issuer}
    assert answer["act"] == further["act"] == {**act, "act": of_the_issuer}
    (event,) = [event for event in granted.audit() if event.get("placeholder_id") == answer["id"]]
    assert event["extra"]["act"] == f"assistant (https://agents.example) < planner ({provider.issuer})"


@pytest.mark.guards(
    "control_plane/core/delegation.py", "party.issuer or issuer) for", "party.issuer or issuer, party.client) for"
)
def test_an_actor_of_an_issuers_is_no_client_of_ours_whatever_it_is_called(
    granted: Workspace, provider: Provider
) -> None:
    client = Operator(granted)
    named = {"sub": client.id, "client_id": client.id}

    exchange = exchanged(granted, provider.token(act={**named, "act": named})).json()
    opened = granted.control_plane.http.post(
        "/v1/sessions",
        json={"runtime": granted.runtime},
        headers={"Authorization": f"Bearer {provider.token(act=named)}"},
    ).json()

    of_the_issuer = {"sub": client.id, "iss": provider.issuer}
    assert exchange["act"] == {**of_the_issuer, "act": of_the_issuer}
    assert introspected(granted, exchange["access_token"])["act"] == exchange["act"]
    assert introspected(granted, opened["session_token"])["act"] == of_the_issuer
    (event,) = [event for event in granted.audit() if event.get("placeholder_id") == exchange["id"]]
    assert event["extra"]["act"] == f"{client.id} ({provider.issuer}) < {client.id} ({provider.issuer})"


@pytest.mark.guards(
    "control_plane/introspection.py",
    "party_of(client, issuer) in session.act",
    "any(p.subject == client.id for p in session.act)",
)
def test_a_client_whose_name_an_issuer_says_sees_and_ends_nothing(granted: Workspace, provider: Provider) -> None:
    client = Operator(granted)
    act = {"sub": client.id, "iss": provider.issuer, "client_id": client.id}

    issued = exchanged(granted, provider.token(act=act)).json()

    assert introspected(granted, issued["access_token"], client.login) == {"active": False}
    path = f"/v1/sessions/{issued['session_id']}"
    token = granted.control_plane.made("POST", f"{path}/token")["session_token"]
    revoke(granted, token, client.login)
    assert granted.control_plane.made("GET", path)["ended_at"] is None


@pytest.mark.guards(
    "control_plane/core/delegation.py", "if any(party.issuer == own_issuer for party in chain):", "if False:"
)
def test_an_issuer_names_no_actor_in_our_name(granted: Workspace, provider: Provider) -> None:
    client = Operator(granted)
    deeper = {"sub": "assistant", "act": client.act()}

    for act in (client.act(), deeper):
        assert_oauth_error(exchanged(granted, provider.token(act=act)), "invalid_request", "token_invalid")
    opened = granted.control_plane.http.post(
        "/v1/sessions",
        json={"runtime": granted.runtime},
        headers={"Authorization": f"Bearer {provider.token(act=deeper)}"},
    )

    assert opened.status_code == 401


def test_an_issuer_says_who_may_act(granted: Workspace, provider: Provider) -> None:
    actor = granted.open_session("bob")["session_token"]
    form = {"actor_token": actor, "actor_token_type": JWT}

    named = exchanged(granted, provider.token(may_act={"sub": "bob"}), **form)
    not_named = exchanged(granted, provider.token(may_act={"sub": "carol"}), **form)
    odd = exchanged(granted, provider.token(may_act={"sub": "bob", "surprise": 1}), **form)

    assert named.json()["act"]["sub"] == "bob"
    for refused in (not_named, odd):
        assert_oauth_error(refused, "invalid_request", "forbidden")


@pytest.mark.parametrize(
    "act",
    [{}, {"sub": ""}, {"sub": 1}, {"iss": "x"}, {"sub": "a", "act": "b"}, {"sub": "a", "act": {}}],
)
def test_an_actor_that_is_none_is_an_error(granted: Workspace, provider: Provider, act: object) -> None:
    assert_oauth_error(exchanged(granted, provider.token(act=act)), "invalid_request", "token_invalid")


@pytest.mark.guards(
    "control_plane/proof.py", "if identity.tenant is None or not runtime.serves(identity.tenant):", "if False:"
)
def test_a_runtime_of_another_tenant_exchanges_nothing_with_it(
    granted: Workspace, other_workspace: Workspace, provider: Provider
) -> None:
    other_workspace.add_credential()
    other_workspace.grant()

    assert_oauth_error(exchanged(other_workspace, provider.token()), "invalid_request", "token_invalid")
    assert other_workspace.control_plane.made("GET", other_workspace.path("placeholders"))["items"] == []


@pytest.mark.guards(
    "control_plane/exchange.py", "            require_subject(request, proof.subject)\n", "            pass\n"
)
def test_another_subject_cannot_be_asked_for_with_it(granted: Workspace, provider: Provider) -> None:
    response = exchanged(granted, provider.token(), requested_subject="bob")

    assert_oauth_error(response, "invalid_request", "subject_conflict")


def test_our_own_tokens_are_no_id_tokens(granted: Workspace) -> None:
    response = exchanged(granted, granted.open_session()["session_token"], ID_TOKEN)

    assert_oauth_error(response, "invalid_request", "token_invalid")
