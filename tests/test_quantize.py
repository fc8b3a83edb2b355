"""Quantisers, bit for bit: against ml_dtypes' casts, and against a float64 NumPy oracle that goes one block at a time."""

import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from dropless.reference import blocks, formats, fp8, mxfp8, nvfp4

ML = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "e2m1": ml_dtypes.float4_e2m1fn}
GROUPS = {"one": (96, 0, 0, 0), "ragged": (33, 0, 31, 1), "empty": (0, 0, 0, 0), "tail": (5, 64, 0, 0)}
"""Group sizes of 96 rows: one shape, so that each quantiser compiles once."""

mx_quantize = jax.jit(mxfp8.quantize, static_argnums=1, static_argnames=("element", "scale_rule"))


def _codes(name: str) -> np.ndarray:
    """The value of every code of a format, as float32."""
    return np.arange(16 if name == "e2m1" else 256, dtype=np.uint8).view(ML[name]).astype(np.float32)


def _hard_values(name: str) -> np.ndarray:
    """Every finite code, every midpoint between neighbours and its own neighbours, extremes, and random magnitudes."""
    codes = _codes(name)
    grid = np.unique(codes[np.isfinite(codes)])
    middle = ((grid[1:].astype(np.float64) + grid[:-1]) / 2).astype(np.float32)
    rng = np.random.default_rng(0)
    wide = rng.standard_normal(20_000) * np.exp2(rng.integers(-20, 18, 20_000))
    edges = [0.0, -0.0, np.inf, -np.inf, 1e-45, -1e-40, 3.4e38]
    up, down = np.nextafter(middle, np.float32(np.inf)), np.nextafter(middle, np.float32(-np.inf))
    return np.concatenate([grid, middle, up, down, wide.astype(np.float32), np.float32(edges)])


def _bits(a) -> np.ndarray:
    return np.atleast_1d(np.asarray(a)).view(np.uint8)


def _saturated(x: np.ndarray, name: str) -> np.ndarray:
    largest = formats.FORMATS[name].largest
    return np.clip(x, -largest, largest).astype(ML[name])


@pytest.mark.parametrize("name", formats.FORMATS)
def test_every_code_survives_a_round_trip(name):
    codes = _codes(name)
    finite = np.isfinite(codes)
    assert finite.sum() == {"e4m3": 254, "e5m2": 248, "e2m1": 16}[name]
    got = _bits(formats.cast(jnp.asarray(codes), formats.FORMATS[name]))
    assert (got[finite] == np.arange(codes.size, dtype=np.uint8)[finite]).all()


@pytest.mark.parametrize("name", formats.FORMATS)
def test_rounding_is_to_nearest_even_and_saturates(name):
    x = _hard_values(name)
    got = jax.jit(lambda v: formats.cast(v, formats.FORMATS[name]))(x)
    assert (_bits(got) == _bits(_saturated(x, name))).all()


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_nan_stays_nan(name):
    assert np.isnan(np.asarray(formats.cast(jnp.float32([np.nan]), formats.FORMATS[name]), np.float32)).all()


def _mx_block(values: np.ndarray, name: str, rule: str) -> tuple[np.ndarray, int]:
    """One block in float64: (elements as bytes, scale byte)."""
    fmt = formats.FORMATS[name]
    magnitudes = np.abs(values[~np.isnan(values)])
    amax = float(magnitudes.max(initial=0.0))
    if amax == 0:
        byte = 0
    elif math.isinf(amax):
        byte = 254
    elif rule == "ocp":
        byte = min(max(math.frexp(amax)[1] - 1 - fmt.emax + 127, 0), 254)
    else:
        target = float(np.float32(amax) * np.float32(1 / fmt.largest))
        mantissa, exponent = math.frexp(target)  # target = mantissa * 2^exponent, mantissa in [0.5, 1)
        up = exponent - 1 if mantissa == 0.5 else exponent
        byte = min(max(up + 127, 0), 254) if target else 0
    multiplier = 1.0 if byte == 0 else 2.0 ** (127 - byte)
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = (values.astype(np.float64) * multiplier).astype(np.float32)
        return _saturated(scaled, name), byte


def _blocks_of(sizes, block):
    """(first position, end) of each block, in order."""
    start = 0
    for size in sizes:
        for at in range(start, start + size, block):
            yield at, min(at + block, start + size)
        start += size


def _edge_blocks(rng, length: int, columns: int) -> np.ndarray:
    """Random magnitudes with zero blocks, infinities, NaN, subnormals and amax at the edges of powers of two planted in."""
    x = rng.standard_normal((length, columns)) * np.exp2(rng.integers(-30, 30, (1, columns)))
    x = x.astype(np.float32)
    if length:
        x[:, 0] = 0.0
        x[0, 1], x[-1, 2] = np.inf, np.nan
        x[:, 3] = np.float32(1e-42)
        x[:, 4] = np.clip(x[:, 4], -1, 1) * 2.0**-120
        for column, top in enumerate((448.0, 256.0, 1.75, 2.0, np.nextafter(np.float32(2), np.float32(0)), 1.0), 5):
            x[:, column] = np.clip(x[:, column], -0.5, 0.5)
            x[length // 2, column] = top
    return x


@pytest.mark.parametrize("rule", ["te", "ocp"])
@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
@pytest.mark.parametrize("groups", GROUPS)
def test_mxfp8_is_the_oracle_bit_for_bit(groups, name, rule):
    sizes = GROUPS[groups]
    x = _edge_blocks(np.random.default_rng(7), 96, 16)
    values, scales = mx_quantize(x, 0, jnp.asarray(sizes, jnp.int32), element=name, scale_rule=rule)
    want_values = np.zeros(x.shape, ML[name])
    want_scales = np.full(scales.shape, mxfp8.NAN_SCALE, np.uint8)
    for index, (start, end) in enumerate(_blocks_of(sizes, mxfp8.BLOCK)):
        for column in range(x.shape[1]):
            block, want_scales[index, column] = _mx_block(x[start:end, column], name, rule)
            want_values[start:end, column] = block
    assert (np.asarray(scales) == want_scales).all()
    same = _bits(values) == _bits(want_values)
    both_nan = np.isnan(np.asarray(values, np.float32)) & np.isnan(want_values.astype(np.float32))
    assert (same | both_nan).all()


def test_a_block_never_crosses_a_group():
    """A huge row at the end of one group must not set the scale of the next group's first rows."""
    x = np.ones((64, 4), np.float32)
    x[32] = 2.0**20
    sizes = jnp.asarray([33, 31], jnp.int32)
    _, scales = own = mx_quantize(x, 0, sizes)
    alone = mx_quantize(x[33:], 0)
    assert (np.asarray(scales)[2] == np.asarray(alone[1])[0]).all()
    assert (_bits(own[0])[33:] == _bits(alone[0])).all()


@pytest.mark.parametrize("module", [mxfp8, fp8, nvfp4])
def test_what_lies_beyond_the_groups_changes_nothing(module):
    sizes = jnp.asarray([3, 0, 34], jnp.int32)
    x = np.random.default_rng(3).standard_normal((64, 8)).astype(np.float32)
    quantize, dequantize = (jax.jit(f, static_argnames="axis") for f in (module.quantize, module.dequantize))
    clean = quantize(x, axis=0, group_sizes=sizes)
    for poison in (np.nan, np.inf, 1e30):
        dirty = x.copy()
        dirty[37:] = poison
        got = quantize(dirty, axis=0, group_sizes=sizes)
        for a, b in zip(jax.tree.leaves(clean), jax.tree.leaves(got), strict=True):
            assert (_bits(a) == _bits(b)).all()
        assert (np.asarray(dequantize(*got, axis=0, group_sizes=sizes))[37:] == 0).all()


@pytest.mark.parametrize("module", [mxfp8, fp8, nvfp4])
def test_padding_scales_are_never_read(module):
    """Overwriting every scale that no block uses leaves the dequantised numbers as they were."""
    sizes = jnp.asarray([3, 0, 34], jnp.int32)
    x = np.random.default_rng(3).standard_normal((64, 8)).astype(np.float32)
    dequantize = jax.jit(module.dequantize, static_argnames="axis")
    values, scales = jax.jit(module.quantize, static_argnames="axis")(x, axis=0, group_sizes=sizes)
    want = np.asarray(dequantize(values, scales, axis=0, group_sizes=sizes))
    if module is fp8:
        poisoned = scales.at[1].set(jnp.nan)  # the empty group's
    else:
        used = sum(-(-int(s) // module.BLOCK) for s in sizes)
        per_block, rest = (scales[0], scales[1:]) if isinstance(scales, tuple) else (scales, None)
        assert per_block.shape[0] > used
        raw = _bits(per_block).copy()
        raw[used:] = 0x7F
        per_block = jnp.asarray(raw.view(per_block.dtype))
        poisoned = per_block if rest is None else (per_block, *rest)
    assert (np.asarray(dequantize(values, poisoned, axis=0, group_sizes=sizes)) == want).all()
    assert np.isfinite(want).all()


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_current_scaling_is_the_oracle_bit_for_bit(name):
    sizes = (3, 0, 40, 7)
    x = (np.random.default_rng(5).standard_normal((50, 12)) * 100).astype(np.float32)
    quantize = jax.jit(fp8.quantize, static_argnums=1, static_argnames="element")
    values, scales = quantize(x, 0, jnp.asarray(sizes, jnp.int32), element=name)
    start = 0
    for group, size in enumerate(sizes):
        rows = x[start : start + size]
        amax = np.abs(rows).max(initial=0.0)
        encode = np.float32(formats.FORMATS[name].largest) / amax if amax else np.float32(1)
        assert np.asarray(scales)[group] == np.float32(1) / encode
        assert (_bits(values)[start : start + size] == _bits(_saturated(rows * encode, name))).all()
        start += size


def test_delayed_scaling_uses_earlier_steps_only_and_saturates():
    history, step = jnp.zeros(4), jax.jit(fp8.quantize_delayed)
    values, scale, history = step(jnp.float32([[8.0, -2.0]]), history)
    assert scale[0] == 1.0
    assert (np.asarray(values, np.float32) == [[8.0, -2.0]]).all()
    assert history.tolist() == [8.0, 0.0, 0.0, 0.0]
    values, scale, history = step(jnp.float32([[1000.0, 4.0]]), history)
    assert scale[0] == np.float32(1) / (np.float32(448) / np.float32(8))
    assert np.asarray(values, np.float32)[0, 0] == 448.0
    assert history.tolist() == [1000.0, 8.0, 0.0, 0.0]


@pytest.mark.parametrize("shape", [(128, 128), (130, 5), (2, 129, 257)])
def test_tile_scales_are_powers_of_two_and_nothing_saturates(shape):
    x = np.random.default_rng(2).standard_normal(shape).astype(np.float32)
    values, scales = jax.jit(fp8.quantize_tiles)(x)
    assert (np.frexp(np.asarray(scales))[0] == 0.5).all()
    for *lead, a, b in np.ndindex(scales.shape):
        tile = x[(*lead, slice(a * 128, a * 128 + 128), slice(b * 128, b * 128 + 128))]
        scale = np.asarray(scales)[(*lead, a, b)]
        assert np.abs(tile).max() <= 448 * scale < 2 * np.abs(tile).max() * (1 + 2**-23)
        got = _bits(values)[(*lead, slice(a * 128, a * 128 + 128), slice(b * 128, b * 128 + 128))]
        assert (got == _bits(_saturated(tile / scale, "e4m3"))).all()


def test_nvfp4_is_the_oracle_bit_for_bit():
    sizes = (17, 0, 16, 3)
    x = np.random.default_rng(9).standard_normal((36, 6)).astype(np.float32)
    x[:, 0] = 0.0
    x[:, 1] *= 1e-6
    x[20, 2] = 400.0
    values, (scales, tensor) = jax.jit(nvfp4.quantize, static_argnums=1)(x, 0, jnp.asarray(sizes, jnp.int32))
    encode = np.float32(6 * 448) / np.float32(400)
    assert tensor == np.float32(1) / encode
    for index, (start, end) in enumerate(_blocks_of(sizes, nvfp4.BLOCK)):
        amax = np.abs(x[start:end]).max(axis=0)
        block = _saturated(amax * np.float32(1 / 6) * encode, "e4m3")
        assert (_bits(scales)[index] == _bits(block)).all()
        wide = block.astype(np.float32)
        factor = np.divide(encode, wide, out=np.zeros_like(wide), where=wide > 0)
        scaled = np.where(wide > 0, x[start:end] * factor, np.float32(0))
        assert (_bits(values)[start:end] == _bits(_saturated(scaled, "e2m1"))).all()


def test_a_zero_block_beside_a_small_tensor_gives_finite_scales():
    """A floor on the zero block's amax, times a large reciprocal of the tensor scale, overflows e4m3 into NaN."""
    x = np.concatenate([np.full(16, 1e-6), np.zeros(16), np.full(16, 400.0)]).astype(np.float32)[:, None]
    for tensor in (x, x[:32]):
        values, (scales, scale) = jax.jit(nvfp4.quantize, static_argnums=1)(tensor, 0)
        assert np.isfinite(np.asarray(scales, np.float32)[: len(tensor) // 16]).all()
        dequantize = jax.jit(nvfp4.dequantize, static_argnums=2)
        assert np.isfinite(np.asarray(dequantize(values, (scales, scale), 0))).all()


def test_block_count_is_the_tightest_static_bound():
    def worst(length, block, groups):
        if groups == 1:
            return -(-length // block)
        return max(-(-first // block) + worst(length - first, block, groups - 1) for first in range(length + 1))

    for length in range(1, 14):
        for groups in (1, 2, 3):
            assert worst(length, 4, groups) <= blocks.block_count(length, 4, groups) <= worst(length, 4, groups) + 1
