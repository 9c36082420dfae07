// Exactly-once pushes: records which (client, sequence) a shard has applied, and the progress of the current push.
#pragma once
#include <cstdint>

#include "persia/layout.hpp"

namespace persia {

// A view of the header's fields. Client 0 or sequence 0 means "not tracked".
class PushLog {
 public:
  explicit PushLog(Header& header) : header_(&header) {}

  // Whether a push has been applied. Numbers 65 or more behind the client's newest one count as applied.
  bool applied(std::uint64_t client, std::uint64_t sequence) const;
  // Starts a push. Returns the number of its rows that an interrupted attempt has applied.
  std::uint64_t begin(std::uint64_t client, std::uint64_t sequence);
  // Marks a push as applied.
  void commit(std::uint64_t client, std::uint64_t sequence);
  // Completes a commit that a crash interrupted, or keeps an interrupted push until it is retried.
  void recover();

 private:
  ClientEntry* entry_of(std::uint64_t client) const;
  OpenPush* open_of(std::uint64_t client, std::uint64_t sequence) const;
  void replace(std::uint64_t client, ClientEntry next);
  void finish_commit();
  void set_aside(const PushProgress& push);

  Header* header_;
};

}  // namespace persia
