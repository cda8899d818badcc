"""Direct mode: a key itself is handed out only where everything says so, and never because nothing answers."""

import base64
import string
from collections.abc import Callable

import httpx
import pytest

from tests.control_plane.conftest import OwnControlPlane
from tests.control_plane.issuing import Provider
from tests.control_plane.serving import PROXY, ControlPlane
from tests.control_plane.test_exchange import assert_oauth_error
from tests.control_plane.workspace import HOST, JWT, SECRET, SESSION, Json, Workspace

P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
DIRECT = "urn:coatcheck:token-type:direct"
PAST_THE_HEARTBEAT = 3_600


@pytest.fixture
def single(own_control_plane: OwnControlPlane) -> Workspace:
    """An installation for one tenant, with a credential that may be handed out, and no proxy registered."""
    workspace = Workspace(own_control_plane(platform_tenancy="single"), "acme")
    workspace.add_credential(allow_direct=True)
    workspace.grant()
    return workspace


def asked(workspace: Workspace, session: Json | None = None, **form: str) -> httpx.Response:
    session = session or workspace.open_session()
    form = {
        "subject_token": session["session_token"],
        "subject_token_type": JWT,
        "audience": "example",
        "requested_token_type": DIRECT,
    } | form
    return workspace.token(**form)


def register(control_plane: ControlPlane) -> None:
    assert control_plane.http.post("/internal/injector", auth=PROXY).status_code == 204


def test_where_everything_says_so_the_key_is_handed_out_and_it_is_in_the_trail(single: Workspace) -> None:
    response = asked(single)

    answer = response.json()
    assert response.status_code == 200, response.text
    assert response.headers["cache-control"] == "no-store"
    assert answer["upstream_credential"] == {"mode": "direct", "value": SECRET}
    assert answer["access_token"] == SECRET
    assert answer["issued_token_type"] == DIRECT
    assert answer["base_url"] == f"https://{HOST}"
    assert "proxy_credential" not in answer
    (event,) = [event for event in single.audit() if event["action"] == "exchange.direct"]
    assert (event["credential"], event["subject"], event["placeholder_id"]) == ("example", "alice", answer["id"])
    assert SECRET not in str(single.audit())


@pytest.mark.guards(
    "control_plane/issuance.py",
    "await records.tokens.add(token)\n        except TakenError:",
    "pass\n        except TakenError:",
)
def test_it_is_handed_out_once_for_each_subject_token(single: Workspace) -> None:
    session = single.open_session()

    first, second = asked(single, session), asked(single, session)

    assert first.status_code == 200
    assert_oauth_error(second, "invalid_request", "token_invalid")
    assert SECRET not in second.text


def second_solution(token: str) -> str:
    """ECDSA: whoever has (r, s) has (r, n - s) too, which verifies as well."""
    signed, _, signature = token.rpartition(".")
    raw = base64.urlsafe_b64decode(signature + "==")
    other = (P256_ORDER - int.from_bytes(raw[32:])).to_bytes(32)
    return f"{signed}.{base64.urlsafe_b64encode(raw[:32] + other).rstrip(b'=').decode()}"


def spare_bits(token: str) -> str:
    """The last character of 64 bytes in base64url has four bits that are no part of them."""
    digits = string.ascii_uppercase + string.ascii_lowercase + string.digits + "-_"
    return token[:-1] + digits[digits.index(token[-1]) ^ 1]


@pytest.mark.guards("control_plane/proof.py", 'token.rpartition(".")[0].encode()', "token.encode()")
@pytest.mark.parametrize("respelt", [second_solution, spare_bits])
def test_a_token_that_is_spelt_otherwise_is_the_same_token(single: Workspace, respelt: Callable[[str], str]) -> None:
    people = Provider("people")
    people.register(single.control_plane, tenant=single.tenant)
    token = people.token()

    first = asked(single, subject_token=token)
    second = asked(single, subject_token=respelt(token))

    assert first.status_code == 200, first.text
    assert respelt(token) != token
    assert_oauth_error(second, "invalid_request", "token_invalid")
    assert SECRET not in second.text


def test_a_session_id_is_exchanged_for_no_key(single: Workspace) -> None:
    session = single.open_session()
    single.exchange(session)

    response = asked(single, subject_token=session["session_id"], subject_token_type=SESSION)

    assert_oauth_error(response, "invalid_request")


def test_a_placeholder_is_exchanged_for_no_key(single: Workspace) -> None:
    issued = single.exchange()

    assert_oauth_error(single.renewal(issued, requested_token_type=DIRECT), "invalid_request")


def test_a_key_has_no_scope(single: Workspace) -> None:
    assert_oauth_error(asked(single, scope="read"), "invalid_scope")


@pytest.mark.guards("control_plane/direct.py", "if not credential.allow_direct or not", "if not")
def test_a_credential_that_does_not_allow_it_is_not_handed_out(single: Workspace) -> None:
    single.add_credential("guarded", destinations=[{"url": "https://guarded.example"}])
    single.grant("guarded")

    assert_oauth_error(asked(single, audience="guarded"), "invalid_target", "direct_not_allowed")


@pytest.mark.guards("control_plane/direct.py", "if not self._is_single_tenant:", "if False:")
def test_an_installation_for_many_tenants_hands_nothing_out(own_control_plane: OwnControlPlane) -> None:
    workspace = Workspace(own_control_plane(), "acme")
    workspace.add_credential(allow_direct=True)
    workspace.grant()

    assert_oauth_error(asked(workspace), "invalid_target", "direct_not_allowed")


@pytest.mark.guards(
    "control_plane/direct.py", "if injectors or len(tenants) != 1:", "if injectors or len(tenants) < 1:"
)
def test_an_installation_that_says_single_and_has_two_tenants_hands_nothing_out(single: Workspace) -> None:
    Workspace(single.control_plane, "second")

    assert_oauth_error(asked(single), "invalid_target", "direct_not_allowed")


@pytest.mark.guards("control_plane/direct.py", "if injectors or len(tenants) != 1:", "if len(tenants) != 1:")
def test_where_a_proxy_is_registered_nothing_is_handed_out(single: Workspace) -> None:
    register(single.control_plane)

    assert_oauth_error(asked(single), "invalid_target", "direct_not_allowed")


@pytest.mark.guards("control_plane/direct.py", "require_one_heard(injectors, self._clock())", "injectors = ()")
@pytest.mark.guards("control_plane/exchange.py", "await self._injectors.require_heard()", "pass")
def test_a_silent_proxy_means_503_and_never_the_key(single: Workspace) -> None:
    register(single.control_plane)
    single.control_plane.clock.advance(PAST_THE_HEARTBEAT)

    for response in (asked(single), asked(single, requested_token_type="")):
        assert_oauth_error(response, "temporarily_unavailable", "credential_unavailable", status=503)
        assert response.headers["retry-after"]
        assert SECRET not in response.text


def test_once_it_is_heard_of_again_placeholders_are_issued_again(single: Workspace) -> None:
    register(single.control_plane)
    single.control_plane.clock.advance(PAST_THE_HEARTBEAT)
    silent = asked(single, requested_token_type="")

    register(single.control_plane)

    assert silent.status_code == 503
    assert single.exchange()["upstream_credential"]["mode"] == "placeholder"
    assert_oauth_error(asked(single), "invalid_target", "direct_not_allowed")


def test_what_runs_is_renewed_though_no_proxy_is_heard_of(single: Workspace) -> None:
    issued = single.exchange()
    register(single.control_plane)
    single.control_plane.clock.advance(PAST_THE_HEARTBEAT)

    assert single.renewal(issued).status_code == 200


@pytest.mark.guards("control_plane/injectors.py", "if not await records.injectors.remove(injector):", "if True:")
def test_only_an_administrators_act_takes_a_registration_back_and_it_is_in_the_trail(single: Workspace) -> None:
    register(single.control_plane)
    single.control_plane.clock.advance(30 * 86_400)
    before = single.control_plane.made("GET", "/v1/injectors")["items"]

    single.control_plane.made("DELETE", f"/v1/injectors/{PROXY[0]}")

    assert [(each["id"], each["silent"]) for each in before] == [(PROXY[0], True)]
    assert single.control_plane.made("GET", "/v1/injectors")["items"] == []
    assert single.control_plane.admin("DELETE", f"/v1/injectors/{PROXY[0]}").status_code == 404
    actions = [event["action"] for event in single.control_plane.made("GET", "/v1/audit")["items"]]
    assert actions.count("injector.register") == actions.count("injector.remove") == 1
    assert asked(single).json()["upstream_credential"]["mode"] == "direct"


def test_a_registration_survives_the_end_of_its_client_and_a_restart(
    single: Workspace, own_control_plane: OwnControlPlane
) -> None:
    register(single.control_plane)
    single.control_plane.stop()

    again = own_control_plane(platform_tenancy="single")

    assert [each["id"] for each in again.made("GET", "/v1/injectors")["items"]] == [PROXY[0]]


def test_only_a_proxy_registers(single: Workspace) -> None:
    login = (single.runtime, single.runtime_secret)

    assert single.control_plane.http.post("/internal/injector", auth=login).status_code == 403
    assert single.control_plane.http.post("/internal/injector").status_code == 401
    assert single.control_plane.made("GET", "/v1/injectors")["items"] == []


@pytest.mark.guards("control_plane/core/reach.py", "if new.allow_direct and not old.allow_direct:", "if False:")
def test_allowing_it_later_needs_the_secret_again_and_forbidding_it_does_not(single: Workspace) -> None:
    single.add_credential("guarded", destinations=[{"url": "https://guarded.example"}])

    refused = single.patch_credential({"allow_direct": True}, "guarded")
    allowed = single.patch_credential({"allow_direct": True, "secret": SECRET}, "guarded")
    forbidden = single.patch_credential({"allow_direct": False})

    assert (refused.status_code, refused.json()["code"]) == (422, "secret_required")
    assert allowed.json()["allow_direct"] is True
    assert forbidden.json()["allow_direct"] is False
    assert_oauth_error(asked(single), "invalid_target", "direct_not_allowed")


def test_allow_direct_edited_in_the_database_hands_nothing_out(single: Workspace) -> None:
    single.add_credential("guarded", destinations=[{"url": "https://guarded.example"}])
    single.grant("guarded")
    single.control_plane.edit("UPDATE credentials SET allow_direct = 1 WHERE name = 'guarded'")

    response = asked(single, audience="guarded")

    assert_oauth_error(response, "temporarily_unavailable", "credential_unavailable", status=503)
    assert SECRET not in response.text
