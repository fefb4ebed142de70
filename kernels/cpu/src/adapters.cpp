#include "adapters.h"

#include <algorithm>

#include "api.h"
#include "pool.h"
#include "scratch.h"

namespace legato {

AdapterTiles tiles_of(const AdapterRuns& runs) {
  AdapterTiles tiles;
  for (int32_t i = 0; i < runs.num_runs; ++i) {
    for (int32_t row = runs.starts[i]; row < runs.starts[i + 1]; row += kAdapterRows) {
      tiles.push_back(
          {runs.rows + row, std::min(kAdapterRows, runs.starts[i + 1] - row), runs.slots[i]});
    }
  }
  return tiles;
}

void adapt(const AdapterModule& module, const AdapterTiles& tiles, const void* x, void* y) {
  const auto tile = LEGATO_PICK(adapt_tile);
  const AdapterArgs args{&module, x, y};
  const int64_t bytes = int64_t{kAdapterRows} * module.parts * module.max_rank * sizeof(float);
  const size_t num_threads = Pool::get().size();
  auto one = [&](int64_t i, int) {
    const size_t next = i + num_threads;
    const int32_t next_slot = next < tiles.size() ? tiles[next].slot : -1;
    tile(args, tiles[i], next_slot, reinterpret_cast<float*>(thread_scratch<AdapterModule>(bytes)));
  };
  if (tiles.size() == 1) {
    one(0, 0);
  } else {
    Pool::get().run(static_cast<int64_t>(tiles.size()), one);
  }
}

}  // namespace legato

LEGATO_API void legato_adapt(const legato::AdapterModule* module, const legato::AdapterRuns* runs,
                             const void* x, void* y) {
  legato::adapt(*module, legato::tiles_of(*runs), x, y);
}
