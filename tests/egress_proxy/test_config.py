"""Settings: what refuses to start."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from control_plane.contract.settings import UnknownSettingError
from egress_proxy.config import PlaintextListener, Settings, settings_from_environment
from egress_proxy.listen import ListenAddress, parse_listen

NEEDED = {
    "COATCHECK_PROXY_CONTROL_PLANE_URL": "http://127.0.0.1:8470",
    "COATCHECK_PROXY_CLIENT_ID": "local-proxy",
    "COATCHECK_PROXY_CLIENT_SECRET_FILE": "/s",
    "COATCHECK_PROXY_CA_CERT_FILE": "/c",
    "COATCHECK_PROXY_CA_KEY_FILE": "/k",
}


def test_settings_come_from_the_environment() -> None:
    settings = settings_from_environment({**NEEDED, "COATCHECK_PROXY_FORWARD_LISTEN": "[::1]:0"})

    assert settings.forward_listen == ListenAddress("::1", 0)
    assert settings.client_id == "local-proxy"


def test_a_misspelt_setting_is_refused_with_the_right_name() -> None:
    with pytest.raises(UnknownSettingError, match="did you mean COATCHECK_PROXY_UPSTREAM_CA_FILES"):
        settings_from_environment({**NEEDED, "COATCHECK_PROXY_UPSTREAM_CA_FILE": "/x"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("COATCHECK_PROXY_SERVICE_HOST", "10.0.0.1"),
        ("COATCHECK_PROXY_SERVICE_PORT", "8471"),
        ("COATCHECK_PROXY_SERVICE_PORT_FORWARD", "8471"),
        ("COATCHECK_PROXY_PORT", "tcp://10.0.0.1:8471"),
        ("COATCHECK_PROXY_PORT_8471_TCP_ADDR", "10.0.0.1"),
        ("COATCHECK_CONTROL_PLANE_ISSUER_URL", "http://x"),
        ("COATCHECK_RUNTIME_LISTEN", "x"),
    ],
)
def test_service_links_and_other_components_settings_are_ignored(name: str, value: str) -> None:
    assert settings_from_environment({**NEEDED, name: value}).workers == 1


@pytest.mark.guards("egress_proxy/config.py", "if not listen.is_loopback:", "if False:")
@pytest.mark.parametrize("name", ["FORWARD_LISTEN", "REVERSE_LISTEN"])
@pytest.mark.parametrize("listen", ["0.0.0.0:8471", "[::]:8471", "10.0.0.1:8471", ":8471"])
def test_a_listener_for_other_machines_without_tls_refuses_to_start(name: str, listen: str) -> None:
    with pytest.raises(ValidationError, match=f"COATCHECK_PROXY_{name}"):
        settings_from_environment({**NEEDED, f"COATCHECK_PROXY_{name}": listen})


def test_the_operator_may_take_the_risk_of_a_plaintext_listener() -> None:
    environment = {
        **NEEDED,
        "COATCHECK_PROXY_FORWARD_LISTEN": "0.0.0.0:8471",
        "COATCHECK_PROXY_PLAINTEXT_LISTENER": "accepted-risk",
    }

    assert settings_from_environment(environment).plaintext_listener is PlaintextListener.ACCEPTED_RISK


def test_settings_are_built_in_code_by_the_same_names() -> None:
    settings = Settings(
        control_plane_url="http://127.0.0.1:1",
        client_id="p",
        client_secret_file=Path("/s"),
        ca_cert_file=Path("/c"),
        ca_key_file=Path("/k"),
        reverse_path_credential=True,
    )

    assert settings.reverse_path_credential


@pytest.mark.parametrize("text", ["127.0.0.1", "127.0.0.1:x", "127.0.0.1:70000"])
def test_a_listener_needs_host_and_port(text: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        parse_listen(text)
