import torch

# ---- float32 products of float16 ones ----
#
# A row is scaled by a power of two and split: high + low are its 22 leading bits. A product is
# then high x high + low x high + high x low, each by PyTorch's own float16 product with float32
# results. Tensor cores truncate what they add up, so the first is made in pieces of `chunk`
# columns, which are added in float32. Truncation is the smaller, the smaller sums are on the way:
# each row of x loses its mean first, whose product is the mean times the weight's sums of rows.
# Rows with an Inf or a NaN have a unit of NaN, and so have rows of so wide a range that float16
# would lose many of their numbers, where that can be seen beside the rounding of their largest
# one's products; what they give is computed from three numbers of bfloat16 each.


{% include "_lib/triton_halves.py" %}


@triton.jit
def product_scaled(values, one, other):
    # The smaller power of two first: nothing on the way is beyond float32.
    return values * tl.minimum(one, other) * tl.maximum(one, other)


@launched
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
    total = tl.load(small + place, mask=inside, other=0.0) / 2048  # LOW_TIMES
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


@triton.jit
def product_parts(values):
    # Three numbers of eight bits for each of these, the second times 2^8 and the third times 2^16,
    # so that subnormal ones lose nothing: all that float32 holds, of its whole range. And the third
    # with what is Inf or NaN, which times 0 is NaN: in the others these are 1 or -1.
    most: tl.constexpr = 3.3895313892515355e38  # of bfloat16
    is_finite = tl.abs(values) < float("inf")
    rest = tl.where(is_finite, values, tl.where(values > 0, 1.0, -1.0))
    high = tl.clamp(rest, -most, most).to(tl.bfloat16)
    rest = (rest - high.to(tl.float32)) * 256
    middle = rest.to(tl.bfloat16)
    low = (rest - middle.to(tl.float32)) * 256
    return high, middle, low.to(tl.bfloat16), tl.where(is_finite, low, values).to(tl.bfloat16)


@triton.jit
def product_exactly(a, b):
    # A product as float32 has it, of a few terms each: all nine products of their parts, those of
    # one size together, since tensor cores truncate what they add up.
    high, middle, low, last = product_parts(a)
    other_high, other_middle, other_low, other_last = product_parts(b)
    rest = tl.dot(low, other_low) / 256
    rest = tl.dot(low, other_middle, rest)
    rest = tl.dot(middle, other_low, rest) / 256
    rest = tl.dot(last, other_high, rest)
    rest = tl.dot(high, other_last, rest)
    rest = tl.dot(middle, other_middle, rest) / 256
    rest = tl.dot(middle, other_high, rest)
    rest = tl.dot(high, other_middle, rest) / 256
    large = tl.dot(high, other_high)
    # Parts of one number may have two signs: where it is beyond float32, so would they be.
    return tl.where(tl.abs(large) == float("inf"), large, large + rest)


@triton.jit
def product_computed(
    found, first, first_other, given, other, other_unit, own_bias, bias, out,
    num_rows, num_others, end, row_apart, column_apart, other_row, other_column, out_row, out_column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):
    # As float32 has it, what some of the rows `found`, behind how many these are, give with some of
    # the others; with `other_unit` only those that have one. `own_bias` is added by row.
    places = first + tl.arange(0, ROWS)
    is_row = places < tl.load(found)
    rows = tl.load(found + 1 + places, mask=is_row, other=num_rows)
    others = first_other + tl.arange(0, COLUMNS)
    inside = is_row[:, None] & (others < num_others)[None, :]
    if other_unit is not None:
        unit = tl.load(other_unit + others, mask=others < num_others, other=1.0)
        inside &= (unit == unit)[None, :]
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for start in tl.range(0, end, DEPTH, num_stages=1):
        at = start + tl.arange(0, DEPTH)
        a = product_rows(given, rows, at, num_rows, end, row_apart, column_apart)
        b = product_rows(other, others, at, num_others, end, other_row, other_column)
        total += product_exactly(a, tl.trans(b))
    if own_bias is not None:
        total += tl.load(own_bias + rows, mask=is_row, other=0.0)[:, None]
    if bias is not None:
        total += tl.load(bias + others, mask=others < num_others, other=0.0)[None, :]
    out += rows.to(tl.int64)[:, None] * out_row + others.to(tl.int64)[None, :] * out_column
    tl.store(out, total, mask=inside)


@triton.jit
def product_place(tile, num_found, num_others, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    # The first row and the first other one of a tile, and whether there is such a tile. Programs
    # beside each other have rows and others that they share.
    down, across = tl.cdiv(num_found, ROWS), tl.cdiv(num_others, COLUMNS)
    group = tile // (8 * across)
    height = tl.maximum(tl.minimum(down - group * 8, 8), 1)
    place = tile % (8 * across)
    return (group * 8 + place % height) * ROWS, place // height * COLUMNS, tile < down * across


@launched
@triton.jit(do_not_specialize=["num_rows"])
def product_repair_kernel(
    x, weight, x_unit, weight_unit, odd, x_found, weight_found, out, num_rows, num_columns, depth,
    all_depth, batches, bias, x_batch, x_row, x_column, x_rows,
    weight_batch, weight_row, weight_column, weight_rows,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):
    # What rows of x without a unit give, with all columns, and then what such columns give with
    # all other rows.
    of_rows = tl.cdiv(num_rows, ROWS) * tl.cdiv(num_columns, COLUMNS)
    of_columns = tl.cdiv(num_columns, ROWS) * tl.cdiv(num_rows, COLUMNS)
    num_tiles = batches * (of_rows + of_columns)
    if tl.load(odd) == 0:
        num_tiles = 0
    for number in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), num_stages=1):
        batch, tile = (number // (of_rows + of_columns)).to(tl.int64), number % (of_rows + of_columns)
        end = depth
        if all_depth is not None:
            end = tl.minimum(depth, all_depth - batch * depth).to(tl.int32)
        # Of what all batches share there is one list.
        rows_found = x_found + tl.where(x_rows == 0, 0, batch * (num_rows + 1))
        columns_found = weight_found + tl.where(weight_rows == 0, 0, batch * (num_columns + 1))
        into = out + batch * num_rows * num_columns
        if tile < of_rows:
            row, column, is_tile = product_place(
                tile, tl.load(rows_found), num_columns, ROWS, COLUMNS
            )
            if is_tile:
                product_computed(
                    rows_found, row, column, x + batch * x_batch, weight + batch * weight_batch,
                    None, None, bias, into, num_rows, num_columns, end,
                    x_row, x_column, weight_row, weight_column, num_columns, 1,
                    ROWS, COLUMNS, DEPTH,
                )
        else:
            column, row, is_tile = product_place(
                tile - of_rows, tl.load(columns_found), num_rows, ROWS, COLUMNS
            )
            if is_tile:
                product_computed(
                    columns_found, column, row, weight + batch * weight_batch, x + batch * x_batch,
                    x_unit + batch * x_rows, bias, None, into, num_columns, num_rows, end,
                    weight_row, weight_column, x_row, x_column, 1, num_columns,
                    ROWS, COLUMNS, DEPTH,
                )


@triton.jit
def product_listed(unit, found, num_rows, ROWS: tl.constexpr):
    # How many rows have no unit, and which.
    count = tl.zeros([], dtype=tl.int32)
    for first in range(0, num_rows, ROWS):
        rows = first + tl.arange(0, ROWS)
        own = tl.load(unit + rows, mask=rows < num_rows, other=1.0)
        is_odd = (own != own).to(tl.int32)
        places = found + count + tl.cumsum(is_odd, axis=0)
        tl.store(places, rows, mask=is_odd > 0)
        count += tl.sum(is_odd, axis=0)
    tl.store(found, count)


@launched
@triton.jit(do_not_specialize=["num_rows", "num_columns", "x_batches"])
def product_list_kernel(
    x_unit, weight_unit, odd, x_found, weight_found, num_rows, num_columns, x_batches,
    ROWS: tl.constexpr,
):
    if tl.load(odd) != 0:
        batch = tl.program_id(0).to(tl.int64)
        if batch < x_batches:
            product_listed(
                x_unit + batch * num_rows, x_found + batch * (num_rows + 1), num_rows, ROWS
            )
        else:
            batch -= x_batches
            product_listed(
                weight_unit + batch * num_columns, weight_found + batch * (num_columns + 1),
                num_columns, ROWS,
            )


@triton.jit
def product_weigh(
    given, unit, other, other_unit, first_row, batch, batches, num_rows, num_others, end,
    given_batch, given_row, given_column, given_rows,
    other_batch, other_row, other_column, other_rows,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):
    # What a row's numbers lose is 2^-48 of its largest at most each, by halves whose low ones are
    # held times 2^11. Of n numbers it is n times that, times a quarter of the largest number of the
    # other operand's row, or less as a rule. Beside a number b of that row, by which the largest is
    # multiplied, any sum in float32 is rounded by 2^-25 of the term: more, unless b is some 2^-12
    # of its row's largest (of 8192 numbers), or smaller. Rows of which more than a 16th of these
    # b are so small, or all are beside the largest of all rows, have a unit of NaN afterwards, and
    # so have wide ones that several products share. A NaN has the unit's exponent in its last
    # bits: what others read is the same before and after.
    rows = first_row + tl.arange(0, ROWS)
    is_row = rows < num_rows
    places = unit + batch * given_rows + rows
    own = tl.load(places, mask=is_row, other=1.0)
    if tl.max((own < 0).to(tl.int32), axis=0) > 0:
        given += batch * given_batch
        largest, at = tl.zeros([ROWS], dtype=tl.float32), tl.zeros([ROWS], dtype=tl.int32)
        for first in range(0, end, COLUMNS):
            columns = first + tl.arange(0, COLUMNS)
            values = tl.abs(
                product_rows(given, rows, columns, num_rows, end, given_row, given_column)
            )
            found = tl.max(values, axis=1)
            at = tl.where(found > largest, first + tl.argmax(values, axis=1), at)
            largest = tl.maximum(found, largest)
        other += batch * other_batch
        least = end.to(tl.float32) * 2.0**-12
        num_small = tl.zeros([ROWS], dtype=tl.int32)
        most, most_lost = tl.zeros([ROWS], dtype=tl.float32), tl.zeros([ROWS], dtype=tl.float32)
        for first in range(0, num_others, COLUMNS):
            others = first + tl.arange(0, COLUMNS)
            is_other = others < num_others
            theirs = tl.load(other_unit + batch * other_rows + others, mask=is_other, other=0.0)
            in_nan = (theirs.to(tl.int32, bitcast=True) & 255) << 23
            theirs = tl.where(theirs == theirs, theirs, in_nan.to(tl.float32, bitcast=True))
            values = product_rows(other, at, others, end, num_others, other_column, other_row)
            values, lost = tl.abs(values), tl.abs(theirs) * least
            num_small += tl.sum(((values < lost[None, :]) & is_other[None, :]).to(tl.int32), axis=1)
            most = tl.maximum(most, tl.max(values, axis=1))
            most_lost = tl.maximum(most_lost, tl.max(lost, axis=0))
        is_shared = (given_rows == 0) & (batches > 1)
        judged = (-own).to(tl.int32, bitcast=True)
        wants = (num_small * 16 > num_others) | (most < most_lost) | is_shared
        judged = tl.where(wants, (judged >> 23) | 0x7FC00000, judged)
        tl.store(places, judged.to(tl.float32, bitcast=True), mask=is_row & (own < 0))


@launched
@triton.jit(do_not_specialize=["num_rows", "num_columns"])
def product_wide_kernel(
    x, weight, x_unit, weight_unit, odd, num_rows, num_columns, depth, all_depth, batches,
    x_batch, x_row, x_column, x_rows, weight_batch, weight_row, weight_column, weight_rows,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):
    of_x = tl.cdiv(num_rows, ROWS)
    each = of_x + tl.cdiv(num_columns, ROWS)
    num_blocks = batches * each
    if tl.load(odd) == 0:
        num_blocks = 0
    for block in tl.range(tl.program_id(0), num_blocks, tl.num_programs(0), num_stages=1):
        batch, place = (block // each).to(tl.int64), block % each
        end = depth
        if all_depth is not None:
            end = tl.minimum(depth, all_depth - batch * depth).to(tl.int32)
        if place < of_x:
            product_weigh(
                x, x_unit, weight, weight_unit, place * ROWS, batch, batches, num_rows,
                num_columns, end,
                x_batch, x_row, x_column, x_rows,
                weight_batch, weight_row, weight_column, weight_rows, ROWS, COLUMNS,
            )
        else:
            product_weigh(
                weight, weight_unit, x, x_unit, (place - of_x) * ROWS, batch, batches, num_columns,
                num_rows, end, weight_batch, weight_row, weight_column, weight_rows,
                x_batch, x_row, x_column, x_rows, ROWS, COLUMNS,
            )


def product_repair(x, weight, bias, x_unit, weight_unit, odd, out, cut=None):
    # Writes what rows and columns with a unit of NaN give, and nothing else; `cut` as where x and
    # weight are split. These are listed first: the time is theirs alone, and little where nothing
    # is odd.
    x, weight = (t.view(-1, *t.shape[-2:]) for t in (x, weight))
    num_rows, num_columns, depth = x.shape[1], weight.shape[1], x.shape[2]
    batches = ceil_div(depth, cut) if cut else max(len(x), len(weight))
    apart = [
        (cut * t.stride(2) if cut else t.stride(0), t.shape[1]) if cut or len(t) > 1 else (0, 0)
        for t in (x, weight)
    ]
    operands = x, weight, x_unit, weight_unit, odd
    sizes = num_rows, num_columns, cut or depth, depth if cut else None
    strides = (
        apart[0][0], x.stride(1), x.stride(2), apart[0][1],
        apart[1][0], weight.stride(1), weight.stride(2), apart[1][1],
    )
    blocks = batches * (ceil_div(num_rows, 16) + ceil_div(num_columns, 16))
    product_wide_kernel[(min(blocks, PROGRAMS),)](
        *operands, *sizes, batches, *strides, ROWS=16, COLUMNS=128, num_warps=4
    )
    x_batches, weight_batches = len(x_unit) // num_rows, len(weight_unit) // num_columns
    found = torch.empty(
        x_batches * (num_rows + 1) + weight_batches * (num_columns + 1),
        dtype=torch.int32, device=x.device,
    )
    lists = found, found[x_batches * (num_rows + 1) :]
    product_list_kernel[(x_batches + weight_batches,)](
        x_unit, weight_unit, odd, *lists, num_rows, num_columns, x_batches, ROWS=1024, num_warps=4
    )
    tiles = ceil_div(num_rows, 64) * ceil_div(num_columns, 64)
    # Two of its programs fill a multiprocessor; more would take long to start, mostly for nothing.
    product_repair_kernel[(min(2 * batches * tiles, 512),)](
        *operands, *lists, out, *sizes, batches, bias, *strides,
        ROWS=128, COLUMNS=64, DEPTH=32, num_warps=8,
    )


def product_as_pytorch(x, weight, bias, out):
    if x.dim() + weight.dim() > 4:
        torch.matmul(x, weight.transpose(-1, -2), out=out)
    elif bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def product_operands(x, weight, out, num_rows, num_columns, depth, x_turned, weight_turned):
    # As matrices, or as batches of these, where there are several. What is turned lies the other
    # way in memory: x as [depth, num_rows], weight as [depth, num_columns].
    def matrices(given, rows, is_turned):
        if not is_turned and given.shape == (rows, depth):
            return given
        found = given.reshape(-1, depth, rows).mT if is_turned else given.reshape(-1, rows, depth)
        return found[0] if len(found) == 1 else found

    x = matrices(x, num_rows, x_turned)
    if out.shape != (num_rows, num_columns):
        out = out.view(-1, num_rows, num_columns)
        out = out[0] if len(out) == 1 else out
    return x, matrices(weight, num_columns, weight_turned), out


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
    num_pieces = max(4, ceil_div(depth, chunk))  # few pieces would be most of a short sum
    piece = ceil_div(ceil_div(depth, num_pieces), 8) * 8  # float16 of 16 bytes
    odd = torch.zeros(1, dtype=torch.int32, device=x.device)
    x_halves, x_high, x_unit, x_mean = product_split(x, num_pieces * piece, True, odd)
    halves, high, unit, sums = product_split(weight, num_pieces * piece, False, odd)
    small = torch.mm(x_halves, halves.t(), out_dtype=torch.float32)
    pieces = high.unflatten(1, (num_pieces, piece)).permute(1, 2, 0)
    most = max(128, 2**28 // (num_pieces * num_columns) // 128 * 128)  # of 1 GB at a time
    for first in range(0, num_rows, most):
        part = x_high[first : first + most]
        count = len(part)
        part = part.unflatten(1, (num_pieces, piece)).transpose(0, 1)
        main = torch.bmm(part, pieces, out_dtype=torch.float32)
        end = first + count
        product_join_kernel[(ceil_div(count, 32) * ceil_div(num_columns, 128),)](
            small[first:end], main, x_unit[first:end], x_mean[first:end], unit, sums, bias,
            out[first:end], count, num_columns,
            num_pieces, ROWS=32, COLUMNS=128, num_warps=4,
        )
    product_repair(x, weight, bias, x_unit, unit, odd, out)
