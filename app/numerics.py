"""The switches of torch that change what is computed, read without importing its compiler."""

import sys
from typing import Any

# What torch's own keys hash (FxGraphHashDetails, AOTAutogradCacheDetails), and what its operators ask on a CPU.
_SWITCHES = {
    "mkldnn": "_get_mkldnn_enabled",
    "mkldnn_deterministic": "_get_mkldnn_deterministic",
    "nnpack": "_get_nnpack_enabled",
    "quantized_engine": "_get_qengine",
    "fp16_reduction_cpu": "_get_cpu_allow_fp16_reduced_precision_reduction",
    "fp16_reduction_gpu": "_get_cublas_allow_fp16_reduced_precision_reduction",
    "bf16_reduction_gpu": "_get_cublas_allow_bf16_reduced_precision_reduction",
    "fp16_accumulation_gpu": "_get_cublas_allow_fp16_accumulation",
    "attention_flash": "_get_flash_sdp_enabled",
    "attention_mem_efficient": "_get_mem_efficient_sdp_enabled",
    "attention_math": "_get_math_sdp_enabled",
    "attention_math_reduction": "_get_math_sdp_allow_fp16_bf16_reduction",
    "fill_uninitialized": "_get_deterministic_fill_uninitialized_memory",
}
_PRECISIONS = (("generic", "all"), ("cuda", "matmul"), ("cuda", "conv"), ("mkldnn", "matmul"), ("mkldnn", "conv"))


def numerics() -> dict[str, Any]:
    """Return the switches as fields of an identity; some belong to the calling thread, so ask on the one that serves.

    A switch that this torch does not have is `absent`.
    """
    import torch

    absent = lambda *_: "absent"  # noqa: E731
    precision = getattr(torch._C, "_get_fp32_precision_getter", absent)
    return {
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "default_device": str(torch.get_default_device()),
        "float32_matmul_precision": _matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "autocast": str(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else "off",
        # There is no getter: with the mode on, half of the smallest normal number is zero.
        "flush_denormal": sys.float_info.min / 2 == 0,
        **{name: str(getattr(torch._C, getter, absent)()) for name, getter in _SWITCHES.items()},
        **{f"fp32_precision_{kind}_{operator}": precision(kind, operator) for kind, operator in _PRECISIONS},
    }


def _matmul_precision() -> str:
    """Return the setting; torch refuses to tell it where it was set for one backend, which the others then tell."""
    import torch

    try:
        return str(torch.get_float32_matmul_precision())
    except RuntimeError:
        return "by backend"
