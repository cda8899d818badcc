"""The clients file: a JSON list of clients with the files that hold their secrets.

    [{"id": "proxy", "kind": "egress_proxy", "tenant": null, "scopes": [], "secret_file": "/run/secrets/proxy"}]

Instead of a `secret_file`, or beside it, `proofs` as in `POST /v1/clients`: keys, a workload, a certificate.

Rule: a secret of fewer than 32 characters, or in a file that others can read, is refused.
"""

import json
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, StringConstraints, TypeAdapter, ValidationError, model_validator

from control_plane.adapters.keyring import KeyFileError, require_private
from control_plane.contract.caller import ClientId, SubjectId, TenantId
from control_plane.contract.secret import Secret, UnusableSecretError
from control_plane.core.client_proofs import NO_PROOFS, ClientProofs
from control_plane.core.names import CLIENT_ID, PRINTABLE, TENANT_ID
from control_plane.core.records import ClientKind
from control_plane.registry import FileClient, NewClient

MIN_SECRET_CHARACTERS: Final = 32


class ClientsFileError(ValueError):
    """The file cannot be used; the message names the entry and what was expected, never a secret."""


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    id: Annotated[str, StringConstraints(pattern=CLIENT_ID)]
    kind: Literal["runtime", "egress_proxy", "operator"]
    tenant: Annotated[str, StringConstraints(pattern=TENANT_ID)] | None = None
    scopes: list[Literal["subject:assert"]] = []
    subject: Annotated[str, StringConstraints(pattern=PRINTABLE)] | None = None
    secret_file: Path | None = None
    proofs: ClientProofs = NO_PROOFS

    @model_validator(mode="after")
    def _provable(self) -> Self:
        if self.secret_file is None and self.proofs.is_empty:
            raise ValueError("it needs a secret_file, or proofs")
        return self


_ENTRIES: Final = TypeAdapter(list[_Entry])


def read_clients_file(path: Path) -> list[FileClient]:
    """Raises `ClientsFileError`. A relative `secret_file` is beside the clients file."""
    try:
        entries = _ENTRIES.validate_python(json.loads(path.read_text("utf-8")))
    except OSError as error:
        raise ClientsFileError(f"cannot read {path}: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ClientsFileError(f"{path}: entry {place}: {first['msg']}") from None
    except ValueError:
        raise ClientsFileError(f"{path} is not JSON") from None
    if len({entry.id for entry in entries}) != len(entries):
        raise ClientsFileError(f"{path}: two entries have the same id")
    return [_file_client(entry, path.parent) for entry in entries]


def read_secret_file(path: Path, *, min_characters: int = MIN_SECRET_CHARACTERS) -> Secret:
    """One secret from a file of its own; of ours, unless told otherwise. Raises `ClientsFileError`."""
    try:
        require_private(path)
        secret = Secret.submitted(path.read_text("utf-8"))
    except (KeyFileError, UnusableSecretError) as error:
        raise ClientsFileError(f"{path}: {error}") from None
    except (OSError, UnicodeDecodeError):
        raise ClientsFileError(f"cannot read {path}") from None
    if len(secret.reveal()) < min_characters:
        raise ClientsFileError(f"{path}: the secret is shorter than {min_characters} characters")
    return secret


def _file_client(entry: _Entry, folder: Path) -> FileClient:
    client = NewClient(
        id=ClientId(entry.id),
        kind=ClientKind(entry.kind),
        tenant=TenantId(entry.tenant) if entry.tenant is not None else None,
        scopes=tuple(entry.scopes),
        proofs=entry.proofs,
        subject=SubjectId(entry.subject) if entry.subject is not None else None,
    )
    return FileClient(client, read_secret_file(folder / entry.secret_file) if entry.secret_file else None)
