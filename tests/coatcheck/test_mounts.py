"""Every path that leads to a folder, from the mount table alone."""

from pathlib import Path

import pytest

from coatcheck.mounts import other_ways_to, parsed

ROOT = "21 1 254:0 / / rw - ext4 /dev/vda rw"
STATE = Path("/home/u/.coatcheck")


@pytest.mark.parametrize(
    "line, ways",
    [
        ("30 21 254:0 / /sysroot rw - ext4 /dev/vda rw", ["/sysroot/home/u/.coatcheck"]),
        ("30 21 254:0 /home /srv/homes rw - ext4 /dev/vda rw", ["/srv/homes/u/.coatcheck"]),
        ("30 21 254:0 /home/u/.coatcheck /state rw - ext4 /dev/vda rw", ["/state"]),
        ("30 21 254:0 /home/u/.coatcheck/kek /keys rw - ext4 /dev/vda rw", ["/keys"]),
        (r"30 21 254:0 /home /a\040b rw - ext4 /dev/vda rw", ["/a b/u/.coatcheck"]),
        ("30 21 254:0 /homes /other rw - ext4 /dev/vda rw", []),
        ("30 21 254:1 / /disk rw - ext4 /dev/vdb rw", []),
    ],
)
@pytest.mark.guards("coatcheck/mounts.py", "if _is_in(inner, mount.root):", "if False:")
def test_every_mount_of_the_same_file_system_that_holds_a_folder_leads_to_it(line: str, ways: list[str]) -> None:
    table = list(parsed([ROOT, line]))

    found = other_ways_to(STATE, table)

    assert found == [Path(way) for way in ways]


def test_a_folder_on_a_mount_of_its_own_is_found_at_the_others_of_that_file_system() -> None:
    table = list(
        parsed([ROOT, "30 21 0:40 /@home /home rw - btrfs /dev/vdb rw", "31 21 0:40 / /mnt/top rw - btrfs /dev/vdb rw"])
    )

    assert other_ways_to(STATE, table) == [Path("/mnt/top/@home/u/.coatcheck")]


def test_without_a_table_nothing_is_known() -> None:
    assert other_ways_to(STATE, []) is None
