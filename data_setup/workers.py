"""Worker processes that do not outlive the process that started them."""

from __future__ import annotations

import multiprocessing
import os
import threading


def follow_parent() -> None:
    """Initializer of a pool's workers: end when the parent does, however it ends.

    A worker whose parent was killed would wait for work forever, or write where its successor writes.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
