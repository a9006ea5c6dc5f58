"""Types of numbers that tensors of GGUF files have: blocks of numbers that share scales (ggml's `ggml_type`)."""

from typing import NamedTuple


class GgmlType(NamedTuple):
    """Type of a tensor's numbers."""

    name: str
    block: int  # numbers that are stored together
    num_bytes: int  # that they take

    def row_bytes(self, num: int) -> int:
        """Number of bytes of a row of `num` numbers, whole blocks."""
        return num // self.block * self.num_bytes


FLOATS = {"F32": 4, "F16": 2, "BF16": 2}  # names that safetensors has, too, and bytes of a number
# By the number that stands for each in files. Others are known and not read: their names are for errors.
READ = {
    0: GgmlType("F32", 1, 4),
    1: GgmlType("F16", 1, 2),
    2: GgmlType("Q4_0", 32, 18),
    3: GgmlType("Q4_1", 32, 20),
    6: GgmlType("Q5_0", 32, 22),
    7: GgmlType("Q5_1", 32, 24),
    8: GgmlType("Q8_0", 32, 34),
    10: GgmlType("Q2_K", 256, 84),
    11: GgmlType("Q3_K", 256, 110),
    12: GgmlType("Q4_K", 256, 144),
    13: GgmlType("Q5_K", 256, 176),
    14: GgmlType("Q6_K", 256, 210),
    20: GgmlType("IQ4_NL", 32, 18),
    23: GgmlType("IQ4_XS", 256, 136),
    30: GgmlType("BF16", 1, 2),
    39: GgmlType("MXFP4", 32, 17),
}
NOT_READ = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    40: "NVFP4",
    41: "Q1_0",
}
BLOCKS = {of.name: of for of in READ.values() if of.name not in FLOATS}  # types that are decoded
