#include <sys/wait.h>
#include <unistd.h>

#include <stdexcept>
#include <utility>

#include "check.hpp"
#include "persia/layout.hpp"
#include "persia/region.hpp"

using persia::Region;

TEST(starts_as_zeros_on_a_huge_page_boundary) {
  const Region region = Region::anonymous(std::size_t{1} << 36);
  CHECK(reinterpret_cast<std::size_t>(region.base()) % persia::kHugePage == 0);
  CHECK(region.base()[0] == std::byte{0});
  CHECK(region.base()[region.size() - 1] == std::byte{0});
}

TEST(moves) {
  Region first = Region::anonymous(8192);
  first.base()[5] = std::byte{7};
  Region second = std::move(first);
  CHECK(second.base()[5] == std::byte{7});
  first = Region::anonymous(4096);
  first = std::move(second);
  CHECK(first.base()[5] == std::byte{7});
}

TEST(discarded_pages_read_as_zeros) {
  const Region region = Region::anonymous(1 << 16);
  region.base()[8192] = std::byte{1};
  region.base()[1] = std::byte{2};
  region.discard(4096, 1 << 15);
  CHECK(region.base()[8192] == std::byte{0});
  CHECK(region.base()[1] == std::byte{2});
}

TEST(too_large_is_an_error) { CHECK_THROWS(Region::anonymous(std::size_t{1} << 60), std::runtime_error); }

TEST(a_forked_child_lets_go_without_unmapping) {
  auto* region = new Region(Region::anonymous(1 << 20));
  const pid_t child = fork();
  if (child == 0) {
    delete region;
    _exit(0);
  }
  int status = 1;
  waitpid(child, &status, 0);
  CHECK(status == 0);
  region->base()[0] = std::byte{1};
  delete region;
}

TEST(sections_do_not_overlap) {
  for (const std::uint64_t capacity : {1ull, 1000ull, 1ull << 27}) {
    const auto l = persia::Layout::of(capacity, 152, 1024);
    CHECK(l.undo >= sizeof(persia::Header));
    CHECK(l.sketch >= l.undo + 152 + sizeof(std::uint32_t));
    CHECK(l.index >= l.sketch + l.sketch_bytes);
    CHECK(l.rows >= l.index + l.index_bytes);
    CHECK(l.last_steps >= l.rows + capacity * 152 && l.last_steps % 4096 == 0);
    CHECK(l.total == l.last_steps + capacity * sizeof(std::uint32_t));
    CHECK(l.max_slots * 4 >= capacity * 5);
  }
}

MAIN
