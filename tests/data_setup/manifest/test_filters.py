"""Filters, one domain, and a share of every site, device and group; unknown values are errors."""

from collections import Counter
from pathlib import Path

import pytest

from data_setup.manifest import read_records
from tests.data_setup.manifest.cohorts import NAMES, config, people_of, person, row, write_tree
from utils.errors import ConfigError


def mixed_tree(root: Path) -> None:
    rows = [row("1001", device, uid=f"{i}.{s}", side=s) for i, device in enumerate(NAMES) for s in ("l", "r")]
    write_tree(root, rows, people_of("1001"))


@pytest.mark.parametrize(
    ("override", "count"),
    [
        ("data.device_filter=[topcon_triton,zeiss_cirrus]", 4),
        ("data.protocol_filter=[cirrus_mac_oct_oct]", 2),
        ("data.protocol_filter=[triton_macula_6x6_oct]", 2),  # the version 2 name
        ("data.region_filter=[Macula]", 4),
        ("data.laterality_filter=[L]", 3),
    ],
)
def test_filters(tmp_path: Path, override: str, count: int) -> None:
    mixed_tree(tmp_path)
    listing = read_records(config(tmp_path, override))
    assert len(listing.records) == count
    key = override.split("=")[0].removeprefix("data.")
    assert listing.skipped == {f"filtered_by_{key}": 6 - count}


def test_single_domain_is_one_device(tmp_path: Path) -> None:
    mixed_tree(tmp_path)
    one = ("data.list_strategy=single_domain", "data.device_filter=[zeiss_cirrus]")
    records = read_records(config(tmp_path, *one)).records
    assert {r.device for r in records} == {"zeiss_cirrus"}
    assert len({r.device for r in read_records(config(tmp_path)).records}) == 3


@pytest.mark.parametrize(
    ("override", "names"),
    [
        ("data.device_filter=[topcon_tritan]", "topcon_triton"),
        ("data.protocol_filter=[spectralis_onh_rc_hr_oct_oct]", "cirrus_disc_oct_oct"),  # no volume
        ("data.region_filter=[macula]", "Macula, 6 x 6"),
        ("data.laterality_filter=[both]", "L, R"),
        ("data.device_filter=[]", "topcon_triton"),
    ],
)
def test_unknown_filter_values_name_the_allowed_ones(tmp_path: Path, override: str, names: str) -> None:
    mixed_tree(tmp_path)
    key = override.split("=")[0]
    with pytest.raises(ConfigError, match=f"{key}: expected some of .*{names}"):
        read_records(config(tmp_path, override))


def test_max_samples_takes_its_share_of_every_site_device_and_group(tmp_path: Path) -> None:
    """In AI-READI the first digit of an id is the site: the lowest ids would be one site."""
    people = [person(n, person_id=str(n % 3 * 3000 + 1000 + n)) for n in range(90)]
    rows = [
        row(p["person_id"], device, uid=f"1.{p['person_id']}.{device}")
        for p in people
        for device in ("topcon_triton", "zeiss_cirrus")
    ]
    write_tree(tmp_path, rows, people)
    every = read_records(config(tmp_path)).records
    listing = read_records(config(tmp_path, "data.max_samples=36"))
    assert listing.skipped == {"beyond_max_samples": 180 - 36}
    assert Counter((r.clinical_site, r.study_group, r.device) for r in listing.records) == Counter(
        dict.fromkeys({(r.clinical_site, r.study_group, r.device) for r in every}, 2)
    )
    assert listing.records == [r for r in every if r in listing.records]  # in the order of the list
    write_tree(tmp_path, rows[::-1], people[::-1])
    assert read_records(config(tmp_path, "data.max_samples=36")).records == listing.records
    assert read_records(config(tmp_path, "data.max_samples=36", "seed=1")).records != listing.records
