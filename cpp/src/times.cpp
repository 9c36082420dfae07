#include "persia/times.hpp"

#include <charconv>
#include <chrono>
#include <cmath>
#include <stdexcept>
#include <string_view>
#include <system_error>

#include "persia/text_parts.hpp"

namespace persia {

namespace {

constexpr double kExact = 9007199254740992.0;  // Below 2^53 a double represents every whole number.

std::int64_t floor_divide(std::int64_t value, std::int64_t by) {
  const std::int64_t quotient = value / by;
  return quotient * by > value ? quotient - 1 : quotient;
}

// Reads a text from its begin on. Each function returns false, and leaves the rest alone, where the text differs.
class Reader {
 public:
  explicit Reader(std::string_view text) : rest_(text) {}

  bool done() const { return rest_.empty(); }

  bool take(char expected) {
    if (rest_.empty() || rest_.front() != expected) return false;
    rest_.remove_prefix(1);
    return true;
  }

  // `least` to `most` digits.
  bool digits(std::size_t least, std::size_t most, int& value) {
    std::size_t count = 0;
    int read = 0;
    while (count < most && count < rest_.size() && is_digit(rest_[count])) {
      read = read * 10 + (rest_[count] - '0');
      ++count;
    }
    if (count < least) return false;
    value = read;
    rest_.remove_prefix(count);
    return true;
  }

  // Nothing, or a point and 1 to `most` digits, whose value a time in seconds does not need.
  bool fraction(std::size_t most) {
    int ignored = 0;
    return !take('.') || digits(1, most, ignored);
  }

 private:
  std::string_view rest_;
};

bool to_days(int year, int month, int day, std::int64_t& days) {
  const std::chrono::year_month_day date{std::chrono::year(year), std::chrono::month(static_cast<unsigned>(month)),
                                         std::chrono::day(static_cast<unsigned>(day))};
  if (!date.ok()) return false;
  days = std::chrono::sys_days(date).time_since_epoch().count();
  return true;
}

// hh, hh:mm or hh:mm:ss, perhaps with a fraction of a second.
bool clock(Reader& reader, std::int64_t& seconds) {
  int hour = 0, minute = 0, second = 0;
  if (!reader.digits(2, 2, hour)) return false;
  if (reader.take(':')) {
    if (!reader.digits(2, 2, minute)) return false;
    if (reader.take(':') && (!reader.digits(2, 2, second) || !reader.fraction(9))) return false;
  }
  seconds = hour * 3600 + minute * 60 + second;
  return hour < 24 && minute < 60 && second < 60;
}

// Z, +hh, +hhmm or +hh:mm, or the same with a minus; nothing is UTC.
bool offset(Reader& reader, std::int64_t& seconds) {
  if (reader.done() || reader.take('Z')) return true;
  const bool east = reader.take('+');
  int hour = 0, minute = 0;
  if (!east && !reader.take('-')) return false;
  if (!reader.digits(2, 2, hour)) return false;
  const bool colon = reader.take(':');
  if (!reader.digits(2, 2, minute) && colon) return false;
  seconds = (hour * 3600 + minute * 60) * (east ? 1 : -1);
  return hour < 24 && minute < 60;
}

bool iso(std::string_view text, std::int64_t& seconds) {
  Reader reader(text);
  int year = 0, month = 0, day = 0;
  std::int64_t days = 0, time = 0, east = 0;
  if (!reader.digits(4, 4, year) || !reader.take('-') || !reader.digits(2, 2, month) || !reader.take('-') ||
      !reader.digits(2, 2, day) || !to_days(year, month, day, days)) {
    return false;
  }
  if (reader.take('T') || reader.take(' ')) {
    if (!clock(reader, time) || !offset(reader, east)) return false;
  }
  seconds = days * 86400 + time - east;
  return reader.done();
}

bool day_first(std::string_view text, std::int64_t& seconds) {
  Reader reader(text);
  int day = 0, month = 0, year = 0, hour = 0, minute = 0, second = 0;
  std::int64_t days = 0;
  if (!reader.digits(1, 2, day) || !reader.take('.') || !reader.digits(1, 2, month) || !reader.take('.') ||
      !reader.digits(4, 4, year) || !to_days(year, month, day, days)) {
    return false;
  }
  if (!reader.done()) {
    reader.take(',');
    if (!reader.take(' ')) return false;
    while (reader.take(' ')) {
    }
    if (!reader.digits(1, 2, hour) || !reader.take(':') || !reader.digits(2, 2, minute)) return false;
    if (reader.take(':') && (!reader.digits(2, 2, second) || !reader.fraction(6))) return false;
  }
  seconds = days * 86400 + hour * 3600 + minute * 60 + second;
  return reader.done() && hour < 24 && minute < 60 && second < 60;
}

bool number(std::string_view text, std::int64_t per_second, std::int64_t& seconds) {
  const std::string_view signless = text.front() == '+' ? text.substr(1) : text;
  const std::size_t first = text.data() == signless.data() && text.front() == '-' ? 1 : 0;
  if (first >= signless.size() || (!is_digit(signless[first]) && signless[first] != '.')) return false;
  const char* const end = signless.data() + signless.size();
  std::int64_t whole = 0;
  const auto as_whole = std::from_chars(signless.data(), end, whole);
  if (as_whole.ec != std::errc() || as_whole.ptr != end) {
    double value = 0;
    const auto as_double = std::from_chars(signless.data(), end, value);
    if (as_double.ec != std::errc() || as_double.ptr != end || !(std::abs(value) < kExact)) return false;
    whole = static_cast<std::int64_t>(std::floor(value));
  }
  seconds = floor_divide(whole, per_second);
  return true;
}

template <class Offset>
std::int64_t times(const Texts& texts, std::span<const Offset> offsets, std::int64_t per_second,
                   std::span<std::int64_t> out, std::span<std::uint8_t> present) {
  if (out.size() != present.size()) throw std::invalid_argument("texts: out and present must be of one length");
  if (per_second < 1) throw std::invalid_argument("texts: per_second must be positive");
  std::ranges::fill(out, 0);
  return for_each_text(texts, offsets, present, [&](std::size_t i, std::string_view text) {
    text = trimmed(text);
    if (is_missing(text)) {
      present[i] = 0;
      return true;
    }
    return iso(text, out[i]) || number(text, per_second, out[i]) || day_first(text, out[i]);
  });
}

}  // namespace

std::int64_t text_times(const Texts& texts, std::span<const std::int32_t> offsets, std::int64_t per_second,
                        std::span<std::int64_t> out, std::span<std::uint8_t> present) {
  return times(texts, offsets, per_second, out, present);
}

std::int64_t text_times(const Texts& texts, std::span<const std::int64_t> offsets, std::int64_t per_second,
                        std::span<std::int64_t> out, std::span<std::uint8_t> present) {
  return times(texts, offsets, per_second, out, present);
}

}  // namespace persia
