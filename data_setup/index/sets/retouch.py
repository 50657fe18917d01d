"""RETOUCH: 112 macular volumes of three makers as MetaImage; those of training with fluid of three kinds."""

from __future__ import annotations

from functools import partial

from data_setup.index.sets import read
from data_setup.index.sets.facts import Fact, Labels, Plug, Scan, Shape, Task, Tree

_DEVICES = {"cirrus": "zeiss_cirrus", "spectralis": "heidelberg_spectralis", "topcon": "topcon_3doct"}
_FLUID = {1: "irf", 2: "srf", 3: "ped"}


def _find(tree: Tree) -> list[Scan]:
    scans = []
    for match in tree.matches(r"(?i)(?:^|/)([^/]+)/oct\.mhd$"):
        folder, maker = match.string.rpartition("/")[0], _maker(match.string)
        reference = f"{folder}/reference.mhd"
        scans.append(
            Scan(
                path=match.string,
                person_id=match[1],
                device=_DEVICES.get(maker, "unknown"),
                protocol=f"retouch_{maker or 'unknown'}",
                yaml={"axes": ["W", "H", "D"]},
                labels=partial(_labels, tree, reference) if reference in tree.sizes else None,
            )
        )
    return scans


def _maker(path: str) -> str:
    """cirrus | spectralis | topcon, by the folders; empty where none names one."""
    return next((maker for maker in _DEVICES if maker in path.lower()), "")


def _labels(tree: Tree, path: str, shape: Shape) -> Labels:
    values = read.classes_of(read.metaimage(tree, path), shape, tree.url(path))
    facts = {name: str(int((values == value).any())) for value, name in _FLUID.items()}
    return Labels(classes=values, facts=facts)


PLUG = Plug(
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
    find=_find,
    tasks=(
        Task(
            "configs/cls_linear_probe.yaml",
            ("task.kind=multilabel", "task.names=[irf,srf,ped]"),
        ),
        Task("configs/segmentation.yaml"),
    ),
    label_classes=_FLUID,
)
