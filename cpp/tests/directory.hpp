// A directory of a test, which goes with all of its files.
#pragma once
#include <dirent.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

namespace persia {

struct Directory {
  explicit Directory(const std::string& parent = "/dev/shm") : path(parent + "/persia-test-XXXXXX") {
    if (mkdtemp(path.data()) == nullptr) std::abort();
  }
  Directory(const Directory&) = delete;
  Directory& operator=(const Directory&) = delete;
  ~Directory() {
    if (DIR* const all = opendir(path.c_str())) {
      while (const dirent* entry = readdir(all)) unlink((path + "/" + entry->d_name).c_str());
      closedir(all);
    }
    rmdir(path.c_str());
  }

  std::string path;
};

// Returns the directory of temporary files, which is mostly on a disk.
inline std::string temporary() {
  const char* const chosen = std::getenv("TMPDIR");
  return chosen == nullptr ? "/tmp" : chosen;
}

}  // namespace persia
