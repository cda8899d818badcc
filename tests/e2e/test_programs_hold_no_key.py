"""`coatcheck run`: a program gets a placeholder and its way out. It holds no key, proxy credential or admin token."""

from pathlib import Path

import pytest

from tests.support.local_stack import LocalStack
from tests.support.processes import Deployment
from tests.support.upstream import Upstream, plain


@pytest.fixture(scope="module")
def upstream_ca_file(deployment: Deployment) -> Path:
    return deployment.folder / "upstream-ca.pem"


@pytest.mark.needs("curl")
def test_a_program_sees_its_placeholder_and_nothing_else_of_ours(
    upstream: Upstream, upstream_ca_file: Path, secret: str, tmp_path: Path
) -> None:
    with LocalStack(tmp_path, upstream_ca=upstream_ca_file) as stack:
        stack.add_credential("weather", url=upstream.url, secret=secret)
        admin_token = (stack.home / "admin-token").read_text().strip()

        seen = stack.coatcheck("run", "--", "sh", "-c", "env; curl -sS -H \"Authorization: Bearer $WEATHER_API_KEY\" "
                               f"{upstream.url}/today", WEATHER_API_KEY=secret)  # fmt: skip

    output = seen.stdout + seen.stderr
    placeholder = next(line for line in output.splitlines() if line.startswith("WEATHER_API_KEY=")).partition("=")[2]
    assert "coatchk1" in placeholder
    assert upstream.seen("/today")[0].header("authorization") == f"Bearer {secret}"
    assert secret not in output
    assert admin_token not in output
    assert "coatprx1" not in output
    assert placeholder.encode() not in upstream.received()


@pytest.mark.parametrize(
    "ttl_seconds, child_seconds", [(2, 5), pytest.param(5, 30, marks=pytest.mark.long)], ids=["short", "long"]
)
@pytest.mark.needs("curl")
def test_a_placeholder_outlives_its_ttl_while_its_program_runs(
    upstream: Upstream, upstream_ca_file: Path, secret: str, tmp_path: Path, ttl_seconds: int, child_seconds: int
) -> None:
    upstream.default = plain(b"ok")
    settings = {"COATCHECK_CONTROL_PLANE_PLACEHOLDER_TTL_SECONDS": str(ttl_seconds)}
    ask = f'curl -sS -o /dev/null -w "%{{http_code}} " -H "Authorization: Bearer $WEATHER_API_KEY" {upstream.url}/'
    script = f"for n in $(seq {child_seconds}); do {ask}$n; sleep 1; done"
    with LocalStack(tmp_path, upstream_ca=upstream_ca_file, settings=settings) as stack:
        stack.add_credential("weather", url=upstream.url, secret=secret)

        ran = stack.coatcheck("run", "--", "sh", "-c", script)

        (issued,) = [item for item in stack.json("placeholder", "list") if item["credential"] == "weather"]
    assert ran.stdout.split() == ["200"] * child_seconds
    assert {seen.header("authorization") for seen in upstream.requests} == {f"Bearer {secret}"}
    assert issued["revoked_at"] is not None, "it ends with its program"


@pytest.mark.needs("curl")
def test_a_stolen_placeholder_of_a_program_is_worthless_after_and_beside_it(
    deployment: Deployment, upstream: Upstream, upstream_ca_file: Path, secret: str, tmp_path: Path
) -> None:
    with LocalStack(tmp_path, upstream_ca=upstream_ca_file) as stack:
        stack.add_credential("weather", url=upstream.url, secret=secret)
        stolen = stack.coatcheck("run", "--", "sh", "-c", "printf %s $WEATHER_API_KEY").stdout.strip()

        second = stack.coatcheck(
            "run", "--", "sh", "-c",
            f'curl -sS -o /dev/null -w "%{{http_code}}" -H "Authorization: Bearer {stolen}" {upstream.url}/',
        )  # fmt: skip

    assert "coatchk1" in stolen
    assert second.stdout.strip() == "403"
    assert upstream.requests == []
