"""Lesson 12. Files that only their owner can use: a record holds a prompt's tokens, in clear.

Modes and owners are POSIX's. On Windows a folder has an access list instead, which in a user's own folders admits no
other user from the start; Python's standard library can neither read nor set it.
"""

import os
import stat
import sys
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None

from mini_engine.base.errors import UserError
from mini_engine.tiers.records import BadRecord

OWNERS_DIRECTORY, OWNERS_FILE = 0o700, 0o600
OTHERS = 0o077
NO_LINKS = getattr(os, "O_NOFOLLOW", 0)
NO_WAITING = getattr(os, "O_NONBLOCK", 0)  # or opening a pipe waits for a writer


def make_private(directory: Path) -> None:
    """Make a directory that only this user can enter. One that exists must be such a directory.

    Raises:
        UserError: it cannot be made, or other users can use it.
    """
    try:
        directory.mkdir(OWNERS_DIRECTORY, parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"the cache directory {directory} cannot be created ({error.strerror}); name another one",
            param="kv_cache_dir",
        ) from error
    check_private(directory, "the cache directory", "kv_cache_dir")


def check_private(path: Path, what: str, param: str) -> None:
    """Raise UserError if a file or directory belongs to another user or is open to others. Windows has no modes."""
    if sys.platform == "win32":
        return
    found = path.stat()
    if found.st_uid != os.geteuid():
        owner = f"belongs to another user (uid {found.st_uid})"
        raise UserError(f"{what} {path} {owner}; name one of your own", param=param)
    if found.st_mode & OTHERS:
        mode = stat.S_IMODE(found.st_mode)
        raise UserError(f"{what} {path} is open to other users (mode {mode:o}); run chmod go= on it", param=param)


def create(path: Path) -> BinaryIO:
    """Open a file for writing that only this user can read. As long as it is open, it is not abandoned."""
    return open(path, "wb", opener=_private_and_locked)


def _private_and_locked(name: str, flags: int) -> int:
    descriptor = os.open(name, flags | NO_LINKS, OWNERS_FILE)
    if fcntl is not None:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def is_abandoned(path: Path) -> bool:
    """Return True if the process that created the file has ended or closed it, False where the system cannot tell."""
    if fcntl is None:
        return True  # Windows removes no file that is open
    try:
        with open(path, "r+b", buffering=0, opener=_without_surprises) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def read_regular(path: Path, num_bytes: int) -> bytes:
    """Return the content of a regular file of this size; nothing else is read, however it got this name.

    Raises:
        BadRecord: it is a link, a device, a pipe or a directory ("irregular"), or has another size ("truncated").
    """
    _expect(path.lstat(), num_bytes)
    with open(path, "rb", buffering=0, opener=_without_surprises) as file:
        _expect(os.fstat(file.fileno()), num_bytes)  # it may have been replaced in between
        return file.read(num_bytes)


def _without_surprises(name: str, flags: int) -> int:
    return os.open(name, flags | NO_LINKS | NO_WAITING)


def _expect(found: os.stat_result, num_bytes: int) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise BadRecord("irregular")
    if found.st_size != num_bytes:
        raise BadRecord("truncated")
