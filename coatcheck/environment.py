"""Which variables CMD gets, and which it does not. Pure.

Rules. CMD gets placeholders, the way out and the certificates; it gets no proxy credential, no admin token and no value
that is a secret of ours. What the shell sets for its own proxy or certificates is taken out where it would win over
ours: a client that went round the proxy would send a placeholder to nowhere.
"""

import ipaddress
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from coatcheck.client import Json
from coatcheck.terminal import WrongUsageError
from control_plane.contract.destination import InvalidDestinationError, is_ip_literal, parse_destination
from control_plane.contract.secret import Secret

REVERSE_URL_VARIABLE: Final = "COATCHECK_REVERSE_URL"
LOOPBACK: Final = "localhost,127.0.0.1,::1"

PROXY_VARIABLES: Final = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy")
NO_PROXY_VARIABLES: Final = ("NO_PROXY", "no_proxy")
CA_FILE_VARIABLES: Final = (
    "SSL_CERT_FILE",  # OpenSSL, Python's ssl, httpx, aiohttp, Go, uv, curl
    "CURL_CA_BUNDLE",
    "REQUESTS_CA_BUNDLE",
    "GIT_SSL_CAINFO",
    "PIP_CERT",
    "AWS_CA_BUNDLE",
    "NODE_EXTRA_CA_CERTS",
    "npm_config_cafile",
    "CARGO_HTTP_CAINFO",
    "DENO_CERT",
    "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH",
    "CLOUDSDK_CORE_CUSTOM_CA_CERTS_FILE",
    "HTTPLIB2_CA_CERTS",
    "NIX_SSL_CERT_FILE",
)
_WOULD_WIN_OVER_OURS: Final = frozenset(
    "all_proxy ftp_proxy pip_proxy cargo_http_proxy npm_config_proxy npm_config_https_proxy npm_config_http_proxy "
    "npm_config_noproxy npm_config_ca git_ssl_capath git_ssl_no_verify git_proxy_command global_agent_http_proxy "
    "global_agent_https_proxy global_agent_no_proxy curl_home".split()
)
"""In lower case; programs read them in either."""
_PROGRAMS_NEED: Final = frozenset(
    "path home user logname shell pwd oldpwd term lang ifs ps4 env bash_env tmpdir tz hostname display "
    "pythonpath pythonhome pythonstartup node_options node_path perl5lib perl5opt perllib rubylib rubyopt classpath "
    "java_tool_options jdk_java_options _java_options java_home node_use_env_proxy node_tls_reject_unauthorized "
    "ssl_cert_dir git_ssl_capath git_exec_path openssl_conf gconv_path shellopts bashopts prompt_command".split()
)
"""In lower case: with anything else in them programs do not start, or start something else."""
_OF_THE_LOADER: Final = ("LD_", "DYLD_", "COATCHECK_", "LC_", "XDG_", "GIT_CONFIG")
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")


@dataclass(frozen=True, slots=True)
class WayOut:
    """Where CMD's clients go, and what they must trust there."""

    forward_url: str
    reverse_url: str
    forward_host: str
    forward_port: int
    ca_bundle: str
    java_trust_store: str | None = None
    java_trust_store_password: str = ""
    has_loopback_destination: bool = False
    """A granted destination is on loopback: then loopback must not go round the proxy."""


@dataclass(frozen=True, slots=True)
class Withheld:
    """What the shell has and CMD must not see."""

    names: frozenset[str]
    """Variables of credentials, granted or not: they may hold the real keys."""
    values: tuple[Secret, ...]


def child_environment(
    parent: Mapping[str, str],
    *,
    placeholders: Mapping[str, str],
    base_urls: Mapping[str, str],
    way_out: WayOut,
    withheld: Withheld,
) -> dict[str, str]:
    """The whole environment of CMD."""
    kept = {name: value for name, value in parent.items() if not _is_withheld(name, value, withheld)}
    return {**kept, **_proxy(way_out), **_certificates(way_out, kept), **base_urls, **placeholders}


def why_not_a_variable(name: str) -> str:
    """Why a placeholder cannot be given in this variable; empty when it can. Never repeats `name`."""
    if not _VARIABLE.fullmatch(name):
        return "a variable's name is letters, digits and '_', and does not begin with a digit"
    ours = {each.lower() for each in (*PROXY_VARIABLES, *NO_PROXY_VARIABLES, *CA_FILE_VARIABLES)}
    if name.lower() in ours or name.lower().startswith("coatcheck_"):
        return "'run' itself sets that variable"
    if name.lower() in _PROGRAMS_NEED | _WOULD_WIN_OVER_OURS or name.upper().startswith(_OF_THE_LOADER):
        return "programs need that variable to work"
    return ""


def variables_of(credentials: Iterable[Json]) -> dict[str, str]:
    """Variable → credential name. Raises `WrongUsageError` where two want the same one, or one that is taken."""
    found: dict[str, str] = {}
    for credential in credentials:
        name = str(credential["name"])
        for variable in credential["variables"]:
            if why := why_not_a_variable(variable):
                raise WrongUsageError(
                    f"{name} uses {variable}: {why}; store it with another --env, or choose others with --credential"
                )
            if variable in found:
                raise WrongUsageError(
                    f"{found[variable]} and {name} both use {variable}; choose one with --credential, "
                    f"or store one of them with another --env"
                )
            found[variable] = name
    return found


def passed_on_keys(parent: Mapping[str, str], provider_variables: Iterable[str], withheld: Withheld) -> list[str]:
    """Variables known to hold providers' keys that CMD gets from the shell as they are."""
    return sorted(
        name for name in set(provider_variables) if parent.get(name) and not _is_withheld(name, parent[name], withheld)
    )


def has_loopback_destination(credentials: Iterable[Json], allowed_hosts: Iterable[str]) -> bool:
    """Whether anything that CMD may reach is on loopback."""
    urls = [destination["url"] for credential in credentials for destination in credential["destinations"]]
    return any(_is_loopback(host) for host in (*map(_host_of, urls), *allowed_hosts))


def _is_withheld(name: str, value: str, withheld: Withheld) -> bool:
    return (
        name.startswith("COATCHECK_")
        or name in withheld.names
        or name.lower() in _WOULD_WIN_OVER_OURS
        or any(secret.reveal() in value for secret in withheld.values)
    )


def _proxy(way_out: WayOut) -> dict[str, str]:
    exempt = "" if way_out.has_loopback_destination else LOOPBACK
    return {
        **dict.fromkeys(PROXY_VARIABLES, way_out.forward_url),
        **dict.fromkeys(NO_PROXY_VARIABLES, exempt),
        "NODE_USE_ENV_PROXY": "1",  # Node ≥ 22.21 and ≥ 24 then honours the above; older ones ignore it
        REVERSE_URL_VARIABLE: way_out.reverse_url,
    }


def _certificates(way_out: WayOut, parent: Mapping[str, str]) -> dict[str, str]:
    given = dict.fromkeys(CA_FILE_VARIABLES, way_out.ca_bundle)
    if way_out.java_trust_store is not None:
        given["JAVA_TOOL_OPTIONS"] = " ".join(filter(None, [parent.get("JAVA_TOOL_OPTIONS"), *_java(way_out)]))
    return given


def _java(way_out: WayOut) -> list[str]:
    """Java reads no environment variable for either; the last of two equal properties wins, and these come last."""
    exempt = "" if way_out.has_loopback_destination else "localhost|127.*|[::1]"
    properties = {
        "javax.net.ssl.trustStore": way_out.java_trust_store,
        "javax.net.ssl.trustStorePassword": way_out.java_trust_store_password,
        "javax.net.ssl.trustStoreType": "PKCS12",
        "https.proxyHost": way_out.forward_host,
        "https.proxyPort": way_out.forward_port,
        "http.proxyHost": way_out.forward_host,
        "http.proxyPort": way_out.forward_port,
        "http.nonProxyHosts": exempt,
    }
    return [f"-D{name}={value}" for name, value in properties.items()]


def _host_of(url: str) -> str:
    try:
        return parse_destination(url).endpoint.host
    except InvalidDestinationError:
        return ""


def _is_loopback(host: str) -> bool:
    if is_ip_literal(host):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost" or host.endswith(".localhost")  # RFC 6761 §6.3
