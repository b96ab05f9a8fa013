"""Golden checksums of number formats, from ml_dtypes (an independent package).

    python tests/oracle/formats.py > tests/golden/formats.txt

Each line: name, CRC-32 of the codes, one byte a value (BF16: two, little endian).
"bf16": all 65,536 BF16 patterns in order; "f32": 2^20 FP32 patterns
(i * 2654435761) mod 2^32.  Values that are not finite or lie beyond the
format's largest, where packages differ, count as code 0.
tests/oracle/formats_cuda.cpp adds the lines that cover those.
"""
import zlib

import ml_dtypes
import numpy as np


def bf16_patterns():
    return (np.arange(65536, dtype=np.uint32) << 16).view(np.float32)


def f32_patterns():
    return (np.arange(1 << 20, dtype=np.uint32) * np.uint32(2654435761)).view(np.float32)


for source, values in (("bf16", bf16_patterns()), ("f32", f32_patterns())):
    for name, dtype, largest in (
        ("e2m1", ml_dtypes.float4_e2m1fn, 6.0),
        ("e4m3", ml_dtypes.float8_e4m3fn, 448.0),
        ("e5m2", ml_dtypes.float8_e5m2, 57344.0),
        ("bf16", ml_dtypes.bfloat16, 3.0e38),
    ):
        with np.errstate(invalid="ignore"):
            inside = np.abs(values) <= largest
        x = np.where(inside, values, np.float32(0))
        codes = x.astype(dtype).view(np.uint16 if name == "bf16" else np.uint8)
        if name != "bf16":
            codes = codes.astype(np.uint8)
        print(f"ml_{name}_{source} {zlib.crc32(codes.tobytes()):08x}")
