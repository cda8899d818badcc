"""What CMD's environment holds, and what it does not (pure; `test_run` looks at a real child's)."""

from typing import Any

import pytest

from coatcheck.environment import (
    CA_FILE_VARIABLES,
    WayOut,
    Withheld,
    child_environment,
    has_loopback_destination,
    passed_on_keys,
    variables_of,
)
from coatcheck.terminal import WrongUsageError
from control_plane.contract.secret import Secret

NOTHING_WITHHELD = Withheld(frozenset(), ())


def way_out(**changed: Any) -> WayOut:
    return WayOut(
        **{
            "forward_url": "http://127.0.0.1:1001",
            "reverse_url": "http://127.0.0.1:1002",
            "forward_host": "127.0.0.1",
            "forward_port": 1001,
            "ca_bundle": "/run-folder/ca-bundle.pem",
            **changed,
        }
    )


def environment(parent: dict[str, str], *, withheld: Withheld = NOTHING_WITHHELD, **way: Any) -> dict[str, str]:
    return child_environment(
        parent,
        placeholders={"OPENAI_API_KEY": "sk-placeholder"},
        base_urls={},
        way_out=way_out(**way),
        withheld=withheld,
    )


def credential(name: str, *variables: str, url: str = "https://api.example.com") -> dict[str, Any]:
    return {"name": name, "variables": list(variables), "destinations": [{"url": url}]}


def test_every_proxy_variable_leads_to_the_listener() -> None:
    given = environment({})

    assert {given[name] for name in ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy")} == {
        "http://127.0.0.1:1001"
    }


def test_every_client_gets_the_bundle_in_its_own_variable() -> None:
    given = environment({})

    assert {given[name] for name in CA_FILE_VARIABLES} == {"/run-folder/ca-bundle.pem"}


def test_loopback_goes_round_the_proxy_unless_something_granted_is_there() -> None:
    usual, with_loopback = environment({}), environment({}, has_loopback_destination=True)

    assert usual["NO_PROXY"] == usual["no_proxy"] == "localhost,127.0.0.1,::1"
    assert with_loopback["NO_PROXY"] == with_loopback["no_proxy"] == ""


@pytest.mark.guards("coatcheck/environment.py", "or name.lower() in _WOULD_WIN_OVER_OURS", "")
def test_a_proxy_of_the_shell_that_would_win_over_ours_is_taken_out() -> None:
    names = ["ALL_PROXY", "all_proxy", "npm_config_https_proxy", "NPM_CONFIG_NOPROXY", "PIP_PROXY"]

    given = environment(dict.fromkeys(names, "http://somewhere-else"))

    assert not set(names) & set(given)


@pytest.mark.guards("coatcheck/environment.py", 'name.startswith("COATCHECK_")', "False")
def test_our_own_settings_are_not_passed_on() -> None:
    given = environment({"COATCHECK_CONTROL_PLANE_ADMIN_TOKEN_FILE": "/f", "COATCHECK_HOME": "/h", "PATH": "/bin"})

    assert [name for name in given if name.startswith("COATCHECK_")] == ["COATCHECK_REVERSE_URL"]
    assert given["PATH"] == "/bin"


@pytest.mark.guards("coatcheck/environment.py", "or name in withheld.names", "")
def test_a_variable_of_a_credential_that_is_not_granted_is_taken_out() -> None:
    given = environment({"STRIPE_API_KEY": "sk_live_real"}, withheld=Withheld(frozenset({"STRIPE_API_KEY"}), ()))

    assert "STRIPE_API_KEY" not in given


def test_a_variable_of_a_granted_credential_holds_the_placeholder_instead_of_the_shells_key() -> None:
    given = environment({"OPENAI_API_KEY": "sk-real"}, withheld=Withheld(frozenset({"OPENAI_API_KEY"}), ()))

    assert given["OPENAI_API_KEY"] == "sk-placeholder"


@pytest.mark.guards("coatcheck/environment.py", "or any(secret.reveal() in value for secret in withheld.values)", "")
def test_a_variable_that_holds_one_of_our_own_secrets_is_taken_out_whatever_its_name() -> None:
    given = environment({"HEADER": "Bearer admin-token-1"}, withheld=Withheld(frozenset(), (Secret("admin-token-1"),)))

    assert "HEADER" not in given


def test_java_gets_proxy_and_trust_store_after_what_the_shell_had() -> None:
    given = environment({"JAVA_TOOL_OPTIONS": "-Xmx1g"}, java_trust_store="/run-folder/truststore.p12")

    options = given["JAVA_TOOL_OPTIONS"].split(" ")
    assert options[0] == "-Xmx1g"
    assert "-Djavax.net.ssl.trustStore=/run-folder/truststore.p12" in options
    assert {"-Dhttps.proxyHost=127.0.0.1", "-Dhttps.proxyPort=1001"} <= set(options)


def test_without_java_its_variable_is_left_alone() -> None:
    assert "JAVA_TOOL_OPTIONS" not in environment({})


def test_two_credentials_with_one_variable_are_wrong_usage_that_names_both() -> None:
    with pytest.raises(WrongUsageError, match=r"first and second both use API_KEY"):
        variables_of([credential("first", "API_KEY"), credential("second", "API_KEY")])


def test_a_credential_cannot_take_a_variable_that_leads_to_the_proxy() -> None:
    with pytest.raises(WrongUsageError, match="HTTPS_PROXY"):
        variables_of([credential("sly", "HTTPS_PROXY")])


def test_each_variable_belongs_to_its_credential() -> None:
    found = variables_of([credential("one", "A", "B"), credential("two", "C")])

    assert found == {"A": "one", "B": "one", "C": "two"}


@pytest.mark.parametrize(
    "url, expected",
    [
        ("https://127.0.0.1:8443", True),
        ("http://localhost:11434", True),
        ("https://[::1]", True),
        ("https://api.example.com", False),
        ("https://127.example.com", False),
    ],
)
def test_loopback_destinations_are_known_by_their_host(url: str, expected: bool) -> None:
    assert has_loopback_destination([credential("any", url=url)], []) is expected


def test_a_loopback_host_that_is_allowed_counts_too() -> None:
    assert has_loopback_destination([credential("any")], ["127.0.0.1"])


def test_keys_of_the_shell_that_nothing_replaces_are_named() -> None:
    parent = {"ANTHROPIC_API_KEY": "sk-ant", "OPENAI_API_KEY": "sk-real", "EMPTY_API_KEY": ""}

    named = passed_on_keys(
        parent,
        ["ANTHROPIC_API_KEY", "OPENAI_API_KEY", "EMPTY_API_KEY"],
        Withheld(frozenset({"OPENAI_API_KEY"}), ()),
    )

    assert named == ["ANTHROPIC_API_KEY"]
