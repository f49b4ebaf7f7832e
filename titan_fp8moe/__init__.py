"""FP8 rowwise grouped GEMMs for the MoE experts of torchtitan models.

Importing this package registers the model converter ``fp8moe``.
"""

# ruff: noqa: E402  (versions are checked before the imports that a wrong one would break)
from titan_fp8moe import environment

environment.check_versions()

from titan_fp8moe import converter, ops
from titan_fp8moe.converter import convert_experts
from titan_fp8moe.experts import float8_experts
from titan_fp8moe.grouped_mm import float8_grouped_mm
from titan_fp8moe.job_config import FP8MoE

__version__ = "0.1.0"

__all__ = ["FP8MoE", "convert_experts", "float8_experts", "float8_grouped_mm", "ops"]

converter.register()
environment.explain_missing_device_at_exit()
