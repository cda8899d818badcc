"""`why` explains every refusal there is, and quotes what came from requests."""

import shlex

import pytest

from coatcheck.explain import explain
from control_plane.contract.refusal import RefusalCode


@pytest.mark.parametrize("code", list(RefusalCode))
def test_every_refusal_code_has_an_explanation(code: RefusalCode) -> None:
    explanation = explain(code, {"host": "api.example.com", "credential": "example", "subject": "local"})

    assert explanation.expected
    assert explanation.todo


@pytest.mark.parametrize("code", list(RefusalCode))
def test_every_refusal_can_be_explained_when_nothing_else_is_known(code: RefusalCode) -> None:
    explanation = explain(code, {})

    assert explanation.expected
    assert not explanation.command.endswith(" ")


def test_a_refused_host_comes_with_the_command_that_allows_it() -> None:
    explanation = explain(RefusalCode.DESTINATION_DENIED, {"scheme": "https", "host": "mirror.test", "port": 443})

    assert explanation.command == "coatcheck allow add mirror.test"


def test_an_unusual_port_is_part_of_the_command() -> None:
    explanation = explain(RefusalCode.DESTINATION_DENIED, {"scheme": "https", "host": "mirror.test", "port": 8443})

    assert explanation.command == "coatcheck allow add mirror.test:8443"


@pytest.mark.guards(
    "coatcheck/explain.py", 'return shlex.quote(shown if is_default else f"{shown}:{port}")', "return shown"
)
def test_a_host_from_a_request_is_quoted_for_the_shell() -> None:
    explanation = explain(RefusalCode.DESTINATION_DENIED, {"scheme": "https", "host": "x;rm -rf ~", "port": 443})

    assert shlex.split(explanation.command) == ["coatcheck", "allow", "add", "x;rm -rf ~"]


def test_a_placeholder_at_another_host_is_not_answered_with_an_allow_rule() -> None:
    event = {"host": "evil.example", "placeholder_id": "ph_1", "credential": "openai"}

    explanation = explain(RefusalCode.DESTINATION_DENIED, event)

    assert explanation.command == "coatcheck credential show openai"
