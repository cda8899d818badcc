"""Names of settings, one rule for every component: a `COATCHECK_*` name nobody knows stops the start.

Rule: a misspelt setting that is silently ignored looks, from outside, exactly like one that works. Settings of other
components may stand in the same environment; variables that Kubernetes adds for each Service are not settings.
"""

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Final

CONTROL_PLANE_PREFIX: Final = "COATCHECK_CONTROL_PLANE_"
PROXY_PREFIX: Final = "COATCHECK_PROXY_"
RUNTIME_PREFIX: Final = "COATCHECK_RUNTIME_"

_OURS: Final = "COATCHECK_"
_COMPONENTS: Final = (CONTROL_PLANE_PREFIX, PROXY_PREFIX, RUNTIME_PREFIX)
_OF_THE_COMMAND_LINE: Final = frozenset(
    "COATCHECK_HOME COATCHECK_REVERSE_URL "
    "COATCHECK_URL COATCHECK_ADMIN_TOKEN_FILE COATCHECK_CA_FILE COATCHECK_TENANT".split()
)
_SERVICE_LINK: Final = re.compile(r"_SERVICE_HOST$|_SERVICE_PORT(_\w+)?$|_PORT_\d+_(TCP|UDP|SCTP)(_\w+)?$")


class UnknownSettingError(ValueError):
    """An environment variable that looks like a setting and is not."""


def refuse_unknown_settings(environment: Mapping[str, str], *, prefix: str, names: Iterable[str]) -> None:
    """Raises `UnknownSettingError`, with the name that was probably meant. `names` are a component's fields."""
    known = {prefix + name.upper() for name in names}
    others = tuple(other for other in _COMPONENTS if other != prefix)
    for name in sorted(environment):
        if not name.startswith(_OURS) or name.startswith(others) or name in known:
            continue
        if name in _OF_THE_COMMAND_LINE or _is_service_link(name, environment[name]):
            continue
        raise UnknownSettingError(f"{name} is not a setting{_guess(name, prefix, known)}")


def refuse_unclear_proof(
    who: str, *, prefix: str, secret: bool, token: bool, certificate: bool, key: bool, control_plane_url: str
) -> None:
    """By which a program proves to the control plane who it is: exactly one of three. Raises `ValueError`.

    What is true says that the setting is there.
    """
    if certificate != key:
        raise ValueError(f"{prefix}CLIENT_CERT_FILE and {prefix}CLIENT_KEY_FILE go together")
    if secret + token + certificate != 1:
        raise ValueError(
            f"{who} proves itself to the control plane by exactly one of {prefix}CLIENT_SECRET_FILE, "
            f"{prefix}CLIENT_TOKEN_FILE and {prefix}CLIENT_CERT_FILE"
        )
    if certificate and not control_plane_url.startswith("https://"):
        raise ValueError(f"{prefix}CLIENT_CERT_FILE needs TLS: {prefix}CONTROL_PLANE_URL begins with https://")


def _guess(name: str, prefix: str, known: Iterable[str]) -> str:
    """What was meant: nearly the whole name; else judged by what follows the prefix, which tells settings apart."""
    whole = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.9)
    if whole:
        return f"; did you mean {whole[0]}?"
    own = name.removeprefix(prefix).removeprefix(_OURS)
    close = difflib.get_close_matches(own, sorted(other.removeprefix(prefix) for other in known), n=1)
    return f"; did you mean {prefix}{close[0]}?" if close else ""


def _is_service_link(name: str, value: str) -> bool:
    """What Kubernetes adds for every Service it knows, also for one that is called coatcheck-runtime."""
    return bool(_SERVICE_LINK.search(name)) or ("_PORT" in name and value.startswith(("tcp://", "udp://")))
