"""Labels of the phantom's voxels as a data set ships them: `python -m data_setup.phantom --labels KIND`.

In: a phantom tree with its truth files. Out: labels/<sop uid>.npz for every good volume, in the frame order
of its file, the manifest's column label_volume, and label_classes.yaml beside it. `lesions`: drusen, fluid
and hyperreflective foci, few and small, as the render has drawn them. `layers`: every layer of the retina is
a class; then label_surfaces names the surfaces between them, too. They are the truth itself.
"""

from pathlib import Path

import numpy as np
import yaml

from data_setup.phantom.files import save_npz
from data_setup.phantom.octa import SURFACES_OF
from data_setup.phantom.render import LESIONS

KINDS = ("lesions", "layers")
FOLDER = "labels"
_NAMED = SURFACES_OF["topcon_triton"]  # the names that most devices have -> the phantom's


def write_labels(out: Path, kind: str) -> None:
    """Write the labels of every volume that has a truth file, and name them in the manifest."""
    manifest = out / "retinal_oct" / "manifest.tsv"
    lines = [line.split("\t") for line in manifest.read_text(encoding="utf-8").splitlines()]
    header, rows = lines[0], lines[1:]
    (out / FOLDER).mkdir()
    columns = ["label_volume", *(["label_surfaces"] if kind == "layers" else [])]
    classes: dict[int, str] = {}
    for row in rows:
        uid = row[header.index("sop_instance_uid")]
        truth = out / "truth" / f"{uid}.npz"
        if not truth.exists():
            row += [""] * len(columns)
            continue
        with np.load(truth) as arrays:
            labels, classes = (of_layers if kind == "layers" else of_lesions)(arrays)
            surfaces = dict(zip(arrays["surface_names"].tolist(), arrays["surfaces"], strict=True))
        save_npz(out / FOLDER / f"{uid}.npz", {"labels": labels})
        row.append(f"/{FOLDER}/{uid}.npz")
        if kind == "layers":
            named = np.stack([surfaces[name] for name in _NAMED.values()]).astype(np.float32)
            content = {"surfaces": named, "names": np.array(list(_NAMED))}
            save_npz(out / FOLDER / f"{uid}_surfaces.npz", content)
            row.append(f"/{FOLDER}/{uid}_surfaces.npz")
    text = "\n".join("\t".join(line) for line in [[*header, *columns], *rows])
    manifest.write_text(text + "\n", encoding="utf-8")
    named_classes = yaml.safe_dump(classes, sort_keys=True)
    manifest.with_name("label_classes.yaml").write_text(named_classes, encoding="utf-8")


def of_lesions(truth: np.lib.npyio.NpzFile) -> tuple[np.ndarray, dict[int, str]]:
    """(lesions uint8 [D, H, W], their names)."""
    return truth["lesions"].astype(np.uint8), dict(enumerate(LESIONS[1:], start=1))


def of_layers(truth: np.lib.npyio.NpzFile) -> tuple[np.ndarray, dict[int, str]]:
    """(number of the layer uint8 [D, H, W], their names): a voxel is in the layer that its centre is in."""
    surfaces = truth["surfaces"]
    rows = np.arange(int(truth["shape"][1]))[None, :, None]
    labels = np.sum([rows >= surface[:, None, :] for surface in surfaces], axis=0)
    labels[labels == len(surfaces)] = 0  # below the last surface
    return labels.astype(np.uint8), dict(enumerate(truth["layer_names"].tolist(), start=1))
