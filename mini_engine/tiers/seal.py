"""Lesson 12. Seals: a tag behind each record that can be made only with a key.

A CRC notices accidents. A program that changes a record can put its CRC right, too, so a CRC says nothing about where
a record comes from. A MAC does: a digest of the record and a secret (here BLAKE2's keyed mode, RFC 7693).
"""

import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path

from mini_engine.base.errors import UserError
from mini_engine.tiers.files import check_private
from mini_engine.tiers.records import BadRecord, Bytes

TAG_BYTES = 32
LEAST_KEY_BYTES = 32
MOST_KEY_BYTES = 2**16
PARAM = "kv_cache_key_file"


class Seal:
    """The seal of an engine without a key: no tag, and every record is opened. num_bytes: the size of a tag."""

    num_bytes = 0

    def tag(self, parts: Iterable[Bytes]) -> bytes:
        """Return the tag of a record, given in parts."""
        return b""

    def opened(self, stored: Bytes) -> memoryview:
        """Return a record without its tag."""
        return memoryview(stored)


NO_SEAL = Seal()


class KeyedSeal(Seal):
    """A tag made with `secret`, any number of bytes."""

    num_bytes = TAG_BYTES

    def __init__(self, secret: bytes) -> None:
        self.key = hashlib.blake2b(secret).digest()  # 64 bytes, the most that a key may have

    def tag(self, parts: Iterable[Bytes]) -> bytes:
        """Return the tag of a record, given in parts."""
        digest = hashlib.blake2b(key=self.key, digest_size=TAG_BYTES)
        for part in parts:
            digest.update(part)
        return digest.digest()

    def opened(self, stored: Bytes) -> memoryview:
        """Return a record without its tag. Raises BadRecord ("forged") if the tag was not made with this key."""
        view = memoryview(stored)
        if not hmac.compare_digest(self.tag([view[:-TAG_BYTES]]), view[-TAG_BYTES:]):
            raise BadRecord("forged")
        return view[:-TAG_BYTES]


def seal_of(key_file: str | Path | None) -> Seal:
    """Return the seal whose secret is in a file; without a file, none.

    Raises:
        UserError: the file cannot be read, is open to other users, or has less than 32 bytes or more than 65,536.
    """
    if key_file is None:
        return NO_SEAL
    path = Path(key_file)
    try:
        check_private(path, "the key file", PARAM)
        with path.open("rb") as file:
            secret = file.read(MOST_KEY_BYTES + 1)
    except OSError as error:
        why = f"cannot be read ({error.strerror}); name another one"
        raise UserError(f"the key file {path} {why}", param=PARAM) from error
    if not LEAST_KEY_BYTES <= len(secret) <= MOST_KEY_BYTES:
        size = f"more than {MOST_KEY_BYTES}" if len(secret) > MOST_KEY_BYTES else str(len(secret))
        advice = f"make one of {LEAST_KEY_BYTES} random bytes"
        raise UserError(f"the key file {path} has {size} bytes; {advice}", param=PARAM)
    return KeyedSeal(secret)
