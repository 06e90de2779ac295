import torch

# ---- float32 products of float16 ones ----
#
# A row is scaled by a power of two and split: high + low are its 22 leading bits. A product is
# then high x high + low x high + high x low, each by PyTorch's own float16 product with float32
# results. Tensor cores truncate what they add up, so the first is made in pieces of `chunk`
# columns, which are added in float32. Truncation is the smaller, the smaller sums are on the way:
# each row of x loses its mean first, whose product is the mean times the weight's sums of rows.
# Rows with an Inf or a NaN have a unit of NaN, and so have rows of so wide a range that float16
# would lose many of their numbers; what they give is computed in float32.


@triton.jit
def product_unit(largest):
    # The power of two that brings the largest value, given as its bits, to [2^12, 2^13), and its
    # inverse: float16 then has 2^-25 of it at least, and with a mean off nothing near its own
    # largest.
    exponent = (largest >> 23) - 127
    shift = tl.minimum(12 - exponent, 126)
    factor = ((shift + 127) << 23).to(tl.float32, bitcast=True)
    return factor, ((127 - shift) << 23).to(tl.float32, bitcast=True)


@triton.jit
def product_rows(source, rows, columns, num_rows, num_columns, row_stride, column_stride):
    places = source + rows.to(tl.int64)[:, None] * row_stride
    places += columns.to(tl.int64)[None, :] * column_stride
    inside = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    return tl.load(places, mask=inside, other=0.0)


@triton.jit
def product_store(
    values, mean, factor, high, low, rows, columns, num_rows, num_columns, padded_columns
):
    # Both are halves of a row of twice as many columns. Scaled first: no difference overflows.
    # Returns how many numbers of each row are below 2^-20 of its largest: their low halves are
    # of few bits.
    values = values * factor[:, None]
    lost = tl.sum(((tl.abs(values) < 2.0**-8) & (values != 0)).to(tl.int32), axis=1)
    values = tl.where((columns < num_columns)[None, :], values - mean[:, None], 0)
    main = values.to(tl.float16)
    place = rows.to(tl.int64)[:, None] * (2 * padded_columns) + columns[None, :]
    inside = (rows < num_rows)[:, None] & (columns < padded_columns)[None, :]
    tl.store(high + place, main, mask=inside)
    tl.store(low + place, (values - main.to(tl.float32)).to(tl.float16), mask=inside)
    return lost


@triton.jit(do_not_specialize=["num_rows"])
def product_split_kernel(
    source, high, low, unit, means, sums, num_rows, num_columns, padded_columns,
    row_stride, column_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, IS_ONE_BLOCK: tl.constexpr,
    LOSES_MEAN: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    values = product_rows(
        source, rows, columns, num_rows, num_columns, row_stride, column_stride
    )
    largest = tl.max(tl.abs(values), axis=1)
    total = tl.sum(values.to(tl.float64), axis=1)
    for first in range(COLUMNS, num_columns, COLUMNS):
        values = product_rows(
            source, rows, first + columns, num_rows, num_columns, row_stride, column_stride
        )
        largest = tl.maximum(largest, tl.max(tl.abs(values), axis=1))
        total += tl.sum(values.to(tl.float64), axis=1)
    factor, own = product_unit(largest.to(tl.int32, bitcast=True))
    is_finite = (tl.abs(total) < float("inf")) & (largest < float("inf"))
    scaled_total = total * factor.to(tl.float64)
    mean = tl.zeros([ROWS], dtype=tl.float32)
    if means is not None:
        if LOSES_MEAN:
            # Of few bits: what is exact in float32 without it is exact with it.
            mean = (tl.floor(scaled_total / num_columns / 512 + 0.5) * 512).to(tl.float32)
        tl.store(means + rows, mean, mask=rows < num_rows)
    if sums is not None:
        tl.store(sums + rows, scaled_total.to(tl.float32), mask=rows < num_rows)
    if IS_ONE_BLOCK:
        lost = product_store(
            values, mean, factor, high, low, rows, columns, num_rows, num_columns, padded_columns
        )
    else:
        lost = tl.zeros([ROWS], dtype=tl.int32)
        for first in range(0, padded_columns, COLUMNS):
            values = product_rows(
                source, rows, first + columns, num_rows, num_columns, row_stride, column_stride
            )
            lost += product_store(
                values, mean, factor, high, low, rows, first + columns, num_rows, num_columns,
                padded_columns,
            )
    is_fine = is_finite & (lost * 8 <= num_columns)
    tl.store(unit + rows, tl.where(is_fine, own, float("nan")), mask=rows < num_rows)


def product_split(source, padded_columns, is_x, loses_mean=True):
    # Low and high parts of x, high and low ones of the weight: one product of such rows makes
    # both of the small products.
    num_rows, num_columns = source.shape
    made = torch.empty((num_rows, 2 * padded_columns), dtype=torch.float16, device=source.device)
    high = made[:, padded_columns:] if is_x else made[:, :padded_columns]
    low = made[:, :padded_columns] if is_x else made[:, padded_columns:]
    unit, beside = torch.empty((2, num_rows), dtype=torch.float32, device=source.device)
    if source.stride(1) == 1:
        rows, columns = 1, min(8192, triton.next_power_of_2(padded_columns))
    else:  # what lies together is of several rows
        rows, columns = 64, 64
    product_split_kernel[(triton.cdiv(num_rows, rows),)](
        source, high, low, unit, beside if is_x else None, None if is_x else beside,
        num_rows, num_columns, padded_columns, source.stride(0), source.stride(1),
        ROWS=rows, COLUMNS=columns, IS_ONE_BLOCK=padded_columns <= columns, LOSES_MEAN=loses_mean,
        num_warps=max(8, rows * columns // 512),
    )
    return made, high, unit, beside


@triton.jit
def product_scaled(values, one, other):
    # The smaller power of two first: nothing on the way is beyond float32.
    return values * tl.minimum(one, other) * tl.maximum(one, other)


@triton.jit(do_not_specialize=["num_rows", "num_pieces"])
def product_join_kernel(
    small, main, x_unit, x_mean, weight_unit, weight_sum, bias, out, num_rows, num_columns,
    num_pieces, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):
    across = tl.cdiv(num_columns, COLUMNS)
    rows = (tl.program_id(0) // across) * ROWS + tl.arange(0, ROWS)
    columns = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = rows < num_rows, columns < num_columns
    inside = is_row[:, None] & is_column[None, :]
    place = rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
    total = tl.load(small + place, mask=inside, other=0.0)
    for _ in tl.range(0, num_pieces, num_stages=1):
        total += tl.load(main + place, mask=inside, other=0.0)
        main += num_rows.to(tl.int64) * num_columns
    mean = tl.load(x_mean + rows, mask=is_row, other=0.0)
    total += mean[:, None] * tl.load(weight_sum + columns, mask=is_column, other=0.0)[None, :]
    one = tl.load(x_unit + rows, mask=is_row, other=0.0)[:, None]
    other = tl.load(weight_unit + columns, mask=is_column, other=0.0)[None, :]
    total = product_scaled(total, one, other)
    if bias is not None:
        total += tl.load(bias + columns, mask=is_column, other=0.0)[None, :]
    tl.store(out + place, total, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def product_repair_kernel(
    x, weight, bias, x_unit, weight_unit, out, num_rows, num_columns, depth,
    x_row, x_column, weight_row, weight_column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):
    across = tl.cdiv(num_columns, COLUMNS)
    for tile in tl.range(
        tl.program_id(0), tl.cdiv(num_rows, ROWS) * across, tl.num_programs(0), num_stages=1
    ):
        rows = (tile // across) * ROWS + tl.arange(0, ROWS)
        columns = (tile % across) * COLUMNS + tl.arange(0, COLUMNS)
        is_row, is_column = rows < num_rows, columns < num_columns
        one = tl.load(x_unit + rows, mask=is_row, other=0.0)
        other = tl.load(weight_unit + columns, mask=is_column, other=0.0)
        wants = (one != one)[:, None] | (other != other)[None, :]
        if tl.max(tl.max(wants.to(tl.int32), axis=1), axis=0) > 0:
            # Short sums in float32: one over all columns would be less exact than PyTorch's own.
            total = tl.zeros([ROWS, COLUMNS], dtype=tl.float64)
            for first in range(0, depth, DEPTH):
                at = first + tl.arange(0, DEPTH)
                a = product_rows(x, rows, at, num_rows, depth, x_row, x_column)
                b = product_rows(
                    weight, columns, at, num_columns, depth, weight_row, weight_column
                )
                total += tl.dot(a, tl.trans(b), input_precision="ieee").to(tl.float64)
            if bias is not None:
                total += tl.load(bias + columns, mask=is_column, other=0.0)[None, :]
            place = rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
            inside = wants & is_row[:, None] & is_column[None, :]
            tl.store(out + place, total.to(tl.float32), mask=inside)


def product_repair(x, weight, bias, x_unit, weight_unit, out):
    # Writes what rows and columns with a unit of NaN give, and nothing else. A program looks at
    # many tiles: of a result of 2^30 numbers as many programs as tiles would take 1 ms to start.
    (num_rows, depth), num_columns = x.shape, len(weight)
    tiles = triton.cdiv(num_rows, 32) * triton.cdiv(num_columns, 32)
    product_repair_kernel[(min(tiles, 8192),)](
        x, weight, bias, x_unit, weight_unit, out, num_rows, num_columns, depth,
        x.stride(0), x.stride(1), weight.stride(0), weight.stride(1),
        ROWS=32, COLUMNS=32, DEPTH=32, num_warps=4,
    )


def product_as_pytorch(x, weight, bias, out):
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def product_operands(x, weight, out, num_rows, num_columns, depth, x_turned, weight_turned):
    # What is turned lies the other way in memory: x as [depth, num_rows], weight as
    # [depth, num_columns].
    x = x.reshape(depth, num_rows).t() if x_turned else x.reshape(num_rows, depth)
    weight = weight.reshape(depth, num_columns).t() if weight_turned else weight.view(-1, depth)
    return x, weight, out.view(num_rows, num_columns)


def product_of_halves(
    x, weight, bias, out, num_rows, num_columns, depth, x_turned, weight_turned, chunk
):
    # x is [num_rows, depth], weight [num_columns, depth], either the other way where turned.
    x, weight, out = product_operands(
        x, weight, out, num_rows, num_columns, depth, x_turned, weight_turned
    )
    sums_in_halves = getattr(torch.backends.cuda.matmul, "allow_fp16_accumulation", False)
    if min(num_rows, num_columns) < 128 or sums_in_halves:  # below, splitting costs what it saves
        product_as_pytorch(x, weight, bias, out)
        return
    num_pieces = max(4, triton.cdiv(depth, chunk))  # few pieces would be most of a short sum
    piece = triton.cdiv(triton.cdiv(depth, num_pieces), 8) * 8  # float16 of 16 bytes
    x_halves, x_high, x_unit, x_mean = product_split(x, num_pieces * piece, True)
    halves, high, unit, sums = product_split(weight, num_pieces * piece, False)
    small = torch.mm(x_halves, halves.t(), out_dtype=torch.float32)
    pieces = high.unflatten(1, (num_pieces, piece)).permute(1, 2, 0)
    most = max(128, 2**28 // (num_pieces * num_columns) // 128 * 128)  # of 1 GB at a time
    for first in range(0, num_rows, most):
        part = x_high[first : first + most]
        count = len(part)
        part = part.unflatten(1, (num_pieces, piece)).transpose(0, 1)
        main = torch.bmm(part, pieces, out_dtype=torch.float32)
        end = first + count
        product_join_kernel[(triton.cdiv(count, 32) * triton.cdiv(num_columns, 128),)](
            small[first:end], main, x_unit[first:end], x_mean[first:end], unit, sums, bias,
            out[first:end], count, num_columns,
            num_pieces, ROWS=32, COLUMNS=128, num_warps=4,
        )
    product_repair(x, weight, bias, x_unit, unit, out)
