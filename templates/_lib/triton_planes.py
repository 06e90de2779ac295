# ---- convolutions of each channel by itself, in float32 ----
#
# Depthwise: a channel of the result is made of one channel of the image. A program takes pixels of
# one plane, beside each other as they lie in memory, and adds up the filter's places. Geometry is
# as in triton_convolutions.


@triton.jit
def planes_kernel(
    image, filters, bias, out, given,
    CHANNELS: tl.constexpr, COLUMNS: tl.constexpr, SIZE: tl.constexpr, KERNEL: tl.constexpr,
    STRIDE: tl.constexpr, PAD: tl.constexpr, DILATION: tl.constexpr, MADE: tl.constexpr,
    PIXELS: tl.constexpr, EPILOGUE: tl.constexpr,
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
    filters += column * (KERNEL[0] * KERNEL[1] * KERNEL[2])
    total = tl.zeros([PIXELS], dtype=tl.float32)
    for kz in tl.static_range(KERNEL[0]):
        for ky in tl.static_range(KERNEL[1]):
            for kx in tl.static_range(KERNEL[2]):
                inside = is_pixel
                if PAD[0] > 0:
                    at = z + kz * DILATION[0]
                    inside &= (at >= 0) & (at < SIZE[0])
                if PAD[1] > 0:
                    at = y + ky * DILATION[1]
                    inside &= (at >= 0) & (at < SIZE[1])
                if PAD[2] > 0:
                    at = x + kx * DILATION[2]
                    inside &= (at >= 0) & (at < SIZE[2])
                step: tl.constexpr = (
                    (kz * DILATION[0] * SIZE[1] + ky * DILATION[1]) * SIZE[2] + kx * DILATION[2]
                )
                value = tl.load(source + step, mask=inside, other=0.0)
                weight = tl.load(filters + (kz * KERNEL[1] + ky) * KERNEL[2] + kx)
                # Zeros around an image meet no filter: one with an Inf would make them NaN.
                total = tl.where(inside, tl.fma(value, weight, total), total)
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
    tiles = triton.cdiv(made[0] * made[1] * made[2], pixels)
    programs = len(x) * out.shape[1] * tiles
    if max(x.stride(1), out.stride(1), programs) >= 2**31 - 2**20:  # 32 bits
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
        MADE=made, PIXELS=pixels, EPILOGUE=epilogue, num_warps=warps,
    )
