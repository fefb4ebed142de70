"""Blocks of GGUF files whose numbers are runs of a grid: of about one, two and three bits.

Each number of a block chooses g, one of a grid's vectors of 4 or 8 features. Bytes of a block of
256 features, from the start (little endian; d: float16 scale):

| type | bytes | layout | means |
|---|---|---|---|
| IQ1_S | 50 | d, 32 low bytes, 8 words: 4 times 3 high bits, s, sign of t | d (2 s + 1) (g + t) |
| IQ1_M | 56 | 32 low bytes, 32 nibbles: 3 high bits, sign of t; 4 words: 4 s, d | as IQ1_S |
| IQ2_XXS | 66 | d, 8 times: 4 bytes, 4 times 7 bits of signs, s | d (s + 1/2) / 4 g |
| IQ2_XS | 74 | d, 32 words: 9 bits, 7 of signs; 16 s | d (s + 1/2) / 4 g |
| IQ2_S | 82 | d, 32 low bytes, 32 of signs, 32 times 2 high bits, 16 s | d (s + 1/2) / 4 g |
| IQ3_XXS | 98 | d, 64 bytes, 8 times: 4 times 7 bits of signs, s | d (s + 1/2) / 2 g |
| IQ3_S | 110 | d, 64 low bytes, 64 high bits, 32 bytes of signs, 8 s | d (2 s + 1) g |

s: of three bits in IQ1, of four in the others. t: 1/8 or, where its sign is set, -1/8. Of 7 bits of
signs, the eighth makes their number even. Source: ggml-common.h and ggml-quants.c of ggml.
"""

from __future__ import annotations

import base64
import functools
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Words = NDArray[Any]

# Values, features of a vector, and which of all vectors are in the grid, in their order: one bit
# each, compressed.
_GRIDS: dict[str, tuple[tuple[int, ...], int, str]] = {
    "IQ1_S": (
        (-1, 0, 1), 8,
        "c-k#eK}(!R7=CxE;dM-9V?RN1diSfb(^(PgE$L;EU0C#DLh=VZ*|bQ>IZZw%yXlwN6ha`hG?#HO$v6$G@ldv(umM"
        "k2dT8mb2WdTox*h^v8VtnDuD#8?@Vw9Syw7v(LR2?w<}y}3b9YJG^C&5*&qs>Nl?x;NhAB!%0hRecnsm$a2YwJ@;"
        "QqccSPG~@n#@N5uBY$^gNY22s7}?HYgoxmY#Y+!Ajh1yxWA4l1OzVO1-XRyWBes^wA;LAoBq<x!%nuPhFWp9`{&R"
        "@7DG%<XIwD^Is3Q$Jf@<B<<hd(0^?jzIHG8vQn*?-$Ub(LsHW&@kYNcQ%|}dP%c;av8KJU^mWiJv*28-WD<$YEG%"
        "#}+D!ES;XeDuFD(VlG#i@A4$V;H%7rH52w&LB_pg1xSvl=L<CZ@9?{WdkSxbxSuMq|l64F4MqT|O(RS}O@H(bLXv"
        "Hn!_OntvSw2GXTKiD_6XGLxujp0!)qyF+V=7Bv?g3oFy??D1-6?{(2le%HQrc>Le(m#@Cb_P%)g$;r#{<KcsUbe#"
        "9?p_<1{H>jE?+1SCIq;Fwj@yPMjA_U90?}vdY$)D1%>fQq-z{36HBT$I&mG*v%J#A~V%aSj@pZtCEAg}V1eou`2@"
        "uUxU_YQ=)6;l3U7EjmAKr#y2F0kdO91c}@u6ikZ68>90+)KINV7E3oVy0wcNC7Qg*Gnz$6Ckekcj5w;yQl$8BcV}"
        "uIeIA*;9XR~L2uzcrHYS+2)y-rqrtcg6e{stpn$cM#il(dTBx(R&0u-;P1DmAvG}u@dX;b%ns9v~6p49X^c}lqEM"
        "lIFjzJBbrp$X4T{{D_p5YV7e^~xM<^E7<_56qcAaL=FI+lT|4v2#Y&dpW2-Egd@Fdf5G@Dheeu*|v(bMFD;1sQ1",
    ),
    "IQ2_XXS": (
        (8, 25, 43), 8,
        "c-nPRORB^$43oj#tB`je2YP^R=KfcCw)5@K5e=lV<VbEmf91ogR%p3E0BR^O#16P=^@J3)+t0mx___f>P^zDolEn"
        "6;is&dxI!#Zg_{KuzkVd4Mw`?l*l~*(z5~c8Qj-!-YZym34v`$TQ4<4*~)dpL;rq|+W4irx`d$&)6^vGb7UkLBrz"
        "cFbHqcf>sMFwRxr;MTG;*}m%Qlby-@@TSk)X7om@@#uKQIjUUWQ&$2&y}*gX5TV=Bc|Cuh1wL(2Kn3A3Yj<N%;gb"
        "lzhT7_jxp@MF=lA5st5R^Hl2J=^JV`E{Z0D^#$6R7",
    ),
    "IQ2_XS": (
        (8, 25, 43), 8,
        "c-mc2TdsvL2pkgnkBRPwCicH3cK=&BJX-bM<{ZTW!^|+oxJIi-qkD|rsuaR~iB<*?x~C4>8J0pJW<V>X*vo#SY&("
        "-c)w(<-fCU6QVt|)*=>oJ=N8h~B3mmYKBw*Y)Ca<s*uvOak7T*la5<g=kAh?T96(5+bR(Mt@J=L5^n!u1sF+~=p="
        "RjVCGbM+vDH*59tF!>kC`)-u3GzO}jM8X_r-*1ytubG*&a^iqGs?p-do}D8x2NWXU?%O)=7t88q040RdJ=Ak)9T+"
        "$YBcFD31^6BC_W+mG1}iEA-T}Oj@u6-pQ1yByIl9%`W3mW#F%j~<yh(N0zSL~oH^Zy%}}tQx4=M73#xoc?jNErTm"
        "D?iDs40;(&MG>YYMNuDE=SK;cc#9vM%q_=>7msuqjC",
    ),
    "IQ2_S": (
        (8, 25, 43), 8,
        "c-n1JU5W-F3~NE(E9iYHjPDBe{#V(wI=kPpE5rQ7#3X8F%Z9aF@G^(h-0EI3Em0|W3^QwctZ7zp0a8G#rYWS&oF&"
        "YfEj@sgh^u5FBBgC>LAkBEEtarKv-X}c)kMD5E9g)N*35uFS6j&;COQ!QC2=T0oAzp}=fs8f?3xctXeG?g^dQAA!"
        "2(KVP=j1x!<Qgx@l7F)Pu!TMd$m>{ZzEray(N$AzRb24)#*U9zYZZF^+2!@EVQ9?ARiEH!J<ErE8usn4?()-BQhW"
        "*1pE<<S|Z6aT82aQO}QP4+el6zUY~*z7~Sl6pK?p!Q_DMIhH4w7?joIO9P^#Dw9CRS7mu8OBC|vDii4FoWN_zK9m"
        "?6y$}qXC*pyH_2f!)+bXep&HXz~CYasM7Fd3(JhmM~KIbkHJ7yU4;E692~{FNElHOf~Fzm+TBn!W(JyjC6",
    ),
    "IQ3_XXS": (
        (4, 12, 20, 28, 36, 44, 52, 62), 4,
        "c-l=-F%H5o3_M%0RAmZ7_lgPeigaLyA4Q!IuVCbv_?)J2Rn;aw-<^~BWtxCXwzFx0%xW)eST<YW5KL&L;j#hAAHo"
        "X-c)&}FY<X@1m|7IGsjrX>q7@bAuHrcP3L2_`6x)_>^v5;&o?@Fdagv_Uo9H*utGOGEJ93R6P|L2rgx{U}Y-UnrS"
        "3sKYtPIbF!WdDS7|dsT<9UQCqzhJe8+4kK5km%XvHjm=J(sMgqk-e3v^zjTJayVggoDWMJzTWE4a0T)3l-9P!ydl"
        "NePrBA?Xny*@kmBo4W|8$?wEo20v5Uy_5",
    ),
    "IQ3_S": (
        (1, 3, 5, 7, 9, 11, 13, 15), 4,
        "c-k#d!AiqG5PdVu!e&pqA>uXNMyUCUt<-~hDT4SrX{pfmmf{D9Rs{Q#&TgE;z`Qr}-rMBob#A|%IbF{W(Id*&Lkw"
        "q!%0~0(%@Ao{OU0lD_x2OXCI^OquXIKLt}o^pYnG?L6&oz+9HeSVPSrN(A}t!YmF^Xmp*3Qy-5G8(e|b5Y-VC?q("
        "AA>+32wuC)HmEXp@c1}PT|h83}iuXSwt^ePGkv?U+Lf3a_=1ov?9@{igP&9v4ypFswx3&TJZ@M2_=SuX>*z&qp%+"
        "CoXl)ge8!drA@5Agyn!FG+()?*sDei}n1QT95(J|p-wR7#Aht{0!Hx!aZfy;cl!bD4D3uqR(zW`GY5;6>@R{_|3X"
        "$jRqNR^eu)^e<Ll^vCYlKPU1;QQ+o$IB(hKom+bHx0SXmXXwyZnVo8~6jd#wQ>",
    ),
}  # fmt: skip
_DELTA = np.float32(0.125)
_NUM_SIGNS = 128
_SIGNS = np.array([n | (n.bit_count() % 2) << 7 for n in range(_NUM_SIGNS)], np.uint8)
_OF_SEVEN = (0, 7, 14, 21)
_OF_FOUR = (0, 4)


def half(blocks: Bytes, at: int) -> Floats:
    """(blocks, 1) float32: the float16 at byte `at` of each block."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def fields(packed: Words, shifts: Sequence[int], mask: int) -> Words:
    """The bits of each number behind each shift, one after the other: (blocks, numbers, shifts)."""
    kind = packed.dtype.type
    parts: Words = packed[:, :, None] >> np.array(shifts, kind)
    return parts & kind(mask)


@functools.cache
def _grid(name: str) -> Floats:
    """(vectors, features)."""
    values, width, packed = _GRIDS[name]
    chosen = np.frombuffer(zlib.decompress(base64.b85decode(packed)), np.uint8)
    numbers = np.flatnonzero(np.unpackbits(chosen, bitorder="little"))
    digits = numbers[:, None] // len(values) ** np.arange(width) % len(values)
    return np.array(values, np.float32)[digits]


def _words(blocks: Bytes, begin: int, end: int, kind: type[np.generic]) -> Words:
    return np.ascontiguousarray(blocks[:, begin:end]).view(kind)


def _of_grid(name: str, index: Words, scale: Floats, signs: Bytes) -> Floats:
    """index: (blocks, vectors). scale: (blocks, parts). signs: (blocks, 32), a bit each feature."""
    num = len(index)
    values = _grid(name)[index].reshape(num, -1)
    negative = np.unpackbits(signs.reshape(num, -1), axis=1, bitorder="little").view(np.bool_)
    np.negative(values, out=values, where=negative)
    parts = values.reshape(num, scale.shape[1], -1)
    parts *= scale[:, :, None]
    return values


def _near_grid(index: Words, scale: Floats, negative: Words) -> Floats:
    """Vectors beside those of IQ1's grid. negative: (blocks, parts), of t."""
    num = len(index)
    values = _grid("IQ1_S")[index].reshape(num, -1)
    near = values.reshape(num, negative.shape[1], -1)
    near += np.where(negative, -_DELTA, _DELTA)[:, :, None]
    parts = values.reshape(num, scale.shape[1], -1)
    parts *= scale[:, :, None]
    return values


def _with_high(low: Bytes, high: Words) -> Words:
    return low.astype(np.uint16) | high.reshape(len(low), -1).astype(np.uint16) << np.uint16(8)


def iq1_s(blocks: Bytes) -> Floats:
    words = _words(blocks, 34, 50, np.uint16)
    scale = half(blocks, 0) * (2 * (words >> np.uint16(12) & np.uint16(7)) + np.uint16(1))
    index = _with_high(blocks[:, 2:34], fields(words, (0, 3, 6, 9), 7))
    return _near_grid(index, scale, words >> np.uint16(15))


def iq1_m(blocks: Bytes) -> Floats:
    num, high = len(blocks), blocks[:, 32:48]
    words = _words(blocks, 48, 56, np.uint16)
    # Each word has four bits of the block's scale above four scales of three bits.
    pieces = (words >> np.uint16(12)) << np.array([0, 4, 8, 12], np.uint16)
    whole = np.bitwise_or.reduce(pieces, axis=1, keepdims=True).view(np.float16)
    steps = 2 * fields(words, (0, 3, 6, 9), 7).reshape(num, -1) + np.uint16(1)
    index = _with_high(blocks[:, :32], fields(high, _OF_FOUR, 7))
    return _near_grid(
        index, whole.astype(np.float32) * steps, fields(high, _OF_FOUR, 8).reshape(num, -1)
    )


def iq2_xxs(blocks: Bytes) -> Floats:
    words = _words(blocks, 2, 66, np.uint32).reshape(len(blocks), 8, 2)
    index = np.ascontiguousarray(words[:, :, 0]).view(np.uint8)
    return _with_signs("IQ2_XXS", index, half(blocks, 0), words[:, :, 1], np.float32(0.25))


def iq3_xxs(blocks: Bytes) -> Floats:
    words = _words(blocks, 66, 98, np.uint32)
    return _with_signs("IQ3_XXS", blocks[:, 2:66], half(blocks, 0), words, np.float32(0.5))


def _with_signs(name: str, index: Words, whole: Floats, words: Words, unit: np.float32) -> Floats:
    """words: (blocks, 8), of four times seven bits of signs and four of a scale."""
    scale = whole * (np.float32(0.5) + (words >> np.uint32(28)).astype(np.float32)) * unit
    return _of_grid(name, index, scale, _SIGNS[fields(words, _OF_SEVEN, 127)])


def _quarters(blocks: Bytes, at: int) -> Floats:
    """(blocks, 16): scales of two bits and more."""
    steps = fields(blocks[:, at : at + 8], _OF_FOUR, 15).reshape(len(blocks), -1)
    return half(blocks, 0) * (np.float32(0.5) + steps.astype(np.float32)) * np.float32(0.25)


def iq2_xs(blocks: Bytes) -> Floats:
    words = _words(blocks, 2, 66, np.uint16)
    signs = _SIGNS[words >> np.uint16(9)]
    return _of_grid("IQ2_XS", words & np.uint16(511), _quarters(blocks, 66), signs)


def iq2_s(blocks: Bytes) -> Floats:
    index = _with_high(blocks[:, 2:34], fields(blocks[:, 66:74], (0, 2, 4, 6), 3))
    return _of_grid("IQ2_S", index, _quarters(blocks, 74), blocks[:, 34:66])


def iq3_s(blocks: Bytes) -> Floats:
    index = _with_high(blocks[:, 2:66], fields(blocks[:, 66:74], range(8), 1))
    steps = fields(blocks[:, 106:110], _OF_FOUR, 15).reshape(len(blocks), -1)
    scale = half(blocks, 0) * (2 * steps + np.uint8(1)).astype(np.float32)
    return _of_grid("IQ3_S", index, scale, blocks[:, 74:106])
