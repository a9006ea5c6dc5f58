"""Settings of torch for the dense products that cuBLAS computes, made in one place, before the first product on a GPU.

| setting | why |
|---|---|
| float32 "highest" | TF32 keeps 10 bits of a factor: float32 answers would not be transformers', token for token |
| bfloat16 sums in float32 throughout | parts of a product that is split over K would be added in bfloat16 |

Both are the process's. cuBLAS repeats its results bit for bit as long as shapes are the same and each stream has a
workspace of its own, which torch sees to; for other numbers of rows it may choose another kernel, with other last bits.
"""

import torch


def settle_products() -> None:
    """Idempotent."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
