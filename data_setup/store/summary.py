"""What `prepare` reports: counts, fields, spacings and their sources, as prepare_report.json and as a table.

In: the store's index and what the manifest skipped. Out: a dictionary of plain values, and text.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from data_setup.resample import BLENDED, left_out, rule_of
from data_setup.store.format import DUPLICATE, KEPT, PENDING
from data_setup.store.quality import LIMITS, share_between
from utils.errors import UserError, shown
from utils.tables import NONE, Table, terminal

AUDIT_NAMES = 20  # files of either kind that the report names
REJECT_NAMES = 5  # files of each reason that the report names
HIGH_LOST_FRACTION = 0.5  # above this share of the field outside the grid, most of a scan is not used
NAMED = 3  # B-scans of a group that a warning names
SEE = "see spatial.target_spacing and spatial.image_size"
WORTHLESS = 0.01  # volumes of a quality below are named
LOW_VALID_FRACTION = 0.6  # below this share of acquired voxels, most tokens of a volume are padding


def by_frequency(values: Iterable[object]) -> dict[str, int]:
    """Value as text -> how often, most frequent first, ties by name."""
    return dict(sorted(Counter(map(str, values)).items(), key=lambda item: (-item[1], item[0])))


def words(numbers: Mapping[str, int], nothing: str = "none") -> str:
    """Names and numbers in one line."""
    return ", ".join(f"{name} {n}" for name, n in numbers.items()) or nothing


def _group(index: pd.DataFrame) -> dict[str, Any]:
    kept = index[index.status == KEPT]

    def median(name: str) -> list[float] | None:
        if kept.empty:
            return None
        return [round(float(kept[f"{name}_{a}"].median()), 6) for a in "dhw"]

    def mean(name: str) -> float | None:
        return None if kept.empty else round(float(kept[name].mean()), 4)

    return {
        "kept": len(kept),
        "rejected": by_frequency(index.loc[~index.status.isin([KEPT, PENDING]), "status"].dropna()),
        "shape_before": median("shape_before"),
        "spacing_before": median("spacing_before"),
        "spacing_after": median("spacing_after"),
        "valid_fraction": mean("valid_fraction"),
        "lost_fraction": mean("lost_fraction"),
        "spacing_source": by_frequency(kept.spacing_source.dropna()),
        "orientation_source": by_frequency(kept.orientation_source.dropna()),
        "quality": _quality(kept),
    }


def _quality(kept: pd.DataFrame) -> dict[str, Any] | None:
    """Median, lowest tenth and means of the measured volumes, and how often which is the worst; or None."""
    measured = kept[kept["quality"].notna()]
    if measured.empty:
        return None
    worst = pd.DataFrame({name: share_between(name, measured[name]) for name in LIMITS}).idxmin(axis=1)
    return {
        "measured": len(measured),
        "median": round(float(measured["quality"].median()), 4),
        "lowest_tenth": round(float(measured["quality"].quantile(0.1)), 4),
        **{name: round(float(measured[name].mean()), 4) for name in LIMITS},
        "worst": by_frequency(worst.dropna()),
    }


def identical_volumes(index: pd.DataFrame) -> list[dict[int, str]]:
    """{row: split} of every volume that several participants have, bit for bit, among the listed rows."""
    kept = index[(index.status == KEPT) & index.listed]
    same = kept[kept.checksum.duplicated(keep=False)].groupby("checksum", sort=False)
    return [dict(zip(part.row, part.split, strict=True)) for _, part in same if part.person_id.nunique() > 1]


def require_apart(url: str, index: pd.DataFrame, lines: Mapping[str, int] | None = None) -> None:
    """Raise UserError for one of `identical_volumes` in two splits; `lines`: path -> line of the manifest."""
    leaks = [rows for rows in identical_volumes(index) if len(set(rows.values())) > 1]
    if leaks:
        raise UserError(
            f"{url}: expected no volume in two splits, found {_named(index, leaks, lines or {})} with the "
            "same voxels under several participants; if they are one person, give their rows of the manifest "
            "one person_id, else take one of them out, and prepare again"
        )


# What to do about a reject; the reasons that are not here are faults of the file itself.
_NEXT_STEPS = {
    "unlisted_class": "name the class there, or correct the labels",
    "not_labels": "write the labels as docs/guides/layers.md says",
    "missing_file": "bring the file to this path, or take its row out of the manifest",
    "missing_codec": "install the decoder that the message names, and prepare again",
    "missing_spacing": "give the spacing in a sidecar or the manifest's column spacing_mm "
    "(docs/guides/importers.md), or export with geometry",
    "implausible_spacing": "compare the spacing with the device's, and correct it in a sidecar",
    "outside_grid": "prepare all scans with the spacing of the message, or take its row out of the manifest",
    "few_grey_levels": "name a label map in the column label_volume of its scan, or export all grey levels",
    "header_mismatch": "compare the file with its row of the manifest, and correct the one that is wrong",
    "bad_sidecar": "correct the sidecar (docs/guides/importers.md)",
    "unknown_axes": "name the order of the axes in a sidecar (docs/guides/importers.md)",
    "missing_shape": "give the shape in the manifest or a sidecar (docs/guides/importers.md)",
    "missing_library": "install the library that the message names, and prepare again",
    "unsupported_format": "export as DICOM, NIfTI or TIFF (docs/guides/importers.md)",
    "scrambled_pixels": "ask the maker for standard OPT DICOM, or take its row out of the manifest",
    "makers_raw_data": "export the scan as OPT DICOM, or take its row out of the manifest",
    "not_opt": "take its row out of the manifest, or export the volume as OPT DICOM",
    "not_a_volume": "export the whole volume as one file, or take its row out of the manifest",
    "not_en_face": "empty its cell of the manifest, or copy the file again; the cube is used without it",
    "unknown_slab": "empty its cell of the manifest; the cube is used without it",
    DUPLICATE: "take one of the two rows out of the manifest, or leave both: the scan is used once",
    "bad_name": "rename the file",
    "unread": "run again",
    "worker_died": "run again with fewer --workers",
    "internal_error": "report the place that is printed above",
}


def next_step(status: str) -> str:
    """What the user does about a reject."""
    return _NEXT_STEPS.get(status, "export or copy the file again, or take its row out of the manifest")


def _named(index: pd.DataFrame, volumes: Sequence[Mapping[int, str]], lines: Mapping[str, int]) -> str:
    """The first of `identical_volumes` in one line: their paths, splits and lines of the manifest."""
    path_of = dict(zip(index.row, index.path, strict=True))

    def named(row: int, split: str) -> str:
        line = lines.get(path_of[row])
        return f"{path_of[row]!r} ({split}{f', line {line}' if line else ''})"

    first = [" and ".join(named(*pair) for pair in rows.items()) for rows in volumes[:AUDIT_NAMES]]
    return "; ".join(first) + (f" and {more} more" if (more := len(volumes) - len(first)) else "")


def shorten(audit: Mapping[str, list[str]]) -> dict[str, dict[str, Any]]:
    """The result of audit.audit_files: per kind the count and the first AUDIT_NAMES names."""
    return {kind: {"count": len(names), "first": names[:AUDIT_NAMES]} for kind, names in audit.items()}


def summarise(
    index: pd.DataFrame, attrs: Mapping[str, Any], skipped: Mapping[str, int], run: Mapping[str, Any]
) -> dict[str, Any]:
    """The report: the store, by device, by protocol; medians of shape and spacing, means of fractions."""
    kept, rejected = index[index.status == KEPT], index[~index.status.isin([KEPT, PENDING])]
    worthless = kept[kept["quality"] < WORTHLESS]
    return {
        "records": len(index),
        "pending": int((index.status == PENDING).sum()),
        "not_in_manifest": int((~index.listed).sum()),
        "identical_volumes": identical_volumes(index),
        "skipped": dict(skipped),
        "synthetic": attrs["synthetic"],
        "geometry": attrs["geometry"],
        **_group(index),
        "rejected_files": {str(r): p.path.head(REJECT_NAMES).tolist() for r, p in rejected.groupby("status")},
        "worthless_files": dict(zip(worthless.path, worthless["quality"].round(5), strict=True)),
        "by_device": {str(name): _group(part) for name, part in index.groupby("device")},
        "by_protocol": {str(name): _group(part) for name, part in index.groupby("protocol")},
        "participants": {str(split): int(part.person_id.nunique()) for split, part in kept.groupby("split")},
        "run": dict(run),
    }


def repeats(index: pd.DataFrame, lines: Mapping[str, int], uids: Mapping[str, str]) -> list[str]:
    """What is said of scans that are in the store twice, by their paths and `lines` of the manifest. `uids`:
    path -> SOPInstanceUID in the manifest. A run's report names no path: this is no part of it.
    """
    copies = index[index.status == DUPLICATE].head(AUDIT_NAMES)
    texts = [f"{path}: {text}" for path, text in zip(copies.path, copies.message, strict=True)]
    texts = [f"left out, the same scan again: {text}" for text in texts]
    shared = [p for p, uid in zip(index.path, index.sop_instance_uid, strict=True) if uids.get(p) and not uid]
    if shared:
        first = ", ".join(shared[:REJECT_NAMES]) + (", ..." if len(shared) > REJECT_NAMES else "")
        texts.append(f"warning: one SOPInstanceUID, other voxels: {first}: each is used as another scan")
    doubts = index[(index.status == KEPT) & index.message.notna()].head(AUDIT_NAMES)
    texts += [f"warning: {path}: {text}" for path, text in zip(doubts.path, doubts.message, strict=True)]
    if same := identical_volumes(index):
        texts.append(f"the same volume under several participants: {_named(index, same, lines)}")
    return texts


def run_line(run: Mapping[str, Any]) -> str:
    memory = "" if run["peak_memory_mb"] is None else f", {run['peak_memory_mb']:.0f} MB each at most"
    return (
        f"{run['prepared']} prepared, {run['reused']} reused in {run['seconds']:.1f} s "
        f"({run['volumes_per_s']:.2f} volumes/s, {run['workers']} workers{memory})"
    )


def _left_out(part: Mapping[str, Any], geometry: Mapping[str, Any]) -> np.ndarray:
    """The B-scans of a group's median scan that no plane of the grid is."""
    if rule_of(geometry) == BLENDED:
        return np.zeros(0, int)
    count, spacing, target = (part[name][0] for name in ("shape_before", "spacing_before", "spacing_after"))
    return left_out(round(count), spacing, geometry["image_size"][0], target, rule_of(geometry))


def _first_of(numbers: np.ndarray) -> str:
    """`1, 4, 7 and 9 more`."""
    more = f" and {len(numbers) - NAMED} more" if len(numbers) > NAMED else ""
    return ", ".join(map(str, numbers[:NAMED] + 1)) + more


def table(report: Mapping[str, Any]) -> str:
    """The report as a few lines of text; spacing in um, D x H x W."""
    header = ("protocol", "kept", "rej.", "valid", "lost", "spacing before -> after [um, D x H x W]")
    rows: list[list[str]] = []
    warnings = []
    for name, part in report["by_protocol"].items():
        rows.append([name, str(part["kept"]), str(sum(part["rejected"].values()))])
        if not part["kept"]:
            rows[-1] += [NONE] * 3
            continue
        um = [" x ".join(f"{1e3 * mm:.3g}" for mm in part[f"spacing_{when}"]) for when in ("before", "after")]
        rows[-1] += [f"{part['valid_fraction']:.2f}", f"{part['lost_fraction']:.2f}", " -> ".join(um)]
        if part["valid_fraction"] < LOW_VALID_FRACTION:
            warnings.append(
                f"{name}: only {part['valid_fraction']:.0%} of the grid lies inside the scan; {SEE}"
            )
        if part["lost_fraction"] > HIGH_LOST_FRACTION:
            warnings.append(f"{name}: {part['lost_fraction']:.0%} of the scan lies outside the grid; {SEE}")
        if (without := _left_out(part, report["geometry"])).size:
            warnings.append(
                f"{name}: left out, since planes of the grid lie further apart: B-scans "
                f"{_first_of(without)} of {round(part['shape_before'][0])}; "
                f"{part['spacing_before'][0]:g} mm along D (spatial.target_spacing) has a plane for each"
            )
    lines = terminal(Table("", header, rows)).split("\n")
    if rule_of(report["geometry"]) == BLENDED:
        lines.append(
            "planes: mixed of neighbouring B-scans, as an older version began this store; another data.store "
            "has none mixed where B-scans lie apart"
        )
    lines.append(f"kept by device: {words({k: v['kept'] for k, v in report['by_device'].items()})}")
    lines.append(f"rejected: {words(report['rejected'])}; skipped: {words(report['skipped'])}")
    lines.append(f"spacing from: {words(report['spacing_source'])}")
    lines.append(f"orientation from: {words(report['orientation_source'])}")
    lines.append(f"participants with volumes: {words(report['participants'])}")
    if report["quality"]:
        part = report["quality"]
        lines.append(
            f"quality of {part['measured']}: median {part['median']:.2f}, lowest tenth under "
            f"{part['lowest_tenth']:.2f}; the worst is {words(part['worst'])}"
        )
    for path, quality in list(report["worthless_files"].items())[:REJECT_NAMES]:
        lines.append(
            f"quality {quality:g}: {path}; next: look at it; data.min_quality leaves such volumes out"
        )
    if (more := len(report["worthless_files"]) - REJECT_NAMES) > 0:
        lines.append(f"quality below {WORTHLESS:g}: {more} more, in prepare_report.json")
    if report["pending"]:
        lines.append(f"pending: {report['pending']} (an interrupted run)")
    if report["not_in_manifest"]:
        lines.append(f"no longer in the manifest, kept in their rows: {report['not_in_manifest']}")
    run = report["run"]
    if run["audit"]:
        numbers = {kind: part["count"] for kind, part in run["audit"].items()}
        lines.append(
            f"files: {numbers['missing']} of the manifest missing, {numbers['orphans']} in no manifest row"
        )
    if run["source_missing"]:
        lines.append(f"source missing now, row kept: {run['source_missing']}")
    lines.append(run_line(run))
    return "\n".join(map(shown, [*lines, *(f"warning: {text}" for text in warnings)]))
