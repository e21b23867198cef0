"""Matrix products of few bfloat16 rows, for processors with AVX512-BF16.

Decoding multiplies each weight matrix with one row, or with one row a tree node, so a pass is as
fast as weights come from memory. oneDNN, which torch calls by default, spends about 20 us on each
call and reads at half of the memory's speed; torch's own code generator has no kernel for these
instructions. This adds one to it: it then takes care of threads, blocks and what follows a product.

Every row is summed in the same order whatever the number of rows, so a product gives a row the
same bits in a pass over one token as in a pass over a tree.
"""

from typing import Any

import torch
import torch._inductor.lowering  # first: the code generator's parts import each other
from torch._inductor.codegen.common import KernelTemplate
from torch._inductor.codegen.cpp_micro_gemm import (
    CppMicroGemm,
    LayoutType,
    generate_gemm_config,
    register_micro_gemm,
)
from torch._inductor.cpu_vec_isa import VecAVX512VNNI, pick_vec_isa
from torch._inductor.ir import ChoiceCaller
from torch._inductor.select_algorithm import ExternKernelCaller, add_preprocessing_fn

from drafthead.heads.compilation import CACHE_TAG

# Rows and columns of a block of sums, 8 x 32 in 16 of the 32 registers; values multiplied at once.
BLOCK = (8, 32, 2)


def has_kernel() -> bool:
    """Whether this processor runs the kernel below and has nothing better (such as AMX)."""
    return (
        torch.cpu.get_capabilities().get("avx512_bf16", False)
        and type(pick_vec_isa()) is VecAVX512VNNI
    )


def fits(config: Any, m: int, n: int, k: int, alpha: int, num_threads: int, **_: Any) -> bool:
    """Whether the kernel computes a product of these sizes: values go in pairs, unscaled."""
    return k % 2 == 0 and alpha == 1 and has_kernel()


@register_micro_gemm(
    *generate_gemm_config(
        VecAVX512VNNI,
        [BLOCK],
        input_dtype=torch.bfloat16,
        input2_dtype=torch.bfloat16,
        output_dtype=torch.float,
        compute_dtype=torch.float,
        extra_check=fits,
    )
)
class FewRowsBf16(CppMicroGemm):
    """C [M, N] = A [M, K] B [K, N] (+ C), for a block of the columns of B.

    B comes as pairs of values that are multiplied together: [K / 2, N, 2]. One instruction
    multiplies a pair of A, repeated 16 times, with the pairs of 16 columns and adds to 16 sums.
    """

    ENTRY = r"""
{{declare_kernel}} {
    for (int64_t n = 0; n < N; n += {{block_n}}) {
        int64_t m = 0;
        for (; m + {{block_m}} <= M; m += {{block_m}}) {
            {{kernel_name}}_rows<{{block_m}}, accum>(
                A + m * lda, B + n, C + m * ldc + n, K, lda, ldb, ldc);
        }
        switch (M - m) {
{%- for rows in range(block_m - 1, 0, -1) %}
            case {{rows}}:
                {{kernel_name}}_rows<{{rows}}, accum>(
                    A + m * lda, B + n, C + m * ldc + n, K, lda, ldb, ldc);
                break;
{%- endfor %}
        }
    }
}
"""

    # Lambdas that are not inlined would keep the sums in memory instead of registers.
    ROWS = r"""
template <int64_t ROWS, bool accum>
inline void {{kernel_name}}_rows(
    const {{input_t}}* {{restrict_keyword}} A,
    const {{input2_t}}* {{restrict_keyword}} B,
    {{output_t}}* {{restrict_keyword}} C,
    int64_t K,
    int64_t lda,
    int64_t ldb,
    int64_t ldc
) {
#define INLINE __attribute__((always_inline))
    constexpr int COLS = {{block_n}} / 16;
    __m512 sums[ROWS * COLS];
    c10::ForcedUnroll<ROWS * COLS>{}([&](auto i) INLINE {
        if constexpr (accum) {
            sums[i] = _mm512_loadu_ps(C + (i / COLS) * ldc + (i % COLS) * 16);
        } else {
            sums[i] = _mm512_setzero_ps();
        }
    });
    __m512bh b[COLS];
    auto pair = [&](int64_t k) INLINE {
        c10::ForcedUnroll<COLS>{}([&](auto c) INLINE {
            b[c] = (__m512bh)_mm512_loadu_si512(B + k * ldb + c * 32);
            // With few rows the wait is for memory; with many it is for arithmetic.
            if constexpr (ROWS <= 4) {
                _mm_prefetch((const char*)(B + (k + 64) * ldb + c * 32), _MM_HINT_T0);
            }
        });
        c10::ForcedUnroll<ROWS>{}([&](auto r) INLINE {
            auto both = *reinterpret_cast<const int32_t*>(A + r * lda + k);
            __m512bh a = (__m512bh)_mm512_set1_epi32(both);
            c10::ForcedUnroll<COLS>{}([&](auto c) INLINE {
                sums[r * COLS + c] = _mm512_dpbf16_ps(sums[r * COLS + c], a, b[c]);
            });
        });
    };
    int64_t k = 0;
    for (; k + 8 <= K; k += 8) {
        pair(k);
        pair(k + 2);
        pair(k + 4);
        pair(k + 6);
    }
    for (; k < K; k += 2) {
        pair(k);
    }
    c10::ForcedUnroll<ROWS * COLS>{}([&](auto i) INLINE {
        _mm512_storeu_ps(C + (i / COLS) * ldc + (i % COLS) * 16, sums[i]);
    });
#undef INLINE
}
"""

    def codegen_define(self, kernel: Any) -> str:
        """The source of the kernel, for the code generator."""
        options = {
            "declare_kernel": self.get_kernel_declaration(),
            "block_m": self.register_blocking.block_m,
            "block_n": self.register_blocking.block_n,
            **self.get_common_options(),
        }
        return "".join(
            KernelTemplate._template_from_string(source).render(options)
            for source in (self.ROWS, self.ENTRY)
        )

    def get_b_layout(self) -> LayoutType:
        """Pairs of values, as the instruction takes them."""
        return LayoutType.VNNI2


def chosen(choices: list[ChoiceCaller]) -> list[ChoiceCaller]:
    """For our graphs the kernel where it is among the choices, and else what torch calls by
    default: trying them out would take seconds for each product.
    """
    if torch.compiler.config.cache_key_tag != CACHE_TAG:
        return choices
    ours = [choice for choice in choices if FewRowsBf16.__name__ in choice.name]
    return ours or [c for c in choices if isinstance(c, ExternKernelCaller)] or choices


add_preprocessing_fn(chosen)
