"""benchmarks/gpu/machine_code.py: the figures that it reads from disassembled code."""

from benchmarks.gpu import machine_code

# As nvdisasm -c prints it, cut short: a loop within a loop, and a branch ahead.
CODE = """
        /*0000*/                   LDG.E R15, desc[UR4][R2.64] ;
.L_x_1:
        /*0010*/              @!P0 LDG.E.U16 R50, desc[UR16][R50.64] ;
        /*0020*/               @P1 BRA `(.L_x_3) ;
.L_x_2:
        /*0030*/                   LDGSTS.E.BYPASS.128 [R45], desc[UR16][R34.64], !P0 ;
        /*0040*/                   HGMMA.64x32x16.F32.BF16 R24, gdesc[UR20], R24 ;
        /*0050*/                   MOV R1, R2 ;
        /*0060*/              @!P0 BRA `(.L_x_2) ;
.L_x_3:
        /*0070*/               @P2 BRA `(.L_x_1) ;
        /*0080*/                   EXIT ;
.L_x_4:
        /*0090*/                   BRA `(.L_x_4);
"""


def test_loops_and_what_is_in_them() -> None:
    outer, inner = machine_code.loops_of(CODE)
    assert inner.size == 4 and inner.kinds == {"LDGSTS.128": 1, "HGMMA.64x32x16.F32.BF16": 1}
    assert outer.size == 7 and outer.kinds == inner.kinds | {"LDG.16": 1}


def test_resident_programs() -> None:
    assert machine_code.resident(32, 4, 0, "sm_90") == 16  # limited by the number of warps
    assert machine_code.resident(97, 8, 1024, "sm_90") == 2  # registers, 104 a thread
    assert machine_code.resident(32, 4, 100 * 1024, "sm_90") == 2
    assert machine_code.resident(32, 4, 100 * 1024, "sm_80") == 1
