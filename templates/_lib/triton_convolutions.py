import contextlib
import functools

# ---- float32 convolutions of float16 halves ----
#
# A convolution is a product without its matrix being written anywhere: a row for each pixel of the
# result, a column for each channel, and for pixel p of a sample
#     out[p, channel] = sum over k of image[start(p) + step(k)] * filters[channel, k],
# where the image has its channels beside each other and zeros around it, and k counts the filter's
# places and, within each, channels. A transposed convolution of stride s is s products in each
# direction, one for each phase: every s-th pixel of the result meets every s-th place of the
# filter.
#
# A sample and a filter of a phase are each scaled by a power of two and split: high + low are 22
# leading bits. A product is then high x high + low x high + high x low. Tensor cores truncate what
# they add up, so sums of DEPTH numbers are added in float32, unless all are few. Samples and
# filters with an Inf or a NaN, and those of so wide a range that float16 would lose many of their
# numbers, are computed again in float32.
#
# Geometry is in three directions, of which the first ones may be trivial. SIZE, KERNEL, STRIDE,
# PAD, DILATION and MADE (the result's) are the operation's; LOW and PADDED are of the image with
# its zeros.


@triton.jit
def convolution_is_fine(largest, lost, count):
    return (largest < 0x7F800000) & (lost.to(tl.int64) * 8 <= count)


@launched
@triton.jit
def convolution_range_kernel(image, largest, count, PIECE: tl.constexpr, BLOCK: tl.constexpr):
    # Of |x| as whole numbers, which are in the same order; a NaN is the largest.
    sample = tl.program_id(1)
    source = image + sample.to(tl.int64) * count
    found = tl.zeros([BLOCK], dtype=tl.int32)
    for first in range(0, PIECE, BLOCK):
        at = tl.program_id(0) * PIECE + first + tl.arange(0, BLOCK)
        bits = tl.load(source + at, mask=at < count, other=0.0).to(tl.int32, bitcast=True)
        found = tl.maximum(found, bits & 0x7FFFFFFF)
    tl.atomic_max(largest + sample, tl.max(found, axis=0))


@triton.jit
def convolution_halves(values, factor):
    values = values * factor
    high = values.to(tl.float16)
    is_lost = (tl.abs(values) < 2.0**-8) & (values != 0)
    return high, (values - high.to(tl.float32)).to(tl.float16), is_lost.to(tl.int32)


@launched
@triton.jit
def convolution_image_kernel(
    image, high, low, largest, lost,
    CHANNELS: tl.constexpr, ROOM: tl.constexpr, PLANE: tl.constexpr, SIZE: tl.constexpr,
    PADDED: tl.constexpr, LOW: tl.constexpr, PIXELS: tl.constexpr, WIDTH: tl.constexpr,
    HALVES: tl.constexpr,
):
    # ROOM: channels as they are stored, some of them zeros; PLANE: of these, that lie together.
    count: tl.constexpr = PADDED[0] * PADDED[1] * PADDED[2]
    own: tl.constexpr = SIZE[0] * SIZE[1] * SIZE[2]
    sample = tl.program_id(1)
    factor, _ = product_unit(tl.load(largest + sample))
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    x = pixel % PADDED[2] - LOW[2]
    y = pixel // PADDED[2] % PADDED[1] - LOW[1]
    z = pixel // (PADDED[1] * PADDED[2]) - LOW[0]
    is_own = (x >= 0) & (x < SIZE[2]) & (y >= 0) & (y < SIZE[1]) & (z >= 0) & (z < SIZE[0])
    source = image + sample.to(tl.int64) * (CHANNELS * own) + (z * SIZE[1] + y) * SIZE[2] + x
    num_lost = tl.zeros([PIXELS, WIDTH], dtype=tl.int32)
    for first in tl.static_range(0, ROOM, WIDTH):
        channel = first + tl.arange(0, WIDTH)
        inside = is_own[:, None] & (channel < CHANNELS)[None, :]
        at = channel.to(tl.int64)[None, :] * own
        values = tl.load(source[:, None] + at, mask=inside, other=0.0)
        main, rest, is_lost = convolution_halves(values, factor)
        num_lost += is_lost
        plane = sample.to(tl.int64) * (ROOM // PLANE) + first // PLANE
        beside = first % PLANE + tl.arange(0, WIDTH)
        place = (plane * count + pixel)[:, None] * PLANE + beside[None, :]
        stored = (pixel < count)[:, None] & (channel < ROOM)[None, :]
        tl.store(high + place, main, mask=stored)
        if HALVES == 2:
            tl.store(low + place, rest, mask=stored)
    total = tl.sum(tl.sum(num_lost, axis=1), axis=0)
    if total > 0:
        tl.atomic_add(lost + sample, total)


@triton.jit
def convolution_phase(phase, axis: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
                      KERNEL: tl.constexpr, MADE: tl.constexpr, LOW: tl.constexpr,
                      IS_TRANSPOSED: tl.constexpr):
    # In one direction: the first pixel of the result, how many there are, the place in the image
    # with its zeros that the first one starts at, and how many places of the filter are met.
    if IS_TRANSPOSED:
        first = (phase + STRIDE[axis] * PAD[axis] - PAD[axis]) % STRIDE[axis]
        num = (MADE[axis] - first + STRIDE[axis] - 1) // STRIDE[axis]
        start = (first + PAD[axis] - phase) // STRIDE[axis] + LOW[axis]
        places = (KERNEL[axis] - phase + STRIDE[axis] - 1) // STRIDE[axis]
    else:
        first, num, start, places = 0, MADE[axis], 0, KERNEL[axis]
    return first, num, start, places


@triton.jit
def convolution_places(at, num_y, num_x, CHANNELS: tl.constexpr):
    # Of numbers k: channel, and places of the filter in the three directions.
    place = at // CHANNELS
    return at % CHANNELS, place // (num_y * num_x), place // num_x % num_y, place % num_x


@launched
@triton.jit
def convolution_filters_kernel(
    filters, high, low, unit,
    CHANNELS: tl.constexpr, ROOM: tl.constexpr, COLUMNS: tl.constexpr, KERNEL: tl.constexpr,
    STRIDE: tl.constexpr, PAD: tl.constexpr, MADE: tl.constexpr, LOW: tl.constexpr,
    IS_TRANSPOSED: tl.constexpr, ROW: tl.constexpr, BLOCK: tl.constexpr,
):
    # A program takes a filter of a phase, in the order of its sums.
    column, phase = tl.program_id(0), tl.program_id(1)
    own_strides: tl.constexpr = STRIDE if IS_TRANSPOSED else (1, 1, 1)
    pz = phase // (own_strides[1] * own_strides[2])
    py = phase // own_strides[2] % own_strides[1]
    px = phase % own_strides[2]
    _, _, _, nz = convolution_phase(pz, 0, STRIDE, PAD, KERNEL, MADE, LOW, IS_TRANSPOSED)
    _, _, _, ny = convolution_phase(py, 1, STRIDE, PAD, KERNEL, MADE, LOW, IS_TRANSPOSED)
    _, _, _, nx = convolution_phase(px, 2, STRIDE, PAD, KERNEL, MADE, LOW, IS_TRANSPOSED)
    num = nz * ny * nx * ROOM
    area: tl.constexpr = KERNEL[0] * KERNEL[1] * KERNEL[2]
    largest = tl.zeros([BLOCK], dtype=tl.int32)
    lost = tl.zeros([BLOCK], dtype=tl.int32)
    factor = 1.0
    own = 1.0
    for sweep in tl.static_range(2):
        for begin in range(0, ROW, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            channel, z, y, x = convolution_places(at, tl.maximum(ny, 1), tl.maximum(nx, 1), ROOM)
            z, y, x = pz + z * own_strides[0], py + y * own_strides[1], px + x * own_strides[2]
            is_own = (at < num) & (channel < CHANNELS) & (column < COLUMNS)
            line = channel * COLUMNS + column if IS_TRANSPOSED else column * CHANNELS + channel
            source = filters + line * area + (z * KERNEL[1] + y) * KERNEL[2] + x
            values = tl.load(source, mask=is_own, other=0.0)
            if sweep == 0:
                largest = tl.maximum(largest, values.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
            else:
                main, rest, is_lost = convolution_halves(values, factor)
                lost += is_lost
                place = (phase * tl.num_programs(0) + column).to(tl.int64) * ROW + at
                tl.store(high + place, main, mask=at < ROW)
                tl.store(low + place, rest, mask=at < ROW)
        if sweep == 0:
            bits = tl.max(largest, axis=0)
            factor, own = product_unit(bits)
        else:
            is_fine = convolution_is_fine(bits, tl.sum(lost, axis=0), num // ROOM * CHANNELS)
            own = tl.where(is_fine | (num == 0), own, float("nan"))
            tl.store(unit + phase * tl.num_programs(0) + column, own)


@launched
@triton.jit
def convolution_kernel(
    high, low, filters_high, filters_low, bias, out, largest, unit, given,
    COLUMNS: tl.constexpr, ROOM: tl.constexpr, PADDED: tl.constexpr, LOW: tl.constexpr,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr, DILATION: tl.constexpr,
    MADE: tl.constexpr, IS_TRANSPOSED: tl.constexpr, ROW: tl.constexpr,
    PIXELS: tl.constexpr, CHANNELS: tl.constexpr, DEPTH: tl.constexpr, PRODUCTS: tl.constexpr,
    VECTOR: tl.constexpr, IS_SHORT: tl.constexpr, STAGES: tl.constexpr, EPILOGUE: tl.constexpr,
):
    # A program takes PIXELS pixels of a phase of one sample, and CHANNELS channels of the result.
    # Phases follow each other: what lies between each other's pixels meets in L2.
    own_strides: tl.constexpr = STRIDE if IS_TRANSPOSED else (1, 1, 1)
    phases: tl.constexpr = own_strides[0] * own_strides[1] * own_strides[2]
    across: tl.constexpr = (COLUMNS + CHANNELS - 1) // CHANNELS
    phase = tl.program_id(0) % phases
    column = tl.program_id(0) // phases % across * CHANNELS + tl.arange(0, CHANNELS)
    tile = tl.program_id(0) // (phases * across)
    sample = tl.program_id(1)
    pz = phase // (own_strides[1] * own_strides[2])
    py = phase // own_strides[2] % own_strides[1]
    px = phase % own_strides[2]
    z0, mz, sz, nz = convolution_phase(pz, 0, STRIDE, PAD, KERNEL, MADE, LOW, IS_TRANSPOSED)
    y0, my, sy, ny = convolution_phase(py, 1, STRIDE, PAD, KERNEL, MADE, LOW, IS_TRANSPOSED)
    x0, mx, sx, nx = convolution_phase(px, 2, STRIDE, PAD, KERNEL, MADE, LOW, IS_TRANSPOSED)
    if tile * PIXELS < mz * my * mx:
        pixel = tile * PIXELS + tl.arange(0, PIXELS)
        is_row = pixel < mz * my * mx
        pixel = tl.where(is_row, pixel, 0)
        x, y, z = pixel % mx, pixel // mx % my, pixel // (mx * my)
        if IS_TRANSPOSED:
            start = ((sz + z) * PADDED[1] + sy + y) * PADDED[2] + sx + x
            z, y, x = z0 + z * STRIDE[0], y0 + y * STRIDE[1], x0 + x * STRIDE[2]
        else:
            start = (z * STRIDE[0] * PADDED[1] + y * STRIDE[1]) * PADDED[2] + x * STRIDE[2]
        turn: tl.constexpr = -1 if IS_TRANSPOSED else 1
        step_x: tl.constexpr = turn * DILATION[2] * ROOM
        step_y: tl.constexpr = turn * DILATION[1] * PADDED[2] * ROOM
        step_z: tl.constexpr = turn * DILATION[0] * PADDED[1] * PADDED[2] * ROOM
        count: tl.constexpr = PADDED[0] * PADDED[1] * PADDED[2] * ROOM
        high += sample.to(tl.int64) * count
        low += sample.to(tl.int64) * count
        line = phase * (tl.cdiv(COLUMNS, CHANNELS) * CHANNELS) + column
        depth = nz * ny * nx * ROOM
        total = tl.zeros([PIXELS, CHANNELS], dtype=tl.float32)
        for begin in tl.range(0, depth, DEPTH, num_stages=STAGES):
            at = begin + tl.arange(0, DEPTH)
            channel, kz, ky, kx = convolution_places(at, ny, nx, ROOM)
            step = kz * step_z + ky * step_y + kx * step_x + channel
            step = tl.where(at < depth, step, 0)
            step = tl.max_contiguous(tl.multiple_of(step, VECTOR), VECTOR)
            place = (start * ROOM)[:, None] + step[None, :]
            own = line[None, :] * ROW + at[:, None]
            x_high, w_high = tl.load(high + place), tl.load(filters_high + own)
            part = total if IS_SHORT else tl.zeros([PIXELS, CHANNELS], dtype=tl.float32)
            if PRODUCTS == 3:
                part = tl.dot(tl.load(low + place), w_high, part)
                part = tl.dot(x_high, tl.load(filters_low + own), part)
            part = tl.dot(x_high, w_high, part)
            total = part if IS_SHORT else total + part
        _, one = product_unit(tl.load(largest + sample))
        other = tl.load(unit + line)
        total = product_scaled(total, one, other[None, :])
        if bias is not None:
            total += tl.load(bias + column, mask=column < COLUMNS, other=0.0)[None, :]
        made: tl.constexpr = MADE[0] * MADE[1] * MADE[2]
        pixel = (z * MADE[1] + y) * MADE[2] + x
        if EPILOGUE is not None:
            total = EPILOGUE(total, sample, column, pixel, is_row, given, COLUMNS, made)
        place = (sample.to(tl.int64) * COLUMNS + column)[None, :] * made + pixel[:, None]
        tl.store(out + place, total, mask=is_row[:, None] & (column < COLUMNS)[None, :])


{% include "_lib/triton_convolutions_again.py" %}


# Triton's own, called by the host, take several us each.
def convolution_parts(number, size):
    return -(-number // size)


def convolution_power(number):
    return 1 << (number - 1).bit_length()


def convolution_in_one_direction(size, kernel, stride, pad, dilation, made, is_transposed):
    # Zeros before the image, its size with all zeros, and the most places of a phase.
    if not is_transposed:
        return pad, (made - 1) * stride + (kernel - 1) * dilation + 1, kernel
    low = end = most = 0
    for phase in range(stride):
        first = (phase - pad) % stride
        start = (first + pad - phase) // stride
        places = (kernel - phase + stride - 1) // stride
        low = max(low, (places - 1) * dilation - start)
        end = max(end, start + (made - first + stride - 1) // stride)
        most = max(most, places)
    return low, low + end, most


def convolutions_take_tf32():
    # Also where allow_tf32 was set.
    return torch.backends.cudnn.conv.fp32_precision == "tf32"


def convolution_as_pytorch(x, filters, bias, out, is_transposed, strides, pads, dilations):
    num_axes = len(strides)
    extra = tuple(
        m - ((i - 1) * s - 2 * p + d * (k - 1) + 1) for m, i, s, p, d, k in
        zip(out.shape[2:], x.shape[2:], strides, pads, dilations, filters.shape[2:])
    ) if is_transposed else (0,) * num_axes
    out.copy_(torch.convolution(
        x, filters, bias, strides, pads, dilations, bool(is_transposed), extra, 1
    ))


@functools.lru_cache(maxsize=None)
def convolution_of(size, kernel, is_transposed, geometry):
    # What there is to know, by the names that kernels have for it. `geometry`: strides, zeros
    # before and behind, dilations and the result's size, a number for each direction.
    own = len(geometry) // 4
    ahead = (1,) * (3 - own)
    of = {
        "STRIDE": ahead + geometry[:own],
        "PAD": (0,) * (3 - own) + geometry[own : 2 * own],
        "DILATION": ahead + geometry[2 * own : 3 * own],
        "MADE": ahead + geometry[3 * own :],
        "SIZE": ahead + size,
        "KERNEL": ahead + kernel,
        "IS_TRANSPOSED": bool(is_transposed),
    }
    names = ("SIZE", "KERNEL", "STRIDE", "PAD", "DILATION", "MADE")
    low, padded, most = zip(*(
        convolution_in_one_direction(*numbers, is_transposed)
        for numbers in zip(*(of[name] for name in names))
    ))
    return of | {"LOW": low, "PADDED": padded, "MOST": most}


def convolution_fits(x, out, of, room):
    # Within the limits of a grid, and of 32 bits for the parts of a sample.
    padded = of["PADDED"]
    # A batch of one may have any stride.
    sample = max(x.numel(), out.numel()) // len(x)
    largest_part = max(padded[0] * padded[1] * padded[2] * room, sample)
    return len(x) <= 65535 and largest_part < 2**31 - 2**20


def convolution_rooms(x, sizes):
    # Memory for halves; None where there is none: PyTorch's own may do with less.
    with contextlib.suppress(torch.OutOfMemoryError):
        return [torch.empty(size, dtype=torch.float16, device=x.device) for size in sizes]
    return None


def convolution_left(x, filters, bias, out, is_transposed, geometry, apart):
    # To PyTorch.
    own = len(geometry) // 4
    told = (geometry[own * i : own * (i + 1)] for i in range(3))
    whole = out if apart is None else torch.empty_like(out)
    convolution_as_pytorch(x, filters, bias, whole, is_transposed, *told)
    if apart is not None:
        apart(whole)


def convolution_ranges(x):
    # Of each sample, the largest number, and room for how many float16 loses.
    largest, lost = torch.zeros((2, len(x)), dtype=torch.int32, device=x.device)
    count = x.numel() // len(x)
    convolution_range_kernel[(convolution_parts(count, 16384), len(x))](
        x, largest, count, PIECE=16384, BLOCK=4096, num_warps=8,
    )
    return largest, lost


def convolution_split(x, high, low, largest, lost, of, room, plane, halves=2):
    padded = of["PADDED"]
    width = min(64, convolution_power(plane))
    pixels = 4096 // width
    convolution_image_kernel[(convolution_parts(padded[0] * padded[1] * padded[2], pixels), len(x))](
        x, high, low, largest, lost, CHANNELS=x.shape[1], ROOM=room, PLANE=plane, PIXELS=pixels,
        WIDTH=width, HALVES=halves, num_warps=8,
        **{name: of[name] for name in ("SIZE", "PADDED", "LOW")},
    )


def convolution_by_halves(
    x, filters, bias, out, pixels, channels, depth, warps, stages, products,
    is_transposed, *geometry, epilogue=None, given=None, apart=None,
):
    # `epilogue` is of all values and may read what is `given`; `apart` computes that of a
    # convolution from PyTorch.
    own = len(geometry) // 4
    out = out.view(len(x), -1, *geometry[3 * own :])
    of = convolution_of(tuple(x.shape[2:]), tuple(filters.shape[2:]), is_transposed, geometry)
    stride, made, most = of["STRIDE"], of["MADE"], of["MOST"]
    padded = of["PADDED"]
    num_samples, num_channels, num_columns = x.shape[0], x.shape[1], out.shape[1]
    room = 4 if num_channels <= 4 else convolution_parts(num_channels, 8) * 8
    phases = stride[0] * stride[1] * stride[2] if is_transposed else 1
    columns = convolution_parts(num_columns, channels) * channels
    row = convolution_parts(most[0] * most[1] * most[2] * room, 64) * 64
    count = padded[0] * padded[1] * padded[2] * room
    # One product where PyTorch takes TF32, which has no more bits: then there are no low halves.
    products = products if products > 1 or convolutions_take_tf32() else 3
    kept = 2 if products > 1 else 1
    sizes = ((kept, num_samples, count), (2, phases * columns, row))
    rooms = convolution_rooms(x, sizes) if convolution_fits(x, out, of, room) else None
    if rooms is None:
        convolution_left(x, filters, bias, out, is_transposed, geometry, apart)
        return
    image, halves = rooms
    unit = torch.empty(phases * columns, dtype=torch.float32, device=x.device)
    largest, lost = convolution_ranges(x)
    convolution_split(x, image[0], image[kept - 1], largest, lost, of, room, room, kept)
    about = {
        name: of[name] for name in ("KERNEL", "STRIDE", "PAD", "MADE", "LOW", "IS_TRANSPOSED")
    }
    convolution_filters_kernel[(columns, phases)](
        filters, halves[0], halves[1], unit, CHANNELS=num_channels, ROOM=room,
        COLUMNS=num_columns, ROW=row, BLOCK=min(1024, convolution_power(row)),
        num_warps=4, **about,
    )
    own_made = [convolution_parts(m, s) if is_transposed else m for m, s in zip(made, stride)]
    tiles = convolution_parts(own_made[0] * own_made[1] * own_made[2], pixels)
    convolution_kernel[(phases * tiles * (columns // channels), num_samples)](
        image[0], image[kept - 1], halves[0], halves[1], bias, out, largest, unit, given,
        COLUMNS=num_columns, ROOM=room, PADDED=padded, DILATION=of["DILATION"], ROW=row,
        PIXELS=pixels, CHANNELS=channels, DEPTH=depth, PRODUCTS=products,
        VECTOR=min(room, 8), IS_SHORT=most[0] * most[1] * most[2] * room <= 96,
        STAGES=stages, EPILOGUE=epilogue, num_warps=warps, **about,
    )
    convolution_repaired(x, filters, bias, out, largest, lost, unit, of, given, epilogue)
