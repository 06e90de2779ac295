# ---- what float16 halves can't hold is convolved again in float32 ----
#
# Of samples with an Inf, a NaN or too wide a range, and of all where a filter has such. Names are
# as in triton_convolutions.


@triton.jit
def convolution_exactly(
    source, filters, pixel, column,
    COLUMNS: tl.constexpr, CHANNELS: tl.constexpr, SIZE: tl.constexpr, KERNEL: tl.constexpr,
    STRIDE: tl.constexpr, PAD: tl.constexpr, DILATION: tl.constexpr, MADE: tl.constexpr,
    IS_TRANSPOSED: tl.constexpr, PIXELS: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
):
    # Places of the filter are taken one by one, each a number: as a block of them Triton 3.6 takes
    # masks for alike in pairs of pixels where they are not.
    own: tl.constexpr = SIZE[0] * SIZE[1] * SIZE[2]
    area: tl.constexpr = KERNEL[0] * KERNEL[1] * KERNEL[2]
    made: tl.constexpr = MADE[0] * MADE[1] * MADE[2]
    x = pixel % MADE[2]
    y = pixel // MADE[2] % MADE[1]
    z = pixel // (MADE[1] * MADE[2])
    total = tl.zeros([PIXELS, WIDTH], dtype=tl.float32)
    for place in range(area):
        kz = place // (KERNEL[1] * KERNEL[2])
        ky, kx = place // KERNEL[2] % KERNEL[1], place % KERNEL[2]
        meets = pixel < made
        if IS_TRANSPOSED:
            iz = z + PAD[0] - kz * DILATION[0]
            iy = y + PAD[1] - ky * DILATION[1]
            ix = x + PAD[2] - kx * DILATION[2]
            meets &= (iz % STRIDE[0] == 0) & (iy % STRIDE[1] == 0) & (ix % STRIDE[2] == 0)
            meets &= (iz >= 0) & (iy >= 0) & (ix >= 0)
            iz, iy, ix = iz // STRIDE[0], iy // STRIDE[1], ix // STRIDE[2]
        else:
            iz = z * STRIDE[0] - PAD[0] + kz * DILATION[0]
            iy = y * STRIDE[1] - PAD[1] + ky * DILATION[1]
            ix = x * STRIDE[2] - PAD[2] + kx * DILATION[2]
            meets &= (iz >= 0) & (iy >= 0) & (ix >= 0)
        meets &= (iz < SIZE[0]) & (iy < SIZE[1]) & (ix < SIZE[2])
        there = (iz * SIZE[1] + iy) * SIZE[2] + ix
        for first in range(0, CHANNELS, DEPTH):
            channel = first + tl.arange(0, DEPTH)
            is_own = channel < CHANNELS
            from_image = source + channel.to(tl.int64)[None, :] * own + there[:, None]
            a = tl.load(from_image, mask=meets[:, None] & is_own[None, :], other=0.0)
            if IS_TRANSPOSED:
                line = channel[:, None] * COLUMNS + column[None, :]
            else:
                line = column[None, :] * CHANNELS + channel[:, None]
            inside = is_own[:, None] & (column < COLUMNS)[None, :]
            b = tl.load(filters + line * area + place, mask=inside, other=0.0)
            part = product_exactly(a, b)
            if IS_TRANSPOSED:  # pixels that a place does not reach know nothing of its Inf or NaN
                part = tl.where(meets[:, None], part, 0.0)
            total += part
    return total


@launched
@triton.jit(do_not_specialize=["num_samples"])
def convolution_repair_kernel(
    image, filters, bias, out, largest, lost, unit, given, num_samples,
    COUNT: tl.constexpr, UNITS: tl.constexpr, NUM_UNITS: tl.constexpr, SAMPLES: tl.constexpr,
    COLUMNS: tl.constexpr, CHANNELS: tl.constexpr, SIZE: tl.constexpr, KERNEL: tl.constexpr,
    STRIDE: tl.constexpr, PAD: tl.constexpr, DILATION: tl.constexpr, MADE: tl.constexpr,
    IS_TRANSPOSED: tl.constexpr, PIXELS: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
    EPILOGUE: tl.constexpr,
):
    # Writes what samples and filters that are not fine give, and nothing else. `COUNT` numbers are
    # of a sample. All programs share each sample that needs it; as a rule there is none.
    units = tl.arange(0, UNITS)
    known = tl.load(unit + units, mask=units < NUM_UNITS, other=0.0)
    are_filters_fine = tl.sum((known != known).to(tl.int32), axis=0) == 0
    made: tl.constexpr = MADE[0] * MADE[1] * MADE[2]
    own: tl.constexpr = SIZE[0] * SIZE[1] * SIZE[2]
    across: tl.constexpr = (COLUMNS + WIDTH - 1) // WIDTH
    for begin in range(0, num_samples, SAMPLES):
        samples = begin + tl.arange(0, SAMPLES)
        is_sample = samples < num_samples
        found = tl.load(largest + samples, mask=is_sample, other=0)
        count = tl.load(lost + samples, mask=is_sample, other=0)
        wants = is_sample & ~convolution_is_fine(found, count, COUNT)
        wants = wants | (is_sample & (not are_filters_fine))
        if tl.sum(wants.to(tl.int32), axis=0) > 0:
            for i in range(SAMPLES):
                if tl.sum((wants & (samples == begin + i)).to(tl.int32), axis=0) > 0:
                    source = image + tl.cast(begin + i, tl.int64) * (CHANNELS * own)
                    target = out + tl.cast(begin + i, tl.int64) * (COLUMNS * made)
                    for tile in range(
                        tl.program_id(0), tl.cdiv(made, PIXELS) * across, tl.num_programs(0)
                    ):
                        column = tile % across * WIDTH + tl.arange(0, WIDTH)
                        pixel = tile // across * PIXELS + tl.arange(0, PIXELS)
                        total = convolution_exactly(
                            source, filters, pixel, column, COLUMNS, CHANNELS, SIZE, KERNEL,
                            STRIDE, PAD, DILATION, MADE, IS_TRANSPOSED, PIXELS, WIDTH, DEPTH,
                        )
                        if bias is not None:
                            more = tl.load(bias + column, mask=column < COLUMNS, other=0.0)
                            total += more[None, :]
                        result = total
                        if EPILOGUE is not None:
                            result = EPILOGUE(
                                result, begin + i, column, pixel, pixel < made, given,
                                COLUMNS, made,
                            )
                        there = column.to(tl.int64)[None, :] * made + pixel[:, None]
                        inside = (pixel < made)[:, None] & (column < COLUMNS)[None, :]
                        tl.store(target + there, result, mask=inside)


def convolution_repaired(x, filters, bias, out, largest, lost, unit, of, given, epilogue):
    convolution_repair_kernel[(512,)](
        x, filters, bias, out, largest, lost, unit, given, len(x), COUNT=x.numel() // len(x),
        UNITS=convolution_power(len(unit)), NUM_UNITS=len(unit), SAMPLES=64,
        COLUMNS=out.shape[1], CHANNELS=x.shape[1], PIXELS=64, WIDTH=32, DEPTH=32,
        EPILOGUE=epilogue, num_warps=4,
        **{name: of[name] for name in (
            "SIZE", "KERNEL", "STRIDE", "PAD", "DILATION", "MADE", "IS_TRANSPOSED",
        )},
    )
