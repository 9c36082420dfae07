#include "persia/push_log.hpp"

#include <algorithm>

#include "persia/memory.hpp"

namespace persia {
namespace {

ClientEntry advance(const ClientEntry& entry, std::uint64_t sequence) {
  ClientEntry next = entry;
  if (sequence <= entry.last) {
    if (sequence < entry.last) next.recent |= std::uint64_t{1} << (entry.last - sequence - 1);
    return next;
  }
  const std::uint64_t gap = sequence - entry.last;
  next.recent = gap < 64 ? entry.recent << gap : 0;
  if (entry.last != 0 && gap <= 64) next.recent |= std::uint64_t{1} << (gap - 1);
  next.last = sequence;
  return next;
}

}  // namespace

ClientEntry* PushLog::entry_of(std::uint64_t client) const {
  auto* const end = header_->clients + kClients;
  auto* const found = std::find_if(header_->clients, end, [&](const auto& entry) { return entry.client == client; });
  return found == end ? nullptr : found;
}

bool PushLog::applied(std::uint64_t client, std::uint64_t sequence) const {
  const ClientEntry* entry = entry_of(client);
  if (entry == nullptr || sequence > entry->last) return false;
  const std::uint64_t behind = entry->last - sequence;
  return behind == 0 || behind > 64 || ((entry->recent >> (behind - 1)) & 1u) != 0;
}

OpenPush* PushLog::open_of(std::uint64_t client, std::uint64_t sequence) const {
  auto* const end = header_->open + kOpenPushes;
  auto* const found = std::find_if(
      header_->open, end, [&](const OpenPush& open) { return open.client == client && open.sequence == sequence; });
  return found == end ? nullptr : found;
}

std::uint64_t PushLog::begin(std::uint64_t client, std::uint64_t sequence) {
  const OpenPush* open = client == 0 ? nullptr : open_of(client, sequence);
  header_->push = {0, 0, open == nullptr ? 0 : open->rows};
  barrier();
  header_->push.sequence = sequence;
  barrier();
  header_->push.client = client;
  return header_->push.rows_applied;
}

void PushLog::commit(std::uint64_t client, std::uint64_t sequence) {
  const ClientEntry* entry = entry_of(client);
  replace(client, advance(entry == nullptr ? ClientEntry{client, 0, 0, 0} : *entry, sequence));
}

// In one step as seen after a kill: the new entry is complete next to the table before the table changes.
void PushLog::replace(std::uint64_t client, ClientEntry next) {
  ClientEntry* entry = entry_of(client);
  if (entry == nullptr) {
    entry = std::min_element(header_->clients, header_->clients + kClients,
                             [](const auto& a, const auto& b) { return a.used < b.used; });
  }
  next.used = header_->client_clock + 1;
  header_->commit_entry = next;
  barrier();
  header_->commit_slot = static_cast<std::uint32_t>(entry - header_->clients) + 1;
  barrier();
  finish_commit();
}

void PushLog::finish_commit() {
  header_->clients[header_->commit_slot - 1] = header_->commit_entry;
  header_->client_clock = header_->commit_entry.used;
  barrier();
  header_->push = {0, 0, 0};
  barrier();
  header_->commit_slot = 0;
}

// What is kept of an interrupted push is void as soon as it counts as applied; nobody needs to remove it.
void PushLog::set_aside(const PushProgress& push) {
  OpenPush* open = open_of(push.client, push.sequence);
  if (open == nullptr) {
    open = std::min_element(header_->open, header_->open + kOpenPushes, [&](const OpenPush& a, const OpenPush& b) {
      const auto age = [&](const OpenPush& o) { return applied(o.client, o.sequence) ? 0 : o.used; };
      return age(a) < age(b);
    });
    open->client = 0;
    barrier();
    open->sequence = push.sequence;
    open->used = ++header_->client_clock;
  }
  open->rows = push.rows_applied;
  barrier();
  open->client = push.client;
}

void PushLog::recover() {
  if (header_->commit_slot != 0) finish_commit();
  if (header_->push.client == 0) return;
  set_aside(header_->push);
  barrier();
  header_->push.client = 0;
  barrier();
}

}  // namespace persia
