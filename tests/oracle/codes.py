"""Golden values of every code, from ml_dtypes (an independent package).

    python tests/oracle/codes.py > tests/golden/codes.txt

256 lines: CODE E4M3 E5M2 E8M0 E2M1, values as FP32 bits, "nan" for any NaN; E2M1's code is the low
nibble.
"""
import ml_dtypes
import numpy as np

TYPES = (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu, ml_dtypes.float4_e2m1fn)

for code in range(256):
    values = [np.uint8(code & 15 if t is ml_dtypes.float4_e2m1fn else code).reshape(1).view(t).astype(np.float32) for t in TYPES]
    print(f"{code:02x}", *("nan" if np.isnan(v[0]) else f"{v.view(np.uint32)[0]:08x}" for v in values))
