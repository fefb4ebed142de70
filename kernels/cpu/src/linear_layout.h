// Memory layout of a packed weight, and the arguments of a task.
//
// Output features are packed in panels of two registers (32 rows with AVX-512, 16 with AVX2). A
// panel is one contiguous stream over k, in units of 8 k, so a decode step reads memory strictly
// forward:
//
//   f32, f16   [k][row]
//   bf16       [k / 2][row][k % 2]              operand of the bf16 dot product
//   i8         [k / 2][row][k % 2]              one byte each
//   i4         [k / 8][row][k % 2][(k / 2) % 4]  four bits each, stored as value + 8
//   i8 by i8   [k / 4][row][k % 4]              operand of the byte dot product: value + 128
//   i4 by i8   [k / 8][row][k % 4][k / 4 % 2]    four bits each, stored as value + 8
//
// Group-quantized weights have, before each group, a header: fp16 scales [row] and, if there are
// any, fp16 zero points [row]. k is padded with zeros to whole units (and groups).
//
// Where both halves of the rows fill whole registers, a panel interleaves one register of the first
// half with the same one of the second: gate and up of a gate_up layer are then side by side.
#pragma once

#include <cstdint>
#include <memory>

#include "isa.h"
#include "linear.h"

namespace legato {

enum class Weights : int { f32 = 0, bf16 = 1, f16 = 2, i8 = 3, i4 = 4 };

// What the micro-kernels read of x. i16, i8: whole numbers with one scale per row and group of k.
enum class Operand : int { f32, bf16, i16, i8 };

constexpr int64_t bytes_of(Operand operand) {
  return operand == Operand::f32 ? 4 : operand == Operand::i8 ? 1 : 2;
}

// How x becomes whole numbers. to_16_bits: a power of two as scale, for each group of k. to_8_bits:
// the largest magnitude is 127.5 times the scale; by_token: one scale for all of a row.
enum class InputRounding : int { to_16_bits = 0, to_8_bits = 1, to_8_bits_by_token = 2 };

constexpr int64_t kUnit = 8;          // k values that layouts and kernels advance by
constexpr int64_t kMaxGroup = 256;    // k values of one scale
static_assert(kMaxGroup * 32768 * 128 <= INT32_MAX, "their sum, of i16 times i8, must fit");
constexpr int64_t kMaxByteGroup = 576;  // the same of x rounded to 8 bits
constexpr int kPanelVecs = 2;         // registers of rows in a panel
constexpr int kMaxLanes = 16;
constexpr int64_t kMaxBlockRows = 96;  // rows of x whose accumulators stay in the L1 cache
constexpr int64_t kMaxWidenedRows = 264;  // the same where many rows pay for widening a k-block
constexpr int64_t kTileK = 32;         // k values of one AMX tile
// With AMX: rows of a task, panels of a task of many rows, and bytes of x that stay in the L2 cache
// while the panels pass over them.
constexpr int64_t kMaxTiledRows = 512;
constexpr int64_t kTiledPanels = 8;
constexpr int64_t kTiledInputBytes = 1 << 20;

struct Task;

// Rows of x as they are given.
struct RawRows {
  const void* first;
  int64_t row_bytes;
  int64_t num_rows;
};

// Where they are prepared to.
struct PreparedRows {
  void* data;         // null: used in place
  float* scales;      // [num_rows][num_operand_groups]; null unless i16 or i8
  float* group_sums;  // [num_rows][num_groups] sums of x; null: not needed
  int32_t* offsets;   // [num_rows][num_operand_groups]; null unless i8
};

struct PackedLinear {
  int64_t O = 0;
  int64_t K = 0;
  int64_t padded_K = 0;
  Type type = Type::f32;
  Weights weights = Weights::f32;
  int64_t group = 0;          // group size; 0: one scale per row, or none
  bool has_zeros = false;
  bool interleaves_halves = false;
  int lanes = kMaxLanes;      // of the instruction set it was packed for
  InputRounding rounding = InputRounding::to_16_bits;
  Operand operand = Operand::f32;
  int64_t operand_group = 0;  // k values of one scale of x; 0 unless i16 or i8
  bool is_tiled = false;      // multiplied by AMX: x is copied to tiles, K padded to whole ones
  bool tiles_bytes = false;   // i8 multiplied by AMX where rows are many, x in place

  int64_t num_panels = 0;
  int64_t unit_bytes = 0;     // of one panel's 8 k
  int64_t header_bytes = 0;   // of one panel's group: scales and zeros
  int64_t panel_bytes = 0;
  char* data = nullptr;
  std::unique_ptr<float[]> row_scales;    // in packed row order, or null
  std::unique_ptr<float[]> bias;          // in packed row order, or null
  std::unique_ptr<int32_t[]> permutation;  // the column of x that packed k reads, or null

  std::shared_ptr<void> memory;  // owner of `data`

  // For the instruction set it was packed for.
  void (*run_task)(const Task&) = nullptr;
  void (*prepare_rows)(const PackedLinear&, const RawRows&, const PreparedRows&) = nullptr;

  int64_t panel_rows() const { return kPanelVecs * lanes; }
  int64_t num_groups() const { return group == 0 ? 1 : padded_K / group; }
  int64_t num_operand_groups() const { return operand_group == 0 ? 0 : padded_K / operand_group; }
  // What weights for bytes of x are stored with in addition.
  int32_t stored_offset() const { return weights == Weights::i8 ? 128 : 8; }
  bool has_tiled_tasks() const { return is_tiled || tiles_bytes; }
  bool is_widened() const {
    return operand == Operand::f32 && (weights == Weights::bf16 || weights == Weights::f16);
  }
  // Where register `vec` of a panel begins among the outputs.
  int64_t column(int64_t panel, int vec) const {
    return interleaves_halves ? panel * lanes + vec * (O / 2) : (panel * kPanelVecs + vec) * lanes;
  }
  // How many of that register's lanes are outputs.
  int64_t width(int64_t panel, int vec) const {
    const int64_t left = O - column(panel, vec);
    return left < 0 ? 0 : left < lanes ? left : lanes;
  }
};

enum class Epilogue : int { store, store_f32, add, silu_mul };

// x as the micro-kernels read it: padded_K columns of the operand's type. For AMX as tiles
// (tiles.h).
struct PreparedInput {
  const char* data;
  int64_t row_bytes;
  const float* scales;      // [M][num_operand_groups]; null unless i16 or i8
  const float* group_sums;  // [M][num_groups] sums of x over each group; null without zero points
  // [M][num_operand_groups] sums of x over each group times -stored_offset(); null unless i8
  const int32_t* offsets;
  int64_t num_rows;
};

// A rectangle of the output: some rows of x times some panels.
struct Task {
  const PackedLinear* linear;
  PreparedInput x;
  int64_t row_begin, num_rows;  // num_rows: at most one of the above
  int64_t panel_begin, panel_end;
  Epilogue epilogue;
  void* out;
  int64_t ldo;       // or kTiled: tiles of the silu_mul epilogue
  int64_t out_rows;  // of the whole product
};

LEGATO_FOR_EACH_ISA(
    void run_linear_task(const Task& task);
    // Of tiles, at most 16 rows.
    void prepare_linear_rows(const PackedLinear& linear, const RawRows& x, const PreparedRows& to))

namespace vnni {
void run_linear_task(const Task& task);  // of i16 and i8 operands only
}

namespace amx {
void run_linear_task(const Task& task);
void run_bytes_task(const Task& task);  // of i8 operands
}

}  // namespace legato
