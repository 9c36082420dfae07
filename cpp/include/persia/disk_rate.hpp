// Random reads of a file, to find out how many a disk serves: as rows on disk are read, and by a plain loop of pread.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace persia {

// Reads of blocks at random places of a file, O_DIRECT.
struct RandomReads {
  std::string path;
  std::uint64_t begin = 0;         // byte of the first block; a multiple of 4 KiB
  std::uint64_t blocks = 1;        // that there are
  std::size_t block_bytes = 4096;  // a multiple of 4 KiB
  std::size_t count = 1;           // blocks to read
  std::uint64_t seed = 0;
};

// Returns the seconds that the reads take by `DiskReader`, in calls of 8,192: as many are in flight as when rows are
// read. Throws std::runtime_error if the file cannot be opened or read.
double read_as_rows(const RandomReads& reads);

// The same by a loop of pread in each of some threads, which are started before.
double read_by_threads(const RandomReads& reads, unsigned threads);

}  // namespace persia
