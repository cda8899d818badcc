"""A `COATCHECK_*` name that nobody knows stops the start; what is not ours to judge does not."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from control_plane.contract.settings import (
    PROXY_PREFIX,
    RUNTIME_PREFIX,
    UnknownSettingError,
    refuse_unknown_settings,
)
from egress_proxy.config import settings_from_environment as settings_of_the_proxy
from runtime.config import settings_from_environment as settings_of_the_runtime
from tests.egress_proxy.test_config import NEEDED
from tests.runtime.test_config import GOOD

NAMES = ("listen", "client_id", "client_secret_file")


def check(name: str, value: str = "x") -> None:
    refuse_unknown_settings({name: value, "PATH": "/bin"}, prefix=RUNTIME_PREFIX, names=NAMES)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("COATCHECK_RUNTIME_LISTNE", "COATCHECK_RUNTIME_LISTEN"),
        ("COATCHECK_RUNTIME_CLIENT_SECRET", "COATCHECK_RUNTIME_CLIENT_SECRET_FILE"),
        ("COATCHECK_RUNTME_LISTEN", "COATCHECK_RUNTIME_LISTEN"),
        ("COATCHECK_LISTEN", "COATCHECK_RUNTIME_LISTEN"),
    ],
)
@pytest.mark.guards(
    "control_plane/contract/settings.py",
    "        if not name.startswith(_OURS) or name.startswith(others) or name in known:",
    "        if not name.startswith(prefix) or name.startswith(others) or name in known:",
)
def test_a_misspelt_setting_stops_the_start_and_says_what_was_meant(name: str, meant: str) -> None:
    with pytest.raises(UnknownSettingError, match=f"{name} is not a setting; did you mean {meant}"):
        check(name)


def test_a_name_like_no_other_is_refused_without_a_guess_and_without_its_value() -> None:
    with pytest.raises(UnknownSettingError) as raised:
        check("COATCHECK_RUNTIME_ZZZZZZZZZZ", "sk-real-0123")

    assert str(raised.value) == "COATCHECK_RUNTIME_ZZZZZZZZZZ is not a setting"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("COATCHECK_RUNTIME_LISTEN", "x"),
        ("COATCHECK_PROXY_ANYTHING", "x"),
        ("COATCHECK_CONTROL_PLANE_ANYTHING", "x"),
        ("COATCHECK_HOME", "/home/x/.coatcheck"),
        ("coatcheck_runtime_listne", "x"),
        ("MY_COATCHECK_RUNTIME_X", "x"),
        ("COATCHECK_RUNTIME_SERVICE_HOST", "10.0.0.1"),
        ("COATCHECK_RUNTIME_SERVICE_PORT", "8474"),
        ("COATCHECK_RUNTIME_SERVICE_PORT_HTTP", "8474"),
        ("COATCHECK_RUNTIME_PORT", "tcp://10.0.0.1:8474"),
        ("COATCHECK_RUNTIME_PORT_8474_TCP", "tcp://10.0.0.1:8474"),
        ("COATCHECK_RUNTIME_PORT_8474_TCP_PROTO", "tcp"),
        ("COATCHECK_RUNTIME_PORT_8474_TCP_ADDR", "10.0.0.1"),
    ],
)
def test_what_is_known_or_not_ours_is_let_be(name: str, value: str) -> None:
    check(name, value)


@pytest.mark.parametrize(
    ("prefix", "base", "read"),
    [(PROXY_PREFIX, NEEDED, settings_of_the_proxy), (RUNTIME_PREFIX, GOOD, settings_of_the_runtime)],
    ids=["egress proxy", "runtime"],
)
@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"CLIENT_SECRET_FILE": None}, "exactly one of"),
        ({"CLIENT_TOKEN_FILE": "/t"}, "exactly one of"),
        ({"CLIENT_SECRET_FILE": None, "CLIENT_CERT_FILE": "/c"}, "go together"),
        ({"CLIENT_SECRET_FILE": None, "CLIENT_KEY_FILE": "/k"}, "go together"),
        ({"CLIENT_SECRET_FILE": None, "CLIENT_CERT_FILE": "/c", "CLIENT_KEY_FILE": "/k"}, "begins with https://"),
    ],
)
def test_a_program_proves_itself_to_the_control_plane_by_exactly_one_thing(
    prefix: str,
    base: Mapping[str, str],
    read: Callable[[Mapping[str, str]], Any],
    given: dict[str, str | None],
    told: str,
) -> None:
    environment = dict(base) | {f"{prefix}{name}": value for name, value in given.items()}

    with pytest.raises(ValueError, match=told):
        read({name: value for name, value in environment.items() if value is not None})
