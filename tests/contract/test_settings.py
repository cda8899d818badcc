"""A `COATCHECK_*` name that nobody knows stops the start; what is not ours to judge does not."""

import pytest

from control_plane.contract.settings import RUNTIME_PREFIX, UnknownSettingError, refuse_unknown_settings

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
