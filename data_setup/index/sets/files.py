"""Public sets with one file a volume: RETOUCH, OCTAVE, FairVision."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import partial

from data_setup.index.sets import read
from data_setup.index.sets.facts import PROBE, Fact, Labels, Plug, Scan, Shape, Task, Tree, fixed, of_field
from data_setup.readers.faults import OCTReadError, RejectReason
from utils.errors import UserError

# RETOUCH: 112 macular volumes of three makers as MetaImage; those of training with fluid of three kinds.
_RETOUCH_DEVICES = {"cirrus": "zeiss_cirrus", "spectralis": "heidelberg_spectralis", "topcon": "topcon_3doct"}
_RETOUCH_FLUID = {1: "irf", 2: "srf", 3: "ped"}


def _retouch_find(tree: Tree) -> list[Scan]:
    scans = []
    for match in tree.matches(r"(?i)(?:^|/)([^/]+)/oct\.mhd$"):
        folder, maker = match.string.rpartition("/")[0], _retouch_maker(match.string)
        reference = f"{folder}/reference.mhd"
        scans.append(
            Scan(
                path=match.string,
                person_id=match[1],
                device=_RETOUCH_DEVICES.get(maker, "unknown"),
                protocol=f"retouch_{maker or 'unknown'}",
                yaml={"axes": ["W", "H", "D"]},
                labels=partial(_retouch_labels, tree, reference) if reference in tree.sizes else None,
            )
        )
    return scans


def _retouch_maker(path: str) -> str:
    """cirrus | spectralis | topcon, by the folders; empty where none names one."""
    return next((maker for maker in _RETOUCH_DEVICES if maker in path.lower()), "")


def _retouch_labels(tree: Tree, path: str, shape: Shape) -> Labels:
    values = read.classes_of(read.metaimage(tree, path), shape, tree.url(path))
    facts = {name: str(int((values == value).any())) for value, name in _RETOUCH_FLUID.items()}
    return Labels(classes=values, facts=facts)


RETOUCH = Plug(
    name="retouch",
    title="RETOUCH",
    content=Fact("112 volumes (70 of training) of Cirrus, Spectralis and Topcon, AMD and RVO", "n/v"),
    licence=Fact("data use agreement, research", "c"),
    access=Fact("register at retouch.grand-challenge.org", "c"),
    citation=Fact("Bogunovic et al., RETOUCH, IEEE Transactions on Medical Imaging 2019", "n/v"),
    layout=Fact(
        """\
RETOUCH-TrainingSet-Cirrus/TRAIN001/oct.mhd, oct.raw, reference.mhd, reference.raw
RETOUCH-TrainingSet-Spectralis/..., RETOUCH-TrainingSet-Topcon/...
RETOUCH-TestSet-.../TEST001/oct.mhd, oct.raw          without reference; the folders name the maker""",
        "+",
    ),
    spacing=Fact("ElementSpacing of each file", "+"),
    orientation=Fact("x along the B-scan, y axial, z between B-scans; their order unknown", "+"),
    labels=Fact("voxels of IRF, SRF and PED; from them which of the three an eye has", "+"),
    splits=Fact("training and test folders; the test part has no labels, so none is taken over", "n/v"),
    find=_retouch_find,
    tasks=(
        Task(PROBE, ("task.kind=multilabel", "task.names=[irf,srf,ped]")),
        Task("configs/segmentation.yaml"),
    ),
    label_classes=_RETOUCH_FLUID,
)


# OCTAVE: 198 volumes of 19 B-scans in the raw layout of nnU-Net, with 13 tissues and lesions.
_OCTAVE_NUM_CLASSES = 13


def _octave_find(tree: Tree) -> list[Scan]:
    scans = []
    for match in tree.matches(r"(?:^|/)imagesTr/OCTAVE_([^_/]+)_([^/]+)_0000\.tif$"):
        labels = re.sub(r"(^|/)imagesTr/(.+)_0000\.tif$", r"\1labelsTr/\2.tif", match.string)
        scans.append(
            Scan(
                path=match.string,
                person_id=f"{match[1]}_{match[2]}",
                device="unknown",
                protocol="octave_19",
                spacing=fixed(0.24, 0.00387, 0.0115),
                facts={"study_group": match[1].lower()},
                labels=partial(_octave_labels, tree, labels) if labels in tree.sizes else None,
            )
        )
    return scans


def _octave_labels(tree: Tree, path: str, shape: Shape) -> Labels:
    return Labels(classes=read.classes_of(read.tiff(tree, path), shape, tree.url(path)))


def _octave_names(tree: Tree) -> Mapping[int, str]:
    """The classes of dataset.json; raises UserError."""
    path = next((match.string for match in tree.matches(r"(?:^|/)dataset\.json$")), None)
    if path is None:
        raise UserError(f"{tree.root}: expected dataset.json, which names the classes, found none")
    try:
        labels = json.loads(tree.read(path))["labels"]
        return {int(value): str(name) for name, value in labels.items() if int(value) > 0}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{tree.url(path)}: expected labels: {{name: number}}, found another file") from error


OCTAVE = Plug(
    name="octave",
    title="OCTAVE",
    content=Fact("198 volumes of 19 B-scans", "c"),
    licence=Fact("CC BY-SA 4.0", "c"),
    access=Fact("Zenodo 14580071", "c"),
    citation=Fact("Kermany et al., Investigative Ophthalmology & Visual Science 2025", "r"),
    layout=Fact(
        """\
nnUNet_raw/Dataset001_OCTAVE/imagesTr/OCTAVE_<disease>_<number>_0000.tif    a page a B-scan
nnUNet_raw/Dataset001_OCTAVE/labelsTr/OCTAVE_<disease>_<number>.tif
nnUNet_raw/Dataset001_OCTAVE/dataset.json                                   names of the classes""",
        "+",
    ),
    spacing=Fact("0.24 x 0.00387 x 0.0115 mm is assumed", "n/v"),
    orientation=Fact("order of B-scans unknown; images have white rims, which stay", "+"),
    labels=Fact("voxels of 13 tissues and lesions, named in dataset.json; disease by the name", "+"),
    splits=Fact("one training part; the external tests are not redistributed", "r"),
    find=_octave_find,
    tasks=(Task(PROBE), Task("configs/segmentation.yaml")),
    label_classes={value: f"class {value} of dataset.json" for value in range(1, _OCTAVE_NUM_CLASSES + 1)},
    read_classes=_octave_names,
)


# FairVision: 30,000 people as .npz, a third each for AMD, diabetic retinopathy and glaucoma.
_FAIRVISION_LABELS = {"AMD": "amd_condition", "DR": "dr_subtype", "Glaucoma": "glaucoma"}
_FAIRVISION_CLASSES = {  # of the owners' own README, which counts them 0 to 3, and 0 and 1
    "amd_condition": {
        "not.in.icd.table": "normal",
        "no.amd.diagnosis": "normal",
        "early.dry": "early",
        "intermediate.dry": "intermediate",
        "advanced.atrophic.dry.with.subfoveal.involvement": "late",
        "advanced.atrophic.dry.without.subfoveal.involvement": "late",
        "wet.amd.active.choroidal.neovascularization": "late",
        "wet.amd.inactive.choroidal.neovascularization": "late",
        "wet.amd.inactive.scar": "late",
    },
    "dr_subtype": {
        "not.in.icd.table": "not_vision_threatening",
        "no.dr.diagnosis": "not_vision_threatening",
        "mild.npdr": "not_vision_threatening",
        "moderate.npdr": "not_vision_threatening",
        "severe.npdr": "vision_threatening",
        "pdr": "vision_threatening",
    },
    "glaucoma": {"0": "0", "0.0": "0", "1": "1", "1.0": "1"},
}
_FAIRVISION_SPLITS = {"Training": "train", "Validation": "val", "Test": "test"}


def _fairvision_find(tree: Tree) -> list[Scan]:
    pattern = r"(?:^|/)(AMD|DR|Glaucoma)/(Training|Validation|Test)/data_(\d+)\.npz$"
    return [
        Scan(
            path=match.string,
            person_id=f"{match[1].lower()}_{match[3]}",
            device="unknown",
            protocol=f"fairvision_{match[1].lower()}",
            region="unknown",
            spacing=of_field(6, 2, 6),
            yaml={"array": "oct_bscans", "axes": ["D", "H", "W"]},
            split=_FAIRVISION_SPLITS[match[2]],
            labels=partial(_fairvision_labels, tree, match.string, _FAIRVISION_LABELS[match[1]]),
        )
        for match in tree.matches(pattern)
    ]


def _fairvision_labels(tree: Tree, path: str, label: str, shape: Shape) -> Labels:
    facts = read.scalars(tree, path, (label,), ("age",))
    words, value = _FAIRVISION_CLASSES[label], facts[label]
    if value not in words:
        expected = f"{label} of {', '.join(words)}"
        raise OCTReadError(tree.url(path), RejectReason.NOT_LABELS, expected, repr(value[:40]))
    return Labels(facts=facts | {label: words[value]})


FAIRVISION = Plug(
    name="fairvision",
    title="FairVision",
    content=Fact("30,000 people, 600 GB, 200 x 200 x 200 or 128 x 200 x 200", "r"),
    licence=Fact("CC BY-NC-ND", "r"),
    access=Fact("form; Hugging Face", "r"),
    citation=Fact("Luo et al., FairVision, 2024", "n/v"),
    layout=Fact(
        """\
AMD|DR|Glaucoma/Training|Validation|Test/data_00001.npz
    oct_bscans [D, H, W], age, race, male, hispanic, language,
    and one of amd_condition, dr_subtype, glaucoma""",
        "r",
    ),
    spacing=Fact("6 x 2 x 6 mm over the array's size is assumed", "n/v"),
    orientation=Fact("first axis between B-scans, second axial; their order and the eye unknown", "+"),
    labels=Fact(
        "glaucoma; amd_condition as normal, early, intermediate or late; dr_subtype as vision-threatening or "
        "not; three groups of 10,000 people; sex, race, ethnicity and language are not taken over",
        "r",
    ),
    splits=Fact("Training, Validation, Test", "r"),
    find=_fairvision_find,
    tasks=tuple(
        Task(PROBE, (f"task.label_column={label}",)) for label in reversed(_FAIRVISION_LABELS.values())
    ),
    classes={
        f"{label} {word}": name
        for label, words in _FAIRVISION_CLASSES.items()
        for word, name in words.items()
    },
)
