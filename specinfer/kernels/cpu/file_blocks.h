// Rows of files, GGUF blocks or floats, in the layout of products (product.h).

#pragma once

#include "product.h"

namespace specinfer {

// ggml's types of blocks with a product, as in kernels/file_blocks.py, and floats.
enum class FileKind : int32_t { kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ8_0, kQ4_K, kQ5_K, kQ6_K, kFloat32, kFloat16, kBFloat16 };

// Rows of a matrix in a file.
struct FileRows {
  int32_t file;       // its descriptor
  FileKind kind;
  int64_t offset;     // bytes before the matrix
  int64_t row_bytes;
  const int64_t* order;  // numbers of the rows, in order; null: first, first + 1, ...
  int64_t first;
  int64_t count;
};

enum class Stored : int32_t { kWhole, kUnread, kOddLevel, kNotFinite };

// Reads these rows of blocks as the channels of `to` from `channel` on, and fills the rest of its last block if they are
// the last. kUnread: the file cannot be read, or has become shorter; kOddLevel: a level is -128, which products do not
// support; kNotFinite: a scale or min is not finite.
Stored lay_out(const FileRows& rows, int64_t channel, const Product& to);

// The same with rows of any kind for a product of int8 or int4. kNotFinite: a number is not finite, or too large.
Stored quantize(const FileRows& rows, int64_t channel, const Product& to);

// Reads rows begin .. end - 1 of these; false: kUnread.
bool read_rows(const FileRows& rows, int64_t begin, int64_t end, uint8_t* to);

// Blocks in memory, as elements of type float32 or bfloat16.
void to_elements(FileKind kind, const uint8_t* blocks, int64_t elements, Type type, void* out);

}  // namespace specinfer
