"""The truth file of one volume of a phantom, by its row of a prepared store's index."""

import io

import numpy as np
import pandas as pd

from utils import storage
from utils.config.schema import StorageOptions
from utils.errors import UserError


def read_truth_file(
    tree: str, record: pd.Series, options: StorageOptions | None = None
) -> dict[str, np.ndarray]:
    """The arrays of a volume's truth file (docs/concepts/phantom.md); UserError where there is none."""
    url = storage.join(tree, "truth", f"{record.sop_instance_uid}.npz")
    try:
        data = storage.read_bytes(url, options)
    except storage.StorageNotFoundError as error:
        raise UserError(f"{url}: expected the truth file that the phantom writes, found none") from error
    with np.load(io.BytesIO(data)) as arrays:
        return dict(arrays)
