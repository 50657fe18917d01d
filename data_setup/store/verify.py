"""Read every volume of a store and compare it with its checksum.

In: a configuration. Out: a line for every volume that is missing, damaged or another one, and the exit code.
"""

import sys
from concurrent.futures import as_completed
from concurrent.futures.process import BrokenProcessPool

from data_setup.store.reader import PreparedStore, VolumeReader
from utils.config.schema import Config
from utils.errors import EXIT_USER_ERROR, TransientError
from utils.storage import StorageAwayError, StorageError
from utils.terminal import say
from utils.workers import executor_of, is_lost_worker

_ROWS = 64  # of a job


def verify(cfg: Config, workers: int, cluster: str | None = None) -> int:
    """0, or EXIT_USER_ERROR when a volume is not what the index says; raises UserError."""
    store = PreparedStore.open(cfg.data.store, cfg.data.storage_options)
    count = len(store.kept)
    parts = [store.volumes.of(store.kept[start : start + _ROWS]) for start in range(0, count, _ROWS)]
    problems: dict[int, str] = {}
    with executor_of(workers, cluster) as pool:
        for future in as_completed([pool.submit(_problems, part) for part in parts]):
            error = future.exception()
            if isinstance(error, BrokenProcessPool) or (error is not None and is_lost_worker(error)):
                text = "expected workers that live, found one that was killed, most often for lack of memory"
                raise TransientError(f"{store.url}: {text}; run again, with fewer --workers") from error
            problems |= future.result()
    for _, problem in sorted(problems.items()):
        say(f"error: {problem}", file=sys.stderr)
    if problems:
        text = f"expected {count} volumes as in the index, found {len(problems)} that differ"
        say(f"error: {store.url}: {text}", file=sys.stderr)
        return EXIT_USER_ERROR
    say(f"{store.url}: {count} volumes are what the index says")
    return 0


def _problems(volumes: VolumeReader) -> dict[int, str]:
    """Row -> what is wrong with its volume."""
    problems = {}
    for row in volumes.rows.tolist():
        try:
            volumes.read(row, compare=True)
        except StorageAwayError:
            raise
        except StorageError as error:
            problems[row] = str(error)
    return problems
