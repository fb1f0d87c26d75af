"""Streams of what .gz and .zst files hold."""

import io
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from hymo.errors import DataError

PACKED = (".gz", ".zst")
_BLOCK = 256 << 10


def is_packed(path: str | Path) -> bool:
    return Path(path).suffix in PACKED


def first_bytes(path: str | Path, count: int) -> bytes:
    """The first bytes of a file, unpacked, as far as they can be: damage is told where it is read. Raises OSError."""
    head = b""
    with open(path, "rb") as raw:
        stream: Any = unpacked(raw, str(path))
        try:
            while len(head) < count and (block := stream.read1(count - len(head))):
                head += block
        except OSError as error:
            if error.errno is not None:  # the disk's, not what the file holds
                raise
    return head


def unpacked(raw: BinaryIO, path: str) -> BinaryIO:
    """What an opened file holds, unpacked where its name says that it is packed."""
    if not is_packed(path):
        return raw
    if path.endswith(".gz"):
        return io.BufferedReader(_Unpacked(raw, lambda: zlib.decompressobj(wbits=31), padding=b"\0"), _BLOCK)
    try:
        import zstandard
    except ImportError:
        raise DataError(f"data.source: {path} needs the zstandard package: pip install zstandard") from None
    return io.BufferedReader(_Unpacked(raw, lambda: zstandard.ZstdDecompressor().decompressobj()), _BLOCK)


class _Unpacked(io.RawIOBase):
    """A stream of what `raw` holds compressed. Raises OSError where the data is damaged or ends in the middle of a
    member (which the zstandard package's own reader takes for the end of the file).

    padding: a byte that may fill a file up after a member, as tapes and disks do with gzip's.
    """

    def __init__(self, raw: BinaryIO, new_member: Callable[[], Any], padding: bytes = b""):
        self._raw, self._new_member, self._padding = raw, new_member, padding
        self._member: Any = None
        self._after_member = False
        self._packed = self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            self._packed = self._packed or self._raw.read(_BLOCK)
            if not self._packed:
                if self._member is not None:
                    raise OSError("it ends in the middle of its compressed data")
                return 0
            if self._after_member:
                self._packed = self._packed.lstrip(self._padding)
                if not self._packed:
                    continue
            self._after_member = False
            self._member = self._member or self._new_member()
            try:
                self._ready = self._member.decompress(self._packed)
            except Exception as error:  # zlib and zstandard have their own, without a common class
                raise OSError(f"its compressed data is damaged ({error})") from None
            self._packed = b""
            if self._member.eof:
                self._packed, self._member, self._after_member = self._member.unused_data, None, True
        size = min(len(buffer), len(self._ready))
        buffer[:size], self._ready = self._ready[:size], self._ready[size:]
        return size
