# ---- rows of float32 as float16 halves ----
#
# Of a row the largest magnitude and the sum are found first, and then its halves. Rows whose
# numbers lie together are one program's each, or a few rows are; of others, where numbers of
# several rows lie together, a program has a piece of 64 rows, which is read twice. What the pieces
# of a row have found is put together by those that read it next. Low halves may be held times
# `low_times`, as in LOW_TIMES: what is a millionth of its row's largest number, as a softmax's
# gradients are, keeps as many bits as the largest then.


LOW_TIMES = 2048


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
    values, mean, factor, high, low, rows, columns, num_rows, num_columns, padded_columns,
    LOW_TIMES: tl.constexpr,
):
    # Both are halves of a row of twice as many columns. Scaled first: no difference overflows.
    # Returns which numbers are below 2^-20 of their row's largest, 2^-30 with low halves
    # that are held times 2^11: they have 17 bits left, or fewer.
    values = values * factor[:, None]
    least: tl.constexpr = 2.0**-8 if LOW_TIMES == 1 else 2.0**-18
    lost = ((tl.abs(values) < least) & (values != 0)).to(tl.int32)
    values = tl.where((columns < num_columns)[None, :], values - mean[:, None], 0)
    main = values.to(tl.float16)
    place = rows.to(tl.int64)[:, None] * (2 * padded_columns) + columns[None, :]
    inside = (rows < num_rows)[:, None] & (columns < padded_columns)[None, :]
    tl.store(high + place, main, mask=inside)
    rest = (values - main.to(tl.float32)) * LOW_TIMES
    tl.store(low + place, rest.to(tl.float16), mask=inside)
    return lost


@triton.jit
def product_block(num_rows, num_pieces, ROWS: tl.constexpr, IS_BEHIND: tl.constexpr):
    # The batch, the piece of its columns and the first row of a program. Programs beside each
    # other have rows beside each other, which may lie together. What is read a second time is from
    # the end on, which L2 may still have.
    blocks = tl.cdiv(num_rows, ROWS)
    program = tl.program_id(0)
    if IS_BEHIND:
        program = tl.num_programs(0) - 1 - program
    return program // blocks // num_pieces, program // blocks % num_pieces, program % blocks * ROWS


@triton.jit
def product_range(
    source, rows, first, end, num_rows, row_stride, column_stride, COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    # Of columns from `first` to `end` the largest magnitude of each row, its sum, and the last
    # block of numbers that was read. Lanes wait for each other once, at the end.
    columns = first + tl.arange(0, COLUMNS)
    values = product_rows(source, rows, columns, num_rows, end, row_stride, column_stride)
    largest = tl.abs(values)
    total = values.to(tl.float64)
    for later in tl.range(first + COLUMNS, end, COLUMNS, num_stages=STAGES):
        columns = later + tl.arange(0, COLUMNS)
        values = product_rows(source, rows, columns, num_rows, end, row_stride, column_stride)
        largest = tl.maximum(largest, tl.abs(values))
        total += values.to(tl.float64)
    return tl.max(largest, axis=1), tl.sum(total, axis=1), values


@launched
@triton.jit(do_not_specialize=["num_rows", "num_pieces"])
def product_range_kernel(
    source, largest, totals, num_rows, num_columns, all_columns, piece_columns, num_pieces,
    batch_stride, row_stride, column_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, IS_EVEN: tl.constexpr, STAGES: tl.constexpr,
):
    batch, piece, first_row = product_block(num_rows, num_pieces, ROWS, False)
    rows = first_row + tl.arange(0, ROWS)
    source += batch.to(tl.int64) * batch_stride
    if IS_EVEN:
        num_rows = num_rows // 16 * 16
    if all_columns is not None:
        num_columns = tl.minimum(num_columns, all_columns - batch * num_columns)
    first = piece * piece_columns
    end = tl.minimum(first + piece_columns, num_columns)
    found, total, _ = product_range(
        source, rows, first, end, num_rows, row_stride, column_stride, COLUMNS, STAGES
    )
    place = (batch * num_pieces + piece).to(tl.int64) * num_rows + rows
    tl.store(largest + place, found, mask=rows < num_rows)
    tl.store(totals + place, total, mask=rows < num_rows)


@triton.jit
def product_found(
    ranges, totals, rows, num_rows, before, first_piece, num_pieces, PIECES: tl.constexpr
):
    # The largest magnitude and the sum of each row in some pieces of it; `before` are other rows'.
    pieces = first_piece + tl.arange(0, PIECES)
    places = (before + pieces).to(tl.int64)[:, None] * num_rows + rows[None, :]
    inside = (pieces < num_pieces)[:, None] & (rows < num_rows)[None, :]
    found = tl.max(tl.load(ranges + places, mask=inside, other=0.0), axis=0)
    return found, tl.sum(tl.load(totals + places, mask=inside, other=0.0), axis=0)


@launched
@triton.jit(do_not_specialize=["num_rows", "num_pieces"])
def product_split_kernel(
    source, high, low, unit, means, sums, odd, ranges, totals, counts,
    num_rows, num_columns, all_columns, padded_columns, piece_columns, num_pieces,
    batch_stride, row_stride, column_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, IS_EVEN: tl.constexpr, STAGES: tl.constexpr,
    IS_ONE_BLOCK: tl.constexpr, LOSES_MEAN: tl.constexpr, PIECES: tl.constexpr,
    LOW_TIMES: tl.constexpr,
):
    batch, piece, first_row = product_block(num_rows, num_pieces, ROWS, PIECES > 1)
    rows = first_row + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    source += batch.to(tl.int64) * batch_stride
    if IS_EVEN:
        num_rows = num_rows // 16 * 16
    is_row = rows < num_rows
    if all_columns is not None:
        num_columns = tl.minimum(num_columns, all_columns - batch * num_columns)
    if PIECES > 1:
        largest, total = product_found(
            ranges, totals, rows, num_rows, batch * num_pieces, 0, num_pieces, PIECES
        )
        if PIECES > 8:
            for later in range(PIECES, num_pieces, PIECES):
                found, more = product_found(
                    ranges, totals, rows, num_rows, batch * num_pieces, later, num_pieces, PIECES
                )
                largest = tl.maximum(largest, found)
                total += more
    else:
        largest, total, values = product_range(
            source, rows, 0, num_columns, num_rows, row_stride, column_stride, COLUMNS, STAGES
        )
    factor, own = product_unit(largest.to(tl.int32, bitcast=True))
    is_fine = (tl.abs(total) < float("inf")) & (largest < float("inf"))
    scaled_total = total * factor.to(tl.float64)
    # What is made of all batches is of one matrix, whose rows are those of one after the other.
    made = batch.to(tl.int64) * num_rows + rows
    mean = tl.zeros([ROWS], dtype=tl.float32)
    if LOSES_MEAN:
        # Of few bits: what is exact in float32 without it is exact with it.
        mean = (tl.floor(scaled_total / num_columns / 512 + 0.5) * 512).to(tl.float32)
    is_first = is_row & (piece == 0)
    if means is not None:
        tl.store(means + made, mean, mask=is_first)
    if sums is not None:
        tl.store(sums + made, scaled_total.to(tl.float32), mask=is_first)
    high += batch.to(tl.int64) * num_rows * 2 * padded_columns
    low += batch.to(tl.int64) * num_rows * 2 * padded_columns
    if IS_ONE_BLOCK:
        lost = product_store(
            values, mean, factor, high, low, rows, columns, num_rows, num_columns, padded_columns,
            LOW_TIMES,
        )
    else:
        lost = tl.zeros([ROWS, COLUMNS], dtype=tl.int32)
        begin = piece * piece_columns
        end = tl.minimum(begin + piece_columns, padded_columns)
        for first in tl.range(begin, end, COLUMNS, num_stages=STAGES):
            values = product_rows(
                source, rows, first + columns, num_rows, num_columns, row_stride, column_stride
            )
            lost += product_store(
                values, mean, factor, high, low, rows, first + columns, num_rows, num_columns,
                padded_columns, LOW_TIMES,
            )
    num_lost = tl.sum(lost, axis=1)
    own = tl.where(is_fine, own, float("nan"))
    if PIECES > 1:
        place = (batch * num_pieces + piece).to(tl.int64) * num_rows + rows
        tl.store(counts + place, num_lost, mask=is_row)
    else:
        own = product_judged(own, num_lost, num_columns, is_row, odd, LOW_TIMES)
    tl.store(unit + made, own, mask=is_first)


@triton.jit
def product_judged(own, num_lost, num_columns, is_row, odd, LOW_TIMES: tl.constexpr):
    # A row's unit, NaN where it is to be repaired; negative where so many of its numbers are lost
    # that product_wide_kernel is to see whether that matters. Any program may say that there are
    # such rows, and none says that there are none.
    is_wide = num_lost * 8 > num_columns
    own = tl.where(is_wide, float("nan") if LOW_TIMES == 1 else -own, own)
    if tl.max((is_row & ((own > 0) == 0)).to(tl.int32), axis=0) > 0:
        tl.store(odd, 1)
    return own


@launched
@triton.jit(do_not_specialize=["all_rows", "num_rows", "num_pieces"])
def product_units_kernel(
    unit, counts, odd, all_rows, num_rows, num_columns, all_columns, num_pieces,
    ROWS: tl.constexpr, LOW_TIMES: tl.constexpr,
):
    # Behind the pieces of a row: how many of its numbers are lost in all.
    made = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = made < all_rows
    batch = made // num_rows
    if all_columns is not None:
        num_columns = tl.minimum(num_columns, all_columns - batch * num_columns)
    place = (batch * num_pieces).to(tl.int64) * num_rows + made % num_rows
    lost = tl.zeros([ROWS], dtype=tl.int32)
    for _ in range(num_pieces):
        lost += tl.load(counts + place, mask=is_row, other=0)
        place += num_rows
    own = tl.load(unit + made, mask=is_row, other=1.0)
    own = product_judged(own, lost, num_columns, is_row, odd, LOW_TIMES)
    tl.store(unit + made, own, mask=is_row)


PROGRAMS = 2048  # that keep the multiprocessors of a large GPU busy


def product_split(
    source, padded_columns, is_x, odd, loses_mean=True, cut=None, low_times=LOW_TIMES
):
    # The halves of [batches, rows, columns], or of a matrix. Low and high parts of x, high and low
    # ones of the weight: one product of such rows makes both of the small products. Where columns
    # are `cut`, each piece of a matrix's is a batch of as many columns, or of fewer. `odd` is set
    # where a row has no unit.
    source = source.view(-1, *source.shape[-2:])
    batches, num_rows, num_columns = source.shape
    batch_stride, row_stride, column_stride = source.stride()
    all_columns = None
    if cut:
        all_columns, num_columns = num_columns, cut
        batches, batch_stride = ceil_div(all_columns, cut), cut * column_stride
    device, all_rows = source.device, batches * num_rows
    made = torch.empty((all_rows, 2 * padded_columns), dtype=torch.float16, device=device)
    high = made[:, padded_columns:] if is_x else made[:, :padded_columns]
    low = made[:, :padded_columns] if is_x else made[:, padded_columns:]
    unit, beside = torch.empty((2, all_rows), dtype=torch.float32, device=device)
    pieces, piece = 1, padded_columns
    if column_stride == 1:
        columns = min(8192, triton.next_power_of_2(padded_columns))
        rows = max(1, 2048 // columns)  # programs of short rows would take long to start
        stages = 1
    else:  # what lies together is of several rows, which several programs read at a time
        rows, columns, stages = 64, 64 if padded_columns <= 64 else 32, 3
        pieces = max(1, PROGRAMS // (batches * ceil_div(num_rows, rows)))
        piece = max(4, ceil_div(ceil_div(padded_columns, pieces), columns)) * columns
        pieces = ceil_div(padded_columns, piece)
    is_one_block = padded_columns <= columns
    grid = (batches * pieces * ceil_div(num_rows, rows),)
    strides = batch_stride, row_stride, column_stride
    # Rows in whole sixteens let a thread read several numbers at once, which lie together.
    is_even = column_stride != 1 and num_rows % 16 == 0
    sizes = {"ROWS": rows, "COLUMNS": columns, "IS_EVEN": is_even, "STAGES": stages}
    sizes["num_warps"] = max(4, rows * columns // 512)
    ranges = totals = counts = None
    # Read at a time: a kernel for each number of pieces would take long to compile, and a loop takes
    # 3 % of the time where there are few.
    at_once = 1 if pieces == 1 else 8 if pieces <= 8 else 64
    if pieces > 1:
        ranges, counts = torch.empty((2, pieces * all_rows), dtype=torch.float32, device=device)
        counts = counts.view(torch.int32)
        totals = torch.empty(pieces * all_rows, dtype=torch.float64, device=device)
        product_range_kernel[grid](
            source, ranges, totals, num_rows, num_columns, all_columns, piece, pieces, *strides,
            **sizes,
        )
    product_split_kernel[grid](
        source, high, low, unit, beside if is_x else None, None if is_x else beside, odd,
        ranges, totals, counts, num_rows, num_columns, all_columns, padded_columns, piece, pieces,
        *strides, IS_ONE_BLOCK=is_one_block, LOSES_MEAN=is_x and loses_mean,
        PIECES=at_once, LOW_TIMES=low_times, **sizes,
    )
    if pieces > 1:
        product_units_kernel[(ceil_div(all_rows, 256),)](
            unit, counts, odd, all_rows, num_rows, num_columns, all_columns, pieces, ROWS=256,
            LOW_TIMES=low_times,
        )
    return made, high, unit, beside
