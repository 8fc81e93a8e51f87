"""Unpack the data of Unix `compress`, which no module of Python's standard library reads."""

from __future__ import annotations

CLEAR, FIRST_WIDTH, LAST_WIDTH = 256, 9, 16
START = [bytes([value]) for value in range(256)] + [b""]  # code 256 resets the table


def unpack(data: bytes) -> bytes:
    """Return the unpacked data of LZW codes, given without the three bytes at the start of a file.

    Codes are 9 bits wide at first, lowest bit first, and grow with the table. They come in groups of eight: where the
    width changes, the rest of a group is padding.
    """
    table, last, pieces = START.copy(), b"", []
    width, group, position = FIRST_WIDTH, 0, 0
    while position + width <= 8 * len(data):
        first = position >> 3
        code = (int.from_bytes(data[first : first + 4], "little") >> (position & 7)) & ((1 << width) - 1)
        position += width
        if code == CLEAR:
            table, last, grown = START.copy(), b"", FIRST_WIDTH
        else:
            if code > len(table) or (code == len(table) and not last):
                raise ValueError(f"damaged data: nothing stands for code {code} at bit {position - width}")
            piece = table[code] if code < len(table) else last + last[:1]  # the very entry that it completes
            pieces.append(piece)
            if last and len(table) < 1 << LAST_WIDTH:
                table.append(last + piece[:1])
            last, grown = piece, width
            if len(table) == 1 << width and width < LAST_WIDTH:
                grown = width + 1
        if grown != width or code == CLEAR:
            group = position = group + -(-(position - group) // (8 * width)) * 8 * width
            width = grown
    return b"".join(pieces)
