"""Kernels for speculative decoding on MLX: few-row matmul, multi-row attention, wide prefill.

Each operation is a triple: `<op>_ops` in plain MLX, `<op>_metal`, `<op>_cuda`, and a dispatcher
that reports its choice. `install` puts those that pay into one model.
"""

from spec_kernels._build import ExactError as ExactError
from spec_kernels._build import KernelError as KernelError
from spec_kernels._build import backend as backend
from spec_kernels._compiler import keep_modules_in as keep_modules_in
from spec_kernels.attention import row_attention as row_attention
from spec_kernels.attention import row_attention_cuda as row_attention_cuda
from spec_kernels.attention import row_attention_metal as row_attention_metal
from spec_kernels.attention import row_attention_ops as row_attention_ops
from spec_kernels.exact import row_invariant as row_invariant
from spec_kernels.hardware import rule_for as rule_for
from spec_kernels.hardware import this_device as this_device
from spec_kernels.installation import install as install
from spec_kernels.installed import Installed as Installed
from spec_kernels.installed import OpState as OpState
from spec_kernels.installed import Report as Report
from spec_kernels.matmul import Weight as Weight
from spec_kernels.matmul import verify_matmul as verify_matmul
from spec_kernels.matmul import verify_matmul_cuda as verify_matmul_cuda
from spec_kernels.matmul import verify_matmul_metal as verify_matmul_metal
from spec_kernels.matmul import verify_matmul_ops as verify_matmul_ops
from spec_kernels.prefill import wide_prefill as wide_prefill
from spec_kernels.prefill import wide_prefill_ops as wide_prefill_ops
