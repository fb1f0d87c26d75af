"""The values of a JSON file one after another: the elements of its list, or several values end to end (JSON lines)."""

import codecs
import json
from collections.abc import Iterator
from typing import Any, BinaryIO

_BLOCK = 1 << 20
_SPACE = " \t\r\n"
# A number is never the text: not as an integer, of which Python refuses those of over 4,300 digits.
DECODER = json.JSONDecoder(parse_int=float)
_NEAR_END = 16  # a value that is merely cut off is found faulty at most so many characters before the end


def loads(line: bytes) -> Any:
    """The value of a line. Raises ValueError, RecursionError."""
    return DECODER.decode(line.decode(json.detect_encoding(line), "surrogatepass"))


class JSONError(ValueError):
    """The file is not JSON, from some character on."""


def values(stream: BinaryIO) -> Iterator[Any]:
    """The elements of a list, or the values of a sequence. No more than one of them is in memory. Raises JSONError."""
    text = _Buffer(stream)
    in_list = text.peek() == "["
    if in_list:
        text.at += 1
        if text.peek() == "]":
            return
    while text.peek():
        yield text.value()
        if not in_list:
            continue
        after = text.peek()
        text.at += 1
        if after == "]":
            break
        if after != ",":
            raise JSONError(f"{'it ends inside its list' if not after else f'found {after!r} after an element'}")
    if text.peek():
        raise JSONError("more text after its list")


class _Buffer:
    """Characters of the stream from `at` on, as many as were needed."""

    def __init__(self, stream: BinaryIO):
        self.at = 0
        self._text, self._ended = "", False
        self._stream, self._decoder = stream, codecs.getincrementaldecoder("utf-8")()

    def peek(self) -> str:
        """The next character that is no space, or nothing at the end."""
        while True:
            while self.at < len(self._text) and self._text[self.at] in _SPACE:
                self.at += 1
            if self.at < len(self._text):
                return self._text[self.at]
            if not self._more():
                return ""

    def value(self) -> Any:
        while True:
            try:
                found, end = DECODER.raw_decode(self._text, self.at)
                if end < len(self._text) or not self._more():  # a number at the end may go on
                    self.at = end
                    return found
            except RecursionError:
                raise JSONError("nested too deeply") from None
            except json.JSONDecodeError as error:
                cut_off = error.msg.startswith("Unterminated") or error.pos >= len(self._text) - _NEAR_END
                if not cut_off or not self._more():
                    raise JSONError(error.msg) from None

    def _more(self) -> bool:
        """Read on, as much as there is already; whether there was more."""
        block = b"" if self._ended else self._stream.read(max(_BLOCK, len(self._text) - self.at))
        self._ended = not block
        try:
            more = self._decoder.decode(block, final=self._ended)
        except UnicodeDecodeError as error:
            raise JSONError(str(error)) from None
        if not self._ended:
            self._text, self.at = self._text[self.at :] + more, 0
        return not self._ended
