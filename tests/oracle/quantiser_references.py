"""The published references that tests/oracle/quantisers.py holds the model against.

    FP4D_ORACLE_SOURCES   a folder with checkouts of microxcaling, ao (torchao) and TransformerEngine

Each function returns plain arrays: codes one an element, scale bytes one a
block and row.  Nothing is copied from them; they run as they are, on a CPU.
"""
import importlib.util
import os
import sys
import types

import numpy as np
import torch

SOURCES = os.environ["FP4D_ORACLE_SOURCES"]


def load(name, path):
    spec = importlib.util.spec_from_file_location(name, os.path.join(SOURCES, path))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def load_transformer_engine():
    """Its reference quantiser; what would need CUDA is only named by it."""
    root = "transformer_engine"
    for name in (root, f"{root}.pytorch", f"{root}.pytorch.custom_recipes"):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = []
    recipes = sys.modules[f"{root}.pytorch.custom_recipes"]
    recipes.gemm = types.ModuleType(f"{root}.pytorch.custom_recipes.gemm")
    recipes.gemm.MMParams = object
    recipes.gemm.GEMMType = types.SimpleNamespace(FPROP=0, DGRAD=1, WGRAD=2)
    sys.modules[recipes.gemm.__name__] = recipes.gemm
    recipes.reference_utils = load(
        f"{root}.pytorch.custom_recipes.reference_utils",
        "TransformerEngine/transformer_engine/pytorch/custom_recipes/reference_utils.py",
    )
    tensor = types.ModuleType(f"{root}.pytorch.quantized_tensor")

    class Quantizer:
        def __init__(self, rowwise=True, columnwise=True):
            self.rowwise_usage, self.columnwise_usage = rowwise, columnwise

    tensor.Quantizer, tensor.QuantizedTensorStorage = Quantizer, object
    sys.modules[tensor.__name__] = tensor
    module = load("te_reference_nvfp4", "TransformerEngine/transformer_engine/pytorch/custom_recipes/reference_nvfp4.py")
    module.E2M1 = recipes.reference_utils.Fp4Formats.E2M1
    return module


te = load_transformer_engine()
# The checkout of torchao, not a release: 0.18 scales by 2^126 where it writes byte 0 (2^-127).
sys.path[:0] = [os.path.join(SOURCES, "ao"), os.path.join(SOURCES, "microxcaling")]
ao = load("ao_nvfp4_reference", "ao/test/prototype/moe_training/nvfp4_training/nvfp4_reference.py")
from mx.mx_ops import _quantize_mx  # noqa: E402
from torchao.prototype.mx_formats.kernels import f32_to_f4_unpacked, unpack_uint4  # noqa: E402
from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx  # noqa: E402
from torchao.prototype.mx_formats.utils import to_blocked  # noqa: E402


def tensor(z, dtype=torch.float32):
    return torch.from_numpy(np.ascontiguousarray(z, np.float32)).to(dtype)


def unpack(packed):
    p = packed.numpy().astype(np.uint8)
    return np.stack([p & 15, p >> 4], -1).reshape(p.shape[0], -1)


def mx_torchao(z, mode):
    """(codes, bytes) of 1x32 blocks by FLOOR or RCEIL."""
    scale, data = to_mx(tensor(z), torch.float4_e2m1fn_x2, 32, getattr(ScaleCalculationMode, mode))
    return unpack(data.reshape(z.shape[0], -1)), scale.view(torch.uint8).numpy().reshape(z.shape[0], -1)


def mx_microxcaling(z, rounding="even"):
    """Decoded values of 1x32 blocks by the OCP rule."""
    return _quantize_mx(tensor(z), 8, "fp4_e2m1", axes=[-1], block_size=32, round=rounding).numpy()


def e2m1_torchao(t):
    return f32_to_f4_unpacked(tensor(t)).numpy()


def nvfp4_torchao(z, tiles):
    """(codes, scale bytes a row)."""
    x = tensor(z, torch.bfloat16)
    o = ao.nvfp4_reference_quantize(x, x.abs().max().float(), block="16x16" if tiles else "1x16")
    return unpack(o.codes), o.scales.view(torch.uint8).numpy()


def rht_torchao(z):
    """The signed H16 along the rows of z (it transposes first, we transpose back)."""
    return ao.reference_rht(tensor(z.T, torch.bfloat16)).float().numpy()


def nvfp4_te(z, tiles, rht=False, four_over_six=False, bound=448):
    """(codes, scale bytes, codes of the transpose, its scale bytes)."""
    q = te.NVFP4QuantizerRef(
        dtype=te.E2M1,
        quant_tile_shape=(16, 16) if tiles else (1, 16),
        with_rht=rht,
        nvfp4_use_4over6=four_over_six,
        nvfp4_e4m3_max=bound,
    )
    qx, sx, qt, st, _, _ = q._quantize(tensor(z, torch.bfloat16))
    return unpack(qx), sx.view(torch.uint8).numpy(), unpack(qt), st.view(torch.uint8).numpy()


def swizzle(scales):
    """Scale bytes [rows, scale columns] in 128x4 tiles, padded with zeros."""
    return to_blocked(torch.from_numpy(np.ascontiguousarray(scales))).numpy()
