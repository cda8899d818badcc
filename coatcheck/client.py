"""The control plane's HTTP API as the commands use it.

Rule: every failure becomes one `CommandError` that says what happened and what to do, with the control plane's own
words where it has some. Before every call it is made sure that the stack still is ours: the admin token and the local
runtime's secret go to nobody else. Proxies and CA variables of the shell are ignored: the local control plane is on
loopback.
"""

import ssl
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import quote

import httpx

from coatcheck.elsewhere import Elsewhere
from coatcheck.record import TRUSTS_NOBODY, own_stack
from coatcheck.state import RUNTIME_CLIENT, TENANT, StateFolder
from coatcheck.terminal import CommandError, WrongUsageError
from control_plane.contract.headers import (
    GRANT_TYPE_TOKEN_EXCHANGE,
    TOKEN_TYPE_JWT,
    TOKEN_TYPE_PLACEHOLDER,
    TOKEN_TYPE_PROXY_CREDENTIAL,
)
from control_plane.contract.secret import Secret

TIMEOUT_SECONDS: Final = 15.0
AUDIT_PAGE: Final = 500

Json = dict[str, Any]


class RefusedCommandError(CommandError):
    """The control plane said no. `code` is from the closed list of refusals, or an OAuth error."""

    def __init__(self, happened: str, todo: str, *, code: str, status: int) -> None:
        super().__init__(happened, todo)
        self.code = code
        self.status = status


@dataclass(frozen=True, slots=True)
class Exchanged:
    """What an exchange gave, with the fields that the commands use."""

    answer: Json

    @property
    def has_placeholder(self) -> bool:
        return "upstream_credential" in self.answer

    @property
    def placeholder(self) -> str:
        return str(self.answer["upstream_credential"]["value"])

    @property
    def proxy_credential(self) -> str:
        return str(self.answer["proxy_credential"])

    @property
    def expires_in(self) -> float:
        return float(self.answer["expires_in"])


class ControlPlane:
    """The operator's view (`/v1`, with the admin token) and the local runtime's (`/oauth`, with its own secret)."""

    def __init__(
        self,
        where: Callable[[], str],
        *,
        admin_token: Secret,
        runtime_secret: Secret | None,
        tenant: str = TENANT,
        trust: ssl.SSLContext = TRUSTS_NOBODY,
        if_unreachable: str = "see 'coatcheck status', start it with 'coatcheck up'",
        if_unknown: str = "the state folder's admin token is not this control plane's: see 'coatcheck doctor'",
    ) -> None:
        self._where = where
        self._if_unreachable = if_unreachable
        self._if_unknown = if_unknown
        self._tenant = f"/v1/tenants/{_segment(tenant)}"
        self._tenant_name = tenant
        self._http = httpx.Client(verify=trust, trust_env=False, timeout=TIMEOUT_SECONDS)
        self._admin = {"Authorization": f"Bearer {admin_token.reveal()}"}
        self._runtime = httpx.BasicAuth(RUNTIME_CLIENT, runtime_secret.reveal()) if runtime_secret else None

    @classmethod
    def of(cls, state: StateFolder, *, tenant: str = TENANT) -> Self:
        """The one of this folder's stack, wherever it listens by then: looked up before every call."""
        return cls(
            lambda: own_stack(state).control_plane_url,
            admin_token=state.admin_token(),
            runtime_secret=state.client_secret(RUNTIME_CLIENT),
            tenant=tenant,
        )

    @classmethod
    def elsewhere(cls, elsewhere: Elsewhere, *, tenant: str) -> Self:
        """One that is administered from here. There is no runtime of ours there. Raises `CommandError`."""
        return cls(
            lambda: elsewhere.url,
            admin_token=elsewhere.admin_token(),
            runtime_secret=None,
            tenant=tenant,
            trust=elsewhere.trust(),
            if_unreachable="is the URL right, does it run, and is its certificate trusted (--ca-file)?",
            if_unknown=f"the token in {elsewhere.admin_token_file} is not believed there",
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    # --- credentials ------------------------------------------------------------------------------------------------

    def presets(self) -> list[Json]:
        return self._items("/v1/presets")

    def add_credential(self, fields: Mapping[str, Any], secret: Secret | None = None) -> Json:
        """`secret` is left out where it is read from a source, which `fields` then name."""
        given = {"secret": secret.reveal()} if secret is not None else {}
        return self._ask("POST", f"{self._tenant}/credentials", {**fields, **given})

    def change_credential(self, name: str, fields: Mapping[str, Any], secret: Secret | None = None) -> Json:
        given = {"secret": secret.reveal()} if secret is not None else {}
        return self._ask("PATCH", f"{self._tenant}/credentials/{_segment(name)}", {**fields, **given})

    def credentials(self) -> list[Json]:
        return self._items(f"{self._tenant}/credentials")

    def credential(self, name: str) -> Json:
        return self._ask("GET", f"{self._tenant}/credentials/{_segment(name)}")

    def rotate(self, name: str, fields: Mapping[str, Any]) -> Json:
        return self._ask("POST", f"{self._tenant}/credentials/{_segment(name)}/rotate", dict(fields))

    def rotation(self, name: str) -> Json:
        """The latest one, and how upstreams answered each version lately."""
        path = f"{self._tenant}/credentials/{_segment(name)}/rotation"
        return self._ask("GET", path, expected=("rotation", "replies"))

    def help_rotation(self, name: str, verb: str) -> Json:
        """`promote`, `rollback` or `cancel`."""
        return self._ask("POST", f"{self._tenant}/credentials/{_segment(name)}/rotation/{verb}")

    def rotation_schedule(self, name: str) -> Json | None:
        try:
            return self._ask("GET", f"{self._tenant}/credentials/{_segment(name)}/rotation/schedule")
        except RefusedCommandError as refused:
            if refused.code == "not_found":
                return None
            raise

    def schedule_rotation(self, name: str, fields: Mapping[str, Any]) -> Json:
        path = f"{self._tenant}/credentials/{_segment(name)}/rotation/schedule"
        return self._ask("PUT", path, dict(fields), expected=("every_seconds",))

    def remove_rotation_schedule(self, name: str) -> None:
        self._ask("DELETE", f"{self._tenant}/credentials/{_segment(name)}/rotation/schedule")

    def delete_credential(self, name: str) -> None:
        self._ask("DELETE", f"{self._tenant}/credentials/{_segment(name)}")

    # --- sources and key-encryption keys ----------------------------------------------------------------------------

    def sources(self) -> list[Json]:
        return self._items("/v1/sources")

    def source(self, name: str) -> Json:
        return self._ask("GET", f"/v1/sources/{_segment(name)}")

    def put_source(self, name: str, fields: Mapping[str, Any]) -> Json:
        return self._ask("PUT", f"/v1/sources/{_segment(name)}", dict(fields))

    def delete_source(self, name: str) -> None:
        self._ask("DELETE", f"/v1/sources/{_segment(name)}")

    def test_source(self, name: str, *, tenant: str, name_there: str) -> Json:
        body = {"tenant": tenant, "name": name_there}
        return self._ask("POST", f"/v1/sources/{_segment(name)}/test", body, expected=("readable", "detail"))

    def keks(self) -> list[Json]:
        return self._items("/v1/keks")

    def reload_keks(self) -> list[Json]:
        items: list[Json] = self._ask("POST", "/v1/keks/reload", expected=("items",))["items"]
        return items

    def start_rewrap(self) -> Json:
        return self._ask("POST", "/v1/keks/rewrap", expected=("state",))

    def rewrap_status(self) -> Json:
        return self._ask("GET", "/v1/keks/rewrap", expected=("state",))

    def retire_kek(self, kek_id: str, *, abandon: bool) -> None:
        self._ask("POST", f"/v1/keks/{_segment(kek_id)}/retire", {"abandon": abandon})

    # --- grants, allow rules, placeholders --------------------------------------------------------------------------

    def add_grant(self, fields: Mapping[str, Any]) -> Json:
        return self._ask("POST", f"{self._tenant}/grants", dict(fields))

    def grants(self) -> list[Json]:
        return self._items(f"{self._tenant}/grants")

    def delete_grant(self, grant_id: str) -> None:
        self._ask("DELETE", f"{self._tenant}/grants/{_segment(grant_id)}")

    def add_allow_rule(self, fields: Mapping[str, Any]) -> Json:
        return self._ask("POST", f"{self._tenant}/allow-rules", dict(fields))

    def allow_rules(self) -> list[Json]:
        return self._items(f"{self._tenant}/allow-rules")

    def delete_allow_rule(self, rule_id: str) -> None:
        self._ask("DELETE", f"{self._tenant}/allow-rules/{_segment(rule_id)}")

    def placeholders(self) -> list[Json]:
        return self._items(f"{self._tenant}/placeholders")

    def issue_placeholder(self, fields: Mapping[str, Any]) -> Json:
        return self._ask("POST", f"{self._tenant}/placeholders", dict(fields))

    def revoke_placeholder(self, placeholder_id: str) -> None:
        self._ask("DELETE", f"{self._tenant}/placeholders/{_segment(placeholder_id)}")

    # --- who can use what -------------------------------------------------------------------------------------------

    def access(self, subject: str | None) -> list[Json]:
        query = {"tenant": self._tenant_name} | ({"subject": subject} if subject is not None else {})
        return self._items("/v1/access", **query)

    def check_access(self, fields: Mapping[str, Any]) -> Json:
        body = {"tenant": self._tenant_name, **fields}
        return self._ask("POST", "/v1/access/check", body, expected=("allowed", "steps"))

    # --- the platform's own keys, and proxies -----------------------------------------------------------------------

    def keys(self) -> list[Json]:
        return self._items("/v1/keys")

    def rotate_key(self, purpose: str, *, compromised: bool) -> Json:
        body = {"compromised": compromised}
        return self._ask("POST", f"/v1/keys/{_segment(purpose)}/rotate", body, expected=("id", "in_use_from"))

    def injectors(self) -> list[Json]:
        return self._items("/v1/injectors")

    def remove_injector(self, injector: str) -> None:
        self._ask("DELETE", f"/v1/injectors/{_segment(injector)}")

    def add_limit(self, fields: Mapping[str, Any]) -> Json:
        return self._ask("POST", f"{self._tenant}/limits", dict(fields))

    def limits(self) -> list[Json]:
        return self._items(f"{self._tenant}/limits")

    def delete_limit(self, limit_id: str) -> None:
        self._ask("DELETE", f"{self._tenant}/limits/{_segment(limit_id)}")

    # --- alarms and decoys ------------------------------------------------------------------------------------------

    def alarms(self, *, limit: int) -> list[Json]:
        return self._items(f"{self._tenant}/alarms", limit=limit)

    def test_alarm(self) -> Json:
        return self._ask("POST", f"{self._tenant}/alarms/test", expected=("id",))

    def alarm_settings(self) -> Json:
        return self._ask("GET", f"{self._tenant}/alarm-settings", expected=("revoke_on_mismatch",))

    def change_alarm_settings(self, fields: Mapping[str, Any]) -> Json:
        return self._ask("PUT", f"{self._tenant}/alarm-settings", dict(fields), expected=("revoke_on_mismatch",))

    def add_alarm_hook(self, url: str) -> Json:
        return self._ask("POST", f"{self._tenant}/alarm-hooks", {"url": url}, expected=("secret",))

    def alarm_hooks(self) -> list[Json]:
        return self._items(f"{self._tenant}/alarm-hooks")

    def delete_alarm_hook(self, hook_id: str) -> None:
        self._ask("DELETE", f"{self._tenant}/alarm-hooks/{_segment(hook_id)}")

    def add_decoy(self, fields: Mapping[str, Any]) -> Json:
        return self._ask("POST", f"{self._tenant}/decoys", dict(fields), expected=("placeholder",))

    def decoys(self) -> list[Json]:
        return self._items(f"{self._tenant}/decoys")

    def delete_decoy(self, decoy_id: str) -> None:
        self._ask("DELETE", f"{self._tenant}/decoys/{_segment(decoy_id)}")

    # --- audit ------------------------------------------------------------------------------------------------------

    def audit_page(self, *, after: int, limit: int = AUDIT_PAGE) -> list[Json]:
        """Events of every tenant, and those of none, oldest first."""
        return self._items("/v1/audit", after=after, limit=limit)

    def audit_of_request(self, request_id: str) -> list[Json]:
        return self._items("/v1/audit", request_id=request_id)

    def audit_chains(self) -> list[Json]:
        """Every chain of the trail; `tenant` is None for the one of the events of no tenant."""
        return self._items("/v1/audit/chains")

    def audit_head(self, tenant: str | None) -> Json:
        return self._ask("GET", f"{_trail(tenant)}/head")

    def audit_keys(self) -> Json:
        """The public keys that sign heads."""
        return self._ask("GET", "/.well-known/coatcheck-audit-keys.json", expected=("keys",))

    def audit_export(self, tenant: str | None, *, after: int = 0) -> Iterator[str]:
        """One chain's export, line by line. Raises `CommandError` where it breaks off."""
        url = self._where() + f"{_trail(tenant)}/export"
        timeout = httpx.Timeout(TIMEOUT_SECONDS, read=60.0)
        try:
            with self._http.stream(
                "GET", url, params={"after": after}, headers=self._admin, timeout=timeout
            ) as response:
                if response.is_error:
                    response.read()
                    raise _refused(response, if_unknown=self._if_unknown)
                yield from response.iter_lines()
        except httpx.HTTPError:
            raise CommandError(
                "the export broke off", "resume it with --after and the last position you have"
            ) from None

    # --- tenants, clients, issuers ----------------------------------------------------------------------------------

    def tenants(self) -> list[Json]:
        return self._items("/v1/tenants")

    def add_tenant(self, name: str) -> Json:
        return self._ask("PUT", f"/v1/tenants/{_segment(name)}")

    def delete_tenant(self, name: str) -> None:
        """With everything it has."""
        self._ask("DELETE", f"/v1/tenants/{_segment(name)}?confirm={_segment(name)}")

    def clients(self) -> list[Json]:
        return self._items("/v1/clients")

    def add_client(self, fields: Mapping[str, Any]) -> Json:
        return self._ask("POST", "/v1/clients", dict(fields))

    def change_client(self, name: str, fields: Mapping[str, Any]) -> Json:
        return self._ask("PATCH", f"/v1/clients/{_segment(name)}", dict(fields))

    def delete_client(self, name: str) -> None:
        self._ask("DELETE", f"/v1/clients/{_segment(name)}")

    def issuers(self) -> list[Json]:
        return self._items("/v1/issuers")

    def issuer_presets(self) -> list[Json]:
        return self._items("/v1/issuer-presets")

    def issuer(self, name: str) -> Json:
        return self._ask("GET", f"/v1/issuers/{_segment(name)}")

    def add_issuer(self, record: Mapping[str, Any]) -> Json:
        return self._ask("POST", "/v1/issuers", dict(record))

    def replace_issuer(self, name: str, record: Mapping[str, Any]) -> Json:
        return self._ask("PUT", f"/v1/issuers/{_segment(name)}", dict(record))

    def delete_issuer(self, name: str) -> None:
        self._ask("DELETE", f"/v1/issuers/{_segment(name)}")

    def test_issuer(self, name: str, token: str, use: str) -> Json:
        return self._ask("POST", f"/v1/issuers/{_segment(name)}/test", {"token": token, "use": use})

    # --- sessions and exchange --------------------------------------------------------------------------------------

    def open_session(self, subject: str) -> Json:
        body = {"runtime": RUNTIME_CLIENT, "tenant": self._tenant_name, "subject": subject}
        return self._ask("POST", "/v1/sessions", body, expected=("session_id", "session_token"))

    def end_session(self, session_id: str) -> None:
        self._ask("DELETE", f"/v1/sessions/{_segment(session_id)}")

    def exchange(self, session_token: str, audience: str) -> Exchanged:
        return self._token(subject_token=session_token, subject_token_type=TOKEN_TYPE_JWT, audience=audience)

    def exchange_for_way_out(self, session_token: str) -> Exchanged:
        """A proxy credential by itself, for a session that needs no placeholder."""
        return self._token(
            subject_token=session_token,
            subject_token_type=TOKEN_TYPE_JWT,
            requested_token_type=TOKEN_TYPE_PROXY_CREDENTIAL,
        )

    def renew(self, exchanged: Exchanged) -> Exchanged:
        """The same placeholder, where there is one, and the same proxy credential, for longer."""
        if not exchanged.has_placeholder:
            return self._token(
                subject_token=exchanged.proxy_credential,
                subject_token_type=TOKEN_TYPE_PROXY_CREDENTIAL,
                requested_token_type=TOKEN_TYPE_PROXY_CREDENTIAL,
            )
        return self._token(
            subject_token=exchanged.placeholder,
            subject_token_type=TOKEN_TYPE_PLACEHOLDER,
            proxy_credential=exchanged.proxy_credential,
        )

    # --- health -----------------------------------------------------------------------------------------------------

    def answers(self) -> bool:
        """Whether this is the control plane that our admin token belongs to."""
        try:
            url = self._where() + "/v1/tenants"
            return self._http.get(url, headers=self._admin, timeout=3).status_code == httpx.codes.OK
        except (CommandError, httpx.HTTPError):
            return False

    def _token(self, **form: str) -> Exchanged:
        if self._runtime is None:
            raise WrongUsageError("an exchange by hand is the local stack's; docs/exchange.md has it by curl")
        fields = {"grant_type": GRANT_TYPE_TOKEN_EXCHANGE, **form}
        response = self._send("POST", "/oauth/token", data=fields, auth=self._runtime)
        return Exchanged(_answer(response, "proxy_credential", "expires_in"))

    def _items(self, path: str, **query: str | int) -> list[Json]:
        response = self._send("GET", path, params=query or None, headers=self._admin)
        items: list[Json] = _answer(response, "items")["items"]
        return items

    def _ask(self, method: str, path: str, body: Json | None = None, *, expected: tuple[str, ...] = ()) -> Json:
        response = self._send(method, path, json=body, headers=self._admin)
        return _answer(response, *expected) if response.content or expected else {}

    def _send(self, method: str, path: str, **how: Any) -> httpx.Response:
        url = self._where()
        try:
            response = self._http.request(method, url + path, **how)
        except httpx.ConnectError:
            moved = self._where()  # started again meanwhile, on another port
            if moved == url:
                raise self._unreachable(url) from None
            return self._send(method, path, **how)
        except httpx.TimeoutException:
            raise CommandError(
                f"the control plane at {url} did not answer in {TIMEOUT_SECONDS:.0f} s",
                "look at 'coatcheck doctor'",
            ) from None
        except httpx.HTTPError:
            raise self._unreachable(url) from None
        if response.is_error:
            raise _refused(response, if_unknown=self._if_unknown)
        return response

    def _unreachable(self, url: str) -> CommandError:
        return CommandError(f"the control plane at {url} cannot be reached", self._if_unreachable)


def _answer(response: httpx.Response, *expected: str) -> Json:
    """What the control plane said. Raises `CommandError` where that is not an answer of a control plane."""
    try:
        said = response.json()
    except ValueError:
        said = None
    if not isinstance(said, dict) or any(name not in said for name in expected):
        raise CommandError(
            f"{response.url.host}:{response.url.port} does not answer as a control plane does", "see 'coatcheck doctor'"
        )
    return said


def _refused(response: httpx.Response, *, if_unknown: str) -> RefusedCommandError:
    """From problem details (RFC 9457) or an OAuth error (RFC 6749 §5.2)."""
    try:
        said = response.json()
    except ValueError:
        said = {}
    if not isinstance(said, dict):
        said = {}
    code = str(said.get("code") or said.get("error") or response.status_code)
    detail = str(said.get("detail") or said.get("error_description") or said.get("title") or "no reason given")
    hint = str(said.get("hint") or "")
    if response.status_code == httpx.codes.UNAUTHORIZED:
        hint = hint or if_unknown
    return RefusedCommandError(
        f"{detail.rstrip('.')} ({code})", hint.rstrip("."), code=code, status=response.status_code
    )


def _trail(tenant: str | None) -> str:
    return "/v1/audit" if tenant is None else f"/v1/tenants/{_segment(tenant)}/audit"


def _segment(name: str) -> str:
    """One path segment: what people type never adds one."""
    return quote(name, safe="") or "-"
