"""What the machine code of a kernel for Hopper says of the assembler that made it."""

import re

INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?(?P<name>[^\s;]+)\s?(?P<arguments>.*?);")


def reads_of_unwritten(listing):
    """The instructions that read a uniform register which no instruction before them, by address, has written.

    ptxas 12.8 makes such of the descriptors of products on Hopper, see `vmonarch.kernels.common.trust`.

    Args:
        listing: what `nvdisasm -c` prints.
    """
    instructions = INSTRUCTION.findall(listing)
    assert instructions, "no instruction in the listing"
    written, found = set(), []
    for name, arguments in instructions:
        arguments = [argument.strip() for argument in arguments.split(",")]
        # Uniform instructions write their first argument, others none of these registers.
        writes = _registers(arguments.pop(0)) if name.startswith(("U", "R2UR", "S2UR", "REDUX")) else []
        reads = [register for argument in arguments for register in _registers(argument)]
        if name.startswith(("HGMMA", "IGMMA", "QGMMA")):
            # Four registers describe both factors in memory, the last two of them the second one.
            first_in_registers = bool(re.fullmatch(r"R\d+(\.reuse)?", arguments[1]))
            reads = [first + i for first in reads for i in range(2 * first_in_registers, 4)]
        if not written.issuperset(reads):
            found.append(name)
        width = 4 if ".128" in name else 2 if ".64" in name or ".WIDE" in name else 1
        written.update(first + i for first in writes for i in range(width))
    return found


def _registers(argument):
    return [int(number) for number in re.findall(r"\bUR(\d+)\b", argument)]
