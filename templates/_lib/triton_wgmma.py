{% include "_lib/triton_cuda.py" %}


# ---- float32 products of float16 halves by one kernel of CUDA C++ ----
#
# Halves, their scales and the repair of rows with an Inf or a NaN are triton_products' own. Between
# these is one kernel in place of three products by PyTorch, and of what joins them. It makes
# products of several matrices at once. A sum that is long beside a result of few tiles is cut into
# pieces, whose products are such a batch, and are then added up.
#
# With `product_weight: converted` halves are made of x alone: the weight is converted on its way into
# the tensor cores, and what float16 cannot have is repaired behind. One call of CUDA C++ does all of
# that where sums run along rows of both operands; where they run along columns of the weight, halves
# of x are triton_products' own. The weight must lie as the copy engine reads it; other products are
# made as above. Words that can be turned off: warpgroups that take turns at multiplying, and kernels
# that are launched while the one before runs.
{% set product_takes_turns, product_overlaps = true, true %}
{% set is_converted = product_weight == "converted" %}
CONVERTED_WEIGHTS = {{ product_weights if is_converted else [] }}
cuda_code = CudaCode(
    r"""
#include <cuda.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstdio>

{% with overlap = is_converted and product_overlaps %}
{% include "_lib/launch.cuh" %}
{% endwith %}

{% include "_lib/wgmma_tensor_map.cuh" %}

{% include "_lib/wgmma_pipeline.cuh" %}

{% set stage_bytes = 4 * (128 + product_n) * product_k %}
{% set product_moments = "kHasMoments = true" in epilogues %}
{% set moment_bytes = 64 * product_n if product_moments else 0 %}
{% with block_n = 128 if product_n == 256 else product_n,
        product_stages = (230000 - moment_bytes) // stage_bytes %}
{% include "_lib/wgmma_halves.cuh" %}
{% endwith %}

{% include "_lib/halves_sums.cuh" %}
{% if is_converted %}

{% with block_n = 64, product_stages = 230000 // stage_bytes %}
{% include "_lib/wgmma_converted.cuh" %}
{% endwith %}
{% endif %}

{{ epilogues }}
""",
    ["-std=c++17", "-O3", "-gencode=arch=compute_90a,code=sm_90a"],
)


NUM_BLOCKS = 132  # of multiprocessors; of all devices alike, so that results are the same
LONGEST = 2**16  # of a sum; PyTorch's sums are of pieces too, and longer ones were less exact


def product_converts(x, weight, depth, x_turned, weight_turned):
    # Whether the weight is converted where it lies: in stages, of which none has numbers of two
    # batches. Sums in one call with all else are not cut.
    if ("columns" if weight_turned else "rows") not in CONVERTED_WEIGHTS:
        return False
    if weight_turned:
        is_whole = weight.dim() == 2 or depth % {{ product_k }} == 0
        return is_whole and (4 * weight.shape[-2] | weight.data_ptr()) % 16 == 0
    is_one = x.dim() == weight.dim() == 2 and not x_turned and depth <= LONGEST
    return is_one and (4 * depth | x.data_ptr() | weight.data_ptr()) % 16 == 0


def product_cut(num_tiles, depth):
    # How many numbers of a sum one product adds up; None if all of them.
    pieces = min(NUM_BLOCKS // num_tiles, depth // 1024)
    if depth > LONGEST:
        pieces = max(pieces, ceil_div(2 * depth, LONGEST))
    return ceil_div(ceil_div(depth, pieces), 64) * 64 if pieces > 1 else None


def product_and_more_by_wgmma(
    x, weight, bias, out, num_rows, num_columns, depth, x_turned, weight_turned,
    function="product_of_rows", given=(), apart=None, has_moments=False,
):
    # As product_of_halves, which says what x and weight are; either may be of as many batches as
    # `out` is. `function` may have an epilogue that reads what is `given`; `apart` computes that of
    # a product from PyTorch. With `has_moments` it finds moments of columns instead: then how many
    # rows each of these are of is returned, and a flag that the GPU sets where they do not hold;
    # None where there are none.
    x, weight, out = product_operands(
        x, weight, out, num_rows, num_columns, depth, x_turned, weight_turned
    )
    # Splitting costs what it saves, unless sums are so short that writing the result takes the time.
    # A gradient's sum is as long as the batch.
    fewest = min(num_rows, num_columns)
    is_short = depth < 256 and not 128 <= 4 * depth <= fewest
    converts = product_converts(x, weight, depth, x_turned, weight_turned)
    in_one_call = converts and not weight_turned
    of_tile = (num_columns, num_rows) if converts else (num_rows, num_columns)
    tiles = ceil_div(of_tile[0], 128) * ceil_div(of_tile[1], {{ product_n }})
    cut = product_cut(tiles, depth) if out.dim() == 2 and not in_one_call else None
    pieces = ceil_div(depth, cut) if cut else 1
    is_long = pieces * out.numel() > 2**28 if cut else depth > LONGEST
    if fewest < 128 or is_short or is_long:
        made = out if apart is None else torch.empty_like(out)
        product_as_pytorch(x, weight, bias, made)
        if apart is not None:
            apart(made)
        return None
    if in_one_call:
        # Halves of x, units and means of its rows, marks of the weight's rows, and a flag.
        numbers = num_rows * (ceil_div(depth, 16) * 16 + 2) + num_columns + 1
        room = torch.empty(numbers, dtype=torch.float32, device=x.device)
        cuda_code(
            function + "_converted", x, weight, bias, out, room, *given,
            num_rows, num_columns, depth,
        )
        return {{ product_n }}, room[-1:].view(torch.int32)
    # Rows of halves begin at multiples of 16 bytes; of 32, which Triton stores as fast as it can.
    padded = cut or ceil_div(depth, 16) * 16
    odd = torch.zeros(1, dtype=torch.int32, device=x.device)
    # A weight's gradient is a sum over samples, and behind a normalisation those of large numbers
    # have small gradients: less the mean of others these would have its error, times those numbers.
    x_halves, x_high, x_unit, x_mean = product_split(
        x, padded, True, odd, not x_turned, cut, 1 if converts else LOW_TIMES
    )
    x_low = x_halves[:, :padded]
    made, own, more, added = out, function, given, bias
    if cut:
        made, own, more, added = out.new_empty(pieces, *out.shape), "product_of_rows", (), None
        if has_moments:
            function, given = own, ()
    x_batches = len(x_unit) // num_rows
    if converts:
        w_batches = pieces if weight.dim() == 2 else len(weight)
        marks = torch.empty(w_batches * num_columns, dtype=torch.int32, device=x.device)
        apart = cut * x.stride(-1) if cut else x.stride(0), x.stride(-2), x.stride(-1)
        numbers = [num_rows, num_columns, padded if cut else depth, depth, padded]
        numbers = [*numbers, x_batches, w_batches, *apart]
        numbers = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        cuda_code(
            own + "_turned", x_high, x_low, x_unit, x_mean, x, weight, added, made, marks, odd,
            *more, numbers, len(numbers),
        )
    else:
        halves, high, unit, sums = product_split(weight, padded, False, odd, cut=cut)
        # First: the kernel takes what is repaired from `made`, so that its epilogue is of all.
        product_repair(x, weight, added, x_unit, unit, odd, made, cut)
        cuda_code(
            own, x_high, x_low, high, halves[:, padded:], x_unit, x_mean, unit, sums, added, made,
            *more, num_rows, num_columns, padded, x_batches, len(unit) // num_columns,
        )
    if cut:
        cuda_code(
            function + "_in_pieces", made, bias, out, *given, num_rows, num_columns, pieces
        )
    return None if cut else ({{ product_n }}, odd) if converts else (128, None)


@replayed
def product_by_wgmma(
    x, weight, bias, out, num_rows, num_columns, depth, x_turned, weight_turned
):
    product_and_more_by_wgmma(
        x, weight, bias, out, num_rows, num_columns, depth, x_turned, weight_turned
    )
