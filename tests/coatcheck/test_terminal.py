"""What reaches a terminal is printable, whatever it came from."""

import time

import pytest

from coatcheck.terminal import CommandError, local_time, printable, show_json, show_table


@pytest.mark.guards("coatcheck/terminal.py", "if text.isprintable():", "if True:")
def test_control_characters_from_outside_are_replaced() -> None:
    for hostile in ("\x1b[2J", "a\nb", "a\rb", "\x9b1m", "\u202eabc", "\x00", "\x07"):
        shown = printable(hostile)

        assert shown.isprintable()
        assert len(shown) == len(hostile)


def test_text_that_is_printable_stays_as_it_is() -> None:
    assert printable("GET https://api.example.com/v1/é 漢") == "GET https://api.example.com/v1/é 漢"


@pytest.mark.guards("coatcheck/terminal.py", 'Text("—" if cell in (None, "") else printable(cell))', "str(cell)")
def test_a_tables_cells_are_neither_escape_sequences_nor_markup(capsys: pytest.CaptureFixture[str]) -> None:
    show_table(["ID", "PATH"], [("1", "/\x1b]0;owned\x07[bold]x[/bold]")], nothing="")

    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "[bold]x[/bold]" in shown


def test_piped_tables_are_not_cut(capsys: pytest.CaptureFixture[str]) -> None:
    show_table(["ID", "LONG"], [("1", "x" * 500)], nothing="")

    assert "x" * 500 in capsys.readouterr().out


def test_json_is_ascii(capsys: pytest.CaptureFixture[str]) -> None:
    show_json({"path": "/\x1b[2J\u202e"})

    shown = capsys.readouterr().out
    assert shown.isascii()
    assert "\x1b" not in shown


def test_an_error_is_what_happened_and_what_to_do() -> None:
    assert str(CommandError("it broke", "mend it")) == "it broke; mend it"


@pytest.mark.parametrize("moment", [253_402_300_799.0, 1e300, float("inf"), float("nan"), -1e300])
def test_a_time_that_no_calendar_holds_is_shown_all_the_same(moment: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        shown = local_time(moment)
    finally:
        monkeypatch.undo()
        time.tzset()

    assert shown.endswith(" s after 1970")
