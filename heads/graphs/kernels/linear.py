"""Matrix products of few bfloat16 rows, for processors with AVX512-BF16.

Decoding multiplies each weight matrix with one row, or with one row a tree node, so a pass is as
fast as weights come from memory. oneDNN, which torch calls by default, spends about 20 us on each
call and reads at half of the memory's speed. Here weights are packed once in the order in which
they are read, and one function, which torch's code generator compiles into the graph of a pass,
multiplies up to twelve rows at a time with a block of 32 columns.

Every row is summed in the same order whatever the number of rows, so a product gives a row the
same bits in a pass over one token as in a pass over a tree.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch._inductor.lowering  # first: the parts of the code generator import each other
from torch._inductor import ir
from torch._inductor.codegen.cpp_template import CppTemplate
from torch._inductor.cpu_vec_isa import VecAVX512VNNI, pick_vec_isa
from torch._inductor.lowering import lowerings, register_lowering
from torch._inductor.utils import parallel_num_threads
from torch.nn import functional
from torch.utils.weak import WeakTensorKeyDictionary

from drafthead.heads.graphs.kernels import attention
from drafthead.heads.graphs.kernels.huge_pages import HugePages

ROWS, COLUMNS = 12, 32  # of a block of sums at most, which fill 24 of the 32 registers

# Packed weights by the first of them: the graphs of a model share one copy.
packed_weights: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
memory = HugePages()


def has_kernel() -> bool:
    """Whether this processor runs the kernel below and has nothing better (such as AMX)."""
    return (
        torch.cpu.get_capabilities().get("avx512_bf16", False)
        and type(pick_vec_isa()) is VecAVX512VNNI
    )


@torch.library.custom_op("drafthead::pack", mutates_args=())
def pack(weights: Sequence[torch.Tensor], paired: bool = False) -> torch.Tensor:
    """Weights [N, K], one below the other, in the order in which the kernel reads them.

    [N / 32, K / 2, 32, 2]: blocks of 32 columns of the product, with the values that are
    multiplied together next to each other. Columns are filled up with zeros. If `paired`, each
    block of the first half is followed by that of the second half: a b c d becomes a c b d.
    """
    known = packed_weights.setdefault(weights[0], {})
    # Weights may have been changed in place since a graph of theirs was made.
    key = (paired, *((weight.data_ptr(), checksum(weight)) for weight in weights))
    if key not in known:
        blocks = in_blocks(torch.cat(list(weights)))
        if paired:
            blocks = blocks.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)
        known[key] = memory.copy(blocks)
    return known[key]


def checksum(weight: torch.Tensor) -> int:
    """The sum of a weight's values, read as whole numbers."""
    return int(weight.view(torch.int16).sum(dtype=torch.int64))


def in_blocks(weight: torch.Tensor) -> torch.Tensor:
    """`pack` of one weight [N, K]."""
    missing = -weight.shape[0] % COLUMNS
    columns = functional.pad(weight, (0, 0, 0, missing)).unflatten(0, (-1, COLUMNS))
    return columns.unflatten(-1, (-1, 2)).transpose(1, 2).contiguous()


@pack.register_fake
def _(weights: Sequence[torch.Tensor], paired: bool = False) -> torch.Tensor:
    columns, inner = sum(weight.shape[0] for weight in weights), weights[0].shape[1]
    return weights[0].new_empty(-(-columns // COLUMNS), inner // 2, COLUMNS, 2)


@torch.library.custom_op("drafthead::linear", mutates_args=())
def linear(
    x: torch.Tensor,  # [..., K]
    packed: torch.Tensor,  # [N / 32, K / 2, 32, 2], from `pack`
    size: int,  # N
    bias: torch.Tensor | None,  # [N]
) -> torch.Tensor:
    """x weight^T + bias [..., N]."""
    weight = packed.transpose(1, 2).flatten(2).flatten(0, 1)[:size]
    return functional.linear(x, weight, bias)


@linear.register_fake
def _(x: torch.Tensor, packed: torch.Tensor, size: int, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], size)


MULTIPLY = r"""
#ifndef DRAFTHEAD_MULTIPLY
#define DRAFTHEAD_MULTIPLY
namespace {
#define INLINE __attribute__((always_inline))

// out[r][0..31] = x[r] . block + bias, of which the first `columns` are stored. Fetches as much as
// the block from `ahead` values further on meanwhile, unless that is 0.
template <int R>
inline void multiply(const at::BFloat16* x, int64_t inner, const at::BFloat16* block,
                     const at::BFloat16* bias, at::BFloat16* out, int64_t size, int columns,
                     int64_t ahead) {
    const __mmask16 some[2] = {
        (__mmask16)((1u << std::min(columns, 16)) - 1),
        (__mmask16)((1u << std::max(columns - 16, 0)) - 1),
    };
    __m512 sums[2 * R];
    c10::ForcedUnroll<2 * R>{}([&](auto i) INLINE {
        if (bias) {
            auto half = _mm256_maskz_loadu_epi16(some[i % 2], bias + i % 2 * 16);
            sums[i] = (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
        } else {
            sums[i] = _mm512_setzero_ps();
        }
    });
    // One instruction multiplies a pair of x, repeated 16 times, with the pairs of 16 columns.
    auto pair = [&](int64_t k) INLINE {
        auto weights = [&](int c) INLINE {
            return (__m512bh)_mm512_loadu_si512(block + k * 32 + c * 32);
        };
        __m512bh left = weights(0), right = weights(1);
        if (ahead) {
            _mm_prefetch((const char*)(block + ahead + k * 32), _MM_HINT_T1);
            _mm_prefetch((const char*)(block + ahead + k * 32 + 32), _MM_HINT_T1);
        }
        c10::ForcedUnroll<R>{}([&](auto r) INLINE {
            auto both = *reinterpret_cast<const int32_t*>(x + r * inner + k);
            __m512bh a = (__m512bh)_mm512_set1_epi32(both);
            sums[2 * r] = _mm512_dpbf16_ps(sums[2 * r], a, left);
            sums[2 * r + 1] = _mm512_dpbf16_ps(sums[2 * r + 1], a, right);
        });
    };
    int64_t k = 0;
    for (; k + 8 <= inner; k += 8) {
        pair(k);
        pair(k + 2);
        pair(k + 4);
        pair(k + 6);
    }
    for (; k < inner; k += 2) {
        pair(k);
    }
    c10::ForcedUnroll<2 * R>{}([&](auto i) INLINE {
        auto half = (__m256i)_mm512_cvtneps_pbh(sums[i]);
        _mm256_mask_storeu_epi16(out + i / 2 * size + i % 2 * 16, some[i % 2], half);
    });
}
#undef INLINE

// f(first row, number of rows as a constant, how far ahead to fetch) for groups of rows that are
// multiplied together; `next` values further on is what is multiplied after all of them.
template <typename F>
inline void in_groups_ahead(int64_t rows, int64_t next, const F& f) {
    constexpr int ROWS = {{rows}}, GROUP = 8, FEW = 2, AHEAD = 128 * 32;
    // One row or two wait for memory, which the processor then reads ahead by itself. More are busy
    // with arithmetic and have to ask: for what is next in the block, or, where earlier groups have
    // fetched the block, for the next one during the last group.
    if (rows <= ROWS) {
        with_rows<ROWS>(rows, [&](auto count) { f(0, count, count() > FEW ? AHEAD : 0); });
    } else {
        in_groups<GROUP>(rows, [&](int64_t r, auto count) {
            f(r, count, r + count() >= rows ? next : 0);
        });
    }
}
}  // namespace
#endif
""".replace("{{rows}}", str(ROWS))


class FewRowsTemplate(CppTemplate):
    """The source of a function of few rows and packed weights, for the code generator."""

    SOURCE: str

    @classmethod
    def call(cls, name: str, x: Any, others: Sequence[Any], size: int) -> Any:
        """A call of the function in the code generator's graph, for x [..., K] to [..., size]."""
        *outer, inner = x.get_size()
        view = lowerings[torch.ops.aten.view.default]
        rows = ir.ExternKernel.require_contiguous(view(x, [prod(outer), inner]))
        nodes = [rows, *map(ir.ExternKernel.realize_input, others)]
        layout = ir.FixedLayout(x.get_device(), x.get_dtype(), [prod(outer), size], [size, 1])
        template = cls(name, nodes, layout, parallel_num_threads())
        return view(template.generate().output_node(), [*outer, size])

    def render(self, **given: Any) -> str:
        """The source for the inputs at hand; nothing is fused behind it."""
        assert not given.get("epilogue_nodes")
        kernel = given["kernel"]
        inputs = dict(zip(("x", "packed", "bias"), self.input_nodes, strict=False))
        options = {
            "template": self,
            "kernel": kernel,
            "inputs": inputs,
            "x": inputs["x"],
            "bias": "bias" in inputs,
            "output": given.get("template_buffer_node") or self.output_node,
            "parts": attention.WITH_ROWS + MULTIPLY,
            "num_threads": self.num_threads,
        }
        return self._template_from_string(self.SOURCE).render(**options)


class LinearTemplate(FewRowsTemplate):
    """The source of the product."""

    SOURCE = r"""
{{template.header().getvalue()}}
{{parts}}
#ifndef DRAFTHEAD_LINEAR  // one file may hold this for inputs of several sizes
#define DRAFTHEAD_LINEAR
namespace {
void linear(const at::BFloat16* x, const at::BFloat16* packed, const at::BFloat16* bias,
            at::BFloat16* out, int64_t rows, int64_t inner, int64_t size, int threads) {
    #pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t first = 0; first < size; first += 32) {
        const auto* block = packed + first * inner;
        const auto* biases = bias ? bias + first : nullptr;
        const int columns = std::min<int64_t>(32, size - first);
        in_groups_ahead(rows, 32 * inner, [&](int64_t r, auto count, int64_t ahead) {
            multiply<count()>(x + r * inner, inner, block, biases, out + r * size + first, size,
                              columns, ahead);
        });
    }
}
}  // namespace
#endif

extern "C"
{{kernel.def_kernel(inputs=inputs, outputs={"output": output})}}
{
    {{kernel.maybe_codegen_profile("linear")}}
    linear(&{{kernel.index(x, [0, 0])}}, packed, {{"bias" if bias else "nullptr"}}, output,
           {{kernel.size(x, 0)}}, {{kernel.size(x, 1)}}, {{kernel.size(output, 1)}},
           {{num_threads}});
}
"""


@register_lowering(torch.ops.drafthead.linear.default, type_promotion_kind=None)
def _lower(x: Any, packed: Any, size: int, bias: Any) -> Any:
    """The operation in the code generator's graph."""
    return LinearTemplate.call("linear", x, [packed] if bias is None else [packed, bias], size)
