# ---- convolutions of each channel by itself, in float32 ----
#
# Depthwise: a channel of the result is made of one channel of the image. A program takes pixels of
# one plane, beside each other as they lie in memory, and adds up the filter's places. Geometry is
# as in triton_convolutions.


@triton.jit
def planes_with_place(
    total, source, filters, is_pixel, z, y, x, PLACE: tl.constexpr, SIZE: tl.constexpr,
    KERNEL: tl.constexpr, PAD: tl.constexpr, DILATION: tl.constexpr,
):
    kz: tl.constexpr = PLACE // (KERNEL[1] * KERNEL[2]) * DILATION[0]
    ky: tl.constexpr = PLACE // KERNEL[2] % KERNEL[1] * DILATION[1]
    kx: tl.constexpr = PLACE % KERNEL[2] * DILATION[2]
    inside = is_pixel
    if PAD[0] > 0:
        inside &= (z + kz >= 0) & (z + kz < SIZE[0])
    if PAD[1] > 0:
        inside &= (y + ky >= 0) & (y + ky < SIZE[1])
    if PAD[2] > 0:
        inside &= (x + kx >= 0) & (x + kx < SIZE[2])
    step: tl.constexpr = (kz * SIZE[1] + ky) * SIZE[2] + kx
    value = tl.load(source + step, mask=inside, other=0.0)
    # Zeros around an image meet no filter: one with an Inf would make them NaN.
    return tl.where(inside, tl.fma(value, tl.load(filters + PLACE), total), total)


@launched
@triton.jit
def planes_kernel(
    image, filters, bias, out, given,
    CHANNELS: tl.constexpr, COLUMNS: tl.constexpr, SIZE: tl.constexpr, KERNEL: tl.constexpr,
    STRIDE: tl.constexpr, PAD: tl.constexpr, DILATION: tl.constexpr, MADE: tl.constexpr,
    PLACES: tl.constexpr, PIXELS: tl.constexpr, EPILOGUE: tl.constexpr,
):
    own: tl.constexpr = SIZE[0] * SIZE[1] * SIZE[2]
    made: tl.constexpr = MADE[0] * MADE[1] * MADE[2]
    tiles: tl.constexpr = (made + PIXELS - 1) // PIXELS
    plane = tl.program_id(0) // tiles
    sample, column = plane // COLUMNS, plane % COLUMNS
    pixel = tl.program_id(0) % tiles * PIXELS + tl.arange(0, PIXELS)
    is_pixel = pixel < made
    z = pixel // (MADE[1] * MADE[2]) * STRIDE[0] - PAD[0]
    y = pixel // MADE[2] % MADE[1] * STRIDE[1] - PAD[1]
    x = pixel % MADE[2] * STRIDE[2] - PAD[2]
    of_sample = sample.to(tl.int64) * CHANNELS + column // (COLUMNS // CHANNELS)
    source = image + of_sample * own + (z * SIZE[1] + y) * SIZE[2] + x
    filters += column * PLACES
    total = tl.zeros([PIXELS], dtype=tl.float32)
    for place in tl.static_range(PLACES):
        total = planes_with_place(
            total, source, filters, is_pixel, z, y, x, place, SIZE, KERNEL, PAD, DILATION
        )
    if bias is not None:
        total += tl.load(bias + column)
    result = total[:, None]
    if EPILOGUE is not None:
        columns = tl.full([1], 0, dtype=tl.int32) + column
        result = EPILOGUE(result, sample, columns, pixel, is_pixel, given, COLUMNS, made)
    place = out + plane.to(tl.int64) * made + pixel
    tl.store(place[:, None], result, mask=is_pixel[:, None])


def convolution_of_planes(
    x, filters, bias, out, pixels, warps, *geometry, epilogue=None, given=None, apart=None,
):
    # As convolution_by_halves, where every channel is its own group.
    own = len(geometry) // 4
    told = [geometry[own * i : own * (i + 1)] for i in range(4)]
    out = out.view(len(x), -1, *told[3])
    ahead = (1,) * (3 - own)
    made = ahead + told[3]
    tiles = ceil_div(made[0] * made[1] * made[2], pixels)
    programs = len(x) * out.shape[1] * tiles
    is_large = max(x.stride(1), out.stride(1), programs) >= 2**31 - 2**20  # 32 bits
    if is_large or filters.stride(0) > 64:  # whose places are not written out
        whole = out if apart is None else torch.empty_like(out)
        whole.copy_(torch.convolution(
            x, filters, bias, *told[:3], False, (0,) * own, x.shape[1]
        ))
        if apart is not None:
            apart(whole)
        return
    planes_kernel[(programs,)](
        x, filters, bias, out, given, CHANNELS=x.shape[1], COLUMNS=out.shape[1],
        SIZE=ahead + tuple(x.shape[2:]), KERNEL=ahead + tuple(filters.shape[2:]),
        STRIDE=ahead + told[0], PAD=(0,) * (3 - own) + told[1], DILATION=ahead + told[2],
        MADE=made, PLACES=filters.stride(0), PIXELS=pixels, EPILOGUE=epilogue, num_warps=warps,
    )
