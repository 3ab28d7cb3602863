"""Lesson 18. Memory that ranks share: bytes of one are those of all, and nothing is left when they are gone."""

import ctypes
import gc
import multiprocessing as mp
import subprocess
import sys
from pathlib import Path

import pytest

from mini_engine.distributed.tensor_parallel.shared_block import CACHE_LINE, SharedBlock

ROOT = Path(__file__).resolve().parents[2]


def answer(block, conn):
    """In another process: say where the block lies, and write into it."""
    conn.send((block.address % CACHE_LINE, bytes(block.buffer[:3])))
    block.buffer[-1] = 7


def test_a_process_that_is_given_a_block_reads_and_writes_the_same_bytes():
    mp.get_context("spawn").RawArray(ctypes.c_ubyte, 24)  # so that the block need not lie at the begin of a page
    block, context = SharedBlock(1000), mp.get_context("spawn")
    block.buffer[:3] = b"abc"
    ours, theirs = context.Pipe()
    process = context.Process(target=answer, args=(block, theirs))
    process.start()
    assert ours.recv() == (0, b"abc")
    process.join()
    assert block.buffer[999] == 7 and len(block.buffer) == 1000
    assert ctypes.c_ubyte.from_address(block.address + 999).value == 7, "address and buffer name the same bytes"


@pytest.mark.parametrize("before", [0, 1, 24, 100])
def test_a_block_is_zero_and_begins_with_a_cache_line_wherever_the_heap_puts_it(before):
    used = [SharedBlock(before + 1) for _ in range(3)]
    for block in used:
        block.buffer[:] = b"\xff" * len(block.buffer)
    del used, block
    gc.collect()  # its memory is used again
    block = SharedBlock(300)
    assert block.address % CACHE_LINE == 0 and bytes(block.buffer) == bytes(300)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="looks at Linux's shared memory")
def test_a_process_that_is_killed_leaves_no_shared_memory_behind():
    code = (
        "import os, signal; from mini_engine.distributed.tensor_parallel.shared_block import SharedBlock\n"
        "block = SharedBlock(1 << 20); block.buffer[:] = bytes(1 << 20); print(os.getpid(), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, encoding="utf-8", check=False)
    assert done.stderr == "", "not even a warning of a tracker of resources"
    assert not [path for path in Path("/dev/shm").iterdir() if done.stdout.strip() in path.name]
