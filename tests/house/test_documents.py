"""What the documents promise is there: tests, settings, codes, commands, files."""

import ast
import re
import subprocess
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer
import typer.main
import yaml
from pydantic_core import PydanticUndefined
from typer.testing import CliRunner

from control_plane.contract.refusal import RETRY_MAY_HELP, RefusalCode, status_of
from egress_proxy.ca import CertificateAuthority

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(path for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")) if path.name != "template.md")
ADRS = sorted((ROOT / "docs/adr").glob("[0-9]*.md"))

TABLE_ROW = re.compile(r"^\| (.+) \|$", re.MULTILINE)


def read(path: str) -> str:
    return (ROOT / path).read_text()


def rows(text: str) -> list[list[str]]:
    """The cells of every table row but headings and rules."""
    return [
        [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", row)]
        for row in TABLE_ROW.findall(text)
        if not set(row) <= set("|- ")
    ]


@cache
def functions_in(file: Path) -> frozenset[str]:
    tree = ast.parse(file.read_text())
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


# --- SECURITY.md ----------------------------------------------------------------------------------------------------


def test_every_invariant_of_the_security_document_names_a_test_that_exists() -> None:
    named = re.findall(r"`(tests/\S+)::(test_\w+)`", read("SECURITY.md"))

    missing = [
        f"{file}::{test}"
        for file, test in named
        if not (ROOT / file).is_file() or test not in functions_in(ROOT / file)
    ]

    assert missing == []


def test_invariants_are_numbered_in_order_and_none_is_without_a_test() -> None:
    section = read("SECURITY.md").split("## What holds")[1].split("\n## ")[0]
    invariants = re.split(r"^(?=\d+\. )", section, flags=re.MULTILINE)[1:]

    assert [int(text.split(".")[0]) for text in invariants] == list(range(1, len(invariants) + 1))
    assert [text for text in invariants if "::test_" not in text] == []


# --- refusals and settings -------------------------------------------------------------------------------------------


def test_the_document_of_refusals_has_every_code_with_its_status() -> None:
    listed = {
        (int(row[0]), row[1].split("`")[1], "↻" in row[1]) for row in rows(read("docs/refusals.md")) if row[0].isdigit()
    }

    assert listed == {(status_of(code), code.value, code in RETRY_MAY_HELP) for code in RefusalCode}


def test_every_code_says_what_to_do() -> None:
    codes = [row for row in rows(read("docs/refusals.md")) if row[0].isdigit()]

    assert [row[1] for row in codes if len(row) != 4 or not row[2].endswith(".") or not row[3].strip()] == []


SETTINGS = {
    "Control plane": "control_plane.config",
    "Egress proxy": "egress_proxy.config",
    "Runtime": "runtime.config",
}


def documented_settings(part: str) -> dict[str, str]:
    section = re.split(r"^## ", read("docs/configuration.md"), flags=re.MULTILINE)
    (text,) = [text for text in section if text.startswith(part)]
    return {row[0].strip("`"): row[1].strip("`") for row in rows(text) if row[0].startswith("`")}


@pytest.mark.parametrize("part", SETTINGS)
def test_the_document_of_settings_has_every_setting(part: str) -> None:
    fields = import_module(SETTINGS[part]).Settings.model_fields

    assert sorted(documented_settings(part)) == sorted(name.upper() for name in fields)


@pytest.mark.parametrize("part", SETTINGS)
def test_the_document_of_settings_has_every_default(part: str) -> None:
    fields = import_module(SETTINGS[part]).Settings.model_fields
    told = documented_settings(part)

    wrong = {
        name: (told[name.upper()], shown(field.default))
        for name, field in fields.items()
        if shown(field.default) not in (told[name.upper()], "–")
        or (shown(field.default) == "–" and told[name.upper()] == "required")
    }

    assert wrong == {}


def shown(default: Any) -> str:
    """A default as the document writes it. Where it depends on something, it is none here and words there."""
    if default is PydanticUndefined:
        return "required"
    if default is None or default in ("", ()):
        return "–"
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, tuple):
        return ":".join(str(part) for part in default)
    return f"{default:g}" if isinstance(default, float) else str(default)


# --- the command line ------------------------------------------------------------------------------------------------


def commands(group: Any, path: str = "coatcheck") -> Iterator[tuple[str, Any]]:
    """Every command that can be run, and its click object."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


def command_line_app() -> typer.Typer:
    app: typer.Typer = import_module("coatcheck.cli").app
    return app


@cache
def command_line() -> dict[str, Any]:
    return dict(commands(typer.main.get_command(command_line_app())))


def documented_commands() -> dict[str, str]:
    """Command to the text of its row or rows."""
    found: dict[str, str] = {}
    for row in rows(read("docs/cli.md")):
        if row[0].startswith("`coatcheck "):
            words = row[0].strip("`").split()
            name = max(
                (" ".join(words[:size]) for size in (2, 3) if " ".join(words[:size]) in command_line()),
                key=len,
                default=row[0],
            )
            found[name] = found.get(name, "") + " ".join(row)
    return found


def test_the_document_of_the_command_line_has_every_command_and_no_other() -> None:
    assert set(documented_commands()) == set(command_line())


def test_the_document_of_the_command_line_has_every_option() -> None:
    document = read("docs/cli.md")
    missing = [
        f"{name} {option}"
        for name, command in command_line().items()
        for parameter in command.params
        for option in parameter.opts[:1]
        if option.startswith("--")
        and not getattr(parameter, "hidden", False)
        and option not in documented_commands()[name]
        and not (option in ("--help", "--secret-file") and option in document)
    ]

    assert missing == []


@pytest.mark.parametrize("name", command_line())
def test_every_command_explains_itself(name: str) -> None:
    answer = CliRunner().invoke(command_line_app(), [*name.split()[1:], "--help"])

    assert answer.exit_code == 0, answer.output
    assert "Usage" in answer.output


# --- files, targets, decisions ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    text = document.read_text()
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]

    def leads_somewhere(link: str) -> bool:
        file, _, anchor = link.partition("#")
        target = (document.parent / file) if file else document
        headings = {
            re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-")
            for heading in re.findall(r"^#+ (.+)$", target.read_text() if target.is_file() else "", re.MULTILINE)
        }
        return target.exists() and (not anchor or anchor in headings)

    assert [link for link in links if not leads_somewhere(link)] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_a_document_names_exist(document: Path) -> None:
    roots = "control_plane|egress_proxy|runtime|coatcheck|tests|bench|charts|docs|requirements"
    named = re.findall(rf"`((?:{roots})/[\w./*-]*\w)`", document.read_text())

    assert [path for path in named if not list(ROOT.glob(path))] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_make_targets_that_a_document_names_exist(document: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", read("Makefile"), re.MULTILINE))

    named = set(re.findall(r"`make ([a-z-]+)[`\s]|^make ([a-z-]+)$", document.read_text(), re.MULTILINE))

    assert {first or second for first, second in named} <= targets


@pytest.mark.parametrize("adr", ADRS, ids=lambda path: path.name)
def test_a_decision_states_its_problem_options_and_bad_sides(adr: Path) -> None:
    text = adr.read_text()

    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)

    assert text.startswith(f"# {adr.name[:4]}: ")
    assert headings == ["Problem", "Options", "Decision", "Bad sides"]
    assert re.search(r"^Status: (proposed|accepted on \d{4}-\d\d-\d\d|superseded by \d{4})$", text, re.MULTILINE)
    assert len(text.splitlines()) <= 80, "one page"


def test_every_decision_is_in_the_index() -> None:
    index = read("docs/adr/README.md")

    assert [adr.name for adr in ADRS if f"({adr.name})" not in index] == []
    assert [int(adr.name[:4]) for adr in ADRS] == list(range(1, len(ADRS) + 1))


def test_every_dependency_has_its_line_in_the_decision() -> None:
    project = tomllib.loads(read("pyproject.toml"))["project"]
    wanted = {*project["dependencies"], *project["optional-dependencies"]["test"]}
    names = {re.split(r"[\[<>=~! ]", entry)[0].lower() for entry in wanted}
    decision = read("docs/adr/0002-dependencies.md").lower()

    told_otherwise = {"pytest-asyncio", "pytest-xdist", "pytest-timeout", "pytest-httpx"}
    assert {name for name in names - told_otherwise if name not in decision} == set()


# --- the commands of docs/kubernetes.md ------------------------------------------------------------------------------

KUBECTL = """#!/bin/sh
echo "$@" >> "$KUBECTL_LOG"
"""


def test_the_documented_commands_make_every_secret_that_the_chart_wants(tmp_path: Path) -> None:
    (script,) = re.findall(r"```sh\n(NS=.*?)```", read("docs/kubernetes.md"), re.DOTALL)
    kubectl = tmp_path / "bin/kubectl"
    kubectl.parent.mkdir()
    kubectl.write_text(KUBECTL)
    kubectl.chmod(0o755)

    subprocess.run(
        ["sh", "-eu", "-c", script.replace("rm -f ./*.key", "cp ca.key ca.kept; rm -f ./*.key")],
        cwd=tmp_path,
        env={"PATH": f"{kubectl.parent}:/usr/bin:/bin", "KUBECTL_LOG": str(tmp_path / "log")},
        check=True,
        capture_output=True,
    )

    log = (tmp_path / "log").read_text()
    made = set(re.findall(r"create (?:secret (?:generic|tls)|configmap) (\S+)", log))
    values = yaml.safe_load(read("charts/coatcheck/ci/sqlite-values.yaml"))
    assert made == set(existing(values))
    for part in ("control-plane", "proxy", "runtime"):
        verify = ["openssl", "verify", "-x509_strict", "-CAfile", "internal.crt", "-purpose", "sslserver"]
        subprocess.run(
            [*verify, "-verify_hostname", f"coatcheck-{part}.coatcheck.svc", f"{part}.crt"],
            cwd=tmp_path,
            check=True,
            capture_output=True,
        )
    (tmp_path / "ca.kept").chmod(0o600)
    CertificateAuthority.load(cert_file=tmp_path / "ca.crt", key_file=tmp_path / "ca.kept")


def existing(values: Any) -> Iterator[str]:
    """Every name of a Secret or ConfigMap that the values point at."""
    for name, value in values.items():
        if name in ("existingSecret", "existingConfigMap"):
            yield value
        elif isinstance(value, dict):
            yield from existing(value)
