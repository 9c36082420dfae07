// A hook by which tests make a disk fail or stall.
#pragma once

namespace persia {

enum class DiskAccess { kAllocate, kWrite, kRead };

#ifdef PERSIA_CRASH_POINTS
// For tests only: called before each access, which fails with the errno that it returns; 0: none. It may take its time.
inline int (*disk_hook)(DiskAccess access) = nullptr;
inline int disk_fault(DiskAccess access) { return disk_hook != nullptr ? disk_hook(access) : 0; }
#else
inline int disk_fault(DiskAccess) { return 0; }
#endif

}  // namespace persia
