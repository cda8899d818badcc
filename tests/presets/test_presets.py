"""The providers we know, and what keeps their data honest."""

import re
from collections import Counter

import pytest

from control_plane.contract.destination import destination_from_json, destination_to_json
from control_plane.contract.placeholder import ENTROPY_BYTES, TokenKind, mint, parse
from control_plane.contract.placement import (
    BasicPlacement,
    HeaderPlacement,
    QueryPlacement,
    placement_from_json,
    placement_to_json,
)
from control_plane.core.presets import PRESETS, InvalidPresetError, Preset, preset_to_json, read_presets

TAG_KEY = b"k" * 32
EVERY_PRESET = pytest.mark.parametrize("preset", PRESETS.values(), ids=list(PRESETS))

ONE_PRESET = """
[acme]
title = "Acme"
destinations = ["https://api.acme.test"]
placements = [{ kind = "header", name = "x-api-key", format = "{secret}" }]
shape = { prefix = "acme_" }
variables = ["ACME_API_KEY"]
base_url_variables = { ACME_BASE_URL = "{base}/v2" }
documentation = "https://acme.test/docs"
"""


def test_at_least_twenty_providers_are_known() -> None:
    assert len(PRESETS) >= 20


@pytest.mark.parametrize(
    "preset_id",
    """anthropic azure-openai github github-git gitlab google-ai huggingface linear mistral notion openai slack
    stripe""".split(),
)
def test_the_providers_that_the_documentation_names_are_known(preset_id: str) -> None:
    assert PRESETS[preset_id].id == preset_id


@EVERY_PRESET
def test_a_placeholder_of_every_shape_parses(preset: Preset) -> None:
    placeholder = mint(preset.shape, TokenKind.PLACEHOLDER, tag_key=TAG_KEY, entropy=b"\x5a" * ENTROPY_BYTES)

    token = parse(placeholder, [TAG_KEY])

    assert token.kind is TokenKind.PLACEHOLDER
    assert placeholder.startswith(preset.shape.prefix)
    assert preset.shape.length in (None, len(placeholder))


@EVERY_PRESET
def test_every_destination_and_placement_survives_the_trip_to_the_store_and_back(preset: Preset) -> None:
    assert [destination_from_json(destination_to_json(d)) for d in preset.destinations] == list(preset.destinations)
    assert [placement_from_json(placement_to_json(p)) for p in preset.placements] == list(preset.placements)


@EVERY_PRESET
def test_a_preset_covers_a_whole_host_and_never_a_private_address(preset: Preset) -> None:
    assert all(destination.path_prefix == "/" for destination in preset.destinations)
    assert not any(destination.allow_private for destination in preset.destinations)
    assert all(destination.methods is None for destination in preset.destinations)


@EVERY_PRESET
def test_a_preset_shows_itself_as_plain_json(preset: Preset) -> None:
    shown = preset_to_json(preset)

    assert shown["id"] == preset.id
    assert shown["variables"] == list(preset.variables)
    assert shown["base_url_variables"] == dict(preset.base_url_variables)


def test_no_two_presets_share_a_variable() -> None:
    holders = Counter(name for preset in PRESETS.values() for name in (*preset.variables, *preset.base_url_variables))

    assert [name for name, count in holders.items() if count > 1] == []


def test_only_azure_openai_leaves_its_host_to_the_operator() -> None:
    assert [preset.id for preset in PRESETS.values() if not preset.destinations] == ["azure-openai"]


def test_no_placeholder_looks_like_a_live_payment_key() -> None:
    assert not any(re.search("live", preset.shape.prefix) for preset in PRESETS.values())


@pytest.mark.parametrize(
    ("preset_id", "placements"),
    [
        ("anthropic", (HeaderPlacement("x-api-key"), HeaderPlacement("authorization", "Bearer {secret}"))),
        ("openai", (HeaderPlacement("authorization", "Bearer {secret}"),)),
        ("github", tuple(HeaderPlacement("authorization", f) for f in ("Bearer {secret}", "token {secret}"))),
        ("github-git", (BasicPlacement("x-access-token"),)),
        ("gitlab", (HeaderPlacement("private-token"), HeaderPlacement("authorization", "Bearer {secret}"))),
        ("gitlab-git", (BasicPlacement("oauth2"),)),
        ("linear", (HeaderPlacement("authorization", "{secret}"),)),
        ("pagerduty", (HeaderPlacement("authorization", "Token token={secret}"),)),
    ],
)
def test_a_key_goes_where_the_provider_documents_it(
    preset_id: str, placements: tuple[HeaderPlacement | BasicPlacement, ...]
) -> None:
    assert PRESETS[preset_id].placements == placements


def test_google_ai_takes_the_key_in_a_header_and_in_the_query() -> None:
    placements = PRESETS["google-ai"].placements

    assert HeaderPlacement("x-goog-api-key") in placements
    assert QueryPlacement("key") in placements


def test_a_github_token_has_the_length_that_clients_check() -> None:
    assert PRESETS["github"].shape.length == 40


@pytest.mark.parametrize(
    ("preset_id", "expected"),
    [
        ("anthropic", {"ANTHROPIC_BASE_URL": "http://127.0.0.1:8472/anthropic"}),
        ("openai", {"OPENAI_BASE_URL": "http://127.0.0.1:8472/openai/v1"}),
        ("linear", {}),
    ],
)
@pytest.mark.parametrize("final_slash", ["", "/"])
def test_base_url_variables_point_an_sdk_at_the_reverse_route(
    preset_id: str, expected: dict[str, str], final_slash: str
) -> None:
    assert PRESETS[preset_id].base_urls(f"http://127.0.0.1:8472/{preset_id}{final_slash}") == expected


def test_a_well_formed_preset_is_read() -> None:
    presets = read_presets(ONE_PRESET)

    assert presets["acme"].base_urls("http://p/acme") == {"ACME_BASE_URL": "http://p/acme/v2"}


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("[acme]", "[Acme_]", "an id"),
        ("title", "titel", "unknown"),
        ("https://api.acme.test", "http://api.acme.test", "https destinations"),
        ("https://api.acme.test", "ftp://api.acme.test", "a destination is"),
        ("https://api.acme.test", "https://user@api.acme.test", "no user"),
        ('"x-api-key"', '"host"', "frames or routes"),
        ('"{secret}"', '"secret"', "exactly one"),
        ('kind = "header"', 'kind = "cookie"', "kind"),
        ('[{ kind = "header", name = "x-api-key", format = "{secret}" }]', "[]", "placement"),
        ('prefix = "acme_"', 'prefix = "coatchk1"', "prefix"),
        ('prefix = "acme_"', "length = 12", "length"),
        ('prefix = "acme_"', "colour = 1", "colour"),
        ('["ACME_API_KEY"]', "[]", "variable"),
        ("ACME_API_KEY", "acme-api-key", "variable"),
        ("{base}/v2", "https://api.acme.test/v2", "{base}"),
        ("{base}/v2", "{base}?key=1", "{base}"),
        ("https://acme.test/docs", "see their page", "documentation"),
    ],
)
def test_a_preset_that_could_mislead_stops_the_process(old: str, new: str, why: str) -> None:
    assert old in ONE_PRESET

    with pytest.raises(InvalidPresetError, match=re.escape(why)):
        read_presets(ONE_PRESET.replace(old, new, 1))


def test_an_empty_file_of_presets_is_an_error() -> None:
    with pytest.raises(InvalidPresetError):
        read_presets("")
