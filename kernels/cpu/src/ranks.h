// Sums over the ranks of a stage that share a machine, through memory that all of them map.
//
// Every rank makes the same calls in the same order. A part is written where its peers read it, and
// each rank adds all parts up in the order of ranks, so that all have the same bits. Two buffers take
// turns: who publishes its next part has read everybody's last one.
#pragma once

#include <atomic>
#include <cstdint>

#include "attention_layout.h"
#include "isa.h"

namespace legato {

// In the order of `_ERRORS` in kernels/cpu/ranks.py.
enum class RankError : int32_t { none, lost, closed, late };

struct SumArgs {
  const char* parts;   // the first rank's
  int64_t part_bytes;  // from one rank's to the next one's
  int num_ranks;
  void* y;
  Dtype dtype;
};

LEGATO_FOR_EACH_ISA(void sum_parts(const SumArgs& args, int64_t begin, int64_t end))

class Ranks {
 public:
  // Bytes of the shared file for this many ranks.
  static int64_t file_bytes(int num_ranks);

  // Maps the file, whose bytes are zero at first. Null where that fails.
  static Ranks* open(int fd, int rank, int num_ranks);
  ~Ranks();

  // x = the sum of all ranks' x. An error ends it: a peer's process is gone, or has closed, or
  // has not come within kPatience; x is then undefined, and every later sum fails too.
  RankError sum(void* x, int64_t count, Dtype dtype);

  // Ends what peers wait for with an error. From any thread.
  void close();

 private:
  struct Line;
  Ranks(char* memory, int rank, int num_ranks);
  Line& line(int rank) const;
  char* parts(uint32_t turn) const;
  RankError await(int peer, uint32_t turn);

  char* memory_;
  int rank_, num_ranks_;
  uint32_t turn_ = 0;
  RankError error_ = RankError::none;
};

}  // namespace legato
