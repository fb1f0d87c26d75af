"""Text that is not UTF-8: found, counted, and where a mark says what it is, turned into UTF-8."""

import codecs
import io
import re
from typing import Any, BinaryIO

# UTF-32 first: its little-endian mark begins with that of UTF-16.
MARKS = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_LEAST_CHARACTERS = 8
_MOST_SEPARATORS = 0.4
_ESCAPED = re.compile("[\udc80-\udcff]")  # what "surrogateescape" makes of a byte that cannot be decoded
_BLOCK = 1 << 20


def marked(head: bytes) -> str | None:
    """The encoding that a mark at the beginning names: utf-16 or utf-32, else None."""
    return next((name for mark, name in MARKS.items() if head.startswith(mark)), None)


def utf16_without_mark(head: bytes) -> str | None:
    """UTF-16LE or UTF-16BE where the beginning of a file is plainly that without its mark, else None.

    Plainly: it holds NUL bytes, and read as UTF-16 it is characters that can be printed and nothing else, with some
    ASCII (at least spaces or line ends) among them. Binary files fail one of these.
    """
    if b"\0" not in head or len(head) < 2 * _LEAST_CHARACTERS or marked(head):
        return None
    rest = head.replace(b"\0", b"")
    if len(head) - len(rest) < _MOST_SEPARATORS * len(head) and _reads_as(rest, "utf-8") is not None:
        return None  # UTF-8 with NUL between its parts
    found = {name: text for name in ("utf-16-le", "utf-16-be") if (text := _reads_as(head, name)) is not None}
    n_ascii = {name: sum(map(str.isascii, text)) for name, text in found.items()}
    best = max(n_ascii, key=n_ascii.__getitem__, default=None)
    return {"utf-16-le": "UTF-16LE", "utf-16-be": "UTF-16BE"}[best] if best and n_ascii[best] else None


def _reads_as(head: bytes, encoding: str) -> str | None:
    """The text, if it is characters that can be printed and spaces alone; the last one may be cut off."""
    try:
        text = codecs.getincrementaldecoder(encoding)().decode(head)
    except UnicodeDecodeError:
        return None
    return text if all(c.isprintable() or c.isspace() for c in text) else None


def not_utf8(text: bytes) -> tuple[int, int]:
    """How many bytes are not UTF-8 text (NUL bytes count as such), and where the first is (-1: there is none)."""
    n_null, first_null = text.count(b"\0"), text.find(b"\0")
    try:
        text.decode()
        return n_null, first_null
    except UnicodeDecodeError as error:
        n_bad = sum(1 for _ in _ESCAPED.finditer(text.decode("utf-8", "surrogateescape")))
        return n_bad + n_null, error.start if first_null < 0 else min(error.start, first_null)


def as_utf8(stream: BinaryIO) -> BinaryIO:
    """The stream without a UTF-8 mark, or turned into UTF-8 where it begins with a mark of UTF-16 or UTF-32."""
    head = stream.read(4)
    whole = io.BufferedReader(_Joined(head, stream))
    if head.startswith(codecs.BOM_UTF8):
        whole.read(len(codecs.BOM_UTF8))
        return whole
    encoding = marked(head)
    return whole if encoding is None else io.BufferedReader(_Transcoded(whole, encoding), _BLOCK)


class _Joined(io.RawIOBase):
    """Bytes that were read already, then the rest of the stream that they came from."""

    def __init__(self, head: bytes, stream: BinaryIO):
        self._head, self._stream = head, stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        some = self._head[: len(buffer)] or self._stream.read(len(buffer))
        self._head = self._head[len(buffer) :]
        buffer[: len(some)] = some
        return len(some)


class _Transcoded(io.RawIOBase):
    """A stream of another encoding as UTF-8; what cannot be decoded becomes U+FFFD."""

    def __init__(self, stream: BinaryIO, encoding: str):
        self._stream, self._decoder = stream, codecs.getincrementaldecoder(encoding)("replace")
        self._ready, self._ended = b"", False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready and not self._ended:
            block = self._stream.read(_BLOCK)
            self._ended = not block
            self._ready = self._decoder.decode(block, final=self._ended).encode("utf-8", "replace")
        size = min(len(buffer), len(self._ready))
        buffer[:size], self._ready = self._ready[:size], self._ready[size:]
        return size
