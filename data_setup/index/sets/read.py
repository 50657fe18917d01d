"""Read the tables and arrays that public sets keep beside their images.

In: a tree and a path. Out: rows of text, or arrays in the order that the manifest's volumes have.
"""

import io
from collections.abc import Sequence

import numpy as np
import tifffile

from data_setup.index.sets.facts import Tree
from data_setup.protocols import Shape
from data_setup.readers import arrays
from data_setup.readers.dicom import open_file
from data_setup.readers.faults import OCTReadError, RejectReason
from data_setup.readers.labels import whole_numbers
from data_setup.readers.sidecar import reading
from data_setup.tables.text import read_cells, require_columns


def sheet(tree: Tree, path: str, required: Sequence[str]) -> list[dict[str, str]]:
    """The rows of a .csv or the first sheet of an .xlsx as text; raises UserError, StorageError."""
    header, rows = read_cells(tree.url(path), tree.options, is_padded=True)
    require_columns(header, required, tree.url(path))
    return [{k: v.strip() for k, v in zip(header, cells, strict=True)} for cells in rows.values()]


def array(tree: Tree, path: str, name: str) -> np.ndarray:
    """An array of a .mat or .npz, axes as MATLAB or NumPy has them; raises OCTReadError, StorageError."""
    with open_file(tree.url(path), tree.options) as file:
        return arrays.load_array(file, tree.url(path), name)


def names_of_arrays(tree: Tree, path: str) -> list[str]:
    """The arrays of numbers in a .mat or .npz; raises OCTReadError, StorageError."""
    with open_file(tree.url(path), tree.options) as file:
        return list(arrays.list_arrays(file, tree.url(path)))


def metaimage(tree: Tree, path: str) -> np.ndarray:
    """A MetaImage of x = W, y = H, z = D as [D, H, W]; raises OCTReadError, StorageError."""
    url = tree.url(path)
    with open_file(url, tree.options) as file:
        meta = arrays.read_metaimage_header(file, url)
        return arrays.read_voxels(file, url, meta, tree.options).transpose(2, 1, 0)


def checked(values: np.ndarray, shape: tuple[int, ...], url: str) -> np.ndarray:
    """The same array; raises OCTReadError where its shape is not that of the scan."""
    if values.shape != shape:
        expected = f"labels of {' x '.join(map(str, shape))}, as the scan"
        raise OCTReadError(
            url, RejectReason.FRAME_SIZE_MISMATCH, expected, " x ".join(map(str, values.shape))
        )
    return values


def classes_of(values: np.ndarray, shape: tuple[int, ...], url: str) -> np.ndarray:
    """uint8 of the same whole numbers; raises OCTReadError where they are others, or not of the shape."""
    return whole_numbers(checked(values, shape, url), url)


def tiff(tree: Tree, path: str) -> np.ndarray:
    """The pages of a TIFF file, [page, row, column]; raises OCTReadError, StorageError."""
    url, data = tree.url(path), io.BytesIO(tree.read(path))
    with reading(url, RejectReason.CORRUPT_FILE, "a TIFF file of labels"):
        return np.asarray(tifffile.imread(data))


def scalars(tree: Tree, path: str, required: Sequence[str], optional: Sequence[str]) -> dict[str, str]:
    """Single values of an .npz as text; raises OCTReadError where one is missing, StorageError."""
    url = tree.url(path)
    with (
        open_file(url, tree.options) as file,
        reading(url, RejectReason.CORRUPT_FILE, "an .npz file"),
        np.load(file, allow_pickle=False) as content,
    ):
        present = set(content.files)
        names = [name for name in (*required, *optional) if name in present]
        values = {name: str(content[name].item()) for name in names}
    if lacking := [name for name in required if name not in present]:
        expected = f"an .npz with {', '.join(lacking)}"
        raise OCTReadError(url, RejectReason.NOT_LABELS, expected, ", ".join(sorted(present)[:6]))
    return values


def matlab_surfaces(tree: Tree, path: str, name: str, axes: Shape, count: int, shape: Shape) -> np.ndarray:
    """float32 [S, D, W], rows from 0, of an array of a .mat, for `count` surfaces of a scan of `shape`.
    `axes`: the places of S, D and W in the file. Raises OCTReadError, StorageError.
    """
    values = array(tree, path, name).transpose(axes)
    rows = checked(values, (count, shape[0], shape[2]), tree.url(path))
    # MATLAB counts from 1; where there is none it has NaN, 0 or less
    return np.where(rows > 0, rows - 1, np.nan).astype(np.float32)
