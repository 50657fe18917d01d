"""How hard the phantom is, measured without any encoder.

    python -m benchmarks.phantom_difficulty --participants 240 --seed 0

In: a number of participants and a seed (a tree is written into a temporary folder), or an existing tree of
size small. Out: a table, and JSON on request: balanced accuracy over the four study groups, 5-fold cross-
validation by participant, for (a) the truth: layer thicknesses, lesion volumes, vessels; (b) the mean
intensity; (c) principal components of the voxels; (d) only the scan plan: device, protocol, eye and site,
which must stay at chance. All four are logistic regressions over participant means with C chosen inside the
training folds.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.ndimage import gaussian_filter, map_coordinates
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import balanced_accuracy_score
from sklearn.model_selection import GridSearchCV, StratifiedKFold
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler

from data_setup.phantom.__main__ import write_tree
from data_setup.protocols import protocol_of_path
from data_setup.readers.dicom import read_volume
from models.probes.tokens import less_protocol_mean
from utils.cli import number_from, run_cli
from utils.errors import UserError
from utils.help_pages import PeopleParser

GRID = (16, 96, 64)  # voxels over 6.0 x 2.3 x 6.0 mm, as configs/smoke_test.yaml has it
SPACING_MM = (0.375, 0.024, 0.09375)
NUM_COMPONENTS = 64
LIMITS = {
    "truth": (0.80, 1.0),
    "mean intensity": (0.0, 0.40),
    "voxel PCA": (0.0, 0.40),
    "scan plan": (0.0, 0.40),
}


def resample(voxels: np.ndarray, spacing_mm: tuple[float, ...]) -> np.ndarray:
    """uint8 [D,H,W] to float32 GRID around its centre, smoothed where the grid is coarser, 0 outside."""
    steps = np.array(SPACING_MM) / spacing_mm
    smooth = gaussian_filter(voxels.astype(np.float32), np.maximum(0.5 * (steps - 1), 0))
    axes = [
        (np.arange(g) - (g - 1) / 2) * s + (n - 1) / 2
        for g, s, n in zip(GRID, steps, voxels.shape, strict=True)
    ]
    return map_coordinates(smooth, np.meshgrid(*axes, indexing="ij"), order=1, cval=0.0)


def truth_features(truth: np.lib.npyio.NpzFile) -> np.ndarray:
    """Mean layer thicknesses (um), lesion volumes (as square roots, they are skewed) and vessel share."""
    lesions = np.sqrt(truth["lesion_volume_mm3"][1:])
    return np.concatenate([truth["layer_thickness_um"], lesions, [truth["vessel_fraction"]]])


def load(root: Path) -> tuple[pd.DataFrame, dict[str, np.ndarray], np.ndarray]:
    """Volumes of a small tree: (person and protocol per volume, features by kind [n,F], label per volume)."""
    people = pd.read_csv(root / "participants.tsv", sep="\t", dtype=str).set_index("person_id")
    rows = pd.read_csv(root / "retinal_oct" / "manifest.tsv", sep="\t", dtype=str)
    # one for each row, or pandas refuses the column
    protocols = [p for p in map(protocol_of_path, rows.filepath) if p is not None]
    rows["protocol"] = [p.name for p in protocols]
    rows = rows[[p.is_volume for p in protocols]].reset_index(drop=True)
    rows["site"] = people.clinical_site[rows.person_id].to_numpy()
    truth, mean, voxels = [], [], []
    for row in rows.itertuples():
        volume = read_volume(str(root / row.filepath.lstrip("/")))
        with np.load(root / "truth" / f"{row.sop_instance_uid}.npz") as arrays:
            truth.append(truth_features(arrays))
        mean.append([volume.voxels.mean(), volume.voxels.std()])
        voxels.append(resample(volume.voxels, volume.header.spacing_mm).ravel())
    plan = pd.get_dummies(rows[["manufacturers_model_name", "protocol", "laterality", "site"]])
    features = {
        "truth": np.array(truth),
        "mean intensity": np.array(mean)[:, :1],
        "voxel PCA": np.array(voxels, dtype=np.float32),
        "scan plan": plan.to_numpy(dtype=float),
    }
    return rows, features, people.study_group[rows.person_id].to_numpy()


def classifier(seed: int) -> GridSearchCV:
    """Standardised logistic regression, C chosen by inner 4-fold cross-validation."""
    steps: Pipeline = make_pipeline(
        StandardScaler(), LogisticRegression(class_weight="balanced", max_iter=4000)
    )
    return GridSearchCV(
        steps,
        {"logisticregression__C": [0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0]},
        scoring="balanced_accuracy",
        cv=StratifiedKFold(4, shuffle=True, random_state=seed),
    )


def pooled(features: np.ndarray, persons: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Participant means [P,F] of volume features [n,F]."""
    return np.stack([features[persons == p].mean(axis=0) for p in order])


def measure(root: Path, seed: int, repeats: int = 3) -> dict[str, dict[str, float]]:
    """Balanced accuracy (mean over `repeats` 5-fold splits, and their spread) of every reference."""
    rows, features, labels = load(root)
    persons, protocol = rows.person_id.to_numpy(), rows.protocol.to_numpy()
    order, first = np.unique(persons, return_index=True)
    target = labels[first]
    results = {}
    for kind, values in features.items():
        scores = []
        for repeat in range(repeats):
            predicted = np.empty_like(target)
            for train, test in StratifiedKFold(5, shuffle=True, random_state=seed + repeat).split(
                order, target
            ):
                training = np.isin(persons, order[train])
                if kind == "scan plan":
                    inputs = values
                elif kind == "voxel PCA":
                    flat = values / np.maximum(values.std(axis=1, keepdims=True), 1e-6)
                    components = min(NUM_COMPONENTS, int(training.sum()) - 1)
                    pca = PCA(components, svd_solver="randomized", random_state=0).fit(flat[training])
                    inputs = less_protocol_mean(pca.transform(flat), protocol, training)
                else:
                    inputs = less_protocol_mean(values, protocol, training)
                inputs = pooled(inputs, persons, order)
                model = classifier(seed).fit(inputs[train], target[train])
                predicted[test] = model.predict(inputs[test])
            scores.append(balanced_accuracy_score(target, predicted))
        results[kind] = {"balanced_accuracy": float(np.mean(scores)), "spread": float(np.ptp(scores))}
    return results


def main(argv: list[str] | None = None) -> int:
    """Command line: see the module's docstring. Exit code 1 when a reference is out of its limits."""
    parser = PeopleParser("benchmarks.phantom_difficulty", __doc__ or "")
    parser.add_argument("--participants", type=int, default=240)
    parser.add_argument("--seed", type=number_from(0), default=0)
    parser.add_argument("--tree", type=Path, help="an existing phantom tree of size small without faults")
    parser.add_argument("--workers", type=number_from(0), default=None)
    parser.add_argument("--json", type=Path, help="write the numbers here")
    args = parser.parse_args(argv)
    if args.participants < 60:
        raise UserError(f"--participants: expected 60 or more (folds by class), found {args.participants}")
    with tempfile.TemporaryDirectory() as folder:
        root = args.tree
        if root is None:
            root = Path(folder) / "tree"
            write_tree(root, args.participants, args.seed, workers=args.workers)
        results = measure(root, args.seed)
    print(f"{'reference':<16}{'balanced accuracy':>18}{'spread':>8}{'wanted':>14}")
    failed = False
    for kind, result in results.items():
        low, high = LIMITS[kind]
        failed |= not low <= result["balanced_accuracy"] <= high
        wanted = f">= {low:.2f}" if low else f"<= {high:.2f}"
        print(f"{kind:<16}{result['balanced_accuracy']:>18.3f}{result['spread']:>8.3f}{wanted:>14}")
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    run_cli(main)
