// All-reduce among the tensor-parallel ranks of one machine, through shared memory.
//
// Every rank makes the same calls in the same order. Each rank publishes its part where its peers
// read it, then adds all parts in rank order, so every rank gets the same bits. Two buffers
// alternate: a rank publishes its next part only after it has read all parts of the one before.
#pragma once

#include <atomic>
#include <cstdint>

#include "attention_layout.h"
#include "isa.h"

namespace legato {

// In the order of `_ERRORS` in kernels/cpu/all_reduce.py.
enum class RankError : int32_t { none, lost, closed, late };

struct SumArgs {
  const char* parts;   // the first rank's
  int64_t part_bytes;  // stride from one rank to the next
  int num_ranks;
  void* y;
  Dtype dtype;
};

LEGATO_FOR_EACH_ISA(void sum_parts(const SumArgs& args, int64_t begin, int64_t end))

class AllReduce {
 public:
  // Bytes of the shared file for this many ranks.
  static int64_t file_bytes(int num_ranks);

  // Maps the file, which must be zeroed. Null if mmap fails.
  static AllReduce* open(int fd, int rank, int num_ranks);
  ~AllReduce();

  // x = the sum of all ranks' x. Fails if a peer's process has died, has closed its end or does not
  // arrive within kPatience; x is then undefined, and every later sum fails too.
  RankError sum(void* x, int64_t count, Dtype dtype);

  // Makes every peer that waits for this rank fail. Callable from any thread.
  void close();

 private:
  struct Line;
  AllReduce(char* memory, int rank, int num_ranks);
  Line& line(int rank) const;
  char* parts(uint32_t turn) const;
  RankError await(int peer, uint32_t turn);

  char* memory_;
  int rank_, num_ranks_;
  uint32_t turn_ = 0;
  RankError error_ = RankError::none;
};

}  // namespace legato
