"""Settings: what is unknown or odd stops the start, and says what was probably meant."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from control_plane.contract.settings import UnknownSettingError
from runtime.config import Settings, settings_from_environment

GOOD = {
    "COATCHECK_RUNTIME_CONTROL_PLANE_URL": "http://127.0.0.1:8470/",
    "COATCHECK_RUNTIME_CLIENT_ID": "runtime-1",
    "COATCHECK_RUNTIME_CLIENT_SECRET_FILE": "/run/secrets/client",
    "COATCHECK_RUNTIME_MODEL": "coat-1",
}


def test_the_least_that_a_runtime_needs_to_be_told() -> None:
    settings = settings_from_environment(GOOD)

    assert settings.listen == ("127.0.0.1", 8474)
    assert settings.control_plane_url == settings.issuer == "http://127.0.0.1:8470"
    assert settings.client_secret_file == Path("/run/secrets/client")
    assert settings.model_audience == "anthropic"


def test_every_setting_may_be_given_in_the_environment() -> None:
    given = GOOD | {
        "COATCHECK_RUNTIME_LISTEN": "[::1]:0",
        "COATCHECK_RUNTIME_ISSUER_URL": "https://coatcheck.example.com",
        "COATCHECK_RUNTIME_MODEL_AUDIENCE": "work-anthropic",
        "COATCHECK_RUNTIME_MODEL_TIMEOUT_SECONDS": "30",
        "COATCHECK_RUNTIME_LOG_LEVEL": "debug",
    }

    settings = settings_from_environment(given)

    assert settings.listen == ("::1", 0)
    assert settings.issuer == "https://coatcheck.example.com"
    assert (settings.model_audience, settings.model_timeout_seconds, settings.log_level) == (
        "work-anthropic",
        30,
        "debug",
    )


def test_the_process_own_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in GOOD.items():
        monkeypatch.setenv(name, value)

    assert settings_from_environment().client_id == "runtime-1"


def test_a_misspelt_name_stops_the_start_and_suggests_the_right_one() -> None:
    with pytest.raises(UnknownSettingError, match="did you mean COATCHECK_RUNTIME_MODEL_AUDIENCE"):
        settings_from_environment(GOOD | {"COATCHECK_RUNTIME_MODEL_AUDIENC": "x"})


@pytest.mark.parametrize(
    "odd",
    [
        {"LISTEN": "8474"},
        {"LISTEN": "127.0.0.1"},
        {"LISTEN": "127.0.0.1:port"},
        {"LISTEN": "127.0.0.1:70000"},
        {"CONTROL_PLANE_URL": "127.0.0.1:8470"},
        {"CONTROL_PLANE_URL": "ftp://x"},
        {"CONTROL_PLANE_URL": "http://user:pw@x"},
        {"CONTROL_PLANE_URL": "http://x?y"},
        {"CLIENT_ID": ""},
        {"MODEL": ""},
        {"MODEL_MAX_TOKENS": "0"},
        {"MODEL_TIMEOUT_SECONDS": "-1"},
        {"LOG_LEVEL": "loud"},
        {"TLS_CERT_FILE": "/tls.pem"},
        {"TLS_KEY_FILE": "/tls.key"},
    ],
)
def test_an_odd_value_stops_the_start(odd: dict[str, str]) -> None:
    with pytest.raises(ValidationError):
        settings_from_environment(GOOD | {f"COATCHECK_RUNTIME_{name}": value for name, value in odd.items()})


@pytest.mark.parametrize("name", ["CONTROL_PLANE_URL", "CLIENT_ID", "CLIENT_SECRET_FILE", "MODEL"])
def test_what_has_no_default_must_be_given(name: str) -> None:
    with pytest.raises(ValidationError):
        settings_from_environment({key: value for key, value in GOOD.items() if not key.endswith(f"RUNTIME_{name}")})


def test_settings_are_made_in_code_with_the_same_names() -> None:
    made: dict[str, Any] = {"listen": ("127.0.0.1", 0), "control_plane_url": "http://x", "client_id": "r"}

    assert Settings(**made, client_secret_file=Path("f"), model="m").listen == ("127.0.0.1", 0)


@pytest.mark.guards(
    "runtime/config.py",
    'if self.tls_cert_file is None and self.plaintext_listener != "accepted-risk" and not _is_loopback(host):',
    "if False:",
)
@pytest.mark.parametrize("listen", ["0.0.0.0:8474", "[::]:8474", "10.0.0.1:8474", ":8474", "runtime.internal:8474"])
def test_a_listener_for_other_machines_is_tls_or_an_accepted_risk(listen: str) -> None:
    given = GOOD | {"COATCHECK_RUNTIME_LISTEN": listen}

    with pytest.raises(ValidationError, match="PLAINTEXT_LISTENER=accepted-risk"):
        settings_from_environment(given)

    settings_from_environment(given | {"COATCHECK_RUNTIME_PLAINTEXT_LISTENER": "accepted-risk"})
    settings_from_environment(
        given | {"COATCHECK_RUNTIME_TLS_CERT_FILE": "cert.pem", "COATCHECK_RUNTIME_TLS_KEY_FILE": "key.pem"}
    )
