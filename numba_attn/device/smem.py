"""Shared tiles: typed views of a block's dynamic shared memory with compile-time shape and strides.

    sK = K_TILE(shared_memory())   where K_TILE = shared_tile(offset, (STAGES, BLOCK_N, BLOCK_D), BLOCK_D + 4)

gives a tile that is read and written as `sK[stage, row, d]` or `sK[stage][row, d]`; `sK[stage]` is a tile of the
remaining dimensions. Accesses compile to `ld.shared` and `st.shared` with constant strides. `load` and `store` move
2 or 4 consecutive elements at once, from tiles and from global tensors alike.

Row strides: 16-byte accesses of a warp are served 8 lanes at a time. Eight lanes that read one chunk each of eight
successive rows touch all 32 banks once if the stride is 4 words times an odd number: BLOCK_D + 4 is, for BLOCK_D a
multiple of 8.
"""

from __future__ import annotations

import operator
from math import prod

from llvmlite import ir
from numba.core.datamodel.models import PrimitiveModel
from numba.cuda import cgutils, types
from numba.cuda.cudadecl import registry as declarations
from numba.cuda.cudaimpl import registry as implementations
from numba.cuda.extending import intrinsic, register_model
from numba.cuda.typing.templates import AbstractTemplate, AttributeTemplate, signature

from numba_attn.device.ptx import emit_cp_async, emit_from_lane_0
from numba_attn.device.verb import twin_of
from numba_attn.tensor import Tensor, element_pointer, in_global_memory, index_types, index_values

_SHARED = 3  # the address space of shared memory in NVVM IR
_POOL = "dynamic_shared_memory"
_POOL_ALIGNMENT = 1024  # so that byte offsets decide which bank an element is in, and where swizzles exchange chunks


class SharedTile(types.Type):
    """Numba type of a tile; its value is a pointer to the first element."""

    def __init__(self, dtype, shape: tuple[int, ...], strides: tuple[int, ...]):
        self.dtype = dtype
        self.shape = shape
        self.strides = strides
        super().__init__(name=f"SharedTile({dtype}, {shape}, {strides})")


@register_model(SharedTile)
class _SharedTileModel(PrimitiveModel):
    def __init__(self, manager, tile):
        super().__init__(manager, tile, manager[tile.dtype].get_value_type().as_pointer(_SHARED))


def tile_strides(shape: tuple[int, ...], row_stride: int | None = None) -> tuple[int, ...]:
    """Element strides of a tile whose rows (the last dimension) start `row_stride` elements apart."""
    strides = [1]
    for length in reversed(shape[1:]):
        length = row_stride if len(strides) == 1 and row_stride is not None else length
        strides.insert(0, strides[0] * length)
    return tuple(strides)


def tile_bytes(shape: tuple[int, ...], row_stride: int | None = None, itemsize: int = 4) -> int:
    """Bytes of shared memory that a tile takes, its padding included."""
    return itemsize * prod(shape[:-1]) * (row_stride or shape[-1])


@intrinsic
def shared_memory(typingctx):
    """The start of the block's dynamic shared memory, which tiles are made from; once per kernel, by whole warps."""

    def codegen(context, builder, sig, args):
        pool = cgutils.add_global_variable(builder.module, ir.ArrayType(ir.IntType(8), 0), _POOL, _SHARED)
        pool.linkage = "external"
        pool.align = _POOL_ALIGNMENT
        # Of no known origin, the address stays in a register; else sm_90 code finds it anew in every loop (S2UR).
        return emit_from_lane_0(builder, builder.ptrtoint(pool, ir.IntType(32)))

    return types.uint32(), codegen


@twin_of(shared_memory)
def _shared_memory(thread):
    return 0


def shared_tile(offset_bytes: int, shape: tuple[int, ...], row_stride: int | None = None, dtype=types.float32):
    """The maker of a tile: `TILE(smem)`, called inside a kernel, is the tile `offset_bytes` behind `smem`."""
    strides = tile_strides(shape, row_stride)
    tile = SharedTile(dtype, shape, strides)

    @intrinsic
    def make_tile(typingctx, smem):
        def codegen(context, builder, sig, args):
            start = context.cast(builder, args[0], sig.args[0], types.uint32)
            return builder.inttoptr(builder.add(start, start.type(offset_bytes)), context.get_value_type(tile))

        return tile(smem), codegen

    @twin_of(make_tile)
    def _make_tile(thread, smem):
        return thread.shared_tile(smem + offset_bytes, shape, strides, str(dtype))

    return make_tile


@declarations.register_global(operator.getitem)
class _GetItem(AbstractTemplate):
    def generic(self, args, kws):
        tile, index = args
        if isinstance(tile, SharedTile):
            used = len(index_types(index))
            if used < len(tile.shape):
                return signature(SharedTile(tile.dtype, tile.shape[used:], tile.strides[used:]), tile, index)
            if used == len(tile.shape):
                return signature(tile.dtype, tile, index)


@declarations.register_global(operator.setitem)
class _SetItem(AbstractTemplate):
    def generic(self, args, kws):
        tile, index, _ = args
        if isinstance(tile, SharedTile) and len(index_types(index)) == len(tile.shape):
            return signature(types.none, tile, index, tile.dtype)


@declarations.register_attr
class _Attributes(AttributeTemplate):
    key = SharedTile

    def resolve_shape(self, tile):
        return types.UniTuple(types.int64, len(tile.shape))


@implementations.lower_getattr(SharedTile, "shape")
def _shape(context, builder, tile, value):
    return context.make_tuple(
        builder,
        types.UniTuple(types.int64, len(tile.shape)),
        [context.get_constant(types.int64, length) for length in tile.shape],
    )


def _tile_pointer(context, builder, tile, pointer, index, index_value):
    offset = context.get_constant(types.int64, 0)
    for subscript, stride in zip(index_values(context, builder, index, index_value), tile.strides, strict=False):
        offset = builder.add(offset, builder.mul(subscript, context.get_constant(types.int64, stride)))
    # Shared addresses are 32-bit.
    return builder.gep(pointer, [builder.trunc(offset, ir.IntType(32))])


@implementations.lower(operator.getitem, SharedTile, types.Any)
def _getitem(context, builder, sig, args):
    pointer = _tile_pointer(context, builder, sig.args[0], args[0], sig.args[1], args[1])
    return pointer if isinstance(sig.return_type, SharedTile) else builder.load(pointer)


@implementations.lower(operator.setitem, SharedTile, types.Any, types.Any)
def _setitem(context, builder, sig, args):
    builder.store(args[2], _tile_pointer(context, builder, sig.args[0], args[0], sig.args[1], args[1]))
    return context.get_dummy_value()


def _pointer(context, builder, array, value, index, index_value):
    """Pointer to an element of a tile or of a tensor."""
    if isinstance(array, Tensor):
        return in_global_memory(builder, element_pointer(context, builder, array, value, index, index_value)[0])
    return _tile_pointer(context, builder, array, value, index, index_value)


def _vector_pointer(context, builder, pointer, n: int):
    vector = ir.VectorType(pointer.type.pointee, n)
    return builder.bitcast(pointer, ir.PointerType(vector, pointer.type.addrspace))


def vector_load(n: int):
    """The verb `load(patch, patch_index, array, index)`: `n` consecutive elements into a register patch, in one access.

    `array` is a tile or a tensor whose last stride is 1, the address a multiple of `n` elements; n = 1 is an ordinary
    access.
    """

    @intrinsic
    def load(typingctx, patch, patch_index, array, index):
        def codegen(context, builder, sig, args):
            pointer = _pointer(context, builder, sig.args[2], args[2], sig.args[3], args[3])
            value = builder.load(_vector_pointer(context, builder, pointer, n), align=4 * n)
            for i, register in enumerate(_registers(context, builder, sig.args[:2], args[:2], n)):
                builder.store(builder.extract_element(value, ir.Constant(ir.IntType(32), i)), register)
            return context.get_dummy_value()

        return types.none(patch, patch_index, array, index), codegen

    @twin_of(load)
    def _load(thread, patch, patch_index, array, index):
        *rows, column = patch_index
        for i, value in enumerate(thread.load(array, index, n)):
            patch[(*rows, column + i)] = value

    return load


def vector_store(n: int):
    """The verb `store(array, index, factor, patch, patch_index)`: factor times `n` consecutive elements, in one access.

    `array` is a tile or a tensor whose last stride is 1, the address a multiple of `n` elements; n = 1 is an ordinary
    access. `patch` is a register patch.
    """

    @intrinsic
    def store(typingctx, array, index, factor, patch, patch_index):
        def codegen(context, builder, sig, args):
            pointer = _pointer(context, builder, sig.args[0], args[0], sig.args[1], args[1])
            vector = ir.Constant(ir.VectorType(pointer.type.pointee, n), ir.Undefined)
            for i, register in enumerate(_registers(context, builder, sig.args[3:], args[3:], n)):
                value = builder.fmul(args[2], builder.load(register))
                vector = builder.insert_element(vector, value, ir.Constant(ir.IntType(32), i))
            builder.store(vector, _vector_pointer(context, builder, pointer, n), align=4 * n)
            return context.get_dummy_value()

        return types.none(array, index, array.dtype, patch, patch_index), codegen

    @twin_of(store)
    def _store(thread, array, index, factor, patch, patch_index):
        *rows, column = patch_index
        thread.store(array, index, [factor * patch[(*rows, column + i)] for i in range(n)])

    return store


def _registers(context, builder, argument_types, arguments, n: int) -> list:
    """Pointers to `n` elements of a local array, from an index on along the last dimension."""
    patch_type, index_type = argument_types
    patch = context.make_array(patch_type)(context, builder, arguments[0])
    *rows, column = index_values(context, builder, index_type, arguments[1])
    indices = ([*rows, builder.add(column, context.get_constant(types.int64, i))] for i in range(n))
    return [cgutils.get_item_pointer(context, builder, patch_type, patch, index, wraparound=False) for index in indices]


def async_copy(n: int, down: range, across: range):
    """The verb `copy(tile, (r, c), tensor, (row, col), rows_left, columns_left)`: asynchronous copies from a place on.

    For every i in `down` and j in `across`, `n` consecutive elements of tensor row row + i, from column col + j on, go
    to the tile at (r + i, c + j). Where i >= rows_left or j >= columns_left the tile's elements become zero and the
    tensor is not touched. Both last strides are 1 and all addresses multiples of `n` elements. One address is
    computed; the others are steps from it.
    """

    @intrinsic
    def copy(typingctx, tile, tile_index, tensor, tensor_index, rows_left, columns_left):
        def codegen(context, builder, sig, args):
            int32, int64 = ir.IntType(32), ir.IntType(64)
            destination = _tile_pointer(context, builder, sig.args[0], args[0], sig.args[1], args[1])
            source, _, _ = element_pointer(context, builder, sig.args[2], args[2], sig.args[3], args[3])
            strides = cgutils.create_struct_proxy(sig.args[2])(context, builder, value=args[2]).strides
            row_stride, column_stride = (builder.extract_value(strides, k) for k in (0, 1))
            step = builder.mul(row_stride, int64(4 * down.step))
            rows_left, columns_left = (context.cast(builder, args[k], sig.args[k], types.int32) for k in (4, 5))
            to, at = builder.ptrtoint(destination, int32), builder.ptrtoint(source, int64)
            for i in down:
                for j in across:
                    is_there = builder.icmp_signed("<", int32(i), rows_left)
                    is_there = builder.and_(is_there, builder.icmp_signed("<", int32(j), columns_left))
                    target = builder.add(to, int32(4 * (i * sig.args[0].strides[0] + j)))
                    n_bytes = builder.select(is_there, int32(4 * n), int32(0))
                    origin = builder.add(at, builder.mul(column_stride, int64(4 * j)))
                    emit_cp_async(builder, target, origin, 4 * n, n_bytes)
                at = builder.add(at, step)
            return context.get_dummy_value()

        return types.none(tile, tile_index, tensor, tensor_index, rows_left, columns_left), codegen

    @twin_of(copy)
    def _copy(thread, tile, tile_index, tensor, tensor_index, rows_left, columns_left):
        (r, c), (row, col) = tile_index, tensor_index
        for i in down:
            for j in across:
                valid = n if i < rows_left and j < columns_left else 0
                thread.copy_async(tile, (r + i, c + j), tensor, (row + i, col + j), n, valid)

    return copy
