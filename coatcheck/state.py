"""The state folder of a local stack: what lies where, and who may read it.

Rule: the folder is the owner's alone (0700), every secret in it a file of mode 0600 that came from the system's
generator. Whatever is found more open, or owned by somebody else, is refused, not repaired: it may have been read.

    control-plane.sqlite    kek/1.hex …            admin-token         clients.json
    secrets/local-runtime   secrets/local-proxy    ca/ca.pem ca/ca.key
    stack.json (while the stack is ready)          stack.log           stack.lock  use.lock
"""

import json
import os
import secrets
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from coatcheck.terminal import CommandError
from control_plane.contract.secret import Secret

TENANT: Final = "local"
SUBJECT: Final = "local"
RUNTIME_CLIENT: Final = "local-runtime"
PROXY_CLIENT: Final = "local-proxy"

_KEK_BYTES: Final = 32
_SECRET_BYTES: Final = 32  # 256 bits
_OPEN_TO_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


@dataclass(frozen=True, slots=True)
class StateFolder:
    """Where everything of one local stack lies. Building it touches nothing."""

    home: Path

    @property
    def database(self) -> Path:
        return self.home / "control-plane.sqlite"

    @property
    def admin_token_file(self) -> Path:
        return self.home / "admin-token"

    @property
    def clients_file(self) -> Path:
        return self.home / "clients.json"

    @property
    def ca_certificate(self) -> Path:
        return self.home / "ca" / "ca.pem"

    @property
    def ca_key(self) -> Path:
        return self.home / "ca" / "ca.key"

    @property
    def stack_file(self) -> Path:
        return self.home / "stack.json"

    @property
    def stack_log(self) -> Path:
        return self.home / "stack.log"

    @property
    def stack_lock(self) -> Path:
        """Held by the stack's process for as long as it lives."""
        return self.home / "stack.lock"

    @property
    def use_lock(self) -> Path:
        """Held, shared, by everything that needs the stack; a stack started for a run ends when nobody holds it."""
        return self.home / "use.lock"

    def client_secret_file(self, client: str) -> Path:
        return self.home / "secrets" / client

    @property
    def kek_files(self) -> list[Path]:
        """Newest first: the one with the highest number."""
        return sorted((self.home / "kek").glob("*.hex"), key=_number, reverse=True)

    def exists(self) -> bool:
        return self.admin_token_file.exists()

    def admin_token(self) -> Secret:
        return self._secret(self.admin_token_file)

    def client_secret(self, client: str) -> Secret:
        return self._secret(self.client_secret_file(client))

    def own_secrets(self) -> list[Secret]:
        """Every value that no child process may get."""
        files = [self.admin_token_file, *self.kek_files, *sorted((self.home / "secrets").glob("*"))]
        return [self._secret(file) for file in files]

    def _secret(self, file: Path) -> Secret:
        try:
            return Secret.submitted(file.read_text())
        except FileNotFoundError:
            raise CommandError(
                f"there is no local stack in {self.home}", "create one with 'coatcheck up', or name it with --home"
            ) from None
        except PermissionError:
            raise CommandError(f"{file} is not yours to read", "name your own state folder with --home") from None


def prepare(state: StateFolder) -> None:
    """Create what is missing. Raises `CommandError` for a folder that is open to others or incomplete."""
    own_folder(state.home)
    for name in ("kek", "secrets", "ca"):
        own_folder(state.home / name)
    _keep_or_create_kek(state)
    for file in (
        state.admin_token_file,
        state.client_secret_file(RUNTIME_CLIENT),
        state.client_secret_file(PROXY_CLIENT),
    ):
        if not file.exists():
            write_private(file, secrets.token_urlsafe(_SECRET_BYTES) + "\n")
    _write_clients(state)
    _keep_or_create_ca(state)
    for file in private_files(state):
        _require_one_owner_and_name(file)
    open_ones = [str(file) for file in private_files(state) if is_open_to_others(file)]
    if open_ones:
        raise CommandError(
            f"others may read {open_ones[0]}", f"if nobody has, close it with 'chmod 600 {open_ones[0]}'"
        )


def private_files(state: StateFolder) -> Iterable[Path]:
    """Every file whose content would give something away."""
    yield from state.kek_files
    yield state.admin_token_file
    yield from sorted((state.home / "secrets").glob("*"))
    yield state.ca_key
    yield from sorted(state.home.glob("control-plane.sqlite*"))


def is_open_to_others(path: Path) -> bool:
    found = path.lstat()
    return bool(found.st_mode & _OPEN_TO_OTHERS) or found.st_uid != os.getuid() or stat.S_ISLNK(found.st_mode)


def _require_one_owner_and_name(file: Path) -> None:
    """A file that has a second name may be read and written there, whatever this folder's mode."""
    found = file.lstat()
    if found.st_uid != os.getuid():
        raise CommandError(f"{file} belongs to somebody else", "name your own state folder with --home")
    if found.st_nlink > 1:
        raise CommandError(
            f"{file} has another name somewhere (a hard link)",
            f"if nobody put it there, find it with 'find / -xdev -samefile {file}' and remove it",
        )


def write_private(file: Path, text: str) -> None:
    """Write a file of mode 0600 that is there whole or not at all."""
    unfinished = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "w") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        unfinished.replace(file)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def own_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise CommandError(f"{folder} is not a folder", "name another one with --home") from None
    except OSError as error:
        raise CommandError(f"cannot create {folder} ({error.strerror})", "name another folder with --home") from None
    if folder.lstat().st_uid != os.getuid():
        raise CommandError(f"the state folder {folder} belongs to somebody else", "name another one with --home")
    if is_open_to_others(folder):
        raise CommandError(
            f"the state folder {folder} is open to other users",
            f"give it to yourself alone with 'chmod 700 {folder}', or name another one with --home",
        )


def _keep_or_create_kek(state: StateFolder) -> None:
    if state.kek_files:
        return
    if state.database.exists():
        # A new key would not open what the old one sealed: it would only hide that the old one is lost.
        raise CommandError(
            f"{state.home / 'kek'} is empty but {state.database.name} holds secrets sealed under its keys",
            "put the key files back from your backup",
        )
    write_private(state.home / "kek" / "1.hex", secrets.token_bytes(_KEK_BYTES).hex() + "\n")


def _write_clients(state: StateFolder) -> None:
    clients: list[dict[str, Any]] = [
        {
            "id": RUNTIME_CLIENT,
            "kind": "runtime",
            "tenant": TENANT,
            "scopes": [],
            "secret_file": str(state.client_secret_file(RUNTIME_CLIENT)),
        },
        {
            "id": PROXY_CLIENT,
            "kind": "egress_proxy",
            "tenant": None,
            "scopes": [],
            "secret_file": str(state.client_secret_file(PROXY_CLIENT)),
        },
    ]
    write_private(state.clients_file, json.dumps(clients, indent=2) + "\n")


def _keep_or_create_ca(state: StateFolder) -> None:
    if state.ca_certificate.exists() != state.ca_key.exists():
        missing = state.ca_key if state.ca_certificate.exists() else state.ca_certificate
        raise CommandError(
            f"{missing} is missing beside its other half",
            f"put it back from your backup, or remove {state.home / 'ca'}: the next 'coatcheck up' makes a new CA",
        )
    if not state.ca_key.exists():
        from egress_proxy.ca import create_ca, utc_now  # slow to import, and needed once

        create_ca(state.home / "ca", now=utc_now())


def _number(file: Path) -> int:
    return int(file.stem) if file.stem.isdigit() else 0
