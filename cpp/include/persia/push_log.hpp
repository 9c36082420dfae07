// Exactly-once pushes: which (client, sequence) a shard has applied, and how far the one in work is.
#pragma once
#include <cstdint>

#include "persia/layout.hpp"

namespace persia {

// A view of the header's fields. Client 0 or sequence 0 means "not tracked".
class PushLog {
 public:
  explicit PushLog(Header& header) : header_(&header) {}

  // Numbers 65 or more behind the newest of their client count as applied: a client must not lag that far.
  bool applied(std::uint64_t client, std::uint64_t sequence) const;
  // Rows of this push that an interrupted attempt has applied already.
  std::uint64_t begin(std::uint64_t client, std::uint64_t sequence);
  void commit(std::uint64_t client, std::uint64_t sequence);
  // Completes a commit that a crash has interrupted, or sets an interrupted push aside until it is retried.
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
