#include "persia/fetched_records.hpp"

#include <algorithm>
#include <stdexcept>
#include <vector>

namespace persia {

RowLog::Wanted FetchedRecords::prepare(const RowLog& log) {
  std::sort(wanted_.begin(), wanted_.end());
  wanted_.erase(std::unique(wanted_.begin(), wanted_.end()), wanted_.end());
  records_.resize(wanted_.size());
  std::transform(wanted_.begin(), wanted_.end(), records_.begin(), [](const auto& wanted) { return wanted.first; });
  bytes_.resize(records_.size() * log.record_bytes());
  return {&log, records_, bytes_.data()};
}

void FetchedRecords::read(std::span<const Pending> pending) {
  std::vector<RowLog::Wanted> wanted;
  for (const auto& [records, log] : pending) {
    if (!records->empty()) wanted.push_back(records->prepare(*log));
  }
  try {
    return RowLog::read(wanted);
  } catch (const std::runtime_error&) {
    // A file may have been cleared meanwhile: that is no reason to lose what the others have.
  }
  for (const auto& [records, log] : pending) {
    try {
      log->read(records->records_, records->bytes_.data());
    } catch (const std::runtime_error&) {
      records->records_.clear();  // Whoever needs one of them reads it, and reports.
    }
  }
}

const std::byte* FetchedRecords::find(const RowLog& log, std::uint32_t record) const {
  const auto at = std::lower_bound(records_.begin(), records_.end(), record);
  if (at == records_.end() || *at != record) return nullptr;
  const auto i = static_cast<std::size_t>(at - records_.begin());
  if (wanted_[i].second != log.generation(log.segment_of(record))) return nullptr;
  return bytes_.data() + i * log.record_bytes();
}

}  // namespace persia
