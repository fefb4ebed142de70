#include "amx.h"
#include "linear_probe.h"

namespace legato::amx {

int64_t multiply_in_registers(int64_t count, float*) {
  constexpr int64_t kChains = 4, kFlops = 2 * kTileRows * 16 * 32;
  TileScope tiles;
  tiles.set_rows(2 * kTileRows);
  for (int64_t i = 0; i < count; i += kChains) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  return (count + kChains - 1) / kChains * kChains * kFlops;
}

}  // namespace legato::amx
