"""A control plane that is not this machine's own: where it is, and by what we are its administrator.

Rule: TLS, verified, except to this machine; the token comes from a file, never from the command line or a variable.
"""

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self
from urllib.parse import urlsplit

from coatcheck.terminal import CommandError, WrongUsageError
from control_plane.contract.secret import Secret, UnusableSecretError

_LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class Elsewhere:
    url: str
    """Without a slash at its end."""
    admin_token_file: Path
    ca_file: Path | None

    @classmethod
    def asked_for(cls, url: str | None, admin_token_file: Path | None, ca_file: Path | None) -> Self | None:
        """What the options say; None: this machine's own. Raises `WrongUsageError`."""
        if url is None:
            if ca_file is not None:
                raise WrongUsageError("--ca-file says what to trust at --control-plane; name that too")
            return None
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username:
            raise WrongUsageError(f"--control-plane takes a URL such as https://coatcheck.example.com, not {url!r}")
        if parts.scheme == "http" and parts.hostname not in _LOOPBACK:
            raise WrongUsageError(f"the token would go to {parts.hostname} in the clear; use https")
        if admin_token_file is None:
            raise WrongUsageError("--control-plane needs --admin-token-file, the file with an administrator's token")
        return cls(url.rstrip("/"), admin_token_file, ca_file)

    def admin_token(self) -> Secret:
        """Raises `CommandError`."""
        try:
            return Secret.submitted(self.admin_token_file.read_text("utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise CommandError(f"cannot read {self.admin_token_file}: {type(error).__name__}") from None
        except UnusableSecretError as error:
            raise CommandError(f"{self.admin_token_file} holds no token: {error}") from None

    def trust(self) -> ssl.SSLContext:
        """The system's authorities, or those of the file alone. Raises `CommandError`."""
        try:
            return ssl.create_default_context(cafile=self.ca_file)
        except (OSError, ssl.SSLError) as error:
            raise CommandError(f"cannot read the certificates in {self.ca_file}: {type(error).__name__}") from None
