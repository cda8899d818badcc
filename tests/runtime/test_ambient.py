"""No credential of the environment reaches a turn, whoever put it there."""

import os
import sys
from pathlib import Path

import pytest

from control_plane.contract.headers import UNUSED_VARIABLE_SENTINEL
from control_plane.core.presets import PRESETS, Preset
from runtime.ambient import scrub_ambient_credentials
from runtime.bootstrap import running
from runtime.core.ambient import SENTINELS, is_ambient, scrubbed
from tests.runtime.test_bootstrap import settings
from tests.support.processes import Served, clean_environment, free_port, private_file

REAL = "sk-ant-api03-a-real-key-of-somebody"
HARMLESS = {
    *("PATH", "HOME", "LANG", "TZ", "TMPDIR", "HOSTNAME", "USER", "TERM", "SSL_CERT_FILE", "NO_PROXY", "MONKEY"),
    *("COATCHECK_RUNTIME_CLIENT_SECRET_FILE", "KUBERNETES_SERVICE_HOST", "PYTHONUNBUFFERED", "KEYMAP", "AUTHOR"),
}
OUTRANKING = [
    *("ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_CUSTOM_HEADERS", "ANTHROPIC_PROFILE", "ANTHROPIC_IDENTITY_TOKEN_FILE"),
    *("ANTHROPIC_BASE_URL", "OPENAI_BASE_URL", "OPENAI_ADMIN_KEY", "OPENAI_ORG_ID", "AZURE_OPENAI_AD_TOKEN"),
    *("GOOGLE_API_KEY", "GOOGLE_APPLICATION_CREDENTIALS", "AWS_PROFILE", "AWS_WEB_IDENTITY_TOKEN_FILE"),
    *("AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_BEARER_TOKEN_BEDROCK", "AWS_ENDPOINT_URL_S3", "AWS_CONFIG_FILE"),
    *("CLAUDE_CODE_OAUTH_TOKEN", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "SSLKEYLOGFILE", "PGPASSWORD", "NETRC"),
    *("anthropic_auth_token", "MY_COMPANY_API_KEY", "SENTRY_DSN", "TOKEN", "DATABASE_PASSWORD"),
    *(
        "SMTP_PASS",
        "DB_PWD",
        "MYSQL_PWD",
        "WATSONX_APIKEY",
        "GITHUB_TOKEN_2",
        "API_KEY_1",
        "TWILIO_CREDS",
        "SERVICE_JWT",
    ),
    *("grpc_proxy", "SOCKS_PROXY", "GCE_METADATA_HOST", "IDENTITY_HEADER", "OTEL_EXPORTER_OTLP_HEADERS"),
    *("ALIBABA_CLOUD_ACCESS_KEY_ID", "OTEL_EXPORTER_OTLP_TRACES_HEADERS"),
]


@pytest.mark.parametrize("preset", PRESETS.values(), ids=lambda preset: preset.id)
def test_every_variable_of_every_preset_is_known(preset: Preset) -> None:
    names = [*preset.variables, *preset.base_url_variables]

    assert [name for name in names if not is_ambient(name)] == []


@pytest.mark.guards("runtime/core/ambient.py", "if not is_ambient(name, value)", "if True")
@pytest.mark.parametrize("name", OUTRANKING)
def test_what_would_come_before_the_sentinel_or_lead_elsewhere_is_not_there(name: str) -> None:
    assert name not in scrubbed({name: REAL, "PATH": "/bin"})


@pytest.mark.guards("runtime/core/ambient.py", "if _HAS_A_PASSWORD.search(value):", "if False:")
@pytest.mark.parametrize("url", ["postgresql://app:hunter2@db/x", "redis://:hunter2@cache:6379/0", "amqps://a:b@q"])
def test_an_address_with_a_password_in_it_is_not_there_whatever_it_is_called(url: str) -> None:
    assert "SOME_PLACE" not in scrubbed({"SOME_PLACE": url})


@pytest.mark.parametrize("url", ["https://example.com/a:b@c", "tcp://10.0.0.1:6379", "https://alice@example.com/x:y"])
def test_an_address_without_a_password_stays(url: str) -> None:
    assert scrubbed({"SOME_PLACE": url})["SOME_PLACE"] == url


def test_what_is_harmless_stays() -> None:
    environment = dict.fromkeys(HARMLESS, "x")

    assert scrubbed(environment).items() >= environment.items()


def test_what_sdks_insist_on_holds_one_text_whatever_it_held() -> None:
    clean = scrubbed(dict.fromkeys(SENTINELS, REAL))

    assert {clean[name] for name in SENTINELS} == {UNUSED_VARIABLE_SENTINEL}
    assert scrubbed(clean) == clean


def test_the_names_that_changed_are_told_and_no_value() -> None:
    environment = {"ANTHROPIC_API_KEY": REAL, "GITHUB_TOKEN": REAL, "PATH": "/bin"}

    changed = scrub_ambient_credentials(environment)

    assert {"ANTHROPIC_API_KEY", "GITHUB_TOKEN"} <= changed
    assert REAL not in environment.values()
    assert scrub_ambient_credentials(environment) == frozenset()


@pytest.mark.guards("runtime/bootstrap.py", "    scrub_ambient_credentials()\n", "")
async def test_a_runtime_inside_of_another_process_scrubs_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*SENTINELS, "ANTHROPIC_AUTH_TOKEN"):
        monkeypatch.setenv(name, REAL)

    async with running(settings(tmp_path, f"http://127.0.0.1:{free_port()}")):
        inside = dict(os.environ)

    assert REAL not in inside.values()
    assert inside["ANTHROPIC_API_KEY"] == UNUSED_VARIABLE_SENTINEL


@pytest.mark.guards(
    "coatcheck/serve.py", "scrubbed(os.environ) if _is_runtime(arguments) else dict(os.environ)", "dict(os.environ)"
)
@pytest.mark.parametrize("isolated", [[], ["-I"]], ids=["as a command", "as the image starts it"])
def test_a_runtime_process_was_never_started_with_a_credential(tmp_path: Path, isolated: list[str]) -> None:
    environment = {
        **clean_environment(),
        "ANTHROPIC_API_KEY": REAL,
        "ANTHROPIC_AUTH_TOKEN": REAL,
        "SOME_TOKEN": REAL,
        "COATCHECK_RUNTIME_LISTEN": "127.0.0.1:0",
        "COATCHECK_RUNTIME_CONTROL_PLANE_URL": f"http://127.0.0.1:{free_port()}",
        "COATCHECK_RUNTIME_CLIENT_ID": "runtime-1",
        "COATCHECK_RUNTIME_CLIENT_SECRET_FILE": str(private_file(tmp_path / "secret", "client-secret")),
        "COATCHECK_RUNTIME_MODEL": "coat-1",
    }
    served = Served([sys.executable, *isolated, "-m", "coatcheck", "serve", "runtime"], environment, cwd=tmp_path)
    try:
        served.wait_until_listening()
        started_with = served.shown_environment()
    finally:
        served.stop()

    assert REAL.encode() not in started_with
    assert f"ANTHROPIC_API_KEY={UNUSED_VARIABLE_SENTINEL}".encode() in started_with
    assert b"ANTHROPIC_AUTH_TOKEN" not in started_with
