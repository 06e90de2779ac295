{# One tile of the GEMM, and what becomes of its statistics. Expects of_tile, of_merge and
   of_constants, the lists of what functions are given, and byte_k, half, dot_precision, origin,
   length and total, which the template sets. #}
@triton.jit
def fused_gemm_scale_bn_tile(
    tile, {{ of_tile }},
    {{ of_constants }},
):
    # Neighbouring tiles share rows of x and columns of weight, which L2 then serves.
    tiles_m = tl.cdiv(batch, BLOCK_M)
    tiles_n = tl.cdiv(out_features, BLOCK_N)
    group = tile // (GROUP_M * tiles_n)
    within = tile % (GROUP_M * tiles_n)
    height = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    tile_m = group * GROUP_M + within % height
    tile_n = within // height
    first_row = tile_m * BLOCK_M
    first_column = tile_n * BLOCK_N
{% macro tile_of(name, rows, first, count, k, columns) -%}
fused_gemm_scale_bn_load(
            {{ name }}, {{ first }}, {{ k }}, {{ count }},
            {{ 'in_features' if not is_split else '2 * in_features' if has_low or 'bytes' in name else 'in_features' }},
            {{ rows }}, {{ columns }}, HAS_DESCRIPTORS, IS_EVEN,
        )
{%- endmacro %}
{% macro x_tile(k, name='x', columns='BLOCK_K') -%}
{{ tile_of(name, 'BLOCK_M', 'first_row', 'batch', k, columns) }}{% endmacro %}
{% macro w_tile(k, name='weight', columns='BLOCK_K') -%}
{{ tile_of(name, 'BLOCK_N', 'first_column', 'out_features', k, columns) }}{% endmacro %}

    h = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
{% if not has_corrections %}
    for k in tl.range(0, in_features, BLOCK_K):
        a = {{ x_tile('k') }}
        b = {{ w_tile('k') }}
{% if is_split %}
        h = tl.dot(a, b.T, h)
{% elif precision == 'tf32' and round_operands %}
        a = fused_gemm_scale_bn_rounded(a)
        b = fused_gemm_scale_bn_rounded(b)
        h = tl.dot(a, b.T, h, input_precision="tf32")
{% else %}
        h = tl.dot(a, b.T, h, input_precision="{{ dot_precision }}")
{% endif %}
{% elif order == 'separate' %}
    small = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for k in tl.range(0, in_features, BLOCK_K):
        a = {{ x_tile('k') }}
        b = {{ w_tile('k') }}
{% if has_low %}
        c, d = a, b
        a_low = {{ x_tile('in_features + k') }}
        b_low = {{ w_tile('in_features + k') }}
{% else %}
        c = {{ x_tile('k', 'x_bytes', 'BYTE_K') }}
        d = {{ w_tile('k', 'weight_bytes', 'BYTE_K') }}
        a_low = {{ x_tile('in_features + k', 'x_bytes', 'BYTE_K') }}
        b_low = {{ w_tile('in_features + k', 'weight_bytes', 'BYTE_K') }}
{% endif %}
        small = tl.dot(a_low, d.T, small)
        small = tl.dot(c, b_low.T, small)
        h = tl.dot(a, b.T, h)
    h += small
{% else %}
    # A tensor core truncates what it adds: the small products come first, while the sum is small,
    # in one loop with the large ones, so that the pipeline stays full.
{% if is_chunked %}
    for chunk in tl.range(0, in_features, CHUNK_K):
        length = tl.minimum(in_features - chunk, CHUNK_K)
        part = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
{% endif %}
{% filter indent(4 if is_chunked else 0, first=True) %}
{% if has_low %}
    for k in tl.range(0, 3 * {{ length }}, BLOCK_K):
        # low x high, high x low, high x high
        sweep = (k >= {{ length }}).to(tl.int32) + (k >= 2 * {{ length }}).to(tl.int32)
        within = {{ origin }}k - sweep * {{ length }}
        a = {{ x_tile('within + tl.where(sweep == 0, in_features, 0)') }}
        b = {{ w_tile('within + tl.where(sweep == 1, in_features, 0)') }}
        {{ total }} = tl.dot(a, b.T, {{ total }})
{% else %}
    for k in tl.range(0, 2 * {{ length }}, BYTE_K):
        # low x high, high x low
        is_first = k < {{ length }}
        within = {{ origin }}k - tl.where(is_first, 0, {{ length }})
        c = {{ x_tile('within + tl.where(is_first, in_features, 0)', 'x_bytes', 'BYTE_K') }}
        d = {{ w_tile('within + tl.where(is_first, 0, in_features)', 'weight_bytes', 'BYTE_K') }}
        {{ total }} = tl.dot(c, d.T, {{ total }})
    for k in tl.range(0, {{ length }}, BLOCK_K):
        a = {{ x_tile(origin ~ 'k') }}
        b = {{ w_tile(origin ~ 'k') }}
        {{ total }} = tl.dot(a, b.T, {{ total }})
{% endif %}
{% endfilter %}
{% if is_chunked %}
        h += part
{% endif %}
{% endif %}

    rows = first_row + tl.arange(0, BLOCK_M)
    columns = first_column + tl.arange(0, BLOCK_N)
    is_row = (rows < batch)[:, None]
    is_column = columns < out_features
{% if is_scaled %}
    x_units = tl.load(x_unit + rows, mask=rows < batch, other=0.0)
    weight_units = tl.load(weight_unit + columns, mask=is_column, other=0.0)
    h = h * (x_units[:, None] * weight_units[None, :])
{% endif %}
    # 64 bits for the tile's place, 32 within it: fewer registers.
    corner = y + first_row.to(tl.int64) * out_features + first_column
    inner = tl.arange(0, BLOCK_M)[:, None] * out_features + tl.arange(0, BLOCK_N)[None, :]
    tl.store(corner + inner, h, mask=is_row & is_column[None, :])

    # Statistics of this tile, around its own mean: no cancellation on offset inputs. `rest` makes
    # up for the rounding of that mean, so that a constant column has no deviation at all.
    count = tl.minimum(batch - first_row, BLOCK_M).to(tl.float32)
    tile_mean = tl.sum(tl.where(is_row, h, 0.0), axis=0) / count
    deviation = tl.where(is_row, h - tile_mean[None, :], 0.0)
    rest = tl.sum(deviation, axis=0)
    m2 = tl.sum(deviation * deviation, axis=0)
{% if stats == 'atomics' %}
    # sum(h) and sum(h^2) in float64, from the float32 sums around the rounded mean.
    around = tile_mean.to(tl.float64)
    total = count * around + rest
    squares = m2 + 2.0 * around * rest + count * around * around
    tl.atomic_add(sums + columns, total, mask=is_column, sem="relaxed")
    tl.atomic_add(sums + out_features + columns, squares, mask=is_column, sem="relaxed")
{% else %}
    place = partial + tile_m.to(tl.int64) * (2 * out_features) + columns
    tl.store(place, tile_mean + rest / count, mask=is_column)
    tl.store(place + out_features, tl.maximum(m2 - rest * rest / count, 0.0), mask=is_column)
{% endif %}
{% if stats == 'shared_memory' %}
    # All of this program's partials are written before its ticket is drawn (the barrier), and
    # seen by whoever draws the last one (acquire and release).
    tl.debug_barrier()
    ticket = tl.atomic_add(tickets + tile_n, 1, sem="acq_rel")
    if ticket == tiles_m - 1:
        fused_gemm_scale_bn_merge_columns(
            {{ of_merge }},
            first_column, batch, out_features, BLOCK_M, BLOCK_N, 16,
        )
{% endif %}
