#include <sys/stat.h>

#include <atomic>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"
#include "directory.hpp"
#include "persia/checksum.hpp"
#include "persia/memory.hpp"
#include "persia/served.hpp"

using namespace persia;

namespace {

using Rows = std::map<std::uint64_t, float>;  // each row has this value in all places

std::vector<float> filled(std::size_t dim, float value) { return std::vector<float>(dim, value); }

void set(ServedTable& table, std::uint64_t id, float value) { table.set({&id, 1}, filled(table.dim(), value).data()); }

bool remove(ServedTable& table, std::uint64_t id) { return table.remove({&id, 1}) == 1; }

// Checks that the table has these rows and none of the others among `ids`.
void check_rows(const ServedTable& table, const Rows& rows, const std::vector<std::uint64_t>& ids) {
  std::vector<float> out(ids.size() * table.dim(), -1.0f);
  const std::unique_ptr<bool[]> found(new bool[ids.size()]);
  std::uint64_t expected = 0;
  const std::uint64_t count = table.lookup(ids, out.data(), found.get());
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const auto row = rows.find(ids[i]);
    CHECK(found[i] == (row != rows.end()));
    expected += found[i];
    for (std::size_t d = 0; d < table.dim(); ++d) CHECK(out[i * table.dim() + d] == (found[i] ? row->second : 0.0f));
  }
  CHECK(count == expected);
  CHECK(table.size() == rows.size());
  const std::vector<std::uint64_t> all = table.ids();
  CHECK(all.size() == rows.size());
  for (const std::uint64_t id : all) CHECK(rows.count(id) == 1);
}

std::string bytes_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void write_bytes(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

// The offsets that docs/reference/served-rows.md gives.
constexpr std::size_t kPage = 4096, kVersionAt = 8, kDimAt = 12, kRowsAt = 16, kBucketsAt = 24, kBytesAt = 32,
                      kNameBytesAt = 44, kHeaderChecksumAt = kPage - 4;

template <class T>
void put(std::string& bytes, std::size_t at, T value) {
  std::memcpy(bytes.data() + at, &value, sizeof value);
}

template <class T>
T get(const std::string& bytes, std::size_t at) {
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

// Makes the header's checksum right, as a liar would.
void seal(std::string& bytes) {
  put(bytes, kHeaderChecksumAt, crc32(0, reinterpret_cast<const std::byte*>(bytes.data()), kHeaderChecksumAt));
}

std::string error_of(const std::string& path) {
  try {
    ServedTable(3, path);
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace

TEST(rows_are_those_of_a_map) {
  Directory directory;
  std::mt19937_64 random(1);
  std::vector<std::uint64_t> universe(3000);
  for (auto& id : universe) id = random();
  universe[0] = 0;
  universe[1] = ~std::uint64_t{0};
  Rows rows;
  auto table = std::make_unique<ServedTable>(5);
  for (int generation = 0; generation < 4; ++generation) {
    for (int step = 0; step < 4000; ++step) {
      const std::uint64_t id = universe[random() % universe.size()];
      if (random() % 3 == 0) {
        CHECK(remove(*table, id) == (rows.erase(id) == 1));
      } else {
        set(*table, id, rows[id] = static_cast<float>(random() % 1000));
      }
      if (step % 1000 == 0) check_rows(*table, rows, universe);
    }
    check_rows(*table, rows, universe);
    const std::string path = directory.path + "/rows";
    table->write_file(path, "users");
    auto mapped = std::make_unique<ServedTable>(5, path);
    mapped->base()->verify();
    CHECK(mapped->base()->name() == "users" && mapped->base()->rows() == rows.size());
    check_rows(*mapped, rows, universe);
    CHECK(mapped->ids() == table->ids());  // also after a file, their order is that of the hashes
    table = std::move(mapped);
  }
}

TEST(rows_of_a_file_are_overridden_and_hidden) {
  Directory directory;
  const std::string path = directory.path + "/rows", second = directory.path + "/second";
  ServedTable first(2);
  for (std::uint64_t id = 0; id < 10; ++id) set(first, id, static_cast<float>(id + 1));
  first.write_file(path, "");
  const std::string before = bytes_of(path);
  ServedTable table(2, path);
  set(table, 3, 30);
  set(table, 100, 5);
  CHECK(remove(table, 4) && !remove(table, 4));  // of the file
  CHECK(remove(table, 3) && !remove(table, 3));  // of the file and of memory
  CHECK(remove(table, 100) && !remove(table, 200));
  set(table, 4, 40);  // again
  CHECK(table.size() == 9);
  const Rows rows{{0, 1}, {1, 2}, {2, 3}, {4, 40}, {5, 6}, {6, 7}, {7, 8}, {8, 9}, {9, 10}};
  const std::vector<std::uint64_t> asked{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 100, 200, 4, 4};
  check_rows(table, rows, asked);
  table.write_file(second, "");
  check_rows(ServedTable(2, second), rows, asked);
  check_rows(ServedTable(2, path), {{0, 1}, {1, 2}, {2, 3}, {3, 4}, {4, 5}, {5, 6}, {6, 7}, {7, 8}, {8, 9}, {9, 10}},
             asked);
  CHECK(bytes_of(path) == before);
  table.write_file(path, "");  // in place of the one that is mapped
  check_rows(table, rows, asked);
  check_rows(ServedTable(2, path), rows, asked);
}

TEST(an_empty_file_is_a_file) {
  Directory directory;
  const std::string path = directory.path + "/rows";
  ServedTable(2).write_file(path, "");
  ServedTable table(2, path);
  check_rows(table, {}, {0, 1, 2});
  set(table, 1, 5);
  check_rows(table, {{1, 5}}, {0, 1, 2});
}

TEST(memory_of_old_rows_is_used_again) {
  ServedTable table(8);
  std::vector<std::uint64_t> ids(2000);
  std::iota(ids.begin(), ids.end(), 0);
  const std::vector<float> values(ids.size() * 8, 1.0f);
  table.set(ids, values.data());
  for (int round = 0; round < 3; ++round) table.set(ids, values.data());
  const std::uint64_t bytes = table.memory_bytes();
  for (int round = 0; round < 30; ++round) {
    table.set(ids, values.data());
    CHECK(table.remove(ids) == ids.size());
    for (auto& id : ids) id += ids.size();  // Slots of removed ids are used again, too.
    table.set(ids, values.data());
  }
  CHECK(table.size() == ids.size());
  CHECK(table.memory_bytes() <= 2 * bytes);
}

// While a writer sets, removes and grows, a row that a reader finds has one version in all places, rows that stay are
// always there, and no reader sees an older version after a newer one.
TEST(readers_see_whole_rows_in_order) {
  constexpr std::size_t kDim = 24, kStay = 200, kComeAndGo = 200;
  const std::uint64_t rounds = kSanitized ? 60 : 400;
  Directory directory;
  const std::string path = directory.path + "/rows";
  ServedTable first(kDim);
  for (std::uint64_t id = 0; id < kStay; id += 2) set(first, id, 0);
  first.write_file(path, "");
  ServedTable table(kDim, path);
  for (std::uint64_t id = 1; id < kStay; id += 2) set(table, id, 0);

  std::atomic<bool> stop{false};
  std::atomic<int> bad{0};
  std::atomic<std::uint64_t> lookups{0};
  const auto read = [&] {
    std::vector<std::uint64_t> ids(kStay + kComeAndGo);
    std::iota(ids.begin(), ids.end(), 0);
    std::vector<float> out(ids.size() * kDim), last(ids.size(), 0.0f);
    const std::unique_ptr<bool[]> found(new bool[ids.size()]);
    while (!stop.load()) {
      table.lookup(ids, out.data(), found.get());
      for (std::size_t i = 0; i < ids.size(); ++i) {
        const float* const row = out.data() + i * kDim;
        for (std::size_t d = 1; d < kDim; ++d) bad += row[d] != row[0];
        if (i < kStay) bad += !found[i];
        if (!found[i]) continue;
        bad += row[0] < last[i];
        last[i] = row[0];
      }
      ++lookups;
    }
  };
  std::vector<std::thread> readers;
  for (int i = 0; i < 3; ++i) readers.emplace_back(read);
  std::uint64_t fresh = 1000;
  for (std::uint64_t round = 1; round <= rounds || lookups.load() < 20; ++round) {
    for (std::uint64_t id = 0; id < kStay + kComeAndGo; ++id) {
      if (id >= kStay && (id + round) % 3 == 0) {
        remove(table, id);
      } else {
        set(table, id, static_cast<float>(round));
      }
    }
    for (int i = 0; i < 100; ++i) set(table, fresh++, 1);
  }
  stop = true;
  for (auto& reader : readers) reader.join();
  CHECK(bad.load() == 0);
}

// A row of a file is there at each moment of the change that overrides it.
const ServedTable* looked_at = nullptr;
int looks = 0;

TEST(a_row_is_hidden_after_its_successor_is_there) {
  Directory directory;
  const std::string path = directory.path + "/rows";
  ServedTable first(2);
  set(first, 7, 1);
  first.write_file(path, "");
  ServedTable table(2, path);
  looked_at = &table;
  crash_hook = [] {
    const std::uint64_t id = 7;
    float values[2] = {};
    CHECK(looked_at->lookup({&id, 1}, values, nullptr) == 1 && values[0] == 2);
    ++looks;
  };
  set(table, 7, 2);
  crash_hook = nullptr;
  CHECK(looks == 1);
}

// Readers ask for the rows that the writer is about to override.
TEST(rows_of_a_file_stay_while_they_are_overridden) {
  constexpr std::uint64_t kRows = kSanitized ? 20'000 : 100'000, kAsked = 32;
  Directory directory;
  const std::string path = directory.path + "/rows";
  ServedTable first(2);
  std::vector<std::uint64_t> ids(kRows + kAsked);
  std::iota(ids.begin(), ids.end(), 0);
  first.set(ids, filled(ids.size() * 2, 1).data());
  first.write_file(path, "");
  ServedTable table(2, path);
  std::atomic<std::uint64_t> next{0};
  std::atomic<int> bad{0};
  const auto read = [&] {
    std::vector<float> out(kAsked * 2);
    for (std::uint64_t at = 0; at < kRows; at = next.load()) {
      bad += table.lookup({ids.data() + at, kAsked}, out.data(), nullptr) != kAsked;
    }
  };
  std::thread reader(read);
  const float values[] = {2, 2};
  while (next.load() < kRows) {
    table.set({ids.data() + next.load(), 1}, values);
    ++next;
  }
  reader.join();
  CHECK(bad.load() == 0);
  CHECK(table.size() == ids.size());
}

// Of files that are written while rows change.
TEST(a_file_is_as_of_one_moment) {
  Directory directory;
  const std::string path = directory.path + "/rows";
  ServedTable table(4);
  std::vector<std::uint64_t> ids(500);
  std::iota(ids.begin(), ids.end(), 0);
  table.set(ids, filled(ids.size() * 4, 0).data());
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    for (int round = 1; !stop.load(); ++round) table.set(ids, filled(ids.size() * 4, static_cast<float>(round)).data());
  });
  for (int file = 0; file < 5; ++file) {
    table.write_file(path, "");
    const ServedTable mapped(4, path);
    std::vector<float> out(ids.size() * 4);
    CHECK(mapped.lookup(ids, out.data(), nullptr) == ids.size());
    for (const float value : out) CHECK(value == out[0]);
  }
  stop = true;
  writer.join();
}

TEST(many_readers_at_a_time) {
  Epochs epochs;
  std::vector<std::unique_ptr<Epochs::Reader>> readers;
  for (int i = 0; i < 100; ++i) readers.push_back(std::make_unique<Epochs::Reader>(epochs));
  const std::uint64_t noted = epochs.current();
  epochs.advance();
  for (; !readers.empty(); readers.pop_back()) CHECK(epochs.oldest() == noted);
  const Epochs::Reader later(epochs);
  CHECK(epochs.oldest() > noted);
}

TEST(damaged_files_are_refused) {
  Directory directory;
  const std::string path = directory.path + "/rows", bad = directory.path + "/bad";
  ServedTable table(3);
  for (std::uint64_t id = 0; id < 1000; ++id) set(table, id, static_cast<float>(id));
  table.write_file(path, "items");
  const std::string good = bytes_of(path);
  const auto refused = [&](std::string bytes, const std::string& because) {
    write_bytes(bad, bytes);
    CHECK(contains(error_of(bad), because));
    CHECK(contains(error_of(bad), bad));
  };
  const auto lying = [&](auto&& change, const std::string& because) {
    std::string bytes = good;
    change(bytes);
    seal(bytes);
    refused(bytes, because);
  };
  refused("", "not a file of served rows");
  refused("PERS", "not a file of served rows");
  refused(std::string(10000, 'x'), "not a file of served rows");
  for (const std::size_t size : {8ul, 100ul, kPage - 1}) refused(good.substr(0, size), "truncated");
  for (const std::size_t size : {kPage, kPage + 1, good.size() - 1}) refused(good.substr(0, size), "bytes instead of");
  refused(good + "x", "bytes instead of");
  for (std::size_t at = kDimAt; at < kPage; at += 37) {
    std::string bytes = good;
    bytes[at] = static_cast<char>(bytes[at] ^ 4);
    refused(bytes, "header is damaged");
  }
  lying([](auto& bytes) { put<std::uint32_t>(bytes, kVersionAt, 2); }, "version 2");
  const std::string contradicts = "contradicts itself";
  for (const std::uint32_t dim : {0u, 2u, 4u, 65537u, ~0u}) {
    lying([&](auto& bytes) { put(bytes, kDimAt, dim); }, contradicts);
  }
  for (const std::uint64_t count : {std::uint64_t{0}, std::uint64_t{1} << 20, std::uint64_t{1} << 32,
                                    std::uint64_t{1} << 61, std::uint64_t{1} << 62, ~std::uint64_t{0}}) {
    lying([&](auto& bytes) { put(bytes, kRowsAt, count); }, contradicts);
    lying([&](auto& bytes) { put(bytes, kBucketsAt, count); }, contradicts);
    lying([&](auto& bytes) { put(bytes, kBytesAt, count); }, contradicts);
  }
  lying([](auto& bytes) { put<std::uint32_t>(bytes, kNameBytesAt, 1025); }, contradicts);
  CHECK(contains(error_of(directory.path), "not a file"));
  CHECK(contains(error_of(directory.path + "/none"), "cannot be opened"));
  CHECK(mkfifo((directory.path + "/fifo").c_str(), 0600) == 0);
  CHECK(contains(error_of(directory.path + "/fifo"), "not a file"));
  CHECK_THROWS(ServedTable(4, path), std::runtime_error);
  CHECK_THROWS(ServedTable{0}, std::invalid_argument);
  CHECK_THROWS(ServedTable{65537}, std::invalid_argument);
}

// What is not checked when a file is opened is checked where it is used: nothing outside of it is read.
TEST(damaged_rows_cannot_lead_outside) {
  Directory directory;
  const std::string path = directory.path + "/rows", bad = directory.path + "/bad";
  ServedTable table(3);
  std::vector<std::uint64_t> ids(1000);
  std::iota(ids.begin(), ids.end(), 0);
  table.set(ids, filled(ids.size() * 3, 1).data());
  table.write_file(path, "");
  const std::string good = bytes_of(path);
  const std::size_t ids_at = 2 * kPage;
  CHECK(get<std::uint64_t>(good, kBucketsAt) == 250);
  std::mt19937_64 random(1);
  int refused = 0;
  for (int round = 0; round < 200; ++round) {
    std::string bytes = good;
    for (int i = 0; i < 20; ++i) {  // entries of the directory, and now and then an id
      const bool in_directory = random() % 4 != 0;
      const std::size_t at = in_directory ? kPage + random() % 251 * 8 : ids_at + random() % 1000 * 8;
      const std::uint64_t values[] = {random() % 1001, random(), 1001, ~std::uint64_t{0}};
      put(bytes, at, values[random() % 4]);
    }
    write_bytes(bad, bytes);
    ServedTable damaged(3, bad);
    CHECK_THROWS(damaged.base()->verify(), std::runtime_error);
    std::vector<float> out(3);
    for (const std::uint64_t id : ids) {
      try {
        damaged.lookup({&id, 1}, out.data(), nullptr);
        if (id % 3 == 0) remove(damaged, id);
        if (id % 3 == 1) set(damaged, id, 2);
      } catch (const std::runtime_error& error) {
        CHECK(contains(error.what(), "directory is damaged"));
        ++refused;
      }
    }
  }
  CHECK(refused > 0);
  std::string bytes = good;
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  write_bytes(bad, bytes);
  CHECK_THROWS(ServedTable(3, bad).base()->verify(), std::runtime_error);
}

TEST(long_ranges_are_searched) {
  Directory directory;
  const std::string path = directory.path + "/rows";
  ServedTable table(1);
  std::vector<std::uint64_t> ids(5000);
  std::iota(ids.begin(), ids.end(), 0);
  table.set(ids, filled(ids.size(), 1).data());
  table.write_file(path, "");
  // The same rows with a directory of one place, which is what a file of very few buckets has.
  std::string bytes = bytes_of(path);
  const std::size_t directory_bytes = (get<std::uint64_t>(bytes, kBucketsAt) + 1) * 8;
  const std::size_t ids_at = kPage + (directory_bytes + kPage - 1) / kPage * kPage;
  bytes.erase(kPage, ids_at - 2 * kPage);
  std::memset(bytes.data() + kPage, 0, kPage);
  put<std::uint64_t>(bytes, kPage + 8, ids.size());
  put<std::uint64_t>(bytes, kBucketsAt, 1);
  put<std::uint64_t>(bytes, kBytesAt, bytes.size());
  seal(bytes);
  write_bytes(path, bytes);
  const ServedTable mapped(1, path);
  std::vector<float> out(ids.size());
  CHECK(mapped.lookup(ids, out.data(), nullptr) == ids.size());
  const std::uint64_t absent = 5000;
  CHECK(mapped.lookup({&absent, 1}, out.data(), nullptr) == 0);
}

TEST(a_file_that_cannot_be_written_leaves_nothing_behind) {
  Directory directory;
  ServedTable table(2);
  set(table, 1, 1);
  CHECK_THROWS(table.write_file(directory.path + "/none/rows", ""), std::runtime_error);
  CHECK_THROWS(table.write_file(directory.path + "/rows", std::string(1025, 'x')), std::runtime_error);
  CHECK(mkdir((directory.path + "/taken").c_str(), 0700) == 0);
  CHECK(mkdir((directory.path + "/taken/in").c_str(), 0700) == 0);
  CHECK_THROWS(table.write_file(directory.path + "/taken", ""), std::runtime_error);
  DIR* const all = opendir(directory.path.c_str());
  std::set<std::string> names;
  while (const dirent* entry = readdir(all)) names.insert(entry->d_name);
  closedir(all);
  CHECK((names == std::set<std::string>{".", "..", "taken"}));
  rmdir((directory.path + "/taken/in").c_str());
  rmdir((directory.path + "/taken").c_str());
}

MAIN
