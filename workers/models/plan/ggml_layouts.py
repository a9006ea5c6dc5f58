"""Layouts of ggml's types of blocks for the compiled kernels: whole numbers of up to 4 bits become int4, of more int8.
No torch."""

from ....kernels.cpu.formats import Format, NumberLayout

GGML_LAYOUTS = {
    "Q4_0": NumberLayout(Format.INT4, 32),
    "Q4_1": NumberLayout(Format.INT4, 32, has_offsets=True),
    "Q5_0": NumberLayout(Format.INT8, 32),
    "Q5_1": NumberLayout(Format.INT8, 32, has_offsets=True),
    "Q8_0": NumberLayout(Format.INT8, 32),
    "Q2_K": NumberLayout(Format.INT4, 16, has_offsets=True),
    "Q3_K": NumberLayout(Format.INT4, 16),
    "Q4_K": NumberLayout(Format.INT4, 32, has_offsets=True),
    "Q5_K": NumberLayout(Format.INT8, 32, has_offsets=True),
    "Q6_K": NumberLayout(Format.INT8, 16),
    "IQ4_NL": NumberLayout(Format.TABLE4, 32),
    "IQ4_XS": NumberLayout(Format.TABLE4, 32),
    "MXFP4": NumberLayout(Format.TABLE4, 32),
}
