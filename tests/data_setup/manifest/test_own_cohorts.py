"""Cohorts of one's own: own names, no participants.tsv, a row for each eye, facts in the manifest."""

from pathlib import Path

import pandas as pd
import pytest

from data_setup.manifest import load_labels, read_records, select_wanted
from data_setup.tables.splits import seeded_split
from tests.data_setup.manifest.cohorts import config, people_of, row, write_tree
from utils.config.schema import Config
from utils.errors import ConfigError, UserError


def own_tree(root: Path, rows: list[str], columns: str = "person_id\tfilepath\tdevice\tprotocol") -> None:
    """A manifest at its own place, without participants.tsv."""
    root.mkdir(exist_ok=True)
    (root / "manifest.tsv").write_text("\n".join([columns, *rows]) + "\n")


def own_config(root: Path, *overrides: str) -> Config:
    return config(root, f"data.manifest_path={root}/manifest.tsv", *overrides)


def test_names_of_ones_own_are_allowed_in_filters(tmp_path: Path) -> None:
    columns = "person_id\tfilepath\tdevice\tprotocol\tanatomic_region\tlaterality"
    lines = ["1\ta.nii\tbioptigen\tradial_x\tFovea\tRight", "2\tb.nii\toptovue\tcube\tPeriphery\tOS"]
    own_tree(tmp_path, lines, columns)
    for override in (
        "data.device_filter=[bioptigen]",
        "data.protocol_filter=[radial_x]",
        "data.region_filter=[Fovea]",
        "data.laterality_filter=[OD]",
    ):
        listing = read_records(own_config(tmp_path, override))
        assert [r.path for r in listing.records] == ["a.nii"], override
    one = ("data.list_strategy=single_domain", "data.device_filter=[optovue]")
    assert [r.path for r in read_records(own_config(tmp_path, *one)).records] == ["b.nii"]
    with pytest.raises(ConfigError, match=r"device_filter: expected some of bioptigen, optovue, .*'optovu'"):
        read_records(own_config(tmp_path, "data.device_filter=[optovu]"))


def test_a_store_takes_the_names_that_it_has(tmp_path: Path) -> None:
    columns = ["device", "protocol", "region", "laterality"]
    index = pd.DataFrame([["bioptigen", "p", "Fovea", "L"], ["optovue", "q", None, "R"]], columns=columns)
    chosen = select_wanted(config(tmp_path, "data.device_filter=[optovue]"), index)
    assert chosen.protocol.tolist() == ["q"]
    with pytest.raises(ConfigError, match=r"expected some of Fovea, .*found 'fovea'"):
        select_wanted(config(tmp_path, "data.region_filter=[fovea]"), index)


def test_only_a_manifest_at_its_own_place_may_lack_participants(tmp_path: Path) -> None:
    own_tree(tmp_path, [f"{n}\t{n}.nii\td\tp" for n in range(40)])
    listing = read_records(own_config(tmp_path))
    assert (len(listing.records), listing.split_source) == (40, "seeded_70_10_20")
    assert {r.person_id: r.split for r in listing.records} == seeded_split(
        dict.fromkeys(map(str, range(40))), 0
    )
    own_tree(tmp_path, [f"{n}\t{n}.nii\td\tp" for n in range(60)])
    listing = read_records(own_config(tmp_path))
    own_tree(tmp_path, [f"{n}\t{n}.nii\td\tp" for n in range(80)])  # who is new moves nobody, without a store
    grown = {r.person_id: r.split for r in read_records(own_config(tmp_path)).records}
    assert {r.person_id: r.split for r in listing.records}.items() <= grown.items()
    assert load_labels(own_config(tmp_path)) == {}
    with pytest.raises(UserError, match=r"participants\.tsv"):
        load_labels(own_config(tmp_path, "task.label_column=grade"))
    with pytest.raises(UserError, match=r"people\.tsv"):
        read_records(own_config(tmp_path, f"data.participants_path={tmp_path}/people.tsv"))
    write_tree(tmp_path, [row("1001")], people_of("1001"))
    (tmp_path / "participants.tsv").unlink()
    for read in (read_records, load_labels):
        with pytest.raises(UserError, match=r"participants\.tsv"):
            read(config(tmp_path))


def test_one_path_of_two_people_is_an_error(tmp_path: Path) -> None:
    own_tree(tmp_path, ["1\ta.nii\td\tp", "1\ta.nii\td\tp", "2\ta.nii\td\tp"])
    expected = r"line 4: expected 'a\.nii' in the rows of one person, found '1' and '2'"
    with pytest.raises(UserError, match=expected):
        read_records(own_config(tmp_path))


def test_participants_may_have_a_row_for_each_eye(tmp_path: Path) -> None:
    columns = "person_id\tfilepath\tdevice\tprotocol\tlaterality"
    own_tree(tmp_path, [f"1\t{n}.nii\td\tp\t{side}" for n, side in enumerate(["R", "left", ""])], columns)
    people = tmp_path / "participants.tsv"
    people.write_text("person_id\teye\tstudy_group\tage\n1\tOD\tAMD\t70\n1\tLeft\thealthy\t70\n")
    records = read_records(own_config(tmp_path)).records
    assert [(r.laterality, r.study_group, r.age) for r in records] == [
        ("R", "AMD", 70),
        ("L", "healthy", 70),
        ("unknown", None, 70),  # what both eyes share
    ]
    assert load_labels(own_config(tmp_path, "task.unit=eye")) == {"1_R": "AMD", "1_L": "healthy"}
    with pytest.raises(UserError, match="study_group of 1: expected one label, found 'AMD' and 'healthy'"):
        load_labels(own_config(tmp_path))
    people.write_text("person_id\teye\trecommended_split\n1\tOD\ttrain\n1\tOS\ttest\n")
    with pytest.raises(UserError, match="participant 1: expected one recommended_split for both eyes"):
        read_records(own_config(tmp_path))
    people.write_text("person_id\teye\tage\n1\tOD\t70\n1\tR\t71\n")
    with pytest.raises(UserError, match="participant 1: expected one row of the R eye, found two"):
        read_records(own_config(tmp_path))
    people.write_text("person_id\teye\n1\tboth\n")
    with pytest.raises(
        UserError, match="line 2: expected an eye as OD, OS, L, R, left or right, found 'both'"
    ):
        read_records(own_config(tmp_path))


@pytest.mark.parametrize(
    ("column", "cell", "message"),
    [
        ("spacing_mm", "0.1 0.2", "line 2: spacing_mm: expected three lengths in mm above 0, D, H, W"),
        ("spacing_mm", "0.1, 0, 0.1", "line 2: spacing_mm: expected three lengths"),
        ("spacing_mm", "0.1; nan; 0.1", "line 2: spacing_mm: expected three lengths"),
        ("d_order", "down", "line 2: d_order: expected superior_to_inferior"),
    ],
)
def test_a_wrong_fact_of_the_manifest_names_its_line(
    tmp_path: Path, column: str, cell: str, message: str
) -> None:
    own_tree(tmp_path, [f"1\ta.nii\td\tp\t{cell}"], f"person_id\tfilepath\tdevice\tprotocol\t{column}")
    with pytest.raises(UserError, match=message):
        read_records(own_config(tmp_path))
