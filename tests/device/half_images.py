"""Images of halves by the description in `device.split_half`, in plain numpy, and fragments as matrices."""

from __future__ import annotations

import numpy as np

from numba_attn.device.fragments import C_COL, C_ROW


def split(X, scale=1.0) -> tuple[np.ndarray, np.ndarray]:
    """hi and lo of X times a power of two, which float64 holds exactly."""
    with np.errstate(all="ignore"):
        x = np.asarray(X, np.float64) * float(scale)
        hi = x.astype(np.float16)
        return hi, (x - hi).astype(np.float16)


def image_of(X, scale=1.0, halves=2) -> np.ndarray:
    """The words of the image of one tile [rows, columns], of hi or of hi and lo."""
    rows, columns = X.shape
    padding = -columns % 64
    planes = []
    for half in split(X, scale)[:halves]:
        chunks = np.pad(half, ((0, 0), (0, padding))).reshape(rows, -1, 8, 8).transpose(1, 0, 2, 3)
        plane = np.empty_like(chunks)  # [block of columns, row, place, half]
        for row in range(rows):
            for chunk in range(8):
                plane[:, row, chunk ^ (row % 8)] = chunks[:, row, chunk]
        planes.append(plane.ravel())
    return np.concatenate(planes).view(np.uint32)


def gathered(registers) -> np.ndarray:
    """[rows, columns] of the registers [32, i, j, 4] that the lanes have of fragments of 16 x 8."""
    _, m_tiles, n_tiles, _ = registers.shape
    X = np.empty((16 * m_tiles, 8 * n_tiles), registers.dtype)
    for i in range(m_tiles):
        for j in range(n_tiles):
            X[16 * i : 16 * i + 16, 8 * j : 8 * j + 8][C_ROW, C_COL] = registers[:, i, j]
    return X


def scattered(X) -> np.ndarray:
    """The registers [32, i, j, 4] of X, whose sides are multiples of 16 and 8."""
    tiles = X.reshape(X.shape[0] // 16, 16, X.shape[1] // 8, 8).swapaxes(1, 2)
    return np.ascontiguousarray(np.moveaxis(tiles[:, :, C_ROW, C_COL], 2, 0))


def of_rows(x) -> np.ndarray:
    """What the lanes have [32, i, h] of one value a row: row 16 i + 8 h + lane // 4."""
    return np.ascontiguousarray(np.repeat(np.moveaxis(x.reshape(-1, 2, 8), 2, 0), 4, axis=0))
