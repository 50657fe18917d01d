"""What is around every training loop: the engine, signals, and the words and the code with which it ends.

In: a configuration and the loop. Out: its exit code (utils/errors.py); every process of the run takes part.
"""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from utils.config.schema import Config
from utils.errors import EXIT_FAILURE, EXIT_STOPPED, UserError
from utils.log import log_failure, setup_logging
from utils.run.folder import last_good
from utils.run.skipped_updates import NotFiniteError
from utils.runtime import patience
from utils.runtime.open import open_runtime, refuse_idle_tpu, report_opened
from utils.runtime.processes import LostPeer
from utils.runtime.single import Runtime, StopRequested, is_out_of_memory
from utils.runtime.watchdog import Watchdog, leave

log = logging.getLogger(__name__)
Loop = Callable[[Runtime, ExitStack], int]


@contextmanager
def open_engine(cfg: Config) -> Iterator[Runtime]:
    """A training's engine, with watchdog, log and signals; other processes hear of what ends it inside."""
    with ExitStack() as outer:
        watchdog = outer.enter_context(Watchdog(patience.STALL_S))
        refuse_idle_tpu()
        runtime = open_runtime(cfg.train.use_bf16, patience.DATA_S)
        runtime.watchdog = watchdog
        setup_logging(runtime.rank)
        report_opened(runtime)
        runtime.keep_programs(Path(cfg.run.dir) / "programs")
        runtime.catch_signals()
        outer.push(partial(_leave_word, runtime))
        yield runtime
        runtime.group.close()  # last: torchrun ends the others once one has ended with 76


def guard(cfg: Config, runtime: Runtime, loop: Loop, out_of_memory: str) -> int:
    """Run the loop, which leaves what it opens to the stack; returns its exit code. What may happen to a
    training becomes a UserError that says how to go on, and a signal before the first step an exit code.
    `out_of_memory`: what to say where it does not fit.
    """
    try:
        with ExitStack() as stack:  # once it is left, the checkpoint under way is there to be named
            return loop(runtime, stack)
    except StopRequested:
        log.info("stopped by %s before the first step; run the same command again", runtime.stopped_by)
        return EXIT_STOPPED
    except LostPeer as error:
        if not runtime.group.is_first:
            raise
        raise LostPeer(f"{error}. {last_good(cfg)}", error.exit_code) from error
    except NotFiniteError as error:
        raise UserError(f"{error}. {last_good(cfg)}") from error
    except UserError:
        raise
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(f"{out_of_memory}. {last_good(cfg)}") from error


def _leave_word(runtime: Runtime, _kind: object, error: BaseException | None, _trace: object) -> None:
    """Log the failure and tell the other processes."""
    if error is not None:
        log_failure(error)
        for worker in multiprocessing.active_children():
            worker.kill()  # one that hangs would keep this process, and with it the others, from ending
        if isinstance(error, UserError):
            error.leaves_at_once = runtime.group.size > 1  # a device may wait for the others' part of a sum
            runtime.group.leave_message(str(error), error.exit_code)
        else:
            runtime.group.leave_message(f"{type(error).__name__}: {error}", EXIT_FAILURE)
            if runtime.group.size > 1:
                leave(EXIT_FAILURE)
