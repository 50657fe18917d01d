"""Cells, and one table in Markdown and on a terminal."""

from __future__ import annotations

from utils.tables import Table, bracketed, estimate, interval, markdown, number, page, terminal, two_cells

SEEN = {"value": 0.5, "ci95": [0.4, 0.6123]}
NOTHING = {"value": None, "ci95": None}


def test_cells_say_what_does_not_exist() -> None:
    assert (number(2.0), number(7, "d"), number(None)) == ("2.000", "7", "-")
    assert (interval([-1, 1], "+.1f"), interval(None)) == ("-1.0 to +1.0", "-")
    assert [estimate(entry) for entry in (SEEN, NOTHING, None)] == ["0.500 (0.400 to 0.612)", "-", "-"]
    assert estimate(SEEN | {"ci95": None}) == "0.500"
    assert (two_cells(SEEN, ".1f"), two_cells(NOTHING)) == (["0.5", "0.4 to 0.6"], ["-", "-"])
    assert bracketed(0.1, [0, 0.25], "+.2f") == "+0.10 [+0.00, +0.25]"


def test_one_table_in_markdown_and_on_a_terminal() -> None:
    table = Table("Rows", ["row", "score"], [["a|b", "0.5"], ["c", "12.25"]], "A note.")
    assert markdown(table).splitlines() == [
        "## Rows", "", "A note.", "", "| row | score |", "| --- | ---: |", "| a\\|b | 0.5 |", "| c | 12.25 |",
    ]  # fmt: skip
    assert terminal(table).splitlines() == ["Rows", "row  score", "a|b    0.5", "c    12.25", "A note."]
    text = page("Title", ["Verdict."], ["one", "two"], [table])
    assert text.startswith("# Title\n\nVerdict.\n\n- one\n- two\n\n## Rows\n")
    assert "## " not in page("Title", [], [], [Table("", ["a"], [])])
