"""A copy of the project that imports nothing from the original, so that a change made in it is the one that runs.

Rule: no environment variable is needed for that. The copy has a `.venv` of its own, whose interpreter sees the copy
first and then the original's installed packages, but not the original's editable install (which would win in a child
process that was started with an empty environment).
"""

import os
import shutil
import site
import sys
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

NOT_COPIED = shutil.ignore_patterns(
    ".git", ".venv*", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info", "build", "dist"
)

_COMMAND = """#!{python}
import sys
from coatcheck.cli import main
sys.exit(main())
"""


@dataclass(frozen=True, slots=True)
class Tree:
    root: Path

    @property
    def python(self) -> Path:
        return self.root / ".venv/bin/python"


def copy_project(original: Path, to: Path) -> Tree:
    """The project's files as they are now, committed or not, and a `.venv` that runs them."""
    shutil.copytree(original, to, ignore=NOT_COPIED)
    venv.create(to / ".venv", with_pip=False, symlinks=True)
    tree = Tree(to)
    packages = [path for path in site.getsitepackages() if Path(path).is_dir()]
    # Lines of a .pth file are put on the path as they stand; the .pth files *in* those folders are not read.
    _own_site_packages(tree).joinpath("copy.pth").write_text("\n".join([str(to), *packages]) + "\n")
    for script in Path(sys.executable).parent.iterdir():
        _link_script(script, tree)
    command = tree.root / ".venv/bin/coatcheck"
    command.unlink(missing_ok=True)
    command.write_text(_COMMAND.format(python=tree.python))
    command.chmod(0o755)
    return tree


@contextmanager
def planted(file: Path, *, old: str, new: str) -> Iterator[None]:
    """Makes the change, and takes it back at the end."""
    untouched = file.read_text()
    _write_as_newer(file, untouched.replace(old, new))
    try:
        yield
    finally:
        _write_as_newer(file, untouched)


def _write_as_newer(file: Path, text: str) -> None:
    """A compiled file is told stale by size and whole seconds, so each writing is seconds newer than the last."""
    moment = file.stat().st_mtime + 2
    file.write_text(text)
    os.utime(file, (moment, moment))


def _own_site_packages(tree: Tree) -> Path:
    return next((tree.root / ".venv/lib").glob("python3*")) / "site-packages"


def _link_script(script: Path, tree: Tree) -> None:
    """Tools that tests start by their path stand beside the copy's interpreter too."""
    beside = tree.root / ".venv/bin" / script.name
    if script.is_file() and not script.name.startswith("python") and not beside.exists():
        beside.symlink_to(script)
