"""Lesson 18. Memory that all ranks of a model share. It has no name, so nothing is left behind however they end.

`multiprocessing` opens a file in memory (/dev/shm on Linux, a temporary file on macOS, a named section on Windows),
removes its name at once and passes the open file to the processes that it starts. The memory is freed with the last of
them, even after `kill -9`. A block with a name would have to be unlinked by a process that may be gone.
"""

import ctypes
import multiprocessing as mp

CACHE_LINE = 64  # bytes; two processes that write to the same line slow each other down


class SharedBlock:
    """Zeroed bytes, shared with processes that receive this object when they start; it cannot be sent later.

    Args:
        size: in bytes.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.array = mp.get_context("spawn").RawArray(ctypes.c_ubyte, size + CACHE_LINE)

    @property
    def address(self) -> int:
        """The first byte's address in this process, a multiple of CACHE_LINE. Valid as long as this object lives."""
        return ctypes.addressof(self.array) + self._offset

    @property
    def buffer(self) -> memoryview:
        """The bytes, writable."""
        return memoryview(self.array).cast("B")[self._offset : self._offset + self.size]

    @property
    def _offset(self) -> int:
        """The first byte's offset, the same in all processes: each maps the file at a multiple of its page size."""
        return -ctypes.addressof(self.array) % CACHE_LINE
