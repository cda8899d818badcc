"""Sources: which place a tenant's name means, who may name which, and what may be configured at all."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.core.names import NAME_IN_SOURCE, TENANT_ID
from control_plane.core.records import Source, SourceKind
from control_plane.core.sources import InvalidSourceError, check_source, may_name, path_of

CORE = "control_plane/core/sources.py"
K = SourceKind
FILES = Source("files", K.FILE, {}, "{tenant}/{name}", 60.0, None, b"", "", 1.0, 1.0)
VAULT = replace(
    FILES,
    kind=K.VAULT,
    settings={"address": "https://vault.test:8200", "auth": {"method": "token", "token_file": "token"}},
)
AWS = replace(
    FILES,
    kind=K.AWS_SECRETS_MANAGER,
    settings={"region": "eu-central-1", "auth": {"method": "keys", "keys_file": "aws"}},
)
CLUSTER = replace(FILES, kind=K.KUBERNETES, path_template="{tenant}/keys/{name}")


@pytest.mark.parametrize("source", [FILES, VAULT, AWS, CLUSTER], ids=lambda source: source.kind.value)
def test_what_is_complete_is_accepted(source: Source) -> None:
    check_source(source)


@pytest.mark.guards(CORE, 'if not _PLAIN.fullmatch(rest) or set(segment) <= {"."}:', "if False:")
@pytest.mark.guards(CORE, "if source.path_template.count(_TENANT) != 1:", "if False:")
@pytest.mark.parametrize(
    "template",
    [
        *("{name}", "all/{name}", "{tenant}", "{tenant}/{tenant}/{name}"),
        *("{tenant}-{name}", "{tenant}{name}", "x/{name}.{tenant}"),
        *("../{tenant}/{name}", "{tenant}/./{name}", "{tenant}/../{name}", "/{tenant}/{name}", "{tenant}//{name}"),
        *("{tenant}/{name}/", "", "{tenant}/{other}/{name}", "{tenant}/{name", "{tenant}/%2e%2e/{name}"),
        *("{tenant}/{name}?x=1", "{tenant}/{name}#x", "{tenant}/ {name}", "{tenant}/\n{name}", "{tenant}\\{name}"),
    ],
)
def test_a_template_in_which_a_name_could_mean_another_tenants_place_is_refused(template: str) -> None:
    with pytest.raises(InvalidSourceError) as error:
        check_source(replace(FILES, path_template=template))

    assert error.value.field == "path_template"


TENANTS = st.from_regex(TENANT_ID, fullmatch=True).filter(str.isascii)
NAMES = st.from_regex(NAME_IN_SOURCE, fullmatch=True).filter(str.isascii)
TEMPLATES = ["{tenant}/{name}", "apps/{tenant}/x-{name}", "{name}/of-{tenant}", "{tenant}.d/{name}/key"]


@given(one=st.tuples(TENANTS, NAMES), other=st.tuples(TENANTS, NAMES), template=st.sampled_from(TEMPLATES))
def test_no_two_tenants_and_no_two_names_mean_the_same_place(
    one: tuple[str, str], other: tuple[str, str], template: str
) -> None:
    source = replace(FILES, path_template=template)
    places = [path_of(source, tenant=tenant.strip(), name=name.strip()) for tenant, name in (one, other)]

    assert (places[0] == places[1]) == ([part.strip() for part in one] == [part.strip() for part in other])


@pytest.mark.guards(CORE, "not re.fullmatch(TENANT_ID, tenant) or not re.fullmatch(NAME_IN_SOURCE, name)", "False")
@pytest.mark.parametrize("name", ["", "..", ".", "a/b", "../a", "a b", "a\0", "a\n", "ä", "a" * 65, "{tenant}", "%2e"])
def test_a_name_with_anything_but_letters_digits_and_two_signs_means_no_place(name: str) -> None:
    with pytest.raises(InvalidSourceError):
        path_of(FILES, tenant="acme", name=name)


def test_a_tenant_that_is_none_means_no_place() -> None:
    for tenant in ("", "..", "a/b", "Acme", "a\n"):
        with pytest.raises(InvalidSourceError):
            path_of(FILES, tenant=tenant, name="key")


BY_PLATFORM, BY_TENANT = True, False


@pytest.mark.guards(CORE, "return by_platform or source.kind not in _OF_THE_PLATFORM_ALONE", "return True")
@pytest.mark.guards(CORE, "return tenant in source.tenants", "return True")
@pytest.mark.parametrize(
    ("source", "tenants", "by_platform", "allowed"),
    [
        pytest.param(FILES, None, BY_PLATFORM, True, id="the platform's administrator names files"),
        pytest.param(FILES, None, BY_TENANT, False, id="a tenant's does not"),
        pytest.param(CLUSTER, None, BY_TENANT, False, id="nor the cluster's Secrets"),
        pytest.param(FILES, ("acme",), BY_TENANT, True, id="unless the tenant is listed"),
        pytest.param(FILES, ("evil",), BY_TENANT, False, id="which another tenant's being listed is not"),
        pytest.param(FILES, ("evil",), BY_PLATFORM, False, id="a list binds the platform's administrator too"),
        pytest.param(VAULT, None, BY_TENANT, True, id="a vault is open to every tenant"),
        pytest.param(AWS, ("evil",), BY_TENANT, False, id="or to the listed ones"),
    ],
)
def test_who_may_name_which_source(
    source: Source, tenants: tuple[str, ...] | None, by_platform: bool, allowed: bool
) -> None:
    assert may_name(replace(source, tenants=tenants), tenant="acme", by_platform=by_platform) is allowed


def with_vault(**settings: Any) -> Source:
    return replace(VAULT, settings={**VAULT.settings, **settings})


FAULTS: dict[str, tuple[Source, str]] = {
    "an address without TLS": (with_vault(address="http://vault.test"), "vault.address"),
    "an address with a path": (with_vault(address="https://vault.test/v1"), "vault.address"),
    "an address with a user": (with_vault(address="https://user:pass@vault.test"), "vault.address"),
    "no address": (replace(VAULT, settings={"auth": VAULT.settings["auth"]}), "vault.address"),
    "no way to log in": (replace(VAULT, settings={"address": "https://vault.test"}), "vault.auth"),
    "an unknown way to log in": (with_vault(auth={"method": "userpass"}), "vault.auth.method"),
    "a file outside of the folder": (
        with_vault(auth={"method": "token", "token_file": "../kek.hex"}),
        "vault.auth.token_file",
    ),
    "a file of another way": (
        with_vault(auth={"method": "token", "token_file": "t", "role_id_file": "r"}),
        "vault.auth.role_id_file",
    ),
    "a role that is missing": (with_vault(auth={"method": "kubernetes", "token_file": "t"}), "vault.auth.role"),
    "an unknown setting": (with_vault(adress="x"), "vault.adress"),
    "a mount that leads elsewhere": (with_vault(mount="../sys"), "vault.mount"),
    "a version of KV that is none": (with_vault(kv_version="3"), "vault.kv_version"),
    "no region": (replace(AWS, settings={"auth": AWS.settings["auth"]}), "aws.region"),
    "a region that is a host": (replace(AWS, settings={**AWS.settings, "region": "evil.test/"}), "aws.region"),
    "settings of a file": (replace(FILES, settings={"root": "/etc"}), "settings.root"),
    "a place in the cluster without a key": (replace(CLUSTER, path_template="{tenant}/{name}"), "path_template"),
    "no time at all": (replace(FILES, ttl_seconds=0.0), "ttl_seconds"),
    "no tenant at all": (replace(FILES, tenants=()), "tenants"),
}


@pytest.mark.parametrize(("source", "field"), FAULTS.values(), ids=FAULTS.keys())
def test_a_source_that_cannot_be_meant_is_refused_by_its_field(source: Source, field: str) -> None:
    with pytest.raises(InvalidSourceError) as error:
        check_source(source)

    assert error.value.field == field
