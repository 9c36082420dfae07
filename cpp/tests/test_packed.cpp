#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "check.hpp"
#include "persia/mix.hpp"
#include "persia/packed.hpp"

using namespace persia;
using check::refuses;

namespace {

constexpr std::size_t kDims[] = {3, 5, 1};

void add_tables(Store& store) {
  for (std::size_t t = 0; t < 3; ++t) {
    TableConfig config;
    config.name = std::string(1, static_cast<char>('a' + t));
    config.dim = kDims[t];
    config.capacity = 1000;
    config.shards = 2;
    store.create_table(config);
  }
}

}  // namespace

TEST(lookup_and_update_of_one_buffer_are_those_of_a_buffer_per_table) {
  ThreadPool pool(2);
  Store packed(pool), apart(pool);
  add_tables(packed);
  add_tables(apart);
  const std::vector<std::size_t> tables = {2, 0, 1}, counts = {4, 0, 3};
  const std::vector<std::uint64_t> ids = {1, 2, 3, 4, 1, 5, 9};
  const std::vector<float> lrs = {0.5f, 0.25f, 0.125f};
  const std::size_t floats = 4 * 1 + 3 * 5;
  std::vector<float> gradients(floats);
  for (std::size_t i = 0; i < floats; ++i) gradients[i] = static_cast<float>(i) + 1;
  for (std::uint32_t step = 0; step < 3; ++step) {
    std::vector<float> one(floats), two(floats);
    lookup_packed(packed, {tables, counts}, ids, one, true);
    const LookupRequest requests[] = {{2, ids.data(), 4, two.data()}, {1, ids.data() + 4, 3, two.data() + 4}};
    apart.lookup(requests, true);
    CHECK(one == two);
    const auto found = update_packed(packed, {tables, counts}, ids, gradients, lrs, step, 7, step + 1);
    const UpdateRequest updates[] = {{2, ids.data(), 4, gradients.data(), lrs[0]},
                                     {1, ids.data() + 4, 3, gradients.data() + 4, lrs[2]}};
    apart.update(updates, step, 7, step + 1);
    CHECK(found.size() == 3 && found[0].applied == 4 && found[1].applied == 0 && found[2].applied == 3);
  }
}

TEST(rows_are_read_with_whether_there_are_any) {
  ThreadPool pool(2);
  Store store(pool);
  add_tables(store);
  const std::vector<std::size_t> tables = {2, 0, 1}, counts = {3, 0, 2};
  const std::vector<std::uint64_t> ids = {1, 2, 3, 9, 5};
  std::vector<float> rows(3 * 1 + 2 * 5), expected(rows.size());
  for (const std::uint64_t id : {std::uint64_t{2}, std::uint64_t{3}}) {
    const LookupRequest request{2, &id, 1, rows.data()};
    store.lookup({&request, 1}, true);
  }
  const LookupRequest request{1, &ids[4], 1, rows.data()};
  store.lookup({&request, 1}, true);
  lookup_packed(store, {tables, counts}, ids, expected, false);
  std::fill(rows.begin(), rows.end(), 99.0f);
  std::vector<std::uint8_t> found(ids.size(), 7);
  read_packed(store, {tables, counts}, ids, rows, found);
  CHECK(found == (std::vector<std::uint8_t>{0, 1, 1, 0, 1}));
  CHECK(rows == expected && rows[0] == 0 && rows[1] != 0 && rows[8] != 0);
  CHECK(store.size(0) == 0 && store.size(1) == 1 && store.size(2) == 2);
  for (const std::size_t size : {0, 4}) {
    CHECK(refuses([&] { read_packed(store, {tables, counts}, ids, rows, std::span(found).first(size)); }));
  }
  CHECK(refuses([&] { read_packed(store, {tables, counts}, ids, std::span(rows).first(12), found); }));
  read_packed(store, {{}, {}}, {}, {}, {});
}

TEST(counts_that_do_not_fit_the_buffers_are_refused_and_nothing_changes) {
  ThreadPool pool(1);
  Store store(pool);
  add_tables(store);
  std::vector<std::uint64_t> ids = {1, 2, 3};
  std::vector<float> rows(3 + 2 * 5), lrs = {1, 1};
  const std::vector<std::size_t> tables = {0, 1};
  const std::size_t huge = ~std::size_t{0};
  const std::vector<std::vector<std::size_t>> wrong = {{1, 1},    {1, 3},    {2, 1},    {3, 0}, {0, 3},   {1},
                                                       {1, 2, 0}, {huge, 2}, {1, huge}, {},     {huge, 4}};
  for (const auto& counts : wrong) {
    CHECK(refuses([&] { lookup_packed(store, {tables, counts}, ids, rows, true); }));
    CHECK(refuses([&] { update_packed(store, {tables, counts}, ids, rows, lrs, 0, 0, 0); }));
  }
  const std::vector<std::size_t> right = {1, 2};
  CHECK(refuses([&] { update_packed(store, {tables, right}, ids, rows, std::span(lrs).first(1), 0, 0, 0); }));
  CHECK(refuses([&] { lookup_packed(store, {tables, right}, ids, std::span(rows).first(12), true); }));
  CHECK(store.size(0) == 0 && store.size(1) == 0);
  lookup_packed(store, {tables, right}, ids, rows, true);
  CHECK(store.size(0) == 1 && store.size(1) == 2);
}

TEST(a_packed_batch_is_what_unique_and_group_by_owner_make_without_gaps) {
  ThreadPool pool(2);
  Arena arena;
  std::mt19937_64 random(3);
  for (const std::uint32_t servers : {1u, 3u}) {
    // The last table has more than 65,536 distinct ids, the first none.
    const std::vector<std::vector<std::size_t>> lengths = {{0}, {100, 50}, {}, {70000, 10}, {7}};
    std::vector<std::vector<std::vector<std::uint64_t>>> given;
    std::vector<PackedGroup> groups;
    std::size_t positions = 0;
    for (const auto& features : lengths) {
      auto& table = given.emplace_back();
      for (const std::size_t n : features) {
        auto& ids = table.emplace_back(n);
        for (auto& id : ids) id = n > 1000 ? random() : random() % 40;
        positions += n;
      }
    }
    std::vector<std::int64_t> bounds(lengths.size() * (servers + 1), -1), expected_bounds = bounds;
    for (std::size_t g = 0; g < given.size(); ++g) {
      PackedGroup group;
      for (const auto& ids : given[g]) group.features.emplace_back(ids);
      group.name_hash = g;
      group.bounds = bounds.data() + g * (servers + 1);
      groups.push_back(group);
    }
    std::vector<std::uint16_t> of_bucket(kBuckets);
    for (std::uint32_t b = 0; b < kBuckets; ++b) of_bucket[b] = static_cast<std::uint16_t>(b % servers);
    const BucketOwners of{of_bucket, servers};
    std::vector<std::uint64_t> ids(positions);
    std::vector<std::uint32_t> inverse(positions);
    const auto sizes = pack_batch(groups, of, ids, inverse, pool, arena);
    std::size_t id = 0, narrow = 0, wide = 0;
    for (std::size_t g = 0; g < given.size(); ++g) {
      UniqueGroup one;
      one.features = groups[g].features;
      std::vector<std::uint64_t> room(one.positions());
      std::vector<std::uint32_t> entries(one.positions());
      one.ids = room.data();
      one.inverse = entries.data();
      unique({&one, 1}, pool, arena);
      OwnerGroup owners{g,
                        {room.data(), one.count},
                        {{entries.data(), entries.size(), one.wide}},
                        expected_bounds.data() + g * (servers + 1)};
      group_by_owner({&owners, 1}, of, pool, arena);
      CHECK(groups[g].wide == one.wide);
      for (std::size_t i = 0; i < one.count; ++i) CHECK(ids[id + i] == room[i]);
      id += one.count;
      const auto* bytes = reinterpret_cast<const std::byte*>(inverse.data());
      const std::size_t width = one.wide ? 4 : 2;
      const std::size_t at = one.wide ? wide * 4 : sizes.wide * 4 + narrow * 2;
      CHECK(entries.empty() || std::memcmp(bytes + at, entries.data(), entries.size() * width) == 0);
      (one.wide ? wide : narrow) += entries.size();
    }
    CHECK(bounds == expected_bounds);
    CHECK(sizes.ids == id && sizes.narrow == narrow && sizes.wide == wide && wide == 70010);
    CHECK(refuses([&] { pack_batch(groups, of, std::span(ids).first(positions - 1), inverse, pool, arena); }));
    CHECK(refuses([&] { pack_batch(groups, of, ids, std::span(inverse).first(0), pool, arena); }));
  }
}

TEST(a_copy_is_whole_for_any_size_and_number_of_threads) {
  constexpr std::size_t kBlock = 1 << 19;
  for (const std::size_t threads : {1, 3}) {
    ThreadPool pool(threads);
    for (const std::size_t size : {std::size_t{0}, std::size_t{1}, kBlock - 1, kBlock, kBlock + 1, 5 * kBlock + 7}) {
      std::vector<std::byte> from(size), to(size + 1, std::byte{99});
      for (std::size_t i = 0; i < size; ++i) from[i] = static_cast<std::byte>(i * 31 + i / 251 + 1);
      copy_bytes(std::span(to).first(size), from, pool);
      CHECK(std::equal(from.begin(), from.end(), to.begin()) && to[size] == std::byte{99});
      CHECK(refuses([&] { copy_bytes(to, from, pool); }));
    }
  }
}

TEST(the_parts_of_all_servers_make_the_whole) {
  // Two tables of 4 and 3 rows, of 2 and 1 bytes, over three servers.
  const std::vector<std::int64_t> bounds = {0, 1, 1, 4, 0, 0, 2, 3};
  const std::vector<std::size_t> widths = {2, 1};
  std::vector<std::byte> whole(11), again(11);
  for (std::size_t i = 0; i < whole.size(); ++i) whole[i] = static_cast<std::byte>(i + 1);
  const std::vector<std::size_t> sizes = {2, 2, 7};
  for (std::size_t s = 0; s < 3; ++s) {
    std::vector<std::byte> mine(sizes[s]);
    take_part({bounds, 3, s, widths}, whole, mine);
    put_part({bounds, 3, s, widths}, again, mine);
  }
  CHECK(whole == again);
  std::vector<std::byte> last(7);
  take_part({bounds, 3, 2, widths}, whole, last);
  const int expected[] = {3, 4, 5, 6, 7, 8, 11};
  for (std::size_t i = 0; i < 7; ++i) CHECK(last[i] == static_cast<std::byte>(expected[i]));
  for (const std::size_t size : {0, 6, 8}) {
    std::vector<std::byte> mine(size);
    CHECK(refuses([&] { take_part({bounds, 3, 2, widths}, whole, mine); }));
    CHECK(refuses([&] { put_part({bounds, 3, 2, widths}, again, mine); }));
  }
  CHECK(refuses([&] { take_part({bounds, 3, 3, widths}, whole, last); }));
  CHECK(refuses([&] { take_part({bounds, 2, 1, widths}, whole, last); }));
  CHECK(refuses([&] { take_part({bounds, 3, 2, widths}, std::span(whole).first(10), last); }));
  for (const std::vector<std::int64_t>& wrong :
       {std::vector<std::int64_t>{0, 1, 1, -4, 0, 0, 2, 3}, {1, 1, 1, 4, 0, 0, 2, 3}, {0, 1, 5, 4, 0, 0, 2, 3}}) {
    CHECK(refuses([&] { take_part({wrong, 3, 2, widths}, whole, last); }));
  }
  CHECK(again == whole);
}

MAIN
