// Threads that help a kernel without ever taking the GIL.
#pragma once
#include <stdint.h>

namespace weft {

// Runs `work(job)` on the caller's thread and on helpers, `threads` in all at most, and returns when all have returned. The
// work must divide itself among all threads that call it, however few come.
//
// One call at a time has helpers. While it runs, other calls work on their callers' threads alone, so that many callers do
// not start more threads than there are cores.
//
// Beside torch, `torch_threads` of its own threads help. They wait for their next operation without yielding, on every core:
// threads of our own would not get a core. 0 asks for our own.
void share(void (*work)(void*), void* job, int64_t threads, int64_t torch_threads);

int64_t num_threads();
void set_num_threads(int64_t count);

// The functions of torch's OpenMP that run work on its threads, void (work, job, threads, flags), and give the number of the
// calling thread, int ().
void set_torch_runner(void* parallel, void* number);

}  // namespace weft
