"""Sorting kernels into the parts of a step."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from benchmarks.profile import Kernel, idle_time, kind_of


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "products"),
        ("triton_tem_fused_flex_attention_backward_transpose_view_5", "attention backward"),
        ("triton_tem_fused__fused_rms_norm__to_copy__unsafe_view_add_cat_cos_flex_attention_mul_transpose_unsqueeze_view_9", "attention forward"),
        ("_exponentials_kernel", "loss kernel"),
        ("_adamw_kernel", "optimiser"),
        ("triton_poi_fused__unsafe_view_mul_silu_silu_backward_view_2", "SwiGLU"),
        ("triton_per_fused__fused_rms_norm__to_copy__unsafe_view_add_cat_mul_neg_split_unsqueeze_view_8", "rope, with the norm of heads"),
        ("triton_red_fused__fused_rms_norm__unsafe_view_add_13", "norms"),
        ("triton_poi_fused__to_copy_add_1", "other compiled"),
        ("Memcpy DtoD (Device -> Device)", "copies and fills"),
    ],
)
def test_a_kernel_seen_on_a_gpu_is_told_its_part(kernel: str, kind: str) -> None:
    assert kind_of(kernel) == kind


def test_time_is_idle_only_where_no_kernel_of_any_stream_runs() -> None:
    kernels = [Kernel("c", 30, 35), Kernel("a", 0, 10), Kernel("b", 5, 20), Kernel("d", 31, 33), Kernel("e", 36, 37)]
    assert idle_time(kernels) == 10 + 1
    assert idle_time([]) == 0
