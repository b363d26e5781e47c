"""The parts of a shared library that the dynamic linker reads whatever is called in it later (elf(5))."""

import os
import struct

HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
SECTION = struct.Struct("<IIQQQQIIQQ")
WRITABLE, ALLOCATED, EXECUTABLE = 1, 2, 4
"""Flags of sections (SHF_*)."""
NO_BITS = 8
"""Type of a section that has no bytes in the file."""
MAX_SECTIONS = 1000
Extent = tuple[int, int]


def find_linked_parts(descriptor: int) -> list[Extent]:
    """Return offset and length in bytes of what is read when a library is loaded.

    These are the symbols, their hashes and the relocations, which come before the code, and the data that is
    written to. Of the code, which is most of it, only what is called is read: 24 of 269 MiB of
    libtorch_cpu.so for `import torch`, spread over it. Returns none for what is no ELF file of 64 bits, least
    significant byte first. Raises OSError.
    """
    try:
        header = HEADER.unpack(os.pread(descriptor, HEADER.size, 0))
        magic, table, size, count = header[0], header[6], header[11], header[12]
        if magic[:6] != b"\x7fELF\x02\x01" or size != SECTION.size or count > MAX_SECTIONS:
            return []
        raw = os.pread(descriptor, size * count, table)
        sections = [SECTION.unpack_from(raw, size * number) for number in range(count)]
    except struct.error:
        return []
    loaded = [section for section in sections if section[2] & ALLOCATED and section[1] != NO_BITS]
    code = min((section[4] for section in loaded if section[2] & EXECUTABLE), default=0)
    written = [section for section in loaded if section[2] & WRITABLE]
    parts = [(0, code)] if code else []
    if written:
        begin = min(section[4] for section in written)
        parts.append((begin, max(section[4] + section[5] for section in written) - begin))
    return parts
