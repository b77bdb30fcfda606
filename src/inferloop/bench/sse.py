"""Server-sent events from bytes, whatever way the network cut them (WHATWG HTML, section 9.2.6)."""

from __future__ import annotations


class EventParser:
    """Feed bytes as they come; get the data of each event once its blank line is there.

    Works on bytes, so a cut inside a UTF-8 character means nothing. Lines end with LF, CRLF or CR; one space after the
    colon is not part of the value; comments and other fields than `data` are ignored; data lines join with LF.
    """

    def __init__(self) -> None:
        self._line = bytearray()
        self._data: list[bytes] = []
        self._after_cr = False
        self._first_line = True
        self.is_clean = False
        """Whether an event may begin with the next byte, and nothing that was fed before says what becomes of it."""

    def feed(self, piece: bytes) -> list[bytes]:
        """Data of the events that this piece completes."""
        events = self._feed(piece)
        self.is_clean = not (self._line or self._data or self._after_cr or self._first_line)
        return events

    def _feed(self, piece: bytes) -> list[bytes]:
        if self._first_line and piece and not self._line:
            self._first_line = piece[:1] == b"\xef"  # else no byte order mark can begin here
        events: list[bytes] = []
        if 13 in piece or self._after_cr or self._first_line:
            self._feed_lines(piece, 0, events, until_clean=False)
            return events
        start = self._feed_lines(piece, 0, events, until_clean=True) if self.unfinished else 0
        # From here on whole events, nearly all of a single `data: ` line.
        *blocks, rest = (piece[start:] if start else piece).split(b"\n\n")
        for block in blocks:
            if block.startswith(b"data: ") and 10 not in block:
                events.append(block[6:])
            else:
                self._feed_lines(block + b"\n\n", 0, events, until_clean=False)
        if rest:
            self._feed_lines(rest, 0, events, until_clean=False)
        return events

    def _feed_lines(self, piece: bytes, start: int, events: list[bytes], *, until_clean: bool) -> int:
        """Line by line. Returns where it stopped: at the end, or with `until_clean` behind the first blank line."""
        if self._after_cr and piece:
            self._after_cr = False
            start += piece[start : start + 1] == b"\n"  # the second half of a CRLF that was cut in two
        while start < len(piece):
            end, next_start = self._line_end(piece, start)
            if end < 0:
                self._line += piece[start:]
                return len(piece)
            self._line += piece[start:end]
            start = next_start
            if self._take_line(events) and until_clean:
                break
        return start

    @property
    def unfinished(self) -> bool:
        """Whether bytes of an event without its blank line are held; at the end of a stream they are discarded."""
        return bool(self._line or self._data)

    def _line_end(self, piece: bytes, start: int) -> tuple[int, int]:
        lf, cr = piece.find(b"\n", start), piece.find(b"\r", start)
        if cr < 0 or 0 <= lf < cr:
            return lf, lf + 1
        if cr + 1 == len(piece):
            self._after_cr = True
            return cr, cr + 1
        return cr, cr + 1 + (piece[cr + 1 : cr + 2] == b"\n")

    def _take_line(self, events: list[bytes]) -> bool:
        """Whether it was blank: nothing of an event is held then."""
        line = bytes(self._line)
        self._line.clear()
        if self._first_line:
            self._first_line = False
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line:
            if self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
            return True
        field, _, value = line.partition(b":")
        if field == b"data":
            self._data.append(value[1:] if value[:1] == b" " else value)
        return False
