"""Where the database is: a value, or a file where a password is in it. Not both, and no file that all can read."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from control_plane.adapters.keyring import generate_kek_file
from control_plane.bootstrap import running
from control_plane.clients_file import ClientsFileError
from control_plane.config import Settings


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    """All that a control plane needs, but the database."""
    generate_kek_file(tmp_path / "kek.hex", bytes(range(48)))
    return {"listen": "127.0.0.1:0", "kek_files": (tmp_path / "kek.hex",)}


def url_file(folder: Path, *, mode: int) -> Path:
    file = folder / "database-url"
    file.write_text(f"sqlite+aiosqlite:///{folder / 'control-plane.sqlite'}\n")
    file.chmod(mode)
    return file


async def test_the_database_is_where_the_file_says(settings: dict[str, Any], tmp_path: Path) -> None:
    async with running(Settings(**settings, database_url_file=url_file(tmp_path, mode=0o600))):
        assert (tmp_path / "control-plane.sqlite").is_file()


@pytest.mark.guards(
    "control_plane/database.py",
    "read_secret_file(file).reveal()",
    "file.read_text().strip()",
)
async def test_a_file_that_everybody_can_read_is_not_used(settings: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ClientsFileError, match="can be read by others"):
        async with running(Settings(**settings, database_url_file=url_file(tmp_path, mode=0o644))):
            pass


def test_one_of_value_and_file_is_given(settings: dict[str, Any], tmp_path: Path) -> None:
    both: dict[str, Any] = {"database_url": "sqlite+aiosqlite://", "database_url_file": tmp_path / "url"}
    neither: dict[str, Any] = {}

    for database in (both, neither):
        with pytest.raises(ValidationError, match="give one of"):
            Settings(**settings, **database)
