"""A lock on a file in the run's directory, so that one process at a time writes a run. The kernel releases it when the
process ends, however it ends. Reading a run needs no lock."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tutelage.errors import UserError
from tutelage.record.files import no_place_for_a_run

LOCK = ".lock"
"""File in a run's directory that names the process which writes the run. A killed process leaves it behind."""
TRIES = 100
"""How often the directory is made again when another process removes it before the lock file is opened."""
_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextmanager
def locked(directory: Path, report: Callable[[str], None] = lambda line: None) -> Iterator[None]:
    """Hold the lock of the run in this directory while entered; UserError that names the process if another one holds
    it. The directory is created if it does not exist, and removed again if nothing was written to it. A file system
    without locks is reported."""
    made = [path for path in (directory, *directory.parents) if not path.exists()]
    file = _claim(directory, report)
    try:
        yield
    finally:
        with suppress(OSError):
            (directory / LOCK).unlink()  # while it is held: whoever opened it before sees that it is gone
        for path in made:
            with suppress(OSError):
                path.rmdir()
        os.close(file)


def _claim(directory: Path, report: Callable[[str], None]) -> int:
    """Open and lock the lock file. A file that another process has removed meanwhile does not count."""
    path, left = directory / LOCK, TRIES
    while True:
        left -= 1
        try:
            directory.mkdir(parents=True, exist_ok=True)
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except (FileExistsError, NotADirectoryError):
            raise UserError(
                f"{directory} is a file, or inside of one; a run needs a directory. Choose another `name` or `out`."
            ) from None
        except (OSError, ValueError) as error:
            if isinstance(error, FileNotFoundError) and left > 0:
                continue  # another process removed the directory that it had made
            raise no_place_for_a_run(directory, error) from error
        try:
            _lock(file, directory, report)
            if _is(file, path):
                _sign(file)
                return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)


def _lock(file: int, directory: Path, report: Callable[[str], None]) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(
            f"{directory} is in use by {_holder(file)}. One process at a time writes a run: wait until it ends, or "
            "stop it with Ctrl-C. Its checkpoints can be evaluated and exported meanwhile."
        ) from None
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise no_place_for_a_run(directory, error) from error
        report(f"{directory}: this file system has no locks; do not resume the run elsewhere while it is under way")


def _is(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def _sign(file: int) -> None:
    """Write which process holds the lock, for the error messages of others."""
    content = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S %Z")}
    with suppress(OSError):
        os.ftruncate(file, 0)
        os.pwrite(file, json.dumps(content).encode(), 0)


def _holder(file: int) -> str:
    try:
        said = json.loads(os.pread(file, 4096, 0))
        return f"process {said['pid']} on {said['host']} since {said['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
