"""FairVision: 30,000 people as .npz, a third each for AMD, diabetic retinopathy and glaucoma."""

from __future__ import annotations

from functools import partial

from data_setup.index.sets import read
from data_setup.index.sets.facts import Fact, Labels, Plug, Scan, Shape, Task, Tree, of_field
from data_setup.readers.faults import OCTReadError, RejectReason

_LABELS = {"AMD": "amd_condition", "DR": "dr_subtype", "Glaucoma": "glaucoma"}
_CLASSES = {  # of the owners' own README, which counts them 0 to 3, and 0 and 1
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
_SPLITS = {"Training": "train", "Validation": "val", "Test": "test"}


def _find(tree: Tree) -> list[Scan]:
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
            split=_SPLITS[match[2]],
            labels=partial(_labels, tree, match.string, _LABELS[match[1]]),
        )
        for match in tree.matches(pattern)
    ]


def _labels(tree: Tree, path: str, label: str, shape: Shape) -> Labels:
    facts = read.scalars(tree, path, (label,), ("age",))
    words, value = _CLASSES[label], facts[label]
    if value not in words:
        expected = f"{label} of {', '.join(words)}"
        raise OCTReadError(tree.url(path), RejectReason.NOT_LABELS, expected, repr(value[:40]))
    return Labels(facts=facts | {label: words[value]})


PLUG = Plug(
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
        "not; each of its own 10,000 people; sex, race, ethnicity and language are not taken over",
        "r",
    ),
    splits=Fact("Training, Validation, Test", "r"),
    find=_find,
    tasks=tuple(
        Task("configs/cls_linear_probe.yaml", (f"task.label_column={label}",))
        for label in reversed(_LABELS.values())
    ),
    classes={f"{label} {word}": name for label, words in _CLASSES.items() for word, name in words.items()},
)
