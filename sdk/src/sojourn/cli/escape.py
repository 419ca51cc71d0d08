"""The escapes of a session, as ssh has them: at the start of a line, `~.` leaves and `~~` is a tilde."""

from __future__ import annotations


class Escapes:
    """What of the typed bytes is for the far side. After `~.` nothing more is."""

    def __init__(self) -> None:
        self.left = False
        self._line_start = True
        self._tilde = False

    def feed(self, data: bytes) -> bytes:
        out = bytearray()
        for byte in data:
            if self._tilde:
                self._tilde = False
                if byte == ord("."):
                    self.left = True
                    break
                if byte != ord("~"):
                    out += b"~"
                out.append(byte)
            elif byte == ord("~") and self._line_start:
                self._tilde = True
                continue
            else:
                out.append(byte)
            self._line_start = byte in b"\r\n"
        return bytes(out)

    def end(self) -> bytes:
        """What was held back, at the end of the input."""
        held, self._tilde = (b"~" if self._tilde else b""), False
        return held
