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
#
# What can be turned off: phases of a transposed convolution that alternate in x made together,
# products with both halves of the filters as one, filters that stay in shared memory, some who
# multiply while others store, and a kernel that is launched while the one before it runs.
{% set image_pairs, image_is_beside, image_keeps = true, true, true %}
{% set image_staggers, image_overlaps = true, true %}
{# Registers: of a thread at the launch, and of one that multiplies when others have given theirs. #}
{% set image_launched = 65536 // image_blocks // (128 * (image_consumers + 1)) // 8 * 8 %}
{% set image_registers =
   [(image_launched * (image_consumers + 1) - 24) // image_consumers // 8 * 8, 240] | min %}
{% set image_room = image_registers - 32 %}
{% set image_own = image_part // 2 * image_groups %}
{% set image_can_pair = image_pairs
   and 2 * image_own + (image_halves - 1) * image_part // 2 <= image_room %}
{# What one instruction adds up fits at the launch. #}
{% set image_wide = image_is_beside and image_halves == 2 and image_part <= 128
   and image_part + 26 <= image_launched %}
{% set image_beside = image_wide and image_own + image_part // 2 * 3 <= image_room %}
{% set image_beside_in_pairs = image_wide and 2 * image_own + image_part // 2 * 3 <= image_room %}
IMAGE_HALVES = {{ image_halves }}
IMAGE_CAN_PAIR = {{ image_can_pair }}  # as far as registers go
IMAGE_KEEPS_FILTERS = {{ image_keeps }}
cuda_code = CudaCode(
    r"""
#include <cuda.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <numeric>

{% with overlap = image_overlaps %}
{% include "_lib/launch.cuh" %}
{% endwith %}

{% include "_lib/wgmma_tensor_map.cuh" %}

{% include "_lib/wgmma_pipeline.cuh" %}

{% include "_lib/wgmma_images.cuh" %}

{{ epilogues }}
""",
    ["-std=c++17", "-O3", "-gencode=arch=compute_90a,code=sm_90a"],
)


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
    return parts, max(1, -(-steps // max(parts, 1)))


def image_pairings(of):
    # Whether phases that alternate in x are made together, where they lie side by side.
    return IMAGE_CAN_PAIR and of["IS_TRANSPOSED"] and of["STRIDE"][2] == 2


def image_phases(of, is_paired):
    # Of each: its first pixel, how many, where its sums begin, how many places, and how far behind
    # its pair's its own sums begin. With how many pixels lie around those of a tile.
    step = of["STRIDE"] if of["IS_TRANSPOSED"] else (1, 1, 1)
    phases = []
    for which in itertools.product(*map(range, step)):
        found = map(
            image_phase, which, of["KERNEL"], of["STRIDE"], of["PAD"], of["DILATION"], of["MADE"],
            of["LOW"], (of["IS_TRANSPOSED"],) * 3,
        )
        phases.append([*(list(each) for each in zip(*found)), 0])
    if is_paired:
        for one, other in zip(phases[::2], phases[1::2]):
            first = min(one[2][2], other[2][2])
            for phase in (one, other):
                phase[2][2], phase[4] = first, phase[2][2] - first
    around = [(max(p[3][i] for p in phases) - 1) * of["DILATION"][i] for i in range(3)]
    around[2] = max(p[4] + max(p[3][2] - 1, 0) * of["DILATION"][2] for p in phases)
    return phases, around


def image_steps(phases, chunk):
    # Pairs of units of a chunk of planes, of each phase.
    return [-(-chunk * math.prod(places) // 2) for _, _, _, places, _ in phases]


@functools.lru_cache(maxsize=None)
def image_tiles(of, samples, planes, columns, consumers, groups, part, blocks, halves):
    # For what convolution_of has told: numbers of the kernel's Geometry, how many channels there
    # are with those of all phases, how many steps a phase has at most, and how many pixels a tile
    # meets. None where the kernel is not for this convolution. Tiles are those that take least, as
    # counted below.
    of = dict(of)
    stride, made, dilation, padded = of["STRIDE"], of["MADE"], of["DILATION"], of["PADDED"]
    is_transposed = of["IS_TRANSPOSED"]
    is_even = all(s == 1 or (is_transposed and d == 1) for s, d in zip(stride, dilation))
    step = stride if is_transposed else (1, 1, 1)
    if not is_even or math.prod(step) > 32:
        return None
    is_paired = image_pairings(of)
    phases, around = image_phases(of, is_paired)
    turns = len(phases) // (2 if is_paired else 1)
    is_line = padded[0] == padded[1] == 1
    column_tiles = -(-columns // part)
    products = 3 if halves == 2 else 1
    # Of shared memory, for what is read: with what a block has of the system's, to align, for the
    # tables and barriers, and for what is written.
    room = 233472 // blocks - 1024 - 128 - 2048 - 128 - 256 - consumers * 8704
    step_bytes = halves * part * 32
    best = None
    grids = [
        g for g in itertools.product(range(1, consumers * groups + 1), repeat=3)
        if g[0] * g[1] * g[2] == consumers * groups
    ]
    for group, grid, chunk, keeps in itertools.product(
        [(1, 1, 64)] if is_line else [(1, 8, 8), (1, 1, 64), (8, 1, 8)],
        [(1, 1, consumers * groups)] if is_line else grids,
        [c for c in range(1, planes + 1) if planes % c == 0],
        [True, False] if IMAGE_KEEPS_FILTERS and 1 in (column_tiles, turns) else [False],
    ):
        tile = [a * b for a, b in zip(group, grid)]
        halo = [a + b for a, b in zip(tile, around)]
        halo_bytes = -(-halves * chunk * math.prod(halo) * 16 // 128) * 128
        is_box = is_line or (halo[2] <= 128 and max(*halo, chunk) <= 256)
        steps = image_steps(phases, chunk)
        kept = planes // chunk * sum(steps) if keeps else 0
        filter_bytes = kept * step_bytes if keeps else 2 * 4 * step_bytes
        # A part has 4 entries of the table.
        is_told = 4 * sum(image_parts(s)[0] for s in steps) <= 512
        if not is_box or not is_told or 2 * halo_bytes + filter_bytes > room:
            continue
        # Sectors of 32 bytes that are written, of which those at a line's ends may be in part;
        # and short lines cost more than long ones.
        across = group[2] * 4 * (2 if is_paired else step[2])
        stored = 64 * part * 4 * (step[2] if not is_paired else 1) // 32
        stored = stored * (across + (32 if made[2] % 8 else 8)) // across
        cost = 0
        for which in range(0, len(phases), len(phases) // turns):
            num = [max(p[1][i] for p in phases[which:][: len(phases) // turns]) for i in range(3)]
            own = steps[which:][: len(phases) // turns]
            # Cycles of a chunk: of the tensor cores, of the sums between parts, of copies.
            taken = sum(own) * products * consumers * groups * part // 2
            if halves == 2:
                taken += sum(image_parts(s)[0] for s in own) * consumers * groups * 32
            taken += (halo_bytes + (not keeps) * sum(own) * step_bytes) // 64 * (sum(own) > 0)
            written = consumers * groups * stored * len(own)
            num_tiles = math.prod(-(-n // t) for n, t in zip(num, tile))
            cost += num_tiles * (planes // chunk * taken + written)
        if best is None or cost < best[0]:
            best = cost, group, tile, halo, chunk, halo_bytes, kept, filter_bytes
    if best is None:
        return None
    _, group, tile, halo, chunk, halo_bytes, kept, filter_bytes = best
    stages = [2, 2]
    more = 0 if kept else 4 * step_bytes
    for i, bytes_more, most in [(1, more, 3), (0, halo_bytes, 4), (1, more, 8), (0, halo_bytes, 8)]:
        if bytes_more > 0:
            used = stages[0] * halo_bytes + (filter_bytes if kept else stages[1] * more)
            stages[i] = max(stages[i], min(most, stages[i] + (room - used) // bytes_more))
    tiles = [max(-(-p[1][i] // tile[i]) for p in phases) for i in range(3)]
    told, table, first_kept = [], 0, 0
    for (first, num, base, places, behind), own in zip(phases, image_steps(phases, chunk)):
        parts = image_parts(own)
        told += [*first, *num, *base, *places, own, *parts, table, first_kept, behind]
        table, first_kept = table + 4 * parts[0], first_kept + planes // chunk * own
    most_steps = planes // chunk * max(image_steps(phases, chunk))
    if samples * math.prod(tiles) * column_tiles * turns >= 2**31:
        return None
    numbers = [
        samples, columns, len(phases), column_tiles, *made, *tiles, *tile, *group, *halo, *step,
        *dilation, *padded, planes, chunk, planes // chunk, most_steps, *stages, int(is_line),
        int(is_paired), kept, *told,
    ]
    return numbers, len(phases) * column_tiles * part, most_steps, math.prod(halo)


@functools.lru_cache(maxsize=None)
def image_numbers(size, kernel, is_transposed, geometry, samples, channels, columns, *how):
    # What a call needs that its shapes decide: what convolution_of tells, the numbers of the
    # kernel's Source and Geometry, and how many halves the image has, with what the tile at a
    # line's end reads behind it, and the filters. None where the kernel is not for it.
    of = convolution_of(size, kernel, is_transposed, geometry)
    planes = convolution_parts(channels, 8)
    found = image_tiles(tuple(of.items()), samples, planes, columns, *how, IMAGE_HALVES)
    if found is None:
        return of, None
    numbers, rows, steps, beyond = found
    own = of["STRIDE"] if is_transposed else (1, 1, 1)
    source = [channels, *of["SIZE"], *of["LOW"], *of["KERNEL"], *own, int(is_transposed)]
    sizes = (
        IMAGE_HALVES * samples * planes * 8 * math.prod(of["PADDED"]) + 8 * beyond,
        rows * steps * IMAGE_HALVES * 16,
    )
    numbers = torch.tensor([*source, *numbers], dtype=torch.int64, device="cpu")
    return of, (numbers, rows, sizes)


def convolution_by_wgmma(
    x, filters, bias, out, consumers, groups, part, blocks, is_transposed, *geometry,
    epilogue=None, given=None, apart=None, function="convolution_of_image",
):
    # As convolution_by_halves. `function` is the CUDA C++ that has the epilogue.
    whole = out.view(len(x), -1, *geometry[-(len(geometry) // 4) :])
    of, found = image_numbers(
        tuple(x.shape[2:]), tuple(filters.shape[2:]), is_transposed, geometry, x.shape[0],
        x.shape[1], whole.shape[1], consumers, groups, part, blocks,
    )
    if not convolution_fits(x, whole, of, convolution_parts(x.shape[1], 8) * 8):
        found = None
    if found is None or (IMAGE_HALVES == 1 and not convolutions_take_tf32()):
        channels = min(128, max(16, convolution_power(whole.shape[1])))
        convolution_by_halves(
            x, filters, bias, out, 128, channels, 64, 8, 3, 2 * IMAGE_HALVES - 1, is_transposed,
            *geometry, epilogue=epilogue, given=given, apart=apart,
        )
        return
    numbers, rows, sizes = found
    rooms = convolution_rooms(x, sizes)
    if rooms is None:
        convolution_left(x, filters, bias, whole, is_transposed, geometry, apart)
        return
    # Of each sample, the largest number, how many float16 loses, and what finding them needs.
    ranges = torch.empty((4, len(x)), dtype=torch.int32, device=x.device)
    unit = torch.empty(rows, dtype=torch.float32, device=x.device)
    cuda_code(
        function, x, filters, bias, out, *rooms, ranges, unit, *(given or ()), numbers,
        len(numbers),
    )
    convolution_repaired(x, filters, bias, whole, ranges[0], ranges[1], unit, of, given, epilogue)
