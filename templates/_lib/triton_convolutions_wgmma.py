import itertools
import math

{% include "_lib/triton_convolutions.py" %}


{% include "_lib/triton_cuda.py" %}


# ---- the same convolutions by one kernel of CUDA C++ ----
#
# The image lies in planes of 8 channels, of which a tile's pixels with those around them are in
# shared memory once for all places of the filter; filters lie in the order of the sums. Ranges,
# scales and what is computed again are as above. Strided convolutions, which would need pixels
# beside each other that are not, remain Triton's, as those do whose tiles do not fit.
# `image_halves` is 2, or 1 for products of the high halves alone.
IMAGE_HALVES = {{ image_halves }}
cuda_code = CudaCode(
    r"""
#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <numeric>

{% with overlap = false %}
{% include "_lib/launch.cuh" %}
{% endwith %}

{% include "_lib/wgmma_tensor_map.cuh" %}

{% include "_lib/wgmma_pipeline.cuh" %}

{% with block_n = image_part %}
{% include "_lib/wgmma_images.cuh" %}
{% endwith %}

{{ epilogues }}
""",
    ["-std=c++17", "-O3", "-gencode=arch=compute_90a,code=sm_90a"],
)


@triton.jit
def convolution_steps_kernel(
    filters, halves, unit,
    CHANNELS: tl.constexpr, COLUMNS: tl.constexpr, KERNEL: tl.constexpr, STRIDE: tl.constexpr,
    PAD: tl.constexpr, MADE: tl.constexpr, LOW: tl.constexpr, IS_TRANSPOSED: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, STEPS: tl.constexpr, PART: tl.constexpr,
    HALVES: tl.constexpr, BLOCK: tl.constexpr,
):
    # A program takes a filter of a phase: of each chunk of planes, pairs of units, which are a
    # plane and a place of the filter. Those of a transposed convolution are turned round, so that
    # all walk forward in the image. A last unit without another one has zeros beside it.
    column, phase = tl.program_id(0), tl.program_id(1)
    own_strides: tl.constexpr = STRIDE if IS_TRANSPOSED else (1, 1, 1)
    pz = phase // (own_strides[1] * own_strides[2])
    py = phase // own_strides[2] % own_strides[1]
    px = phase % own_strides[2]
    _, _, _, nz = convolution_phase(pz, 0, STRIDE, PAD, KERNEL, MADE, LOW, IS_TRANSPOSED)
    _, _, _, ny = convolution_phase(py, 1, STRIDE, PAD, KERNEL, MADE, LOW, IS_TRANSPOSED)
    _, _, _, nx = convolution_phase(px, 2, STRIDE, PAD, KERNEL, MADE, LOW, IS_TRANSPOSED)
    places = nz * ny * nx
    room = (CHUNK * places + 1) // 2 * 2
    num = CHUNKS * room * 8
    target = (phase * (tl.num_programs(0) // PART) + column // PART).to(tl.int64) * STEPS
    target = halves + target * (HALVES * PART * 16) + column % PART // 8 * 128 + column % 8 * 8
    area: tl.constexpr = KERNEL[0] * KERNEL[1] * KERNEL[2]
    largest = tl.zeros([BLOCK], dtype=tl.int32)
    lost = tl.zeros([BLOCK], dtype=tl.int32)
    factor = 1.0
    own = 1.0
    for sweep in tl.static_range(2):
        for begin in range(0, num, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            which = at // 8
            within = which % tl.maximum(room, 1)
            plane = which // tl.maximum(room, 1) * CHUNK + within // tl.maximum(places, 1)
            channel = plane * 8 + at % 8
            none, z, y, x = convolution_places(
                within % tl.maximum(places, 1), tl.maximum(ny, 1), tl.maximum(nx, 1), 1
            )
            if IS_TRANSPOSED:
                z, y, x = nz - 1 - z, ny - 1 - y, nx - 1 - x
            z, y, x = pz + z * own_strides[0], py + y * own_strides[1], px + x * own_strides[2]
            is_own = (at < num) & (within < CHUNK * places)
            is_own = is_own & (channel < CHANNELS) & (column < COLUMNS)
            line = channel * COLUMNS + column if IS_TRANSPOSED else column * CHANNELS + channel
            source = filters + line * area + (z * KERNEL[1] + y) * KERNEL[2] + x
            values = tl.load(source, mask=is_own, other=0.0)
            if sweep == 0:
                largest = tl.maximum(largest, values.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
            else:
                main, rest, is_lost = convolution_halves(values, factor)
                lost += is_lost
                place = which // 2 * (HALVES * PART * 16) + which % 2 * 64 + at % 8
                tl.store(target + place, main, mask=at < num)
                if HALVES == 2:
                    tl.store(target + place + PART * 16, rest, mask=at < num)
        if sweep == 0:
            bits = tl.max(largest, axis=0)
            factor, own = product_unit(bits)
        else:
            is_fine = convolution_is_fine(bits, tl.sum(lost, axis=0), places * CHANNELS)
            own = tl.where(is_fine | (num == 0), own, float("nan"))
            tl.store(unit + phase * tl.num_programs(0) + column, own)


def image_phase(phase, kernel, stride, pad, dilation, made, low, is_transposed):
    # As convolution_phase, of a filter that is turned round.
    if not is_transposed:
        return 0, made, 0, kernel
    first = (phase - pad) % stride
    places = (kernel - phase + stride - 1) // stride
    start = (first + pad - phase) // stride + low - max(places - 1, 0) * dilation
    return first, (made - first + stride - 1) // stride, start, places


def image_parts(steps):
    # How many parts of at most 4 steps, and how many steps each has.
    parts = -(-steps // 4)
    return parts, -(-steps // max(parts, 1))


@functools.lru_cache(maxsize=None)
def image_tiles(of, samples, planes, columns, consumers, groups, part, blocks, halves):
    # For what convolution_of has told: the numbers of the kernel's Geometry, what the filters'
    # kernel wants to know, how many filters there are with those of all phases, and how many
    # pixels a tile meets. None where the kernel is not for this convolution. Tiles are those that
    # take least, as counted below.
    of = dict(of)
    kernel, stride, pad, made = of["KERNEL"], of["STRIDE"], of["PAD"], of["MADE"]
    dilation, padded, is_transposed = of["DILATION"], of["PADDED"], of["IS_TRANSPOSED"]
    is_even = all(s == 1 or (is_transposed and d == 1) for s, d in zip(stride, dilation))
    step = stride if is_transposed else (1, 1, 1)
    if not is_even or step[0] * step[1] * step[2] > 32:
        return None
    phases = []
    for which in itertools.product(*map(range, step)):
        found = map(
            image_phase, which, kernel, stride, pad, dilation, made, of["LOW"],
            (is_transposed,) * 3,
        )
        phases.append([list(each) for each in zip(*found)])
    around = [(max(p[3][i] for p in phases) - 1) * dilation[i] for i in range(3)]
    is_line = padded[0] == padded[1] == 1
    column_tiles = -(-columns // part)
    products = 3 if halves == 2 else 1
    room = 233472 // blocks - 1024 - 128 - 2048 - 256  # of shared memory, for both rings
    filter_bytes = 4 * halves * part * 32
    best = None
    grids = [
        g for g in itertools.product(range(1, consumers * groups + 1), repeat=3)
        if g[0] * g[1] * g[2] == consumers * groups
    ]
    for group, grid, chunk in itertools.product(
        [(1, 1, 64)] if is_line else [(1, 8, 8), (1, 1, 64), (8, 1, 8)],
        [(1, 1, consumers * groups)] if is_line else grids,
        [c for c in range(1, planes + 1) if planes % c == 0],
    ):
        tile = [a * b for a, b in zip(group, grid)]
        halo = [a + b for a, b in zip(tile, around)]
        halo_bytes = -(-halves * chunk * halo[0] * halo[1] * halo[2] * 16 // 128) * 128
        is_box = is_line or (halo[2] <= 128 and max(*halo, chunk) <= 256)
        if not is_box or 2 * halo_bytes + 2 * filter_bytes > room:
            continue
        cost = 0
        for _, num, _, places in phases:
            steps = -(-chunk * places[0] * places[1] * places[2] // 2)
            num_tiles = math.prod(-(-n // t) for n, t in zip(num, tile))
            # Cycles of a chunk: of the tensor cores, of the sums between parts, of copies.
            taken = steps * products * consumers * groups * part // 2
            taken += image_parts(steps)[0] * consumers * groups * 32
            taken += (halo_bytes + steps * halves * part * 32) // 64 * (steps > 0)
            stored = consumers * groups * 64 * part * 4 // 32
            cost += num_tiles * (planes // chunk * taken + stored)
        if best is None or cost < best[0]:
            best = cost, group, tile, halo, chunk, halo_bytes
    if best is None:
        return None
    _, group, tile, halo, chunk, halo_bytes = best
    stages = [2, 2]
    for i, bytes_more, most in [(1, filter_bytes, 3), (0, halo_bytes, 3), (1, filter_bytes, 8)]:
        used = stages[0] * halo_bytes + stages[1] * filter_bytes
        stages[i] = min(most, stages[i] + (room - used) // bytes_more)
    tiles = [max(-(-p[1][i] // tile[i]) for p in phases) for i in range(3)]
    told, table = [], 0
    for first, num, base, places in phases:
        steps = -(-chunk * places[0] * places[1] * places[2] // 2)
        told += [*first, *num, *base, *places, steps, *image_parts(steps), table]
        table += steps
    most_steps = planes // chunk * max(told[12::16])
    num_tiles = samples * math.prod(tiles) * column_tiles * len(phases)
    if table > 508 or num_tiles >= 2**31:
        return None
    numbers = [
        samples, columns, len(phases), column_tiles, *made, *tiles, *tile, *group, *halo, *step,
        *dilation, *padded, planes, chunk, most_steps, *stages, int(is_line), *told,
    ]
    about = {"CHUNK": chunk, "CHUNKS": planes // chunk, "STEPS": most_steps, "PART": part}
    rows = len(phases) * column_tiles * part
    return torch.tensor(numbers, dtype=torch.int64), about, rows, math.prod(halo)


def convolution_by_wgmma(
    x, filters, bias, out, consumers, groups, part, blocks, is_transposed, *geometry,
    epilogue=None, given=None, apart=None, function="convolution_of_image",
):
    # As convolution_by_halves. `function` is the CUDA C++ that has the epilogue.
    of = convolution_of(tuple(x.shape[2:]), tuple(filters.shape[2:]), is_transposed, geometry)
    whole = out.view(len(x), -1, *geometry[-(len(geometry) // 4) :])
    num_samples, num_channels, num_columns = x.shape[0], x.shape[1], whole.shape[1]
    planes = convolution_parts(num_channels, 8)
    found = None
    if convolution_fits(x, whole, of, planes * 8):
        found = image_tiles(
            tuple(of.items()), num_samples, planes, num_columns, consumers, groups, part, blocks,
            IMAGE_HALVES,
        )
    if found is None or (IMAGE_HALVES == 1 and not convolutions_take_tf32()):
        channels = min(128, max(16, convolution_power(num_columns)))
        convolution_by_halves(
            x, filters, bias, out, 128, channels, 64, 8, 3, 2 * IMAGE_HALVES - 1, is_transposed,
            *geometry, epilogue=epilogue, given=given, apart=apart,
        )
        return
    numbers, about, rows, beyond = found
    size = num_samples * planes * 8 * math.prod(of["PADDED"])
    # What the tile at a line's end reads behind it is of no pixel.
    sizes = (IMAGE_HALVES * size + 8 * beyond, (rows, about["STEPS"] * IMAGE_HALVES * 16))
    rooms = convolution_rooms(x, sizes)
    if rooms is None:
        convolution_left(x, filters, bias, whole, is_transposed, geometry, apart)
        return
    image, halves = rooms
    high, low = image[:size], image[(IMAGE_HALVES - 1) * size :]
    unit = torch.empty(rows, dtype=torch.float32, device=x.device)
    largest, lost = convolution_ranges(x)
    convolution_split(x, high, low, largest, lost, of, planes * 8, 8, IMAGE_HALVES)
    phases = math.prod(of["STRIDE"]) if is_transposed else 1
    convolution_steps_kernel[(rows // phases, phases)](
        filters, halves, unit, CHANNELS=num_channels, COLUMNS=num_columns, HALVES=IMAGE_HALVES,
        BLOCK=512, num_warps=4, **about,
        **{name: of[name] for name in ("KERNEL", "STRIDE", "PAD", "MADE", "LOW", "IS_TRANSPOSED")},
    )
    cuda_code(
        function, image, halves, bias, out, largest, unit, *(given or ()), numbers, len(numbers)
    )
    convolution_repaired(x, filters, bias, whole, largest, lost, unit, of, given, epilogue)
