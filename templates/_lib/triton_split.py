# ---- operands, split ahead into {{ half }} ----
#
# Of a row, the high parts come first and the low parts after them, each padded with zeros.
{% if centre %}


@triton.jit
def fused_gemm_scale_bn_centre_kernel(
    x, x_centre, batch, in_features, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    # Any constant row may be subtracted from x. The mean of a few rows, evenly spread, is enough.
    rows = tl.arange(0, ROWS).to(tl.int64) * batch // ROWS
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < in_features
    values = tl.load(
        x + rows[:, None] * in_features + columns[None, :], mask=inside[None, :], other=0.0
    )
    centre = tl.sum(values, axis=0) / ROWS
    # An Inf must reach the mean as it is, and Inf - Inf is none.
    centre = tl.where(tl.abs(centre) < float("inf"), centre, 0.0)
    tl.store(x_centre + columns, centre, mask=inside)


def fused_gemm_scale_bn_centre(x, x_centre, batch, in_features):
    fused_gemm_scale_bn_centre_kernel[(triton.cdiv(in_features, 32),)](
        x, x_centre, batch, in_features, ROWS=128, BLOCK=32, num_warps=4
    )
{% endif %}


@triton.jit(do_not_specialize=["batch", "num_programs"])
def fused_gemm_scale_bn_mean_kernel(
    {{ of_mean }}, num_programs, BLOCK: tl.constexpr, CHUNK: tl.constexpr
):
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < in_features
    total = tl.zeros([CHUNK, BLOCK], dtype=tl.float64)
    for first in tl.range(0, num_programs, CHUNK):
        rows = first + tl.arange(0, CHUNK)
        places = x_sums + rows.to(tl.int64)[:, None] * in_features + columns[None, :]
        present = (rows < num_programs)[:, None] & inside[None, :]
        total += tl.load(places, mask=present, other=0.0).to(tl.float64)
    mean = tl.sum(total, axis=0) / batch
    if x_centre is not None:
        mean += tl.load(x_centre + columns, mask=inside, other=0.0).to(tl.float64)
    tl.store(x_mean + columns, mean.to(tl.float32), mask=inside)


def fused_gemm_scale_bn_mean({{ of_mean }}):
    num_programs = triton.cdiv(batch, triton.cdiv(batch, x_sums.shape[0]))
    fused_gemm_scale_bn_mean_kernel[(triton.cdiv(in_features, 32),)](
        {{ of_mean }}, num_programs, BLOCK=32, CHUNK=64, num_warps=4
    )


@triton.jit
def fused_gemm_scale_bn_row_block(source, centre, row, first, num_columns, BLOCK: tl.constexpr):
    columns = first + tl.arange(0, BLOCK)
    inside = columns < num_columns
    values = tl.load(source + row * num_columns + columns, mask=inside, other=0.0)
    if centre is not None:
        values -= tl.load(centre + columns, mask=inside, other=0.0)
    return values


@triton.jit
def fused_gemm_scale_bn_store_split(
    values, factor, halves, bytes_, row, first, padded_columns, BLOCK: tl.constexpr
):
{% if is_scaled %}
    values *= factor
{% endif %}
    main = values.to(tl.{{ half }})
    columns = first + tl.arange(0, BLOCK)
    inside = columns < padded_columns
{% if has_low %}
    place = halves + row * (2 * padded_columns) + columns
    tl.store(place, main, mask=inside)
    low = (values - main.to(tl.float32)).to(tl.{{ half }})
    tl.store(place + padded_columns, low, mask=inside)
{% else %}
    tl.store(halves + row * padded_columns + columns, main, mask=inside)
{% endif %}
{% if has_bytes %}
    # 2^-6 and 2^6 bring both into float8's range and cancel in the correction products, which
    # then carry the same power of two as the float16 product.
    residual = values - main.to(tl.float32)
    place = bytes_ + row * (2 * padded_columns) + columns
    tl.store(place, (values * 0.015625).to(tl.float8e4nv), mask=inside)
    tl.store(place + padded_columns, (residual * 64.0).to(tl.float8e4nv), mask=inside)
{% endif %}
{% if is_scaled %}


@triton.jit
def fused_gemm_scale_bn_factor(largest, unit, row):
    # A power of two brings the row's largest value into [2^12, 2^13), whatever the data's range:
    # rounding to float16 is then relative to it, and the residual is at most 2.
    exponent = (tl.max(largest, axis=0).to(tl.int32, bitcast=True) >> 23) - 127
    shift = tl.minimum(12 - exponent, 126)
    tl.store(unit + row, ((127 - shift) << 23).to(tl.float32, bitcast=True))
    return ((shift + 127) << 23).to(tl.float32, bitcast=True)
{% endif %}


@triton.jit(do_not_specialize=["num_rows", "rows_per_program"])
def fused_gemm_scale_bn_split_kernel(
    {{ of_split }},
    num_rows, rows_per_program, num_columns, padded_columns,
    BLOCK: tl.constexpr, IS_ONE_BLOCK: tl.constexpr,
):
    # Each row is centred, multiplied by another one (`other` gives `product`), scaled and split;
    # the rows of a program are added up in `sums`.
    begin = tl.program_id(0).to(tl.int64) * rows_per_program
    end = tl.minimum(begin + rows_per_program, num_rows)
    factor = 1.0
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for row in tl.range(begin, end):
        if IS_ONE_BLOCK:
            values = fused_gemm_scale_bn_row_block(source, centre, row, 0, num_columns, BLOCK)
            total += values
            if product is not None:
                columns = tl.arange(0, BLOCK)
                weights = tl.load(other + columns, mask=columns < num_columns, other=0.0)
                tl.store(product + row, tl.sum(values * weights, axis=0))
{% if is_scaled %}
            factor = fused_gemm_scale_bn_factor(tl.abs(values), unit, row)
{% endif %}
            fused_gemm_scale_bn_store_split(
                values, factor, halves, bytes_, row, 0, padded_columns, BLOCK
            )
        else:
            largest = tl.zeros([BLOCK], dtype=tl.float32)
            dot = tl.zeros([BLOCK], dtype=tl.float32)
            for first in tl.range(0, num_columns, BLOCK):
                values = fused_gemm_scale_bn_row_block(
                    source, centre, row, first, num_columns, BLOCK
                )
                largest = tl.maximum(largest, tl.abs(values))
                if product is not None:
                    columns = first + tl.arange(0, BLOCK)
                    dot += values * tl.load(other + columns, mask=columns < num_columns, other=0.0)
            if product is not None:
                tl.store(product + row, tl.sum(dot, axis=0))
{% if is_scaled %}
            factor = fused_gemm_scale_bn_factor(largest, unit, row)
{% endif %}
            for first in tl.range(0, padded_columns, BLOCK):
                values = fused_gemm_scale_bn_row_block(
                    source, centre, row, first, num_columns, BLOCK
                )
                fused_gemm_scale_bn_store_split(
                    values, factor, halves, bytes_, row, first, padded_columns, BLOCK
                )
    if sums is not None:
        place = sums + tl.program_id(0).to(tl.int64) * num_columns
        if IS_ONE_BLOCK:
            columns = tl.arange(0, BLOCK)
            tl.store(place + columns, total, mask=columns < num_columns)
        else:
            for first in tl.range(0, num_columns, BLOCK):
                total = tl.zeros([BLOCK], dtype=tl.float32)
                for row in tl.range(begin, end):
                    total += fused_gemm_scale_bn_row_block(
                        source, centre, row, first, num_columns, BLOCK
                    )
                columns = first + tl.arange(0, BLOCK)
                tl.store(place + columns, total, mask=columns < num_columns)


def fused_gemm_scale_bn_split(
    {{ of_split }}, num_rows, num_columns
):
    padded_columns = triton.cdiv(num_columns, 128) * 128
    rows_per_program = 1 if sums is None else triton.cdiv(num_rows, sums.shape[0])
    block = min({{ split_block }}, triton.next_power_of_2(padded_columns))
{% if half == 'bfloat16' %}
    halves = halves.view(torch.bfloat16)
{% endif %}
    bytes_ = None if bytes_ is None else bytes_.view(torch.float8_e4m3fn)
    fused_gemm_scale_bn_split_kernel[(triton.cdiv(num_rows, rows_per_program),)](
        {{ of_split }},
        num_rows, rows_per_program, num_columns, padded_columns,
        BLOCK=block, IS_ONE_BLOCK=padded_columns <= block, num_warps={{ split_warps }},
    )
